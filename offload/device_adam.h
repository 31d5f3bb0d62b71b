// Adam on a device: all state and the update there, with the bits of the CPU,
// in any of the types that state is stored as.
//
//   DeviceAdamOptions options;
//   options.exp_avg_type = StateType::kScaledFloat8E4M3;
//   ASSIGN_OR_RETURN(DeviceAdam adam,
//                    DeviceAdam::Create(
//                        device, options,
//                        {{numel, 0, weights, "w", shape, box}}));
//   RETURN_IF_ERROR(adam.Clear(*stream));
//   RETURN_IF_ERROR(adam.SetMastersFromWeights(*stream));
//   ASSIGN_OR_RETURN(AdamConstants constants, ComputeAdamConstants(group, t));
//   RETURN_IF_ERROR(adam.Step(*stream, {gradient}, DType::kBFloat16,
//                             {constants}, factor));
//   ASSIGN_OR_RETURN(StateLease lease, adam.LeaseState(*stream));
//
// A step reads stored values as fp32, updates them as adam_step does
// (AdamStepArgs of dispatch/kernel.h), and stores them again, rounded or
// quantized leaf by leaf. What it leaves follows from state, gradients and
// constants alone: weights are made of masters as they are stored, so that a
// restored run goes on with the same bits.
//
// Device memory in bytes, where of an array a parameter of n elements takes
// AlignedNumel(n) elements: those of masters (4 fp32, 2 scaled fp16 or int16
// remainders, 0 none) and of both moments; 4 a leaf of each parameter for each
// scaled type among the three; for fp32 scratch
//
//   4 * min(chunk_numel, the largest AlignedNumel(n))
//
// for each moment of a scaled type, and for masters that adam_step cannot
// update in their place (all but fp32, and none with fp32 weights); and with
// step_and_lr_on_device kScheduleBytes a group. All is taken at creation.

#ifndef ONEPASS_OFFLOAD_DEVICE_ADAM_H_
#define ONEPASS_OFFLOAD_DEVICE_ADAM_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/state.h"
#include "offload/adam_options.h"

namespace onepass {

struct DeviceAdamOptions {
  DType weights_type = DType::kBFloat16;  // bf16, fp16 or fp32
  // fp32, bf16, scaled fp16 or scaled e4m3, each its own.
  StateType exp_avg_type = StateType::kFloat32;
  StateType exp_avg_sq_type = StateType::kFloat32;
  // fp32; scaled fp16; int16 remainder: what bf16 weights lack to fp32 masters,
  // to which they are then not always the nearest (SplitRemainderArgs); or
  // none: the weights themselves are updated, and rounded at each step.
  std::optional<StateType> master_type = StateType::kFloat32;
  // For graph capture: each group's step and learning rate are on the device,
  // read there, and counted there, by each CapturableStep(). With fp32 masters,
  // and moments that are both fp32 or both bf16.
  bool step_and_lr_on_device = false;
  // Elements that are updated at a time where they are not in their place:
  // rounded down to a multiple of a leaf, but at least one.
  int64_t chunk_numel = int64_t{256} << 10;
};

struct DeviceAdamParameter {
  int64_t numel = 0;
  int group = 0;            // index of the constants of a step
  void* weights = nullptr;  // device memory of weights_type, the caller's
  // For views of its state; without a name there are none.
  std::string name = {};            // unique
  std::vector<int64_t> shape = {};  // of the whole parameter
  Box box = {};                     // of this rank; of `numel` elements
};

class DeviceAdam {
 public:
  // Elements that an array of `numel` takes among others: the next begins where
  // memory of a device would, whatever its type.
  static constexpr int64_t AlignedNumel(int64_t numel) {
    return (numel + Device::kAlignment - 1) / Device::kAlignment *
           Device::kAlignment;
  }
  static constexpr int64_t kScheduleBytes = 64;

  // Takes the memory of all state. It is not initialised before the caller sets
  // it, or Clear(). `device` must outlive the result. InvalidArgument, naming
  // the option or the parameter: types that the device has not, or that do not
  // go together, a numel or group below 0, weights that are null, a box that is
  // none of its shape, or on which there can be no scaled types
  // (HasLeavesOfTensor()), a name that was there before. ResourceExhausted:
  // memory.
  static absl::StatusOr<DeviceAdam> Create(
      Device& device, const DeviceAdamOptions& options,
      std::vector<DeviceAdamParameter> parameters);

  // Puts zeros into masters and moments, steps and learning rates. Weights stay
  // as they are: where they hold what masters do not, so do these.
  absl::Status Clear(Stream& stream);
  // Masters become what the weights are; where masters cannot hold that (scaled
  // ones), the weights become what the masters are. Remainders become 0.
  absl::Status SetMastersFromWeights(Stream& stream);

  // Puts on `stream` the update of all parameters, each gradient multiplied by
  // `grad_scale`, and their weights: in the same operation where these are of
  // 16 bits and masters fp32. gradients[i]: device memory, numel of grad_type,
  // of parameter i; of any value where that has none. constants[g]: of group g.
  // Allocates nothing. InvalidArgument, with nothing put there: another number
  // of gradients, a group without constants, as in dispatch/operations.h.
  // FailedPrecondition: state is leased, or the step is CapturableStep()'s.
  // Another error makes it unusable where a part was put there already: every
  // further call returns it.
  absl::Status Step(Stream& stream, absl::Span<const void* const> gradients,
                    DType grad_type, absl::Span<const AdamConstants> constants,
                    float grad_scale);
  // The same where step and learning rate are on the device. groups[g]: options
  // of group g, whose lr has no meaning. What is there is not checked.
  absl::Status CapturableStep(Stream& stream,
                              absl::Span<const void* const> gradients,
                              DType grad_type,
                              absl::Span<const AdamOptions> groups,
                              float grad_scale);

  // Device memory of a group, for who sets it there; null where it is not on
  // the device.
  int64_t* device_step(int group) const;  // updates that it has had
  float* device_lr(int group) const;
  // The same after what is on `stream`. InvalidArgument: no such group, a step
  // below 0, an lr that is no finite number of at least 0. FailedPrecondition:
  // they are not on the device.
  absl::StatusOr<int64_t> GetStep(Stream& stream, int group) const;
  absl::StatusOr<float> GetLr(Stream& stream, int group) const;
  absl::Status SetStep(Stream& stream, int group, int64_t step);
  absl::Status SetLr(Stream& stream, int group, float lr);

  // Device memory: numel elements of state_type(), null where there is no such
  // state. kParam is the weights.
  void* state(int parameter, StateKind kind) const;
  // Of a scaled type: LeafCount(numel) floats, else null.
  float* scales(int parameter, StateKind kind) const;
  // Of a kind that there is.
  StateType state_type(StateKind kind) const;

  // All state in its place, after what is on `stream`: of each parameter its
  // weights, where they are state, then masters and moments as far as there are
  // any; of 0 elements, too. While it is out, what changes state returns
  // FailedPrecondition, and this object is not to be moved. FailedPrecondition:
  // a parameter has no name, or, with the name of the state, a leaf is not
  // finite, which no scaled type can hold.
  absl::StatusOr<StateLease> LeaseState(Stream& stream);
  // The same, to be replaced. Commit() makes the weights of the masters, where
  // there are any but remainders, on `stream`, which outlives it, and waits. It
  // ends on the thread of the calls; steps and learning rates are set apart.
  absl::StatusOr<StateRestore> RestoreState(Stream& stream);
  bool leased() const { return use_->leases > 0; }
  // OK, or why it is unusable.
  const absl::Status& status() const { return use_->unusable; }

  const std::vector<DeviceAdamParameter>& parameters() const {
    return parameters_;
  }

 private:
  static constexpr StateType kRemainder = StateType::kInt16Remainder;
  // That a piece of a step takes at most, where it is not updated in its place:
  // three loads, the update, three stores, and two for the weights.
  static constexpr size_t kOperationsOfPiece = 9;

  // Masters, or a moment.
  struct Array {
    std::optional<StateType> type;
    DeviceBuffer data;
    DeviceBuffer scales;   // of a scaled type
    DeviceBuffer scratch;  // fp32, of what is not updated in its place
  };

  // Of a group, on the device.
  struct Schedule {
    int64_t step;  // updates until now
    float lr;
    AdamConstants constants;  // of the latest step
  };
  static_assert(sizeof(Schedule) <= kScheduleBytes);

  // Elements [offset, offset + numel) of a parameter; of all where it is
  // updated in its place, else at most of a chunk.
  struct Piece {
    int parameter;
    int64_t offset;
    int64_t numel;
  };

  // Stays where it is when the object is moved: a lease ends on any thread.
  struct Use {
    std::atomic<int> leases{0};
    bool restoring = false;
    absl::Status unusable;
  };

  struct StepInput;

  DeviceAdam(const DeviceAdamOptions& options,
             std::vector<DeviceAdamParameter> parameters);

  static absl::Status CheckOptions(const Device& device,
                                   const DeviceAdamOptions& options);
  static absl::Status CheckParameters(
      const DeviceAdamOptions& options,
      absl::Span<const DeviceAdamParameter> parameters);
  absl::Status TakeMemory(Device& device);

  absl::Status CheckUsable() const;
  // That, and that nothing is leased.
  absl::Status CheckChangeable() const;
  absl::Status CheckGroup(int group) const;
  // Makes it unusable.
  absl::Status Fail(const absl::Status& error);

  const Array& array(StateKind kind) const;
  Schedule* schedule(int group) const;

  // Calls `add`, which appends to operations_, for all pieces, and `run` to run
  // them whenever there is no room for more, and at the end.
  absl::Status ForEachPiece(absl::FunctionRef<void(const Piece&)> add,
                            absl::FunctionRef<absl::Status()> run);
  absl::Status RunPieces(Stream& stream,
                         absl::FunctionRef<void(const Piece&)> add);

  // Of a piece: what is stored of it, and its values where adam_step takes
  // them.
  void* Stored(const Piece& piece, StateKind kind) const;
  float* Scales(const Piece& piece, StateKind kind) const;
  void* Weights(const Piece& piece) const;
  void* Values(const Piece& piece, StateKind kind) const;
  // Append the operation that brings values there, or stores them; none where
  // they are stored there.
  void AddLoad(const Piece& piece, StateKind kind);
  void AddStore(const Piece& piece, StateKind kind);
  void AddQuantize(const Piece& piece, StateKind kind, const float* values);
  // Those that make weights of masters.
  void AddWeights(const Piece& piece);
  // What is no operation: where both masters and weights are fp32.
  absl::Status CopyMasters(Stream& stream, bool to_weights);

  absl::Status RunStep(Stream& stream, const StepInput& input);
  void AddSchedules(const StepInput& input);
  void AddStep(const Piece& piece, const StepInput& input);

  absl::Status ForEachView(
      absl::FunctionRef<void(StateView view, void* data, float* scales)> add)
      const;
  absl::Status CheckScales(Stream& stream) const;
  absl::Status Commit(Stream& stream);

  DeviceAdamOptions options_;
  std::vector<DeviceAdamParameter> parameters_;
  std::vector<int64_t> positions_;       // of each in the arrays, in elements
  std::vector<int64_t> leaf_positions_;  // the same in scales
  int64_t numel_ = 0;                    // of the arrays
  int64_t leaves_ = 0;                   // of the scales
  int64_t chunk_numel_ = 0;
  int64_t groups_ = 0;
  std::array<Array, 3> arrays_;  // masters, exp_avg, exp_avg_sq
  bool updates_in_place_ = true;
  DeviceBuffer schedules_;
  std::vector<DeviceOperation> operations_;  // room for them
  std::unique_ptr<Use> use_ = std::make_unique<Use>();
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_DEVICE_ADAM_H_

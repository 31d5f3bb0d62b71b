// Adam over the shards of one rank, with their fp32 state in host memory: the
// gradients come down from the device, the update and the 16-bit copy of the
// weights are one pass, and each updated piece travels to the device while the
// next one is updated. No communication: for trainers with sharding and
// communication of their own. offload/zero_optimizer.h adds both.
//
//   ASSIGN_OR_RETURN(auto optimizer,
//                    ShardOptimizer::Create(runtime, options, shards));
//   // Each micro-batch, after the backward pass of loss * LossScale():
//   ASSIGN_OR_RETURN(Event * copied,
//                    optimizer->AddGradient(shard, gradient, stream));
//   // Then:
//   StepInput input;
//   ASSIGN_OR_RETURN(input.norm, optimizer->LocalNorm());
//   input.norm.Merge(of_other_ranks);
//   ASSIGN_OR_RETURN(StepReport report, optimizer->Step(input));
//
// Weights, masters and moments are the same bits for every kernel, number of
// threads, cpu_ratio, piece_numel, sub_group_numel, number of buffers and path.
//
// Host memory, in bytes an element that the CPU updates (w: bytes of grad_type,
// m: of both moments together), where each stretch of a shard in a sub-group
// takes a multiple of 32 elements:
//   pinned:   w             (0 where pin_memory is off or refused; pageable w)
//   pageable: 4 + m         masters and moments
//             + 4           where micro_batches > 1, or path is kSeparate and
//                           grad_type is of 16 bits: gradients in fp32
// and staging_buffers * piece_numel * 2 bytes pinned (pageable where refused),
// less where there are fewer pieces or all are shorter, none where weights are
// fp32; and one NormSum. Fusing needs nothing that kSeparate does not. Device
// memory, beside the caller's weights, in bytes an element that the device
// updates, of which each shard takes a multiple of 256: 4 + m + w, w being 4
// where micro_batches > 1; and 8 bytes a leaf of the largest shard, and one
// NormSum. All is taken at creation: a step allocates nothing.
//
// An error that comes while gradients are added, weights updated or state set
// or restored makes the optimizer unusable: every further call that returns a
// status returns it, and nothing is in flight when the call returns. What is
// refused beforehand, with InvalidArgument, NotFound or FailedPrecondition,
// leaves everything as it was; so do errors of other calls.
//
// Calls are made by one thread at a time; a lease may end on another.

#ifndef ONEPASS_OFFLOAD_SHARD_OPTIMIZER_H_
#define ONEPASS_OFFLOAD_SHARD_OPTIMIZER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/norm_sum.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "offload/adam_options.h"
#include "offload/loss_scaler.h"
#include "offload/step_trace.h"

namespace onepass {

// Writes elements [offset, offset + values.size()) to `values`.
using FillValues =
    std::function<absl::Status(int64_t offset, absl::Span<float> values)>;

// Those of an array that outlives the call which takes them.
FillValues ValuesOf(absl::Span<const float> array);

// One rank's part of one parameter.
struct Shard {
  std::string name;            // of the parameter; unique in an optimizer
  std::vector<int64_t> shape;  // of the whole parameter
  Box box;                     // of this rank
  int group = 0;               // index of ShardOptimizerOptions::groups
  FillValues values;           // initial weights, in C order of the box
  // On the device: box.numel() elements of weights_type, the caller's, which
  // creation, each step and SetState() write: nothing else may be using them
  // then. They outlive the optimizer. May be null where numel is 0.
  void* weights = nullptr;
};

enum class StepPath : uint8_t {
  kFused,     // one pass
  kSeparate,  // three: scale, Adam, cast. The same bits; for comparison.
};

struct ShardOptimizerOptions {
  std::vector<AdamOptions> groups = {AdamOptions()};
  // Of the weights on the device: bf16, fp16 or fp32.
  DType weights_type = DType::kBFloat16;
  // Of the gradients that AddGradient() takes, and that travel to the host.
  DType grad_type = DType::kBFloat16;
  DType exp_avg_type = DType::kFloat32;     // fp32 or bf16
  DType exp_avg_sq_type = DType::kFloat32;  // fp32 or bf16
  // Gradients that are added up for a step.
  int64_t micro_batches = 1;
  // Largest norm of the gradient of all ranks; 0: not clipped.
  double max_norm = 0;
  LossScaleOptions loss_scale;
  // Part of the elements that the CPU updates, to within one leaf; the device
  // updates the others.
  double cpu_ratio = 1;
  StepPath path = StepPath::kFused;
  // Elements that are updated, and copied, at a time; rounded down to a
  // multiple of the kernel's block and of 32, but at least that.
  int64_t piece_numel = int64_t{512} << 10;
  int staging_buffers = 2;
  // Elements of one allocation of host state.
  int64_t sub_group_numel = int64_t{1} << 28;
  // Whether to pin what is copied to and from the device.
  bool pin_memory = true;
  // How long a step, or another change of state, waits for readers behind
  // fences in all. Other ranks wait for this one meanwhile: less than the
  // timeout of communicators.
  std::chrono::milliseconds fence_timeout = std::chrono::minutes(5);
};

struct StepInput {
  NormSum norm;  // of the gradients of all ranks, as they are: still scaled
  // Of a loss scaler of the caller's: what gradients are to be multiplied by.
  // That of the optimizer then stays as it is. Unset: 1 / LossScale().
  std::optional<double> inv_scale;
  bool found_inf = false;  // skip this step, as if the norm were not finite
};

struct StepReport {
  // Nothing was changed but counters and the loss scale.
  bool skipped = false;
  absl::string_view skip_reason;  // empty where it was not
  double norm = 0;                // of the unscaled gradient, before clipping
  float factor = 0;       // that gradients were multiplied by; 0: skipped
  double loss_scale = 1;  // of this step

  // The same for all steps, also those that are skipped.
  // Whether the update itself multiplies gradients, and writes copies; else why
  // not: text that lives as long as the optimizer.
  bool scale_fused = false;
  absl::string_view scale_reason;
  bool copy_fused = false;
  absl::string_view copy_reason;
  bool streaming_stores = false;  // of the copies
  int64_t cpu_numel = 0;
  int64_t device_numel = 0;
  int64_t pieces = 0;

  // Times that the host waited: for all gradients and for the last copy, 2; 1
  // where the step was skipped. Apart, those that a faster link spares: for a
  // gradient that still travelled when the next one of its shard was added
  // (AddGradient(), only with micro-batches), and for a staging buffer.
  int64_t host_waits = 0;
  int64_t gradient_waits = 0;
  int64_t buffer_waits = 0;
  int64_t fence_waits = 0;  // for state that was still being exported
  // Staging buffers whose copies had not ended, the largest number of them when
  // one more was sent, with that one: at most staging_buffers, and 1 where each
  // copy ended before the next piece was updated.
  int64_t most_buffers_in_flight = 0;
  double seconds = 0;  // of Step()
};

class ShardOptimizer {
 public:
  // Takes all memory, and writes the weights on the device. InvalidArgument,
  // with the option or shard by name: what makes no sense, or a type that the
  // kernel, or the device where it has a part, does not take. OutOfRange:
  // shards of more than 2^44 elements in all. ResourceExhausted: memory is
  // refused; refused pinning is no error (pinning_error()). Errors of
  // Shard::values, and of the device, are returned as they are.
  static absl::StatusOr<std::unique_ptr<ShardOptimizer>> Create(
      const Runtime& runtime, ShardOptimizerOptions options,
      std::vector<Shard> shards);

  // Waits for what is in flight. No lease of LeaseState() or RestoreState() may
  // be out.
  ~ShardOptimizer();

  ShardOptimizer(const ShardOptimizer&) = delete;
  ShardOptimizer& operator=(const ShardOptimizer&) = delete;

  // Adds the gradient of a shard: on the device, numel elements of grad_type,
  // complete when `stream`, of the same device, comes by. Null: zeros. Each
  // shard gets micro_batches of them before a step, or none, which is zeros
  // too. When the event is over the memory may be reused; it is the
  // optimizer's, and the next call for this shard records it anew.
  // InvalidArgument: no such shard, a gradient that is not aligned to its
  // elements, a stream of another device. FailedPrecondition: one too many, or
  // after the norm of this step was taken.
  absl::StatusOr<Event*> AddGradient(int shard, const void* gradient,
                                     Stream& stream);
  // Forgets the gradients that were added since the last step.
  absl::Status DropGradients();

  // Of the gradients added, as they are: still scaled. Waits for them.
  // FailedPrecondition: a shard, which is named, has too few.
  absl::StatusOr<NormSum> LocalNorm();

  // The update. Where the norm is not finite, or found_inf: none. Gradients
  // are used up in both cases. FailedPrecondition: as LocalNorm(), or state is
  // leased. InvalidArgument: an inv_scale that is no finite number above 0 with
  // a finite inverse, a norm below that of this rank's gradients alone, a
  // factor or constants (ComputeAdamConstants()) that fp32 cannot hold.
  absl::StatusOr<StepReport> Step(const StepInput& input);

  // What the loss is to be multiplied by before the backward pass.
  double LossScale() const;
  const LossScaleState& loss_scale_state() const;
  absl::Status SetLossScaleState(const LossScaleState& state);
  // Whether that would be taken.
  absl::Status CheckLossScaleState(const LossScaleState& state) const;

  // Options of a group, effective at the next step.
  absl::Status SetGroupOptions(int group, const AdamOptions& options);
  const std::vector<AdamOptions>& groups() const;
  // Updates that a group has had; skipped steps are none.
  int64_t step(int group) const;
  absl::Status SetStep(int group, int64_t step);
  // Steps that were skipped since creation, for whatever reason.
  int64_t skipped_steps() const;

  // State of a shard as fp32 values, in C order of its box. Set rounds to the
  // stored type; kMaster sets the weights on the device as well. NotFound: no
  // shard of that name.
  absl::Status GetState(absl::string_view name, StateKind kind,
                        absl::Span<float> values);
  absl::Status SetState(absl::string_view name, StateKind kind,
                        absl::Span<const float> values);
  // All state in place, views of a shard in the order of StateKind; a shard
  // without elements has none, unless its tensor has none either. While it is
  // out, Step(), SetState() and RestoreState() return FailedPrecondition;
  // gradients may be added. The optimizer outlives it.
  absl::StatusOr<StateLease> LeaseState();
  // The same behind fences, one for each shard, those first of which a part is
  // on the device: the optimizer goes on, and waits before it changes what has
  // not been read: Step() for each shard that it updates, for those of the
  // device together; SetState(), RestoreState() and destruction for all. What
  // is not read within fence_timeout cancels the reading, and fails nothing
  // here. The lease may outlive the optimizer.
  absl::StatusOr<StateLease> LeaseStateBehindFences();
  // The same as LeaseState(), to be replaced; Commit() writes the weights on
  // the device from the masters. While it is out, LeaseState() is refused, too.
  // Steps, options and the loss scale are set apart. It ends on the thread of
  // the calls. FailedPrecondition: state is leased, or gradients were added.
  absl::StatusOr<StateRestore> RestoreState();
  // Whether one of LeaseState() or RestoreState() is out.
  bool leased() const;

  // Options, steps and the names of the shards of each group.
  std::vector<StateGroup> StateGroups() const;
  // Sets options and steps; names have no meaning. InvalidArgument, with
  // nothing set: another number of groups, options that make no sense.
  absl::Status SetStateGroups(absl::Span<const StateGroup> groups);

  // As they were given, but for `values`.
  const std::vector<Shard>& shards() const;
  // Why pinning was refused; OK where it was not, or not wanted.
  const absl::Status& pinning_error() const;
  // Bytes of host memory taken at creation.
  int64_t pageable_bytes() const;
  int64_t pinned_bytes() const;

  // Where set, each step appends to it; null ends that. Tracing allocates and
  // records more events.
  absl::Status SetTrace(StepTrace* trace);

  // Makes it unusable with `error`, unless it is already: for a trainer whose
  // ranks agree to stop.
  void MarkUnusable(const absl::Status& error);
  // OK, or why it is unusable.
  const absl::Status& status() const;

 private:
  class Impl;

  explicit ShardOptimizer(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_SHARD_OPTIMIZER_H_

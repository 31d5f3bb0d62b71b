// ZeRO stage 3 (Rajbhandari et al. 2020) with the optimizer offloaded: every
// rank owns a part of each unit's weights and all state of that part, units are
// gathered for use and released after, gradients are reduced to their owners,
// and one step is taken by all ranks or by none.
//
//   ASSIGN_OR_RETURN(auto optimizer,
//                    ZeroOptimizer::Create(runtime, communicator, options,
//                                          units));
//   {
//     ASSIGN_OR_RETURN(Gathered unit, optimizer->Gather(u, *stream));
//     Forward(unit.weights(p), *stream);
//     RETURN_IF_ERROR(stream->Synchronize());
//   }                               // released
//   ...
//   RETURN_IF_ERROR(optimizer->ReduceGradients(u, gradients, *stream));
//   ASSIGN_OR_RETURN(StepReport report, optimizer->Step({}));
//
// Create(), Gather(), ReduceGradients() and Step() are collective: every rank
// calls them in the same order, on one thread. All other functions ask nobody.
//
// Errors. What is said of a function below is found before anything is changed,
// and the optimizer goes on: Step() finds it on all ranks alike, naming the
// rank that has it; of Gather() and ReduceGradients() it follows from the
// arguments and calls, which are the same on all ranks, or from this rank's
// memory and streams: for the others the call has then not taken place, and
// they wait for the right one, within the deadline. Any other error makes
// the optimizer unusable, on all ranks: their collective calls, those under way
// or the next, return an error that names the rank, within the communicator's
// deadline, and leave nothing in flight. So does an error of shards() that
// makes these unusable.
//
// The gradient of a unit is summed over ranks in rank order in fp32, divided by
// the number of ranks and rounded once to ShardOptimizerOptions::grad_type.
// Given equal reduced gradients, weights, norm and factor are the same bits for
// every number of ranks.
//
// Device memory, in bytes, beside that of ShardOptimizer: of each unit
// shard_numel() weights; of a gathered unit padded_numel() weights; and for the
// reduction, of the largest unit, 2 * padded_numel() of grad_type and 4 *
// shard_numel(), or on a rank alone padded_numel() of grad_type. Host memory,
// beside that of ShardOptimizer: ZeroOptions::collective_bytes in each
// direction, or world() shards of the largest unit where they are less; none
// where Device::host_accessible() or on a rank alone.

#ifndef ONEPASS_OFFLOAD_ZERO_OPTIMIZER_H_
#define ONEPASS_OFFLOAD_ZERO_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/norm_sum.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "offload/device_collectives.h"
#include "offload/partition.h"
#include "offload/shard_optimizer.h"

namespace onepass {

struct ZeroParameter {
  std::string name;  // unique among all units
  std::vector<int64_t> shape;
  int group = 0;
  // Initial weights, flat in C order; of each element the owner's are taken.
  FillValues values;
};

struct ZeroUnit {
  std::string name;
  std::vector<ZeroParameter> parameters;
};

// All ranks have the same, but for what changes neither bits nor what is
// exchanged: local_grad_type, path, cpu_ratio, piece_numel, staging_buffers,
// sub_group_numel, pin_memory.
struct ZeroOptions {
  // Of each rank; grad_type is what gradients are rounded to before they are
  // exchanged, and after they are summed.
  ShardOptimizerOptions shard;
  // Of the gradients that ReduceGradients() takes. fp32, or that grad_type, or
  // where that is fp32 any.
  DType local_grad_type = DType::kBFloat16;
  // Host memory that what ranks exchange goes through, in each direction, where
  // threads of the host may not read the device's. At least a byte a rank.
  int64_t collective_bytes = int64_t{16} << 20;
};

struct ZeroStepInput {
  // As in StepInput. inv_scale is the same on all ranks; found_inf on one of
  // them is found on all.
  std::optional<double> inv_scale;
  bool found_inf = false;
};

class ZeroOptimizer;

// The weights of a unit, whole, in device memory, until it goes. Streams that
// read them have done so by then, and the optimizer is still there.
class Gathered {
 public:
  ~Gathered();
  Gathered(Gathered&& other) noexcept;
  Gathered& operator=(Gathered&& other) noexcept;

  // numel elements of weights_type, of parameter i of the unit; read only.
  const void* weights(int parameter) const;
  // Over when they are there, for streams beside Gather()'s.
  const Event& ready() const { return *ready_; }

 private:
  friend class ZeroOptimizer;
  Gathered() = default;
  void Release();

  ZeroOptimizer* optimizer_ = nullptr;
  int unit_ = 0;
  DeviceBuffer buffer_;
  std::unique_ptr<Event> ready_;
};

class ZeroOptimizer {
 public:
  // Collective. `communicator` outlives the optimizer, which is the only one
  // to call it. Errors, of one rank on all: those of ShardOptimizer::Create(),
  // and options or units that make no sense or differ between ranks.
  static absl::StatusOr<std::unique_ptr<ZeroOptimizer>> Create(
      const Runtime& runtime, Communicator& communicator, ZeroOptions options,
      std::vector<ZeroUnit> units);

  ~ZeroOptimizer();

  ZeroOptimizer(const ZeroOptimizer&) = delete;
  ZeroOptimizer& operator=(const ZeroOptimizer&) = delete;

  // Collective. Later work on `stream` finds the weights there.
  // InvalidArgument: there is no such unit, `stream` is of another device.
  absl::StatusOr<Gathered> Gather(int unit, Stream& stream);

  // Collective: of each unit once a micro-batch, or not at all, which is zeros.
  // gradients[i]: on the device, complete when `stream` comes by, of parameter
  // i, all of it, as this rank computed it; null where it computed none, which
  // is zeros. When the call returns they may be reused. InvalidArgument: there
  // is no such unit, it has another number of parameters, a gradient is not
  // aligned to its elements, `stream` is of another device.
  // FailedPrecondition: one too many, or Step() has refused to go on with those
  // that there are.
  absl::Status ReduceGradients(int unit,
                               absl::Span<const void* const> gradients,
                               Stream& stream);
  // Forgets the gradients that were reduced since the last step. All ranks do.
  absl::Status DropGradients();

  // Collective. FailedPrecondition: a unit has too few gradients, is gathered,
  // or state is leased; inv_scale, the loss scale, a group's options or its
  // step differ between ranks; so do the units that were gathered and reduced
  // since the last step, whose weights or gradients are then not to be trusted:
  // DropGradients(). InvalidArgument: as ShardOptimizer::Step().
  absl::StatusOr<StepReport> Step(const ZeroStepInput& input);

  // Sets what this rank owns of the weights of a parameter. All ranks do, with
  // the same values. InvalidArgument: there is no such parameter. Errors of
  // `values` leave the weights as they were.
  absl::Status SetParameter(int unit, int parameter, const FillValues& values);

  const std::vector<ZeroUnit>& units() const { return units_; }
  const UnitPartition& partition(int unit) const {
    return states_[unit].partition;
  }
  int rank() const { return communicator_.rank(); }
  int world() const { return communicator_.size(); }
  // State, options, loss scale and trace of what this rank owns. Its gradients
  // and steps are this class's.
  ShardOptimizer& shards() { return *shards_; }
  // Options and steps of the groups, with the names of all their parameters,
  // also those of which this rank owns nothing: what a checkpoint of all ranks
  // holds. They are set by ShardOptimizer::SetStateGroups(), on all ranks.
  std::vector<StateGroup> StateGroups() const;
  // Why pinning was refused, to shards() or for what ranks exchange; OK where
  // it was not, or not wanted.
  const absl::Status& pinning_error() const;
  // Bytes of weights that are gathered, and the most that ever were.
  const MemoryUse& gathered() const { return gathered_; }

 private:
  friend class Gathered;

  // What a rank says of itself before and after an update. Its bytes are
  // exchanged: none is padding.
  struct Vote {
    NormSum norm;
    uint64_t fingerprint;  // of what is the same on all ranks
    uint64_t calls;        // of the calls since the last step
    int32_t code;          // absl::StatusCode
    bool found_inf;
    bool changed;       // by the update, or unusable
    char message[234];  // ends with a zero, cut off where too long
  };

  // What this rank owns of a parameter.
  struct Owned {
    ParameterRange range;
    int shard;  // index in shards_
  };

  struct UnitState {
    UnitPartition partition;
    std::vector<int64_t> numels;  // of its parameters
    int64_t weights_begin;        // of this rank's in weights_, in elements
    std::vector<Owned> owned;
    int64_t reductions = 0;  // since the last step
    int gathered = 0;        // how many times it is now
  };

  ZeroOptimizer(const Runtime& runtime, Communicator& communicator,
                ZeroOptions options, std::vector<ZeroUnit> units)
      : runtime_(runtime),
        communicator_(communicator),
        options_(std::move(options)),
        units_(std::move(units)) {}

  // --- Creation ---

  absl::Status Initialize();
  absl::Status PartitionUnits();
  absl::Status TakeMemory();
  absl::StatusOr<std::vector<Shard>> MakeShards();

  // --- Agreement ---

  // Lets all ranks know `mine` and the rest of `vote`; `votes_` are then those
  // of all. An error where one of them has one, which names the rank; all are
  // unusable then where one has changed, or where not all could be asked.
  absl::Status Agree(const absl::Status& mine, Vote vote);
  // After that. An error names a rank that has another fingerprint than this
  // one, and `what` it is of.
  absl::Status CompareFingerprints(absl::StatusCode code,
                                   absl::string_view what) const;
  // The same, of the calls. A collective of two units of one size cannot tell
  // them apart.
  absl::Status CompareCalls() const;
  enum class Call : uint8_t { kGather, kReduce };
  void NoteCall(Call call, int unit);
  // Tells the others, who may be waiting in a collective, makes this rank
  // unusable and waits for what it has on its streams. Returns `error`.
  absl::Status Fail(const absl::Status& error);
  uint64_t StepFingerprint(const ZeroStepInput& input) const;

  // --- Gradients ---

  absl::Status CheckUnit(int unit) const;
  absl::Status CheckStream(const Stream& stream) const;
  absl::Status CheckGradients(int unit,
                              absl::Span<const void* const> gradients) const;
  absl::Status CheckUsable() const;
  absl::Status Reduce(int unit, absl::Span<const void* const> gradients,
                      Stream& stream);
  // Puts this rank's gradient of a unit together, in grad_type.
  absl::Status Flatten(int unit, absl::Span<const void* const> gradients,
                       Stream& stream);
  // The mean over ranks of what this rank owns of a unit, from received_.
  absl::StatusOr<const char*> Average(int unit, Stream& stream);
  // That a step may be taken, and the norm of what this rank owns.
  absl::StatusOr<NormSum> PrepareStep();
  void ForgetGradients();

  // What this rank has of a unit's weights.
  char* Weights(int unit) const {
    return weights_.as<char>() + states_[unit].weights_begin * weights_bytes();
  }
  int64_t weights_bytes() const {
    return ByteSize(options_.shard.weights_type);
  }

  const Runtime runtime_;
  Communicator& communicator_;
  const ZeroOptions options_;
  const std::vector<ZeroUnit> units_;
  std::vector<UnitState> states_;  // of the units

  // Memory. Streams are declared after it, so that they end before it goes.
  DeviceBuffer weights_;   // this rank's of all units
  DeviceBuffer flat_;      // a unit's gradient, of this rank
  DeviceBuffer received_;  // this rank's part, of all ranks
  DeviceBuffer sum_;       // fp32
  std::unique_ptr<DeviceCollectives> collectives_;
  std::unique_ptr<ShardOptimizer> shards_;
  std::unique_ptr<Stream> stream_;

  std::vector<Vote> votes_;
  // A hash of the gathers and reductions since the last step, or since one was
  // refused because they differed.
  uint64_t calls_ = 0;
  bool must_drop_ = false;         // the gradients: they differed
  bool gradients_closed_ = false;  // for the step: their norm may be taken
  MemoryUse gathered_;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_ZERO_OPTIMIZER_H_

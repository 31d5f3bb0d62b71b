#include "offload/shard_optimizer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "dispatch/fp_environment.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"
#include "offload/cpu_adam.h"
#include "offload/device_adam.h"
#include "offload/gradient_clip.h"
#include "offload/host_layout.h"
#include "offload/partition.h"

namespace onepass {
namespace {

using Clock = std::chrono::steady_clock;

constexpr DTypeSet kWeightTypes = {DType::kBFloat16, DType::kFloat16,
                                   DType::kFloat32};
// Elements that go through one buffer when state is set, read or created.
constexpr int64_t kBounceNumel = int64_t{1} << 18;
// Elements of one rank: bytes of all arrays fit 64 bits, and what is cut out of
// them fits a list.
constexpr int64_t kMostNumel = int64_t{1} << 44;
// Of reading the clocks of host and device at once: one may be interrupted.
constexpr int kClockTries = 8;

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  return absl::Status(status.code(), absl::StrCat(context, status.message()));
}

absl::Status Invalid(absl::string_view name, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(name, " ", problem));
}

absl::Status CheckPositive(absl::string_view name, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return Invalid(name, absl::StrCat("is ", value, ", expected at least 1"));
}

absl::Status CheckType(absl::string_view name, DType type, DTypeSet expected) {
  if (expected.Contains(type)) return absl::OkStatus();
  return Invalid(name, absl::StrCat("is ", Name(type),
                                    ", which is none of those supported"));
}

absl::Status CheckStep(int64_t step) {
  if (step >= 0 && step <= kMostSteps) return absl::OkStatus();
  return Invalid("step",
                 absl::StrCat("is ", step, ", expected 0 to ", kMostSteps));
}

absl::Status CheckIndex(absl::string_view name, int index, size_t size) {
  if (index >= 0 && static_cast<size_t>(index) < size) return absl::OkStatus();
  return Invalid(name, absl::StrCat("is ", index, ", expected one of ", size));
}

bool Aligned(const void* data, DType type) {
  return reinterpret_cast<uintptr_t>(data) %
             static_cast<uintptr_t>(ByteSize(type)) ==
         0;
}

// Not inlined: their arithmetic may not leave the environment its caller sets.
[[gnu::noinline]] void Divide(const double& a, const double& b,
                              double& quotient) {
  quotient = a / b;
}

double Quotient(double a, double b) {
  double quotient;
  const ScopedFpEnvironment fp;
  Divide(a, b, quotient);
  return quotient;
}

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Of masters and moments.
StateType ToStateType(DType type) {
  return type == DType::kFloat32 ? StateType::kFloat32 : StateType::kBFloat16;
}

// The number of elements of a shard, or what is wrong with it.
absl::StatusOr<int64_t> CheckShard(const Shard& shard,
                                   const ShardOptimizerOptions& options) {
  const auto invalid = [&](absl::string_view problem) {
    return Invalid(absl::StrCat("shard \"", shard.name, "\":"), problem);
  };
  if (shard.name.empty()) return Invalid("a shard", "has no name");
  if (absl::Status status =
          CheckIndex("group", shard.group, options.groups.size());
      !status.ok()) {
    return invalid(status.message());
  }
  const absl::StatusOr<int64_t> checked = CheckBox(shard.shape, shard.box);
  if (!checked.ok()) return invalid(checked.status().message());
  const int64_t numel = *checked;
  if (numel == 0) return numel;
  if (shard.weights == nullptr) return invalid("weights is null");
  if (!Aligned(shard.weights, options.weights_type)) {
    return invalid(absl::StrCat("weights is not aligned to elements in ",
                                Name(options.weights_type)));
  }
  if (!shard.values) return invalid("values is not set");
  return numel;
}

absl::Status CheckOptions(const ShardOptimizerOptions& options,
                          const Runtime& runtime) {
  if (options.groups.empty()) return Invalid("groups", "is empty");
  for (size_t i = 0; i < options.groups.size(); ++i) {
    if (absl::Status status = ValidateAdamOptions(options.groups[i]);
        !status.ok()) {
      return Annotate(status, absl::StrCat("group ", i, ": "));
    }
  }
  for (const absl::Status& status :
       {CheckType("weights_type", options.weights_type, kWeightTypes),
        CheckType("grad_type", options.grad_type,
                  runtime.kernel.gradient_types),
        CheckType("exp_avg_type", options.exp_avg_type,
                  runtime.kernel.moment_types),
        CheckType("exp_avg_sq_type", options.exp_avg_sq_type,
                  runtime.kernel.moment_types),
        CheckPositive("micro_batches", options.micro_batches),
        CheckPositive("piece_numel", options.piece_numel),
        CheckPositive("staging_buffers", options.staging_buffers),
        CheckPositive("sub_group_numel", options.sub_group_numel)}) {
    if (!status.ok()) return status;
  }
  if (!(options.max_norm >= 0) || !std::isfinite(options.max_norm)) {
    return Invalid("max_norm", absl::StrCat("is ", options.max_norm,
                                            ", expected a finite number >= 0"));
  }
  return absl::OkStatus();
}

// Host memory that is copied from or to a device: pinned, or plain where that
// is not wanted or was refused.
class TransferMemory {
 public:
  TransferMemory() = default;
  explicit TransferMemory(PinnedBuffer buffer) : pinned_(std::move(buffer)) {}
  explicit TransferMemory(HostBuffer buffer) : plain_(std::move(buffer)) {}

  char* data() const {
    return static_cast<char*>(pinned_.bytes() > 0 ? pinned_.data()
                                                  : plain_.data());
  }
  int64_t pinned_bytes() const { return pinned_.bytes(); }
  int64_t plain_bytes() const { return plain_.bytes(); }

 private:
  PinnedBuffer pinned_;
  HostBuffer plain_;
};

}  // namespace

FillValues ValuesOf(absl::Span<const float> array) {
  return [array](int64_t offset, absl::Span<float> values) {
    if (static_cast<size_t>(offset) + values.size() > array.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("there are ", array.size(), " values, of ",
                       static_cast<size_t>(offset) + values.size()));
    }
    std::copy_n(array.data() + offset, values.size(), values.data());
    return absl::OkStatus();
  };
}

class ShardOptimizer::Impl {
 public:
  Impl(const Runtime& runtime, ShardOptimizerOptions options,
       std::vector<Shard> shards, LossScaler scaler)
      : runtime_(runtime),
        options_(std::move(options)),
        shards_(std::move(shards)),
        steps_(options_.groups.size(), 0),
        constants_(options_.groups.size()),
        scaler_(scaler) {}

  ~Impl() {
    AwaitAllFences();
    Drain();
  }

  absl::Status Initialize();

  absl::StatusOr<Event*> AddGradient(int shard, const void* gradient,
                                     Stream& stream);
  absl::Status DropGradients();
  absl::StatusOr<NormSum> LocalNorm();
  absl::StatusOr<StepReport> Step(const StepInput& input);

  absl::Status GetState(absl::string_view name, StateKind kind,
                        absl::Span<float> values);
  absl::Status SetState(absl::string_view name, StateKind kind,
                        absl::Span<const float> values);
  absl::StatusOr<StateLease> LeaseState();
  absl::StatusOr<StateLease> LeaseStateBehindFences();
  absl::StatusOr<StateRestore> RestoreState();
  std::vector<StateGroup> StateGroups() const;
  absl::Status SetStateGroups(absl::Span<const StateGroup> groups);
  bool leased() const { return leases_ > 0; }
  absl::Status SetTrace(StepTrace* trace);

  absl::Status SetGroupOptions(int group, const AdamOptions& options);
  absl::Status SetStep(int group, int64_t step);
  absl::Status SetLossScaleState(const LossScaleState& state);

  const LossScaler& scaler() const { return scaler_; }
  const std::vector<AdamOptions>& groups() const { return options_.groups; }
  int64_t step(int group) const { return steps_[group]; }
  int64_t skipped_steps() const { return skipped_steps_; }
  const std::vector<Shard>& shards() const { return shards_; }
  const absl::Status& pinning_error() const { return pinning_error_; }
  int64_t pageable_bytes() const { return pageable_bytes_; }
  int64_t pinned_bytes() const { return pinned_bytes_; }
  const absl::Status& status() const { return unusable_; }
  void MarkUnusable(const absl::Status& error) {
    if (unusable_.ok()) Fail(error).IgnoreError();
  }

 private:
  // Masters and moments of a sub-group.
  struct SubGroupState {
    HostBuffer master;
    HostBuffer exp_avg;
    HostBuffer exp_avg_sq;
    HostBuffer sums;  // gradients in fp32, where they are kept so
  };

  struct ShardState {
    int64_t numel = 0;
    int64_t cpu_numel = 0;          // the first of them
    int device_index = -1;          // in device_adam_, or -1
    int64_t device_position = 0;    // of its gradients there, in elements
    std::unique_ptr<Event> ready;   // a gradient, on the caller's stream
    std::unique_ptr<Event> landed;  // and its copies
    int64_t gradients = 0;          // since the last step
    // Those that were not null. With micro-batches the last of them lies in
    // `wire_`, and those before it in `sums`.
    int64_t given = 0;
    bool zero = true;  // what the update will read are zeros already

    int64_t device_numel() const { return numel - cpu_numel; }
  };

  // Elements [offset, offset + numel) of a state of a shard.
  struct Stretch {
    bool on_device;
    char* data;
    DType type;
    int64_t offset;
    int64_t numel;
  };

  // A staging buffer, and the end of the copies out of it.
  struct Staging {
    char* data;
    std::unique_ptr<Event> copied;
  };

  struct TracedEvents {
    TraceRow row;
    const char* name;
    std::unique_ptr<Event> begin;
    std::unique_ptr<Event> end;
    int64_t numel;
  };

  // --- Creation ---

  // Elements of each.
  absl::StatusOr<std::vector<int64_t>> CheckShards();
  absl::Status CheckDeviceTypes() const;
  absl::Status TakeHostMemory();
  absl::Status TakeDeviceMemory();
  void ChoosePath();
  absl::StatusOr<TransferMemory> TakeTransferMemory(
      int64_t bytes, const HostBufferOptions& options);
  absl::Status TakeHostArray(int64_t numel, DType type, HostBuffer* array);
  absl::Status WriteInitialValues();

  // --- State ---

  // Calls `add` with each view of all state, in order.
  absl::Status ForEachView(
      absl::FunctionRef<void(StateView view, void* data)> add);
  // Writes the weights of this stretch of the masters of a shard, and leaves
  // `rounded` to hold what travels until the copy stream is done.
  absl::Status SendWeights(int shard, const Stretch& stretch,
                           std::vector<uint16_t>& rounded);
  // After masters were replaced in their place.
  absl::Status SendAllWeights();
  // `values` become this stretch of the masters of a shard, and its weights.
  absl::Status WriteMaster(int shard, const Stretch& stretch,
                           absl::Span<const float> values);
  absl::StatusOr<int> FindShard(absl::string_view name, size_t numel) const;

  // --- Pointers ---

  // Of the wire gradient at a position of the host arrays.
  char* Wire(int64_t position) const {
    return wire_.data() + position * ByteSize(options_.grad_type);
  }
  char* InSubGroup(const HostBuffer& array, DType type, int sub_group,
                   int64_t position) const {
    return array.as<char>() +
           (position - layout_->sub_groups()[sub_group].begin) * ByteSize(type);
  }
  float* Master(int sub_group, int64_t position) const {
    return reinterpret_cast<float*>(InSubGroup(
        state_[sub_group].master, DType::kFloat32, sub_group, position));
  }
  float* Sum(int sub_group, int64_t position) const {
    return reinterpret_cast<float*>(InSubGroup(
        state_[sub_group].sums, DType::kFloat32, sub_group, position));
  }
  char* Weights(int shard, int64_t offset) const {
    return static_cast<char*>(shards_[shard].weights) +
           offset * ByteSize(options_.weights_type);
  }
  char* DeviceGradient(int shard) const {
    return device_gradients_.as<char>() + shard_states_[shard].device_position *
                                              ByteSize(device_gradient_type());
  }
  DType device_gradient_type() const {
    return options_.micro_batches > 1 ? DType::kFloat32 : options_.grad_type;
  }
  // Whether the update of the CPU reads gradients in fp32 from `sums`.
  bool reads_sums() const {
    return options_.micro_batches > 1 ||
           (options_.path == StepPath::kSeparate &&
            options_.grad_type != DType::kFloat32);
  }
  bool has_cpu_part() const { return !layout_->pieces().empty(); }
  bool has_device_part() const { return device_adam_.has_value(); }

  DType TypeOf(StateKind kind) const {
    return kind == StateKind::kMaster   ? DType::kFloat32
           : kind == StateKind::kExpAvg ? options_.exp_avg_type
                                        : options_.exp_avg_sq_type;
  }

  // Where a state of a shard lies, in order.
  absl::Status ForEachStretch(
      int shard, StateKind kind,
      absl::FunctionRef<absl::Status(const Stretch&)> visit);
  // The same in stretches of up to kBounceNumel.
  absl::Status ForEachChunk(
      int shard, StateKind kind,
      absl::FunctionRef<absl::Status(const Stretch&)> visit);

  // --- Errors ---

  absl::Status CheckUsable() const;
  absl::Status CheckNotLeased() const;
  using Deadline = std::chrono::steady_clock::time_point;
  // Of waits that begin now.
  Deadline FenceDeadline() const {
    return std::chrono::steady_clock::now() + options_.fence_timeout;
  }
  // Returns when nothing of the shard, or of all, is still to be read.
  void AwaitFences(int shard, Deadline deadline);
  void AwaitAllFences();
  void Drain();
  // Nothing is in flight afterwards, and the optimizer is unusable.
  absl::Status Fail(const absl::Status& error);

  // --- Gradients ---

  absl::Status CheckGradient(int shard, const void* gradient,
                             const Stream& stream) const;
  absl::Status AddNull(int shard);
  absl::Status AddToShard(int shard, const void* gradient);
  // Whether the gradient that is being added completes those of a step.
  bool IsLast(const ShardState& state) const {
    return state.gradients + 1 == options_.micro_batches;
  }
  // Adds the norm of `numel` elements of the device to that of this step.
  absl::Status AddNorm(const void* gradient, int64_t numel);
  // The same, where the sums of its leaves are in device_leaf_sums_.
  absl::Status AddLeafSums(int64_t numel);
  // Adds the gradient of a micro-batch that landed to those before it.
  absl::Status SumLanded(int shard, NormSum* norm);
  absl::Status FinishGradients();
  absl::Status FillZero(int shard);
  void ForgetGradients();
  absl::Status CheckComplete() const;

  // --- Step ---

  absl::StatusOr<double> LossScaleOf(const StepInput& input) const;
  // The norm of all ranks holds that of this one.
  absl::Status CheckNorm(const StepInput& input) const;
  // What is the same for all steps.
  void Describe(StepReport& report) const;
  absl::Status Update(float factor, StepReport& report);
  absl::Status UpdateInOnePass(float factor, StepReport& report);
  absl::Status UpdateInThreePasses(float factor, StepReport& report);
  absl::Status UpdateWithoutCopies(float factor);
  // With copies where `copies` is not null.
  absl::Status UpdatePiece(const HostLayout::Piece& piece, float factor,
                           char* copies, bool stream_copy);
  absl::Status CopyToWeights(StepReport& report);
  absl::StatusOr<Staging*> NextStaging(StepReport& report);
  absl::Status SendPiece(const HostLayout::Piece& piece, Staging& staging,
                         StepReport& report);
  // Waits for the event, and counts that, unless it is over.
  absl::Status Await(Event& event, const char* name, int64_t& waits);

  // --- Trace ---

  double Now() const { return Seconds(Clock::now() - trace_origin_time_); }
  void TraceHost(const char* name, double begin, int64_t numel) {
    if (trace_ != nullptr) {
      trace_->spans.push_back({TraceRow::kHost, name, begin, Now(), numel});
    }
  }
  absl::Status TraceBegin(Stream& stream, TraceRow row, const char* name,
                          int64_t numel);
  absl::Status TraceEnd(Stream& stream);
  absl::Status CollectTrace();
  // The same instant by both clocks, as well as they can be read together.
  absl::Status ReadClocks(std::unique_ptr<Event>* on_device,
                          Clock::time_point* on_host);

  const Runtime runtime_;
  ShardOptimizerOptions options_;
  std::vector<Shard> shards_;
  absl::flat_hash_map<std::string, int> shard_of_name_;
  std::vector<int64_t> steps_;
  int64_t skipped_steps_ = 0;
  std::vector<AdamConstants> constants_;
  LossScaler scaler_;

  // Memory. Streams are declared after it, so that they end before it goes.
  std::optional<HostLayout> layout_;
  std::vector<SubGroupState> state_;
  TransferMemory wire_;
  TransferMemory staging_memory_;
  TransferMemory device_norm_on_host_;
  std::optional<DeviceAdam> device_adam_;
  DeviceBuffer device_gradients_;
  DeviceBuffer device_leaf_sums_;
  DeviceBuffer device_norm_;
  int64_t pageable_bytes_ = 0;
  int64_t pinned_bytes_ = 0;

  std::unique_ptr<Stream> gradient_stream_;
  std::unique_ptr<Stream> copy_stream_;
  std::unique_ptr<Stream> device_stream_;
  std::unique_ptr<Event> gradients_done_;
  std::unique_ptr<Event> device_done_;
  std::unique_ptr<Event> copies_done_;

  std::vector<ShardState> shard_states_;
  // Of the shards with a device part, in order.
  std::vector<const void*> device_gradient_pointers_;
  std::vector<Staging> staging_;
  size_t next_staging_ = 0;
  size_t in_flight_ = 0;             // of the buffers, the last before the next
  std::vector<AdamStepArgs> parts_;  // of a piece: room for them

  NormSum norm_;  // of the CPU's sums, then of all
  bool device_norm_used_ = false;
  bool gradients_finished_ = false;
  int64_t gradient_waits_ = 0;  // as in StepReport

  bool copy_fused_ = false;
  std::string copy_reason_;   // empty where it is
  std::string scale_reason_;  // empty where that is
  absl::Status pinning_error_;

  absl::Status unusable_;
  std::atomic<int> leases_{0};
  bool restoring_ = false;  // one of them is to be written
  std::vector<std::shared_ptr<StateFences>> fences_;
  int64_t fence_waits_ = 0;  // of this step
  Deadline fence_deadline_;  // of this step

  StepTrace* trace_ = nullptr;
  Clock::time_point trace_origin_time_;
  std::unique_ptr<Event> trace_origin_;
  std::vector<TracedEvents> traced_;
};

// --- Creation ---

absl::Status ShardOptimizer::Impl::Initialize() {
  ONEPASS_RETURN_IF_ERROR(CheckOptions(options_, runtime_));
  std::vector<int64_t> numels;
  ONEPASS_ASSIGN_OR_RETURN(numels, CheckShards());
  std::vector<int64_t> cpu_numels;
  ONEPASS_ASSIGN_OR_RETURN(
      cpu_numels, SplitBetweenCpuAndDevice(numels, options_.cpu_ratio));
  const int64_t block = std::lcm(runtime_.kernel.operations->block_numel(),
                                 HostLayout::kAlignmentNumel);
  options_.piece_numel =
      std::max(options_.piece_numel / block, int64_t{1}) * block;
  ONEPASS_ASSIGN_OR_RETURN(
      layout_, HostLayout::Create(cpu_numels, options_.sub_group_numel,
                                  options_.piece_numel));
  Device& device = runtime_.device;
  if (cpu_numels != numels) ONEPASS_RETURN_IF_ERROR(CheckDeviceTypes());
  shard_states_.resize(shards_.size());
  for (size_t i = 0; i < shards_.size(); ++i) {
    ShardState& shard = shard_states_[i];
    shard.numel = numels[i];
    shard.cpu_numel = cpu_numels[i];
    ONEPASS_ASSIGN_OR_RETURN(shard.ready, device.CreateEvent());
    ONEPASS_ASSIGN_OR_RETURN(shard.landed, device.CreateEvent());
  }
  ONEPASS_ASSIGN_OR_RETURN(gradient_stream_, device.CreateStream("gradients"));
  ONEPASS_ASSIGN_OR_RETURN(copy_stream_, device.CreateStream("weights"));
  ONEPASS_ASSIGN_OR_RETURN(device_stream_, device.CreateStream("adam"));
  for (std::unique_ptr<Event>* event :
       {&gradients_done_, &device_done_, &copies_done_}) {
    ONEPASS_ASSIGN_OR_RETURN(*event, device.CreateEvent());
  }
  ONEPASS_RETURN_IF_ERROR(TakeHostMemory());
  ONEPASS_RETURN_IF_ERROR(TakeDeviceMemory());
  ChoosePath();
  return WriteInitialValues();
}

absl::StatusOr<std::vector<int64_t>> ShardOptimizer::Impl::CheckShards() {
  std::vector<int64_t> numels;
  int64_t all = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const absl::StatusOr<int64_t> numel = CheckShard(shards_[i], options_);
    if (!numel.ok()) return numel.status();
    if (*numel > kMostNumel - all) {
      return absl::OutOfRangeError(absl::StrCat(
          "up to shard \"", shards_[i].name, "\" there are ", all, " + ",
          *numel, " elements, expected at most ", kMostNumel));
    }
    all += *numel;
    numels.push_back(*numel);
    if (!shard_of_name_.emplace(shards_[i].name, static_cast<int>(i)).second) {
      return Invalid(absl::StrCat("shard \"", shards_[i].name, "\""),
                     "is there twice");
    }
  }
  return numels;
}

absl::Status ShardOptimizer::Impl::CheckDeviceTypes() const {
  const Device& device = runtime_.device;
  const auto check = [&](absl::string_view name, DType type,
                         DTypeSet expected) {
    if (expected.Contains(type)) return absl::OkStatus();
    return Invalid(
        name, absl::StrCat("is ", Name(type), ", which device ", device.name(),
                           " does not update with: it has a part, "
                           "by a cpu_ratio of ",
                           options_.cpu_ratio));
  };
  ONEPASS_RETURN_IF_ERROR(check(
      options_.micro_batches > 1 ? "the sum of micro_batches" : "grad_type",
      device_gradient_type(), device.gradient_types()));
  ONEPASS_RETURN_IF_ERROR(
      check("exp_avg_type", options_.exp_avg_type, device.moment_types()));
  ONEPASS_RETURN_IF_ERROR(check("exp_avg_sq_type", options_.exp_avg_sq_type,
                                device.moment_types()));
  if (options_.weights_type == DType::kFloat32) return absl::OkStatus();
  return check("weights_type", options_.weights_type, device.copy_types());
}

void ShardOptimizer::Impl::ChoosePath() {
  if (options_.path == StepPath::kSeparate) {
    scale_reason_ = copy_reason_ = "the separate path was asked for";
  } else if (!has_cpu_part()) {
    copy_reason_ = "the CPU updates nothing";
  } else if (options_.weights_type == DType::kFloat32) {
    copy_reason_ = "weights are fp32: the masters themselves are copied";
  } else if (!runtime_.kernel.copy_types.Contains(options_.weights_type)) {
    copy_reason_ =
        absl::StrCat("kernel ", runtime_.kernel.name, " writes no copies in ",
                     Name(options_.weights_type));
  } else if (!options_.pin_memory) {
    copy_reason_ = "memory is not pinned: pin_memory is off";
  } else if (!pinning_error_.ok()) {
    copy_reason_ =
        absl::StrCat("memory is not pinned: ", pinning_error_.message());
  } else {
    copy_fused_ = true;
  }
}

absl::StatusOr<TransferMemory> ShardOptimizer::Impl::TakeTransferMemory(
    int64_t bytes, const HostBufferOptions& options) {
  if (options_.pin_memory && pinning_error_.ok()) {
    absl::StatusOr<PinnedBuffer> pinned =
        runtime_.device.AllocatePinned(runtime_.pool, bytes, options);
    if (pinned.ok()) return TransferMemory(*std::move(pinned));
    pinning_error_ = pinned.status();
  }
  absl::StatusOr<HostBuffer> plain =
      HostBuffer::Create(runtime_.pool, bytes, options);
  if (!plain.ok()) return plain.status();
  return TransferMemory(*std::move(plain));
}

absl::Status ShardOptimizer::Impl::TakeHostArray(int64_t numel, DType type,
                                                 HostBuffer* array) {
  HostBufferOptions options;
  options.element_bytes = ByteSize(type);
  options.piece_numel = options_.piece_numel;
  ONEPASS_ASSIGN_OR_RETURN(
      *array,
      HostBuffer::Create(runtime_.pool, numel * ByteSize(type), options));
  pageable_bytes_ += array->bytes();
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::TakeHostMemory() {
  for (const HostLayout::SubGroup& sub_group : layout_->sub_groups()) {
    const int64_t numel = sub_group.end - sub_group.begin;
    SubGroupState& state = state_.emplace_back();
    ONEPASS_RETURN_IF_ERROR(
        TakeHostArray(numel, DType::kFloat32, &state.master));
    ONEPASS_RETURN_IF_ERROR(
        TakeHostArray(numel, options_.exp_avg_type, &state.exp_avg));
    ONEPASS_RETURN_IF_ERROR(
        TakeHostArray(numel, options_.exp_avg_sq_type, &state.exp_avg_sq));
    if (reads_sums()) {
      ONEPASS_RETURN_IF_ERROR(
          TakeHostArray(numel, DType::kFloat32, &state.sums));
    }
  }

  HostBufferOptions wire_options;
  wire_options.element_bytes = ByteSize(options_.grad_type);
  wire_options.piece_numel = options_.piece_numel;
  ONEPASS_ASSIGN_OR_RETURN(
      wire_, TakeTransferMemory(layout_->numel() * ByteSize(options_.grad_type),
                                wire_options));
  // No more buffers than there are pieces to fill them.
  const int64_t buffers =
      options_.weights_type == DType::kFloat32
          ? 0
          : std::min<int64_t>(options_.staging_buffers,
                              static_cast<int64_t>(layout_->pieces().size()));
  const int64_t staging_bytes =
      layout_->longest_piece() * ByteSize(options_.weights_type);
  HostBufferOptions staging_options;
  staging_options.element_bytes = ByteSize(options_.weights_type);
  staging_options.piece_numel = layout_->longest_piece();
  ONEPASS_ASSIGN_OR_RETURN(
      staging_memory_,
      TakeTransferMemory(buffers * staging_bytes, staging_options));
  for (int64_t i = 0; i < buffers; ++i) {
    Staging& staging = staging_.emplace_back();
    staging.data = staging_memory_.data() + i * staging_bytes;
    ONEPASS_ASSIGN_OR_RETURN(staging.copied, runtime_.device.CreateEvent());
  }
  size_t most_parts = 0;
  for (const HostLayout::Piece& piece : layout_->pieces()) {
    most_parts = std::max(most_parts, piece.parts.size());
  }
  parts_.reserve(most_parts);

  HostBufferOptions norm_options;
  norm_options.element_bytes = sizeof(NormSum);
  ONEPASS_ASSIGN_OR_RETURN(device_norm_on_host_,
                           TakeTransferMemory(sizeof(NormSum), norm_options));
  for (const TransferMemory* memory :
       {&wire_, &staging_memory_, &device_norm_on_host_}) {
    pinned_bytes_ += memory->pinned_bytes();
    pageable_bytes_ += memory->plain_bytes();
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::TakeDeviceMemory() {
  Device& device = runtime_.device;
  int64_t most_leaves = 0;
  int64_t device_numel = 0;
  std::vector<DeviceAdamParameter> parameters;
  for (size_t i = 0; i < shards_.size(); ++i) {
    ShardState& shard = shard_states_[i];
    most_leaves = std::max(most_leaves, LeafCount(shard.numel));
    if (shard.device_numel() == 0) continue;
    shard.device_index = static_cast<int>(parameters.size());
    shard.device_position = device_numel;
    device_numel += DeviceAdam::AlignedNumel(shard.device_numel());
    DeviceAdamParameter& parameter = parameters.emplace_back();
    parameter.numel = shard.device_numel();
    parameter.group = shards_[i].group;
    parameter.weights = Weights(static_cast<int>(i), shard.cpu_numel);
  }
  ONEPASS_ASSIGN_OR_RETURN(
      device_leaf_sums_,
      device.Allocate(most_leaves * static_cast<int64_t>(sizeof(double))));
  ONEPASS_ASSIGN_OR_RETURN(device_norm_, device.Allocate(sizeof(NormSum)));
  if (parameters.empty()) return absl::OkStatus();
  ONEPASS_ASSIGN_OR_RETURN(
      device_gradients_,
      device.Allocate(device_numel * ByteSize(device_gradient_type())));
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (shard_states_[i].device_index < 0) continue;
    device_gradient_pointers_.push_back(DeviceGradient(static_cast<int>(i)));
  }
  DeviceAdamOptions adam_options;
  adam_options.weights_type = options_.weights_type;
  adam_options.exp_avg_type = ToStateType(options_.exp_avg_type);
  adam_options.exp_avg_sq_type = ToStateType(options_.exp_avg_sq_type);
  ONEPASS_ASSIGN_OR_RETURN(
      device_adam_,
      DeviceAdam::Create(device, adam_options, std::move(parameters)));
  ONEPASS_RETURN_IF_ERROR(device_adam_->Clear(*device_stream_));
  ONEPASS_RETURN_IF_ERROR(device_stream_->SetZero(device_gradients_.data(),
                                                  device_gradients_.bytes()));
  return device_stream_->Synchronize();
}

absl::Status ShardOptimizer::Impl::WriteInitialValues() {
  std::vector<float> buffer;
  for (size_t i = 0; i < shards_.size(); ++i) {
    Shard& shard = shards_[i];
    const int index = static_cast<int>(i);
    const absl::Status status = ForEachChunk(
        index, StateKind::kMaster, [&](const Stretch& stretch) -> absl::Status {
          buffer.resize(stretch.numel);
          ONEPASS_RETURN_IF_ERROR(
              shard.values(stretch.offset, absl::MakeSpan(buffer)));
          return WriteMaster(index, stretch, buffer);
        });
    if (!status.ok()) {
      return Annotate(status, absl::StrCat("shard \"", shard.name, "\": "));
    }
    shard.values = nullptr;
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::ForEachStretch(
    int shard, StateKind kind,
    absl::FunctionRef<absl::Status(const Stretch&)> visit) {
  const DType type = TypeOf(kind);
  for (const HostLayout::Part& part : layout_->segments_of(shard)) {
    const SubGroupState& state = state_[part.sub_group];
    const HostBuffer& array = kind == StateKind::kMaster   ? state.master
                              : kind == StateKind::kExpAvg ? state.exp_avg
                                                           : state.exp_avg_sq;
    ONEPASS_RETURN_IF_ERROR(
        visit({/*on_device=*/false,
               InSubGroup(array, type, part.sub_group, part.position), type,
               part.offset, part.numel}));
  }
  const ShardState& state = shard_states_[shard];
  if (state.device_index < 0) return absl::OkStatus();
  return visit(
      {/*on_device=*/true,
       static_cast<char*>(device_adam_->state(state.device_index, kind)), type,
       state.cpu_numel, state.device_numel()});
}

absl::Status ShardOptimizer::Impl::ForEachChunk(
    int shard, StateKind kind,
    absl::FunctionRef<absl::Status(const Stretch&)> visit) {
  return ForEachStretch(shard, kind, [&](const Stretch& whole) -> absl::Status {
    for (int64_t i = 0; i < whole.numel; i += kBounceNumel) {
      ONEPASS_RETURN_IF_ERROR(visit(
          {whole.on_device, whole.data + i * ByteSize(whole.type), whole.type,
           whole.offset + i, std::min(kBounceNumel, whole.numel - i)}));
    }
    return absl::OkStatus();
  });
}

// --- State ---

absl::Status ShardOptimizer::Impl::WriteMaster(int shard,
                                               const Stretch& stretch,
                                               absl::Span<const float> values) {
  const int64_t bytes = stretch.numel * static_cast<int64_t>(sizeof(float));
  std::vector<uint16_t> rounded;
  absl::Status status;
  if (stretch.on_device) {
    status = copy_stream_->CopyToDevice(stretch.data, values.data(), bytes);
  } else {
    std::memcpy(stretch.data, values.data(), bytes);
  }
  if (status.ok()) status = SendWeights(shard, stretch, rounded);
  // Whatever happened: `values` and `rounded` go.
  status.Update(copy_stream_->Synchronize());
  return status;
}

absl::Status ShardOptimizer::Impl::SendWeights(int shard,
                                               const Stretch& stretch,
                                               std::vector<uint16_t>& rounded) {
  const DType type = options_.weights_type;
  char* const weights = Weights(shard, stretch.offset);
  const int64_t bytes = stretch.numel * ByteSize(type);
  if (type == DType::kFloat32) {
    return stretch.on_device
               ? copy_stream_->CopyOnDevice(weights, stretch.data, bytes)
               : copy_stream_->CopyToDevice(weights, stretch.data, bytes);
  }
  CastArgs cast = {stretch.numel, stretch.data, weights, DType::kFloat32, type};
  if (stretch.on_device) return copy_stream_->Run({cast});
  rounded.resize(stretch.numel);
  cast.out = rounded.data();
  ONEPASS_RETURN_IF_ERROR(Cast(runtime_.kernel, runtime_.pool, cast));
  return copy_stream_->CopyToDevice(weights, rounded.data(), bytes);
}

absl::Status ShardOptimizer::Impl::SendAllWeights() {
  std::vector<uint16_t> rounded;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const int shard = static_cast<int>(i);
    const absl::Status status = ForEachChunk(
        shard, StateKind::kMaster, [&](const Stretch& stretch) -> absl::Status {
          absl::Status sent = SendWeights(shard, stretch, rounded);
          sent.Update(copy_stream_->Synchronize());
          return sent;
        });
    if (!status.ok()) {
      return Fail(Annotate(status, absl::StrCat("restoring weights of shard \"",
                                                shards_[i].name, "\": ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int> ShardOptimizer::Impl::FindShard(absl::string_view name,
                                                    size_t numel) const {
  const auto found = shard_of_name_.find(name);
  if (found == shard_of_name_.end()) {
    return absl::NotFoundError(
        absl::StrCat("there is no shard \"", name, "\""));
  }
  const int64_t expected = shard_states_[found->second].numel;
  if (static_cast<int64_t>(numel) != expected) {
    return Invalid(
        absl::StrCat("shard \"", name, "\""),
        absl::StrCat("has ", expected, " elements, and the span ", numel));
  }
  return found->second;
}

absl::Status ShardOptimizer::Impl::GetState(absl::string_view name,
                                            StateKind kind,
                                            absl::Span<float> values) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  int shard;
  ONEPASS_ASSIGN_OR_RETURN(shard, FindShard(name, values.size()));
  std::vector<char> buffer;
  return ForEachChunk(shard, kind, [&](const Stretch& stretch) -> absl::Status {
    const int64_t bytes = stretch.numel * ByteSize(stretch.type);
    const char* from = stretch.data;
    if (stretch.on_device) {
      buffer.resize(bytes);
      ONEPASS_RETURN_IF_ERROR(
          copy_stream_->CopyToHost(buffer.data(), from, bytes));
      ONEPASS_RETURN_IF_ERROR(copy_stream_->Synchronize());
      from = buffer.data();
    }
    float* const to = values.data() + stretch.offset;
    if (stretch.type == DType::kFloat32) {
      std::memcpy(to, from, bytes);
      return absl::OkStatus();
    }
    return Cast(runtime_.kernel, runtime_.pool,
                {stretch.numel, from, to, stretch.type, DType::kFloat32});
  });
}

absl::Status ShardOptimizer::Impl::SetState(absl::string_view name,
                                            StateKind kind,
                                            absl::Span<const float> values) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(CheckNotLeased());
  AwaitAllFences();
  int shard;
  ONEPASS_ASSIGN_OR_RETURN(shard, FindShard(name, values.size()));
  std::vector<char> buffer;
  const absl::Status status =
      ForEachChunk(shard, kind, [&](const Stretch& stretch) -> absl::Status {
        const auto chunk = values.subspan(stretch.offset, stretch.numel);
        if (kind == StateKind::kMaster) {
          return WriteMaster(shard, stretch, chunk);
        }
        const int64_t bytes = stretch.numel * ByteSize(stretch.type);
        char* to = stretch.data;
        if (stretch.on_device) {
          buffer.resize(bytes);
          to = buffer.data();
        }
        if (stretch.type == DType::kFloat32) {
          std::memcpy(to, chunk.data(), bytes);
        } else {
          ONEPASS_RETURN_IF_ERROR(Cast(runtime_.kernel, runtime_.pool,
                                       {stretch.numel, chunk.data(), to,
                                        DType::kFloat32, stretch.type}));
        }
        if (!stretch.on_device) return absl::OkStatus();
        ONEPASS_RETURN_IF_ERROR(
            copy_stream_->CopyToDevice(stretch.data, to, bytes));
        return copy_stream_->Synchronize();
      });
  if (status.ok()) return status;
  // A part of it may have been set.
  return Fail(Annotate(status, absl::StrCat("setting ", Name(kind),
                                            " of shard \"", name, "\": ")));
}

absl::StatusOr<StateLease> ShardOptimizer::Impl::LeaseState() {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (restoring_) {
    return absl::FailedPreconditionError("state is being restored");
  }
  std::vector<StateView> views;
  ONEPASS_RETURN_IF_ERROR(ForEachView(
      [&](StateView view, void*) { views.push_back(std::move(view)); }));
  ++leases_;
  return StateLease(std::move(views), [this] { --leases_; });
}

absl::StatusOr<StateLease> ShardOptimizer::Impl::LeaseStateBehindFences() {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (restoring_) {
    return absl::FailedPreconditionError("state is being restored");
  }
  // The order of a step: it begins with all that is on the device, in whole
  // shards here, and then takes the others one by one.
  std::vector<StateView> views;
  std::vector<StateView> others;
  ONEPASS_RETURN_IF_ERROR(ForEachView([&](StateView view, void*) {
    const bool first = shard_states_[view.fence].device_index >= 0;
    (first ? views : others).push_back(std::move(view));
  }));
  views.insert(views.end(), std::make_move_iterator(others.begin()),
               std::make_move_iterator(others.end()));
  auto fences = std::make_shared<StateFences>(static_cast<int>(shards_.size()));
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (shard_states_[i].numel == 0) fences->Open(static_cast<int>(i));
  }
  // Those that nobody reads behind any more are forgotten.
  fences_.erase(std::remove_if(fences_.begin(), fences_.end(),
                               [](const std::shared_ptr<StateFences>& old) {
                                 return old->all_open();
                               }),
                fences_.end());
  fences_.push_back(fences);
  return StateLease(std::move(views), nullptr, std::move(fences));
}

void ShardOptimizer::Impl::AwaitFences(int shard, Deadline deadline) {
  for (const std::shared_ptr<StateFences>& fences : fences_) {
    const double begin = Now();
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (!fences->Wait(shard, std::max(left, std::chrono::milliseconds(0)))) {
      continue;
    }
    ++fence_waits_;
    TraceHost("wait for an export", begin, 0);
  }
}

void ShardOptimizer::Impl::AwaitAllFences() {
  const Deadline deadline = FenceDeadline();
  for (size_t i = 0; i < shards_.size(); ++i) {
    AwaitFences(static_cast<int>(i), deadline);
  }
}

absl::StatusOr<StateRestore> ShardOptimizer::Impl::RestoreState() {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(CheckNotLeased());
  AwaitAllFences();
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (shard_states_[i].gradients == 0) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "shard \"", shards_[i].name,
        "\" has gradients of a step: take it, or DropGradients(), before "
        "state is restored"));
  }
  std::vector<StateTarget> targets;
  ONEPASS_RETURN_IF_ERROR(ForEachView([&](StateView view, void* data) {
    targets.push_back({std::move(view), data, nullptr});
  }));
  ++leases_;
  restoring_ = true;
  StateRestore::Owner owner;
  owner.commit = [this] { return SendAllWeights(); };
  owner.end = [this](bool written, bool committed) {
    --leases_;
    restoring_ = false;
    if (written && !committed && unusable_.ok()) {
      Fail(absl::AbortedError("a restore ended before all state was there"))
          .IgnoreError();
    }
  };
  return StateRestore(std::move(targets), std::move(owner));
}

absl::Status ShardOptimizer::Impl::ForEachView(
    absl::FunctionRef<void(StateView view, void* data)> add) {
  alignas(float) static char nothing[sizeof(float)];
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard& shard = shards_[i];
    for (const StateKind kind :
         {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      const auto add_stretch = [&](const Stretch& stretch) {
        StateView view;
        view.name = absl::StrCat("state.", shard.name, ".", Name(kind));
        view.type = ToStateType(stretch.type);
        view.shape = shard.shape;
        view.box = shard.box;
        view.offset = stretch.offset;
        view.numel = stretch.numel;
        view.on_device = stretch.on_device;
        view.data = stretch.data;
        view.fence = static_cast<int>(i);
        add(std::move(view), stretch.data);
        return absl::OkStatus();
      };
      ONEPASS_RETURN_IF_ERROR(
          ForEachStretch(static_cast<int>(i), kind, add_stretch));
      // A parameter without elements is one all the same, in some place.
      if (std::count(shard.shape.begin(), shard.shape.end(), 0) > 0) {
        ONEPASS_RETURN_IF_ERROR(
            add_stretch({/*on_device=*/false, nothing, TypeOf(kind), 0, 0}));
      }
    }
  }
  return absl::OkStatus();
}

std::vector<StateGroup> ShardOptimizer::Impl::StateGroups() const {
  std::vector<StateGroup> groups;
  for (size_t i = 0; i < options_.groups.size(); ++i) {
    groups.push_back(ToStateGroup(options_.groups[i], steps_[i]));
  }
  for (const Shard& shard : shards_) {
    groups[shard.group].parameters.push_back(shard.name);
  }
  return groups;
}

absl::Status ShardOptimizer::Impl::SetStateGroups(
    absl::Span<const StateGroup> groups) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (groups.size() != options_.groups.size()) {
    return Invalid("groups", absl::StrCat("are ", groups.size(), ", expected ",
                                          options_.groups.size()));
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    absl::Status status = ValidateAdamOptions(ToAdamOptions(groups[i]));
    if (status.ok()) status = CheckStep(groups[i].step);
    if (!status.ok()) return Annotate(status, absl::StrCat("group ", i, ": "));
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    options_.groups[i] = ToAdamOptions(groups[i]);
    steps_[i] = groups[i].step;
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::SetGroupOptions(int group,
                                                   const AdamOptions& options) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(CheckIndex("group", group, options_.groups.size()));
  if (absl::Status status = ValidateAdamOptions(options); !status.ok()) {
    return Annotate(status, absl::StrCat("group ", group, ": "));
  }
  options_.groups[group] = options;
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::SetStep(int group, int64_t step) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(CheckIndex("group", group, steps_.size()));
  ONEPASS_RETURN_IF_ERROR(CheckStep(step));
  steps_[group] = step;
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::SetLossScaleState(
    const LossScaleState& state) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  return scaler_.SetState(state);
}

// --- Errors ---

absl::Status ShardOptimizer::Impl::CheckUsable() const {
  if (unusable_.ok()) return absl::OkStatus();
  return Annotate(unusable_, "the optimizer is unusable: ");
}

absl::Status ShardOptimizer::Impl::CheckNotLeased() const {
  const int leases = leases_;
  if (leases == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("state is leased, leases: ", leases));
}

void ShardOptimizer::Impl::Drain() {
  // Streams whose device failed drop what is on them.
  for (Stream* stream :
       {gradient_stream_.get(), copy_stream_.get(), device_stream_.get()}) {
    if (stream != nullptr) stream->Synchronize().IgnoreError();
  }
}

absl::Status ShardOptimizer::Impl::Fail(const absl::Status& error) {
  Drain();
  unusable_ = error;
  return error;
}

// --- Gradients ---

absl::Status ShardOptimizer::Impl::CheckGradient(int shard,
                                                 const void* gradient,
                                                 const Stream& stream) const {
  ONEPASS_RETURN_IF_ERROR(CheckIndex("shard", shard, shards_.size()));
  // Only where it is needed: this is called in every step.
  const auto name = [&] {
    return absl::StrCat("gradient of shard \"", shards_[shard].name, "\"");
  };
  if (!Aligned(gradient, options_.grad_type)) {
    return Invalid(name(), absl::StrCat("is not aligned to elements in ",
                                        Name(options_.grad_type)));
  }
  if (&stream.device() != &runtime_.device) {
    return Invalid(name(),
                   absl::StrCat("is on a stream of device ",
                                stream.device().name(), ", expected one of ",
                                runtime_.device.name(), ", the optimizer's"));
  }
  if (gradients_finished_) {
    return absl::FailedPreconditionError(absl::StrCat(
        name(), " comes after the norm of this step was taken: step first"));
  }
  if (shard_states_[shard].gradients == options_.micro_batches) {
    return absl::FailedPreconditionError(
        absl::StrCat(name(), " is one too many: there are ",
                     options_.micro_batches, " (micro_batches) already"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Event*> ShardOptimizer::Impl::AddGradient(int shard,
                                                         const void* gradient,
                                                         Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(CheckGradient(shard, gradient, stream));
  ShardState& state = shard_states_[shard];
  const absl::Status status = [&]() -> absl::Status {
    if (state.numel == 0) return absl::OkStatus();
    if (gradient == nullptr) return AddNull(shard);
    ONEPASS_RETURN_IF_ERROR(stream.Record(*state.ready));
    ONEPASS_RETURN_IF_ERROR(gradient_stream_->Wait(*state.ready));
    ONEPASS_RETURN_IF_ERROR(TraceBegin(*gradient_stream_, TraceRow::kGradients,
                                       "gradient", state.numel));
    ONEPASS_RETURN_IF_ERROR(AddToShard(shard, gradient));
    ONEPASS_RETURN_IF_ERROR(TraceEnd(*gradient_stream_));
    return gradient_stream_->Record(*state.landed);
  }();
  if (!status.ok()) {
    return Fail(Annotate(status, absl::StrCat("gradient of shard \"",
                                              shards_[shard].name, "\": ")));
  }
  ++state.gradients;
  return state.landed.get();
}

absl::Status ShardOptimizer::Impl::AddNull(int shard) {
  const ShardState& state = shard_states_[shard];
  // Of the last gradient the sum's norm is taken, also where it adds nothing.
  if (!IsLast(state) || state.given == 0 || state.device_numel() == 0) {
    return absl::OkStatus();
  }
  return AddNorm(DeviceGradient(shard), state.device_numel());
}

absl::Status ShardOptimizer::Impl::AddToShard(int shard, const void* gradient) {
  ShardState& state = shard_states_[shard];
  const auto* bytes = static_cast<const char*>(gradient);
  const int64_t element = ByteSize(options_.grad_type);
  const char* device_part = bytes + state.cpu_numel * element;
  if (state.given > 0 && state.cpu_numel > 0) {
    // What landed before makes way.
    ONEPASS_RETURN_IF_ERROR(
        Await(*state.landed, "wait for gradients", gradient_waits_));
    ONEPASS_RETURN_IF_ERROR(SumLanded(shard, nullptr));
  }
  const bool first = state.given == 0;
  ++state.given;
  state.zero = false;
  for (const HostLayout::Part& part : layout_->segments_of(shard)) {
    ONEPASS_RETURN_IF_ERROR(gradient_stream_->CopyToHost(
        Wire(part.position), bytes + part.offset * element,
        part.numel * element));
  }
  if (options_.micro_batches == 1) {
    if (state.device_numel() > 0) {
      ONEPASS_RETURN_IF_ERROR(gradient_stream_->CopyOnDevice(
          DeviceGradient(shard), device_part, state.device_numel() * element));
    }
    // Here, where it is read anyway, and not again on the host.
    return AddNorm(gradient, state.numel);
  }
  if (state.device_numel() == 0) return absl::OkStatus();
  AccumulateArgs sum;
  sum.numel = state.device_numel();
  sum.out = DeviceGradient(shard);
  sum.sum = first ? nullptr : static_cast<const float*>(sum.out);
  sum.term = device_part;
  sum.term_type = options_.grad_type;
  sum.leaf_sums = IsLast(state) ? device_leaf_sums_.as<double>() : nullptr;
  ONEPASS_RETURN_IF_ERROR(gradient_stream_->Run({sum}));
  return IsLast(state) ? AddLeafSums(sum.numel) : absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::AddNorm(const void* gradient,
                                           int64_t numel) {
  SquaredNormArgs squares;
  squares.numel = numel;
  squares.x = gradient;
  squares.leaf_sums = device_leaf_sums_.as<double>();
  // Of a whole shard as it came, or of the device's own sum.
  squares.type = device_gradient_type();
  ONEPASS_RETURN_IF_ERROR(gradient_stream_->Run({squares}));
  return AddLeafSums(numel);
}

absl::Status ShardOptimizer::Impl::AddLeafSums(int64_t numel) {
  if (!device_norm_used_) {
    ONEPASS_RETURN_IF_ERROR(
        gradient_stream_->SetZero(device_norm_.data(), device_norm_.bytes()));
    device_norm_used_ = true;
  }
  SumLeavesArgs sum;
  sum.count = LeafCount(numel);
  sum.leaf_sums = device_leaf_sums_.as<double>();
  sum.sum = device_norm_.as<NormSum>();
  return gradient_stream_->Run({sum});
}

absl::Status ShardOptimizer::Impl::SumLanded(int shard, NormSum* norm) {
  const int64_t numel = shard_states_[shard].cpu_numel;
  if (numel == 0) return absl::OkStatus();
  const double begin = Now();
  for (const HostLayout::Part& part : layout_->segments_of(shard)) {
    AccumulateArgs sum;
    sum.numel = part.numel;
    sum.out = Sum(part.sub_group, part.position);
    sum.sum = shard_states_[shard].given == 1
                  ? nullptr
                  : static_cast<const float*>(sum.out);
    sum.term = Wire(part.position);
    sum.term_type = options_.grad_type;
    ONEPASS_RETURN_IF_ERROR(
        Accumulate(runtime_.kernel, runtime_.pool, sum, norm));
  }
  TraceHost("sum", begin, numel);
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::FillZero(int shard) {
  ShardState& state = shard_states_[shard];
  if (state.zero) return absl::OkStatus();
  for (const HostLayout::Part& part : layout_->segments_of(shard)) {
    if (options_.micro_batches == 1) {
      std::memset(Wire(part.position), 0,
                  part.numel * ByteSize(options_.grad_type));
    } else {
      std::memset(Sum(part.sub_group, part.position), 0,
                  part.numel * sizeof(float));
    }
  }
  if (state.device_index >= 0) {
    ONEPASS_RETURN_IF_ERROR(gradient_stream_->SetZero(
        DeviceGradient(shard),
        state.device_numel() * ByteSize(device_gradient_type())));
  }
  state.zero = true;
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::CheckComplete() const {
  for (size_t i = 0; i < shards_.size(); ++i) {
    const int64_t gradients = shard_states_[i].gradients;
    if (gradients != 0 && gradients != options_.micro_batches) {
      return absl::FailedPreconditionError(
          absl::StrCat("shard \"", shards_[i].name, "\" has ", gradients,
                       " gradients, expected ", options_.micro_batches,
                       " (micro_batches) or none"));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::FinishGradients() {
  if (gradients_finished_) return absl::OkStatus();
  ONEPASS_RETURN_IF_ERROR(CheckComplete());
  const int shards = static_cast<int>(shards_.size());
  const absl::Status status = [&]() -> absl::Status {
    for (int i = 0; i < shards; ++i) {
      if (shard_states_[i].given == 0) ONEPASS_RETURN_IF_ERROR(FillZero(i));
    }
    if (device_norm_used_) {
      ONEPASS_RETURN_IF_ERROR(gradient_stream_->CopyToHost(
          device_norm_on_host_.data(), device_norm_.data(), sizeof(NormSum)));
    }
    const double begin = Now();
    ONEPASS_RETURN_IF_ERROR(gradient_stream_->Record(*gradients_done_));
    ONEPASS_RETURN_IF_ERROR(gradients_done_->Wait());
    TraceHost("wait for gradients", begin, 0);
    norm_ = NormSum();
    for (int i = 0; i < shards && options_.micro_batches > 1; ++i) {
      if (shard_states_[i].given > 0) {
        ONEPASS_RETURN_IF_ERROR(SumLanded(i, &norm_));
      }
    }
    if (device_norm_used_) {
      NormSum of_device;
      std::memcpy(static_cast<void*>(&of_device), device_norm_on_host_.data(),
                  sizeof(NormSum));
      norm_.Merge(of_device);
    }
    return absl::OkStatus();
  }();
  if (!status.ok()) return Fail(Annotate(status, "gradients: "));
  gradients_finished_ = true;
  return absl::OkStatus();
}

void ShardOptimizer::Impl::ForgetGradients() {
  for (ShardState& state : shard_states_) state.gradients = state.given = 0;
  device_norm_used_ = false;
  gradients_finished_ = false;
  gradient_waits_ = 0;
}

absl::Status ShardOptimizer::Impl::DropGradients() {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (absl::Status status = gradient_stream_->Synchronize(); !status.ok()) {
    return Fail(Annotate(status, "dropping gradients: "));
  }
  ForgetGradients();
  return absl::OkStatus();
}

absl::StatusOr<NormSum> ShardOptimizer::Impl::LocalNorm() {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(FinishGradients());
  return norm_;
}

// --- Step ---

absl::StatusOr<StepReport> ShardOptimizer::Impl::Step(const StepInput& input) {
  const auto begin = Clock::now();
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  ONEPASS_RETURN_IF_ERROR(CheckNotLeased());
  StepReport report;
  ONEPASS_ASSIGN_OR_RETURN(report.loss_scale, LossScaleOf(input));
  ONEPASS_RETURN_IF_ERROR(FinishGradients());
  ONEPASS_RETURN_IF_ERROR(CheckNorm(input));
  Describe(report);
  const double norm = GradientNorm(input.norm);
  report.norm = Quotient(norm, report.loss_scale);
  const bool finite = input.norm.finite() && std::isfinite(report.norm);
  report.skipped = input.found_inf || !finite;
  if (report.skipped) {
    report.skip_reason =
        !finite ? "the norm of the gradient is not finite"
                : "the caller found infinity in the gradients (found_inf)";
  } else {
    ONEPASS_ASSIGN_OR_RETURN(
        report.factor, ClipFactor(norm, options_.max_norm, report.loss_scale));
    for (size_t i = 0; i < steps_.size(); ++i) {
      absl::StatusOr<AdamConstants> constants =
          ComputeAdamConstants(options_.groups[i], steps_[i] + 1);
      if (!constants.ok()) {
        return Annotate(constants.status(), absl::StrCat("group ", i, ": "));
      }
      constants_[i] = *constants;
    }
    if (absl::Status status = Update(report.factor, report); !status.ok()) {
      return Fail(Annotate(status, "update: "));
    }
    for (int64_t& step : steps_) ++step;
  }
  if (absl::Status status = CollectTrace(); !status.ok()) {
    return Fail(Annotate(status, "trace: "));
  }
  skipped_steps_ += report.skipped;
  // Another's scale has rules of its own.
  if (!input.inv_scale.has_value()) scaler_.Update(report.skipped);
  ForgetGradients();
  report.seconds = Seconds(Clock::now() - begin);
  return report;
}

absl::StatusOr<double> ShardOptimizer::Impl::LossScaleOf(
    const StepInput& input) const {
  if (!input.inv_scale.has_value()) return scaler_.scale();
  const double scale = Quotient(1, *input.inv_scale);
  if (*input.inv_scale > 0 && std::isfinite(*input.inv_scale) &&
      std::isfinite(scale)) {
    return scale;
  }
  return Invalid("inv_scale",
                 absl::StrCat("is ", *input.inv_scale, ", and its inverse ",
                              scale, ", expected finite numbers above 0"));
}

absl::Status ShardOptimizer::Impl::CheckNorm(const StepInput& input) const {
  const double all = input.norm.Total();
  const double mine = norm_.Total();
  const bool holds = norm_.finite() ? !(all < mine) : !input.norm.finite();
  if (holds || input.found_inf) return absl::OkStatus();
  return Invalid(
      "norm",
      absl::StrCat("has a sum of squares of ", all, ", expected at least the ",
                   mine, " of this rank: that of LocalNorm(), merged"));
}

void ShardOptimizer::Impl::Describe(StepReport& report) const {
  report.scale_fused = scale_reason_.empty();
  report.scale_reason = scale_reason_;
  report.copy_fused = copy_fused_;
  report.copy_reason = copy_reason_;
  report.streaming_stores =
      copy_fused_ && StreamsCopy(runtime_.kernel, options_.weights_type,
                                 CopyStores::kAuto, layout_->longest_piece());
  for (const ShardState& state : shard_states_) {
    report.cpu_numel += state.cpu_numel;
    report.device_numel += state.device_numel();
  }
  report.pieces = static_cast<int64_t>(layout_->pieces().size());
  report.host_waits = 1;  // that of FinishGradients()
  report.gradient_waits = gradient_waits_;
}

absl::Status ShardOptimizer::Impl::Update(float factor, StepReport& report) {
  in_flight_ = 0;
  fence_waits_ = 0;
  fence_deadline_ = FenceDeadline();
  if (has_device_part()) {
    for (size_t i = 0; i < shard_states_.size(); ++i) {
      if (shard_states_[i].device_index < 0) continue;
      AwaitFences(static_cast<int>(i), fence_deadline_);
    }
    ONEPASS_RETURN_IF_ERROR(TraceBegin(*device_stream_, TraceRow::kDevice,
                                       "update", report.device_numel));
    ONEPASS_RETURN_IF_ERROR(
        device_adam_->Step(*device_stream_, device_gradient_pointers_,
                           device_gradient_type(), constants_, factor));
    ONEPASS_RETURN_IF_ERROR(TraceEnd(*device_stream_));
    ONEPASS_RETURN_IF_ERROR(device_stream_->Record(*device_done_));
  }
  ONEPASS_RETURN_IF_ERROR(options_.path == StepPath::kFused
                              ? UpdateInOnePass(factor, report)
                              : UpdateInThreePasses(factor, report));
  const double begin = Now();
  if (has_device_part()) {
    ONEPASS_RETURN_IF_ERROR(copy_stream_->Wait(*device_done_));
  }
  ONEPASS_RETURN_IF_ERROR(copy_stream_->Record(*copies_done_));
  ONEPASS_RETURN_IF_ERROR(copies_done_->Wait());
  ++report.host_waits;
  TraceHost("wait for the last copy", begin, 0);
  report.fence_waits = fence_waits_;
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::UpdateInOnePass(float factor,
                                                   StepReport& report) {
  if (!copy_fused_) {
    ONEPASS_RETURN_IF_ERROR(UpdateWithoutCopies(factor));
    return CopyToWeights(report);
  }
  for (const HostLayout::Piece& piece : layout_->pieces()) {
    Staging* staging;
    ONEPASS_ASSIGN_OR_RETURN(staging, NextStaging(report));
    ONEPASS_RETURN_IF_ERROR(
        UpdatePiece(piece, factor, staging->data, report.streaming_stores));
    ONEPASS_RETURN_IF_ERROR(SendPiece(piece, *staging, report));
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::UpdateInThreePasses(float factor,
                                                       StepReport& report) {
  const bool widen = reads_sums() && options_.micro_batches == 1;
  for (size_t i = 0; i < state_.size(); ++i) {
    const HostLayout::SubGroup& sub_group = layout_->sub_groups()[i];
    const int64_t numel = sub_group.end - sub_group.begin;
    float* gradients = reads_sums()
                           ? state_[i].sums.as<float>()
                           : reinterpret_cast<float*>(Wire(sub_group.begin));
    if (widen) {
      // 16 bits are never scaled in place: that would round twice.
      const double begin = Now();
      ONEPASS_RETURN_IF_ERROR(Cast(runtime_.kernel, runtime_.pool,
                                   {numel, Wire(sub_group.begin), gradients,
                                    options_.grad_type, DType::kFloat32}));
      TraceHost("widen", begin, numel);
    }
    const double begin = Now();
    ONEPASS_RETURN_IF_ERROR(Scale(runtime_.kernel, runtime_.pool,
                                  {numel, gradients, gradients, factor}));
    TraceHost("scale", begin, numel);
  }
  ONEPASS_RETURN_IF_ERROR(UpdateWithoutCopies(1));
  return CopyToWeights(report);
}

absl::Status ShardOptimizer::Impl::UpdateWithoutCopies(float factor) {
  for (const HostLayout::Piece& piece : layout_->pieces()) {
    ONEPASS_RETURN_IF_ERROR(UpdatePiece(piece, factor, nullptr, false));
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::UpdatePiece(const HostLayout::Piece& piece,
                                               float factor, char* copies,
                                               bool stream_copy) {
  const SubGroupState& state = state_[piece.sub_group];
  parts_.clear();
  for (const HostLayout::Part& part : piece.parts) {
    AwaitFences(part.shard, fence_deadline_);
    AdamStepArgs args;
    args.numel = part.numel;
    args.param = Master(part.sub_group, part.position);
    args.exp_avg_type = options_.exp_avg_type;
    args.exp_avg_sq_type = options_.exp_avg_sq_type;
    args.exp_avg = InSubGroup(state.exp_avg, args.exp_avg_type, part.sub_group,
                              part.position);
    args.exp_avg_sq = InSubGroup(state.exp_avg_sq, args.exp_avg_sq_type,
                                 part.sub_group, part.position);
    if (reads_sums()) {
      args.grad = Sum(part.sub_group, part.position);
    } else {
      args.grad = Wire(part.position);
      args.grad_type = options_.grad_type;
    }
    if (copies != nullptr) {
      args.copy_type = options_.weights_type;
      args.copy =
          copies + (part.position - piece.begin) * ByteSize(args.copy_type);
      args.stream_copy = stream_copy;
    }
    args.grad_scale = factor;
    args.constants = constants_[shards_[part.shard].group];
    parts_.push_back(args);
  }
  const double begin = Now();
  ONEPASS_RETURN_IF_ERROR(AdamStep(runtime_.kernel, runtime_.pool, parts_));
  TraceHost("update", begin, piece.end - piece.begin);
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::CopyToWeights(StepReport& report) {
  if (options_.weights_type == DType::kFloat32) {
    for (const HostLayout::Part& part : layout_->segments()) {
      ONEPASS_RETURN_IF_ERROR(
          TraceBegin(*copy_stream_, TraceRow::kCopies, "copy", part.numel));
      ONEPASS_RETURN_IF_ERROR(copy_stream_->CopyToDevice(
          Weights(part.shard, part.offset),
          Master(part.sub_group, part.position),
          part.numel * static_cast<int64_t>(sizeof(float))));
      ONEPASS_RETURN_IF_ERROR(TraceEnd(*copy_stream_));
    }
    return absl::OkStatus();
  }
  for (const HostLayout::Piece& piece : layout_->pieces()) {
    Staging* staging;
    ONEPASS_ASSIGN_OR_RETURN(staging, NextStaging(report));
    const double begin = Now();
    // With the elements between parts: masters there are zeros.
    ONEPASS_RETURN_IF_ERROR(
        Cast(runtime_.kernel, runtime_.pool,
             {piece.end - piece.begin, Master(piece.sub_group, piece.begin),
              staging->data, DType::kFloat32, options_.weights_type}));
    TraceHost("cast", begin, piece.end - piece.begin);
    ONEPASS_RETURN_IF_ERROR(SendPiece(piece, *staging, report));
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardOptimizer::Impl::Staging*>
ShardOptimizer::Impl::NextStaging(StepReport& report) {
  Staging& staging = staging_[next_staging_];
  if (in_flight_ == staging_.size()) {
    // All are: this one for longest.
    ONEPASS_RETURN_IF_ERROR(
        Await(*staging.copied, "wait for a buffer", report.buffer_waits));
    --in_flight_;
  }
  next_staging_ = (next_staging_ + 1) % staging_.size();
  return &staging;
}

absl::Status ShardOptimizer::Impl::Await(Event& event, const char* name,
                                         int64_t& waits) {
  bool done;
  ONEPASS_ASSIGN_OR_RETURN(done, event.Done());
  if (done) return absl::OkStatus();
  const double begin = Now();
  ONEPASS_RETURN_IF_ERROR(event.Wait());
  TraceHost(name, begin, 0);
  ++waits;
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::SendPiece(const HostLayout::Piece& piece,
                                             Staging& staging,
                                             StepReport& report) {
  const int64_t element = ByteSize(options_.weights_type);
  ONEPASS_RETURN_IF_ERROR(TraceBegin(*copy_stream_, TraceRow::kCopies, "copy",
                                     piece.end - piece.begin));
  // One copy for each shard, even where weights follow one another: they may be
  // allocations of their own, which a copy may not join.
  for (const HostLayout::Part& part : piece.parts) {
    ONEPASS_RETURN_IF_ERROR(copy_stream_->CopyToDevice(
        Weights(part.shard, part.offset),
        staging.data + (part.position - piece.begin) * element,
        part.numel * element));
  }
  ONEPASS_RETURN_IF_ERROR(TraceEnd(*copy_stream_));
  ONEPASS_RETURN_IF_ERROR(copy_stream_->Record(*staging.copied));
  // Copies end in the order of their stream: the oldest first.
  const size_t size = staging_.size();
  while (in_flight_ > 0) {
    const size_t oldest = (next_staging_ + 2 * size - 1 - in_flight_) % size;
    bool done;
    ONEPASS_ASSIGN_OR_RETURN(done, staging_[oldest].copied->Done());
    if (!done) break;
    --in_flight_;
  }
  ++in_flight_;
  report.most_buffers_in_flight =
      std::max(report.most_buffers_in_flight, static_cast<int64_t>(in_flight_));
  return absl::OkStatus();
}

// --- Trace ---

absl::Status ShardOptimizer::Impl::SetTrace(StepTrace* trace) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (trace != nullptr) {
    std::unique_ptr<Event> origin;
    Clock::time_point origin_time;
    ONEPASS_RETURN_IF_ERROR(ReadClocks(&origin, &origin_time));
    trace_origin_ = std::move(origin);
    trace_origin_time_ = origin_time;
  }
  traced_.clear();
  trace_ = trace;
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::ReadClocks(std::unique_ptr<Event>* on_device,
                                              Clock::time_point* on_host) {
  std::unique_ptr<Event> event;
  ONEPASS_ASSIGN_OR_RETURN(event, runtime_.device.CreateEvent());
  ONEPASS_ASSIGN_OR_RETURN(*on_device, runtime_.device.CreateEvent());
  // The event's time is then that of its own Record().
  ONEPASS_RETURN_IF_ERROR(copy_stream_->Synchronize());
  Clock::duration shortest = Clock::duration::max();
  for (int i = 0; i < kClockTries; ++i) {
    const Clock::time_point before = Clock::now();
    ONEPASS_RETURN_IF_ERROR(copy_stream_->Record(*event));
    ONEPASS_RETURN_IF_ERROR(event->Wait());
    const Clock::duration taken = Clock::now() - before;
    if (taken >= shortest) continue;
    shortest = taken;
    // The event is of some time between. Its earliest keeps what the host did
    // after waiting for a stream behind what it waited for: by the latest, host
    // spans would be early, as if they overlapped copies that had ended.
    *on_host = before;
    std::swap(*on_device, event);
  }
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::TraceBegin(Stream& stream, TraceRow row,
                                              const char* name, int64_t numel) {
  if (trace_ == nullptr) return absl::OkStatus();
  TracedEvents events = {row, name, nullptr, nullptr, numel};
  ONEPASS_ASSIGN_OR_RETURN(events.begin, runtime_.device.CreateEvent());
  ONEPASS_ASSIGN_OR_RETURN(events.end, runtime_.device.CreateEvent());
  ONEPASS_RETURN_IF_ERROR(stream.Record(*events.begin));
  traced_.push_back(std::move(events));
  return absl::OkStatus();
}

absl::Status ShardOptimizer::Impl::TraceEnd(Stream& stream) {
  if (trace_ == nullptr) return absl::OkStatus();
  return stream.Record(*traced_.back().end);
}

absl::Status ShardOptimizer::Impl::CollectTrace() {
  if (trace_ == nullptr) return absl::OkStatus();
  for (const TracedEvents& events : traced_) {
    TraceSpan span = {events.row, events.name, 0, 0, events.numel};
    ONEPASS_ASSIGN_OR_RETURN(span.begin_s, runtime_.device.SecondsBetween(
                                               *trace_origin_, *events.begin));
    ONEPASS_ASSIGN_OR_RETURN(span.end_s, runtime_.device.SecondsBetween(
                                             *trace_origin_, *events.end));
    trace_->spans.push_back(span);
  }
  traced_.clear();
  return absl::OkStatus();
}

// --- What users see ---

absl::StatusOr<std::unique_ptr<ShardOptimizer>> ShardOptimizer::Create(
    const Runtime& runtime, ShardOptimizerOptions options,
    std::vector<Shard> shards) {
  absl::StatusOr<LossScaler> scaler = LossScaler::Create(options.loss_scale);
  if (!scaler.ok()) return Annotate(scaler.status(), "loss_scale: ");
  auto impl = std::make_unique<Impl>(runtime, std::move(options),
                                     std::move(shards), *scaler);
  ONEPASS_RETURN_IF_ERROR(impl->Initialize());
  return absl::WrapUnique(new ShardOptimizer(std::move(impl)));
}

ShardOptimizer::ShardOptimizer(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}

ShardOptimizer::~ShardOptimizer() = default;

absl::StatusOr<Event*> ShardOptimizer::AddGradient(int shard,
                                                   const void* gradient,
                                                   Stream& stream) {
  return impl_->AddGradient(shard, gradient, stream);
}
absl::Status ShardOptimizer::DropGradients() { return impl_->DropGradients(); }
absl::StatusOr<NormSum> ShardOptimizer::LocalNorm() {
  return impl_->LocalNorm();
}
absl::StatusOr<StepReport> ShardOptimizer::Step(const StepInput& input) {
  return impl_->Step(input);
}
double ShardOptimizer::LossScale() const { return impl_->scaler().scale(); }
const LossScaleState& ShardOptimizer::loss_scale_state() const {
  return impl_->scaler().state();
}
absl::Status ShardOptimizer::CheckLossScaleState(
    const LossScaleState& state) const {
  LossScaler scaler = impl_->scaler();
  return scaler.SetState(state);
}
absl::Status ShardOptimizer::SetLossScaleState(const LossScaleState& state) {
  return impl_->SetLossScaleState(state);
}
absl::Status ShardOptimizer::SetGroupOptions(int group,
                                             const AdamOptions& options) {
  return impl_->SetGroupOptions(group, options);
}
const std::vector<AdamOptions>& ShardOptimizer::groups() const {
  return impl_->groups();
}
int64_t ShardOptimizer::step(int group) const { return impl_->step(group); }
int64_t ShardOptimizer::skipped_steps() const { return impl_->skipped_steps(); }
absl::Status ShardOptimizer::SetStep(int group, int64_t step) {
  return impl_->SetStep(group, step);
}
absl::Status ShardOptimizer::GetState(absl::string_view name, StateKind kind,
                                      absl::Span<float> values) {
  return impl_->GetState(name, kind, values);
}
absl::Status ShardOptimizer::SetState(absl::string_view name, StateKind kind,
                                      absl::Span<const float> values) {
  return impl_->SetState(name, kind, values);
}
absl::StatusOr<StateLease> ShardOptimizer::LeaseState() {
  return impl_->LeaseState();
}
absl::StatusOr<StateLease> ShardOptimizer::LeaseStateBehindFences() {
  return impl_->LeaseStateBehindFences();
}
absl::StatusOr<StateRestore> ShardOptimizer::RestoreState() {
  return impl_->RestoreState();
}
std::vector<StateGroup> ShardOptimizer::StateGroups() const {
  return impl_->StateGroups();
}
absl::Status ShardOptimizer::SetStateGroups(
    absl::Span<const StateGroup> groups) {
  return impl_->SetStateGroups(groups);
}
bool ShardOptimizer::leased() const { return impl_->leased(); }
const std::vector<Shard>& ShardOptimizer::shards() const {
  return impl_->shards();
}
const absl::Status& ShardOptimizer::pinning_error() const {
  return impl_->pinning_error();
}
int64_t ShardOptimizer::pageable_bytes() const {
  return impl_->pageable_bytes();
}
int64_t ShardOptimizer::pinned_bytes() const { return impl_->pinned_bytes(); }
absl::Status ShardOptimizer::SetTrace(StepTrace* trace) {
  return impl_->SetTrace(trace);
}
void ShardOptimizer::MarkUnusable(const absl::Status& error) {
  impl_->MarkUnusable(error);
}
const absl::Status& ShardOptimizer::status() const { return impl_->status(); }

}  // namespace onepass

#include "offload/zero_optimizer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "absl/container/flat_hash_set.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"
#include "xxhash.h"

namespace onepass {
namespace {

// Elements of all units together: bytes of any array of theirs fit 64 bits.
constexpr int64_t kMostNumel = std::numeric_limits<int64_t>::max() / 16;

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  return absl::Status(status.code(), absl::StrCat(context, status.message()));
}

absl::StatusOr<int64_t> Numel(const ZeroParameter& parameter) {
  int64_t numel = 1;
  for (const int64_t size : parameter.shape) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel)) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter \"", parameter.name, "\": shape is [",
                       absl::StrJoin(parameter.shape, ", "),
                       "], expected sizes of at least 0 that fit 64 bits"));
    }
  }
  return numel;
}

// A hash of values, each with all before it as its seed. Allocates nothing.
class Fingerprint {
 public:
  explicit Fingerprint(uint64_t value = 0) : value_(value) {}

  template <typename T>
  void Add(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    AddBytes(&value, sizeof(value));
  }
  void AddText(absl::string_view text) { AddBytes(text.data(), text.size()); }
  void AddGroup(const AdamOptions& group) {
    Add(group.lr);
    Add(group.beta1);
    Add(group.beta2);
    Add(group.eps);
    Add(group.weight_decay);
    Add(group.mode);
    Add(group.bias_correction);
  }

  uint64_t value() const { return value_; }

 private:
  void AddBytes(const void* data, size_t bytes) {
    value_ = XXH3_64bits_withSeed(data, bytes, value_);
  }

  uint64_t value_;
};

// Of what has to be the same on all ranks at creation.
uint64_t CreationFingerprint(const ZeroOptions& options,
                             const std::vector<ZeroUnit>& units,
                             bool host_accessible) {
  const ShardOptimizerOptions& shard = options.shard;
  Fingerprint fingerprint;
  fingerprint.Add(host_accessible);
  fingerprint.Add(options.collective_bytes);
  fingerprint.Add(shard.weights_type);
  fingerprint.Add(shard.grad_type);
  fingerprint.Add(shard.exp_avg_type);
  fingerprint.Add(shard.exp_avg_sq_type);
  fingerprint.Add(shard.micro_batches);
  fingerprint.Add(shard.max_norm);
  const LossScaleOptions& scale = shard.loss_scale;
  fingerprint.Add(scale.mode);
  fingerprint.Add(scale.initial_scale);
  fingerprint.Add(scale.hysteresis);
  fingerprint.Add(scale.min_scale);
  fingerprint.Add(scale.growth_interval);
  fingerprint.Add(scale.max_scale);
  fingerprint.Add(shard.groups.size());
  for (const AdamOptions& group : shard.groups) fingerprint.AddGroup(group);
  for (const ZeroUnit& unit : units) {
    fingerprint.AddText(unit.name);
    fingerprint.Add(unit.parameters.size());
    for (const ZeroParameter& parameter : unit.parameters) {
      fingerprint.AddText(parameter.name);
      fingerprint.Add(parameter.group);
      fingerprint.Add(parameter.shape.size());
      for (const int64_t size : parameter.shape) fingerprint.Add(size);
    }
  }
  return fingerprint.value();
}

}  // namespace

// --- Gathered ---

Gathered::Gathered(Gathered&& other) noexcept
    : optimizer_(std::exchange(other.optimizer_, nullptr)),
      unit_(other.unit_),
      buffer_(std::move(other.buffer_)),
      ready_(std::move(other.ready_)) {}

Gathered& Gathered::operator=(Gathered&& other) noexcept {
  if (this != &other) {
    Release();
    optimizer_ = std::exchange(other.optimizer_, nullptr);
    unit_ = other.unit_;
    buffer_ = std::move(other.buffer_);
    ready_ = std::move(other.ready_);
  }
  return *this;
}

Gathered::~Gathered() { Release(); }

void Gathered::Release() {
  if (optimizer_ == nullptr) return;
  optimizer_->gathered_.in_use -= buffer_.bytes();
  --optimizer_->states_[unit_].gathered;
}

const void* Gathered::weights(int parameter) const {
  return buffer_.as<char>() +
         optimizer_->partition(unit_).unit_offset(parameter) *
             optimizer_->weights_bytes();
}

// --- Creation ---

absl::StatusOr<std::unique_ptr<ZeroOptimizer>> ZeroOptimizer::Create(
    const Runtime& runtime, Communicator& communicator, ZeroOptions options,
    std::vector<ZeroUnit> units) {
  auto optimizer = absl::WrapUnique(new ZeroOptimizer(
      runtime, communicator, std::move(options), std::move(units)));
  const absl::Status mine = optimizer->Initialize();
  Vote vote = {};
  vote.fingerprint = CreationFingerprint(optimizer->options_, optimizer->units_,
                                         runtime.device.host_accessible());
  ONEPASS_RETURN_IF_ERROR(optimizer->Agree(mine, vote));
  ONEPASS_RETURN_IF_ERROR(optimizer->CompareFingerprints(
      absl::StatusCode::kInvalidArgument, "options, units or kind of device"));
  return optimizer;
}

ZeroOptimizer::~ZeroOptimizer() = default;

absl::Status ZeroOptimizer::Initialize() {
  votes_.resize(world());
  const DType wire = options_.shard.grad_type;
  const DType local = options_.local_grad_type;
  if (!kGradientTypes.Contains(local) ||
      (local != wire && local != DType::kFloat32 && wire != DType::kFloat32)) {
    return absl::InvalidArgumentError(
        absl::StrCat("local_grad_type is ", Name(local), ", and grad_type ",
                     Name(wire), ": expected the same, or one of them fp32"));
  }
  if (options_.collective_bytes < world()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "collective_bytes is ", options_.collective_bytes,
        ", expected at least one for each of ", world(), " ranks"));
  }
  ONEPASS_RETURN_IF_ERROR(PartitionUnits());
  ONEPASS_RETURN_IF_ERROR(TakeMemory());
  std::vector<Shard> shards;
  ONEPASS_ASSIGN_OR_RETURN(shards, MakeShards());
  ONEPASS_ASSIGN_OR_RETURN(
      shards_,
      ShardOptimizer::Create(runtime_, options_.shard, std::move(shards)));
  return absl::OkStatus();
}

absl::Status ZeroOptimizer::PartitionUnits() {
  absl::flat_hash_set<absl::string_view> names;
  int64_t all_numel = 0;  // of all ranks
  for (const ZeroUnit& unit : units_) {
    std::vector<int64_t> numels;
    for (const ZeroParameter& parameter : unit.parameters) {
      if (!names.insert(parameter.name).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("parameter \"", parameter.name, "\" is there twice"));
      }
      ONEPASS_ASSIGN_OR_RETURN(numels.emplace_back(), Numel(parameter));
    }
    absl::StatusOr<UnitPartition> partition =
        UnitPartition::Create(numels, world());
    if (!partition.ok()) {
      return Annotate(partition.status(),
                      absl::StrCat("unit \"", unit.name, "\": "));
    }
    if (partition->padded_numel() > kMostNumel - all_numel) {
      return absl::OutOfRangeError(absl::StrCat("the units until \"", unit.name,
                                                "\" have more elements than ",
                                                kMostNumel));
    }
    const int64_t weights_begin = all_numel / world();
    all_numel += partition->padded_numel();
    states_.push_back(
        {*std::move(partition), std::move(numels), weights_begin, {}});
  }
  return absl::OkStatus();
}

absl::Status ZeroOptimizer::TakeMemory() {
  Device& device = runtime_.device;
  const int64_t wire = ByteSize(options_.shard.grad_type);
  int64_t numel = 0;
  int64_t most = 0;  // of a shard
  for (const UnitState& state : states_) {
    numel += state.partition.shard_numel();
    most = std::max(most, state.partition.shard_numel());
  }
  ONEPASS_ASSIGN_OR_RETURN(stream_, device.CreateStream("zero"));
  ONEPASS_ASSIGN_OR_RETURN(weights_, device.Allocate(numel * weights_bytes()));
  ONEPASS_ASSIGN_OR_RETURN(flat_, device.Allocate(world() * most * wire));
  if (world() > 1) {
    ONEPASS_ASSIGN_OR_RETURN(received_, device.Allocate(world() * most * wire));
    ONEPASS_ASSIGN_OR_RETURN(
        sum_, device.Allocate(most * static_cast<int64_t>(sizeof(float))));
  }
  DeviceCollectivesOptions collectives;
  collectives.chunk_bytes =
      std::clamp(most * std::max(weights_bytes(), wire), int64_t{1},
                 options_.collective_bytes / world());
  collectives.pin_memory = options_.shard.pin_memory;
  ONEPASS_ASSIGN_OR_RETURN(
      collectives_, DeviceCollectives::Create(device, runtime_.pool,
                                              communicator_, collectives));
  // What belongs to nobody is zero, and stays so.
  ONEPASS_RETURN_IF_ERROR(stream_->SetZero(weights_.data(), weights_.bytes()));
  return stream_->Synchronize();
}

absl::StatusOr<std::vector<Shard>> ZeroOptimizer::MakeShards() {
  std::vector<Shard> shards;
  for (size_t u = 0; u < units_.size(); ++u) {
    UnitState& state = states_[u];
    const int64_t begin = rank() * state.partition.shard_numel();
    for (const ParameterRange& range : state.partition.RangesOf(rank())) {
      const ZeroParameter& parameter = units_[u].parameters[range.parameter];
      if (!parameter.values) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameter \"", parameter.name, "\": values is not set"));
      }
      state.owned.push_back({range, static_cast<int>(shards.size())});
      Shard& shard = shards.emplace_back();
      shard.name = parameter.name;
      shard.shape = parameter.shape;
      shard.box = {{range.offset}, {range.numel}};
      shard.group = parameter.group;
      shard.values = [&parameter, range](int64_t offset,
                                         absl::Span<float> values) {
        return parameter.values(range.offset + offset, values);
      };
      shard.weights = Weights(static_cast<int>(u)) +
                      (range.unit_offset - begin) * weights_bytes();
    }
  }
  return shards;
}

// --- Agreement ---

absl::Status ZeroOptimizer::Agree(const absl::Status& mine, Vote vote) {
  static_assert(std::has_unique_object_representations_v<Vote>);
  vote.code = static_cast<int32_t>(mine.code());
  const absl::string_view message =
      mine.message().substr(0, sizeof(vote.message) - 1);
  std::copy(message.begin(), message.end(), vote.message);
  vote.changed |= shards_ != nullptr && !shards_->status().ok();
  const absl::Status asked =
      communicator_.AllGather(&vote, votes_.data(), sizeof(Vote));

  // The caller's own error in full, before those of others.
  absl::Status outcome = mine;
  outcome.Update(asked);
  bool changed = !asked.ok();
  for (int rank = 0; asked.ok() && rank < world(); ++rank) {
    const Vote& other = votes_[rank];
    changed |= other.changed;
    const auto code = static_cast<absl::StatusCode>(other.code);
    if (outcome.ok() && code != absl::StatusCode::kOk) {
      outcome = absl::Status(
          code, absl::StrCat("rank ", rank, " failed: ", other.message));
    }
  }
  if (!outcome.ok() && changed && shards_ != nullptr) {
    shards_->MarkUnusable(outcome);
  }
  return outcome;
}

absl::Status ZeroOptimizer::CompareFingerprints(absl::StatusCode code,
                                                absl::string_view what) const {
  for (int other = 0; other < world(); ++other) {
    if (votes_[other].fingerprint == votes_[rank()].fingerprint) continue;
    return absl::Status(code, absl::StrCat("rank ", other, " has another ",
                                           what, " than rank ", rank()));
  }
  return absl::OkStatus();
}

void ZeroOptimizer::NoteCall(Call call, int unit) {
  Fingerprint fingerprint(calls_);
  fingerprint.Add(call);
  fingerprint.Add(unit);
  calls_ = fingerprint.value();
}

absl::Status ZeroOptimizer::CompareCalls() const {
  for (int other = 0; other < world(); ++other) {
    if (votes_[other].calls == votes_[rank()].calls) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", other,
                     " has gathered or reduced other units since the last "
                     "step than rank ",
                     rank(), ", or in another order: drop the gradients"));
  }
  return absl::OkStatus();
}

absl::Status ZeroOptimizer::Fail(const absl::Status& error) {
  communicator_.Abort(error.message());
  shards_->MarkUnusable(error);
  stream_->Synchronize().IgnoreError();
  return error;
}

uint64_t ZeroOptimizer::StepFingerprint(const ZeroStepInput& input) const {
  Fingerprint fingerprint;
  fingerprint.Add(input.inv_scale.has_value());
  fingerprint.Add(input.inv_scale.value_or(0));
  const LossScaleState& scale = shards_->loss_scale_state();
  fingerprint.Add(scale.scale);
  fingerprint.Add(scale.hysteresis_left);
  fingerprint.Add(scale.clean_steps);
  for (size_t i = 0; i < shards_->groups().size(); ++i) {
    fingerprint.AddGroup(shards_->groups()[i]);
    fingerprint.Add(shards_->step(static_cast<int>(i)));
  }
  return fingerprint.value();
}

// --- Weights ---

absl::Status ZeroOptimizer::CheckUnit(int unit) const {
  if (unit >= 0 && static_cast<size_t>(unit) < units_.size()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unit is ", unit, ", expected one of ", units_.size()));
}

absl::Status ZeroOptimizer::CheckStream(const Stream& stream) const {
  const Device& device = runtime_.device;
  if (&stream.device() == &device) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("stream is of device ", stream.device().name(),
                   ", expected one of ", device.name(), ", the optimizer's"));
}

absl::Status ZeroOptimizer::CheckUsable() const {
  if (shards_->status().ok()) return absl::OkStatus();
  return Annotate(shards_->status(), "the optimizer is unusable: ");
}

absl::StatusOr<Gathered> ZeroOptimizer::Gather(int unit, Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckUnit(unit));
  ONEPASS_RETURN_IF_ERROR(CheckStream(stream));
  UnitState& state = states_[unit];
  Gathered gathered;
  const absl::Status status = [&]() -> absl::Status {
    ONEPASS_RETURN_IF_ERROR(CheckUsable());
    ONEPASS_ASSIGN_OR_RETURN(
        gathered.buffer_,
        runtime_.device.Allocate(state.partition.padded_numel() *
                                 weights_bytes()));
    ONEPASS_ASSIGN_OR_RETURN(gathered.ready_, runtime_.device.CreateEvent());
    ONEPASS_RETURN_IF_ERROR(collectives_->AllGather(
        Weights(unit), gathered.buffer_.data(),
        state.partition.shard_numel() * weights_bytes(), *stream_));
    ONEPASS_RETURN_IF_ERROR(stream_->Record(*gathered.ready_));
    return stream.Wait(*gathered.ready_);
  }();
  if (!status.ok()) {
    return Fail(Annotate(
        status, absl::StrCat("gathering unit \"", units_[unit].name, "\": ")));
  }
  gathered.optimizer_ = this;
  gathered.unit_ = unit;
  ++state.gathered;
  NoteCall(Call::kGather, unit);
  ++gathered_.allocations;
  gathered_.in_use += gathered.buffer_.bytes();
  gathered_.peak = std::max(gathered_.peak, gathered_.in_use);
  return gathered;
}

std::vector<StateGroup> ZeroOptimizer::StateGroups() const {
  std::vector<StateGroup> groups = shards_->StateGroups();
  for (StateGroup& group : groups) group.parameters.clear();
  for (const ZeroUnit& unit : units_) {
    for (const ZeroParameter& parameter : unit.parameters) {
      groups[parameter.group].parameters.push_back(parameter.name);
    }
  }
  return groups;
}

const absl::Status& ZeroOptimizer::pinning_error() const {
  return shards_->pinning_error().ok() ? collectives_->pinning_error()
                                       : shards_->pinning_error();
}

absl::Status ZeroOptimizer::SetParameter(int unit, int parameter,
                                         const FillValues& values) {
  ONEPASS_RETURN_IF_ERROR(CheckUnit(unit));
  const std::vector<ZeroParameter>& parameters = units_[unit].parameters;
  if (parameter < 0 || static_cast<size_t>(parameter) >= parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter is ", parameter, ", expected one of ", parameters.size(),
        " of unit \"", units_[unit].name, "\""));
  }
  if (!values) return absl::InvalidArgumentError("values is not set");
  std::vector<float> part;
  for (const Owned& owned : states_[unit].owned) {
    if (owned.range.parameter != parameter) continue;
    part.resize(owned.range.numel);
    ONEPASS_RETURN_IF_ERROR(values(owned.range.offset, absl::MakeSpan(part)));
    ONEPASS_RETURN_IF_ERROR(shards_->SetState(parameters[parameter].name,
                                              StateKind::kMaster, part));
  }
  return absl::OkStatus();
}

// --- Gradients ---

absl::Status ZeroOptimizer::CheckGradients(
    int unit, absl::Span<const void* const> gradients) const {
  const ZeroUnit& of = units_[unit];
  if (gradients.size() != of.parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unit \"", of.name, "\" has ", of.parameters.size(),
        " parameters, and there are ", gradients.size(), " gradients"));
  }
  const DType type = options_.local_grad_type;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (reinterpret_cast<uintptr_t>(gradients[i]) %
            static_cast<uintptr_t>(ByteSize(type)) !=
        0) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient of parameter \"", of.parameters[i].name,
                       "\" is not aligned to elements in ", Name(type)));
    }
  }
  return absl::OkStatus();
}

absl::Status ZeroOptimizer::ReduceGradients(
    int unit, absl::Span<const void* const> gradients, Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckUnit(unit));
  ONEPASS_RETURN_IF_ERROR(CheckStream(stream));
  ONEPASS_RETURN_IF_ERROR(CheckGradients(unit, gradients));
  const std::string& name = units_[unit].name;
  UnitState& state = states_[unit];
  // An optimizer that is unusable has to tell the others.
  if (CheckUsable().ok() &&
      (gradients_closed_ || state.reductions == options_.shard.micro_batches)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unit \"", name, "\" has ", state.reductions, " gradients of ",
        options_.shard.micro_batches,
        gradients_closed_ ? ", and a step was refused since: step first"
                          : ": step first"));
  }
  if (absl::Status status = Reduce(unit, gradients, stream); !status.ok()) {
    status =
        Fail(Annotate(status, absl::StrCat("reducing unit \"", name, "\": ")));
    // What was put there reads memory of the caller's.
    stream.Synchronize().IgnoreError();
    return status;
  }
  ++state.reductions;
  NoteCall(Call::kReduce, unit);
  return absl::OkStatus();
}

absl::Status ZeroOptimizer::Reduce(int unit,
                                   absl::Span<const void* const> gradients,
                                   Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  const UnitPartition& partition = states_[unit].partition;
  const int64_t wire = ByteSize(options_.shard.grad_type);
  ONEPASS_RETURN_IF_ERROR(Flatten(unit, gradients, stream));
  if (world() > 1) {
    ONEPASS_RETURN_IF_ERROR(
        collectives_->AllToAll(flat_.data(), received_.data(),
                               partition.shard_numel() * wire, stream));
  }
  const char* mean;
  ONEPASS_ASSIGN_OR_RETURN(mean, Average(unit, stream));
  for (const Owned& owned : states_[unit].owned) {
    const int64_t offset =
        owned.range.unit_offset - rank() * partition.shard_numel();
    Event* landed;
    ONEPASS_ASSIGN_OR_RETURN(
        landed,
        shards_->AddGradient(owned.shard, mean + offset * wire, stream));
    // The memory is used again: for the next unit, or by the caller.
    ONEPASS_RETURN_IF_ERROR(stream.Wait(*landed));
  }
  return stream.Synchronize();
}

absl::Status ZeroOptimizer::Flatten(int unit,
                                    absl::Span<const void* const> gradients,
                                    Stream& stream) {
  const DType wire = options_.shard.grad_type;
  const DType local = options_.local_grad_type;
  const UnitState& state = states_[unit];
  const auto at = [&](int64_t position) {
    return flat_.as<char>() + position * ByteSize(wire);
  };
  int64_t end = 0;  // of what is written
  const auto zero_to = [&](int64_t position) {
    const int64_t begin = std::exchange(end, position);
    if (begin == position) return absl::OkStatus();
    return stream.SetZero(at(begin), (position - begin) * ByteSize(wire));
  };
  for (size_t i = 0; i < gradients.size(); ++i) {
    const int64_t numel = state.numels[i];
    if (gradients[i] == nullptr || numel == 0) continue;
    const int64_t begin = state.partition.unit_offset(static_cast<int>(i));
    ONEPASS_RETURN_IF_ERROR(zero_to(begin));
    if (local == wire) {
      ONEPASS_RETURN_IF_ERROR(
          stream.CopyOnDevice(at(begin), gradients[i], numel * ByteSize(wire)));
    } else {
      CastArgs cast;
      cast.numel = numel;
      cast.in = gradients[i];
      cast.out = at(begin);
      cast.in_type = local;
      cast.out_type = wire;
      ONEPASS_RETURN_IF_ERROR(stream.Run({cast}));
    }
    end = begin + numel;
  }
  return zero_to(state.partition.padded_numel());
}

absl::StatusOr<const char*> ZeroOptimizer::Average(int unit, Stream& stream) {
  if (world() == 1) return flat_.as<const char>();
  const DType wire = options_.shard.grad_type;
  const UnitPartition& partition = states_[unit].partition;
  const int64_t shard_numel = partition.shard_numel();
  const int64_t shard_bytes = shard_numel * ByteSize(wire);
  const int64_t begin = rank() * shard_numel;
  AccumulateArgs sum;
  sum.numel = std::clamp(partition.numel() - begin, int64_t{0}, shard_numel);
  sum.term_type = wire;
  for (int from = 0; from < world(); ++from) {
    sum.sum = from == 0 ? nullptr : sum_.as<float>();
    sum.term = received_.as<char>() + from * shard_bytes;
    sum.out = sum_.data();
    if (from == world() - 1) {
      // Goes where the first lay: that is used up.
      sum.out = received_.data();
      sum.out_type = wire;
      sum.divisor = static_cast<float>(world());
    }
    ONEPASS_RETURN_IF_ERROR(stream.Run({sum}));
  }
  return received_.as<const char>();
}

absl::Status ZeroOptimizer::DropGradients() {
  ONEPASS_RETURN_IF_ERROR(shards_->DropGradients());
  ForgetGradients();
  return absl::OkStatus();
}

void ZeroOptimizer::ForgetGradients() {
  for (UnitState& state : states_) state.reductions = 0;
  gradients_closed_ = false;
  must_drop_ = false;
}

// --- Step ---

absl::StatusOr<NormSum> ZeroOptimizer::PrepareStep() {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (must_drop_) {
    return absl::FailedPreconditionError(
        "ranks had gathered or reduced other units when a step was refused: "
        "drop the gradients");
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    const int64_t reductions = states_[u].reductions;
    if (reductions != 0 && reductions != options_.shard.micro_batches) {
      return absl::FailedPreconditionError(
          absl::StrCat("unit \"", units_[u].name, "\" has ", reductions,
                       " gradients, expected ", options_.shard.micro_batches,
                       " (micro_batches) or none"));
    }
  }
  // On all ranks, whether they get as far as the norm or not.
  gradients_closed_ = true;
  for (size_t u = 0; u < units_.size(); ++u) {
    if (states_[u].gathered > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("unit \"", units_[u].name,
                       "\" is gathered: release it before the step"));
    }
  }
  if (shards_->leased())
    return absl::FailedPreconditionError("state is leased");
  return shards_->LocalNorm();
}

absl::StatusOr<StepReport> ZeroOptimizer::Step(const ZeroStepInput& input) {
  const absl::StatusOr<NormSum> norm = PrepareStep();
  Vote vote = {};
  if (norm.ok()) vote.norm = *norm;
  vote.fingerprint = StepFingerprint(input);
  vote.calls = calls_;
  vote.found_inf = input.found_inf;
  ONEPASS_RETURN_IF_ERROR(Agree(norm.status(), vote));
  if (absl::Status status = CompareCalls(); !status.ok()) {
    // On all ranks.
    must_drop_ = true;
    calls_ = 0;
    return status;
  }
  ONEPASS_RETURN_IF_ERROR(
      CompareFingerprints(absl::StatusCode::kFailedPrecondition,
                          "inv_scale, loss scale, options of a group or step"));

  StepInput step;
  step.inv_scale = input.inv_scale;
  for (const Vote& other : votes_) {
    step.found_inf |= other.found_inf;
    step.norm.Merge(other.norm);
  }
  const absl::StatusOr<StepReport> report = shards_->Step(step);
  vote.changed = report.ok();
  ONEPASS_RETURN_IF_ERROR(Agree(report.status(), vote));
  ForgetGradients();
  calls_ = 0;
  return report;
}

}  // namespace onepass

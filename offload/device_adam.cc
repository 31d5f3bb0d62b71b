#include "offload/device_adam.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

constexpr StateKind kArrayKinds[] = {StateKind::kMaster, StateKind::kExpAvg,
                                     StateKind::kExpAvgSq};
constexpr int64_t kFloatBytes = sizeof(float);
// Room where a step takes more operations than it has parameters.
constexpr size_t kOperations = 48;

// Of codes, where they have scales.
DType ElementType(StateType type) {
  switch (type) {
    case StateType::kBFloat16:
      return DType::kBFloat16;
    case StateType::kFloat16:
    case StateType::kScaledFloat16:
      return DType::kFloat16;
    case StateType::kScaledFloat8E4M3:
      return DType::kFloat8E4M3;
    default:
      return DType::kFloat32;
  }
}

StateType WeightsStateType(DType type) {
  return type == DType::kFloat32    ? StateType::kFloat32
         : type == DType::kBFloat16 ? StateType::kBFloat16
                                    : StateType::kFloat16;
}

const void* At(const void* data, DType type, int64_t offset) {
  if (data == nullptr) return nullptr;
  return static_cast<const char*>(data) + offset * ByteSize(type);
}

std::string StateName(const DeviceAdamParameter& parameter, StateKind kind) {
  return absl::StrCat("state.", parameter.name, ".", Name(kind));
}

absl::Status Invalid(absl::string_view what) {
  return absl::InvalidArgumentError(what);
}

absl::Status CheckType(absl::string_view name, DType type, DTypeSet expected) {
  if (expected.Contains(type)) return absl::OkStatus();
  return Invalid(absl::StrCat(name, " is ", Name(type),
                              ", which Adam on this device does not take"));
}

absl::Status CheckMomentType(const Device& device, absl::string_view name,
                             StateType type) {
  switch (type) {
    case StateType::kFloat32:
    case StateType::kBFloat16:
      return CheckType(name, ElementType(type), device.moment_types());
    case StateType::kScaledFloat16:
    case StateType::kScaledFloat8E4M3:
      return CheckType(name, DType::kFloat32, device.moment_types());
    default:
      return Invalid(
          absl::StrCat(name, " is ", Name(type),
                       ", expected fp32, bf16, scaled fp16 or scaled e4m3"));
  }
}

}  // namespace

struct DeviceAdam::StepInput {
  absl::Span<const void* const> gradients;
  DType grad_type;
  // One of them: of the groups.
  absl::Span<const AdamConstants> constants;
  absl::Span<const AdamOptions> options;
  float grad_scale;
};

// --- Creation ---

absl::StatusOr<DeviceAdam> DeviceAdam::Create(
    Device& device, const DeviceAdamOptions& options,
    std::vector<DeviceAdamParameter> parameters) {
  ONEPASS_RETURN_IF_ERROR(CheckOptions(device, options));
  ONEPASS_RETURN_IF_ERROR(CheckParameters(options, parameters));
  DeviceAdam adam(options, std::move(parameters));
  ONEPASS_RETURN_IF_ERROR(adam.TakeMemory(device));
  return adam;
}

absl::Status DeviceAdam::CheckOptions(const Device& device,
                                      const DeviceAdamOptions& options) {
  ONEPASS_RETURN_IF_ERROR(
      CheckMomentType(device, "exp_avg_type", options.exp_avg_type));
  ONEPASS_RETURN_IF_ERROR(
      CheckMomentType(device, "exp_avg_sq_type", options.exp_avg_sq_type));
  const DType weights = options.weights_type;
  if (weights != DType::kFloat32) {
    ONEPASS_RETURN_IF_ERROR(CheckType(
        "weights_type", weights,
        // Others are written by casts, or are halves of their masters.
        options.master_type.value_or(StateType::kFloat32) == StateType::kFloat32
            ? device.copy_types()
            : kCopyTypes));
  }
  const std::string master =
      options.master_type.has_value() ? Name(*options.master_type) : "none";
  if (options.master_type.has_value()) {
    switch (*options.master_type) {
      case StateType::kFloat32:
      case StateType::kScaledFloat16:
        break;
      case StateType::kInt16Remainder:
        if (weights == DType::kBFloat16) break;
        return Invalid(absl::StrCat(
            "master_type is ", master,
            ", which needs bf16 weights: weights_type is ", Name(weights)));
      default:
        return Invalid(absl::StrCat(
            "master_type is ", master,
            ", expected fp32, scaled fp16, int16 remainder or none"));
    }
  }
  if (options.step_and_lr_on_device) {
    if (options.master_type != StateType::kFloat32) {
      return Invalid(absl::StrCat(
          "step_and_lr_on_device needs fp32 masters: master_type is ", master));
    }
    if (options.exp_avg_type != options.exp_avg_sq_type ||
        IsScaled(options.exp_avg_type)) {
      return Invalid(absl::StrCat(
          "step_and_lr_on_device needs moments that are both fp32 or both "
          "bf16: exp_avg_type is ",
          Name(options.exp_avg_type), ", exp_avg_sq_type is ",
          Name(options.exp_avg_sq_type)));
    }
  }
  if (options.chunk_numel < 1) {
    return Invalid(absl::StrCat("chunk_numel is ", options.chunk_numel,
                                ", expected at least 1"));
  }
  return absl::OkStatus();
}

absl::Status DeviceAdam::CheckParameters(
    const DeviceAdamOptions& options,
    absl::Span<const DeviceAdamParameter> parameters) {
  std::set<absl::string_view> names;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const DeviceAdamParameter& parameter = parameters[i];
    if (parameter.numel < 0 || parameter.group < 0 ||
        (parameter.numel > 0 && parameter.weights == nullptr)) {
      return Invalid(
          absl::StrCat("parameter ", i, " has numel ", parameter.numel,
                       ", group ", parameter.group, " and weights ",
                       parameter.weights == nullptr ? "null" : "set",
                       ", expected numel and group of at least 0 and weights"));
    }
    if (parameter.name.empty()) continue;
    const std::string prefix =
        absl::StrCat("parameter ", i, ", \"", parameter.name, "\": ");
    if (!names.insert(parameter.name).second) {
      return Invalid(absl::StrCat(prefix, "another has this name"));
    }
    const absl::StatusOr<int64_t> numel =
        CheckBox(parameter.shape, parameter.box);
    if (!numel.ok()) {
      return Invalid(absl::StrCat(prefix, numel.status().message()));
    }
    if (*numel != parameter.numel) {
      return Invalid(absl::StrCat(prefix, "box has ", *numel,
                                  " elements, numel is ", parameter.numel));
    }
    if (HasLeavesOfTensor(parameter.shape, parameter.box)) continue;
    const std::optional<StateType> types[] = {
        options.master_type, options.exp_avg_type, options.exp_avg_sq_type};
    for (size_t kind = 0; kind < std::size(types); ++kind) {
      if (!types[kind].has_value() || !IsScaled(*types[kind])) continue;
      return Invalid(absl::StrCat(
          StateName(parameter, kArrayKinds[kind]), " cannot be ",
          Name(*types[kind]),
          ": its box is neither the whole parameter nor a range of its "
          "elements that is cut at multiples of ",
          kLeafNumel));
    }
  }
  return absl::OkStatus();
}

DeviceAdam::DeviceAdam(const DeviceAdamOptions& options,
                       std::vector<DeviceAdamParameter> parameters)
    : options_(options), parameters_(std::move(parameters)) {
  for (const DeviceAdamParameter& parameter : parameters_) {
    positions_.push_back(numel_);
    leaf_positions_.push_back(leaves_);
    numel_ += AlignedNumel(parameter.numel);
    leaves_ += LeafCount(parameter.numel);
    groups_ = std::max(groups_, int64_t{parameter.group} + 1);
    chunk_numel_ = std::max(chunk_numel_, AlignedNumel(parameter.numel));
  }
  const int64_t leaves_of_chunk =
      std::max(options_.chunk_numel / kLeafNumel, int64_t{1});
  chunk_numel_ = std::min(chunk_numel_, leaves_of_chunk * kLeafNumel);
  arrays_[0].type = options_.master_type;
  arrays_[1].type = options_.exp_avg_type;
  arrays_[2].type = options_.exp_avg_sq_type;
}

absl::Status DeviceAdam::TakeMemory(Device& device) {
  for (Array& array : arrays_) {
    const bool scaled = array.type.has_value() && IsScaled(*array.type);
    if (array.type.has_value()) {
      ONEPASS_ASSIGN_OR_RETURN(array.data,
                               device.Allocate(numel_ * ByteSize(*array.type)));
    }
    if (scaled) {
      ONEPASS_ASSIGN_OR_RETURN(array.scales,
                               device.Allocate(leaves_ * kFloatBytes));
    }
    const bool in_place = array.type.has_value()
                              ? !scaled && array.type != kRemainder
                              : options_.weights_type == DType::kFloat32;
    if (!in_place) {
      ONEPASS_ASSIGN_OR_RETURN(array.scratch,
                               device.Allocate(chunk_numel_ * kFloatBytes));
    }
    updates_in_place_ &= in_place;
  }
  if (options_.step_and_lr_on_device) {
    ONEPASS_ASSIGN_OR_RETURN(schedules_,
                             device.Allocate(groups_ * kScheduleBytes));
  }
  operations_.reserve(updates_in_place_
                          ? parameters_.size() +
                                (options_.step_and_lr_on_device ? groups_ : 0)
                          : kOperations);
  return absl::OkStatus();
}

// --- What there is ---

const DeviceAdam::Array& DeviceAdam::array(StateKind kind) const {
  return arrays_[kind == StateKind::kMaster   ? 0
                 : kind == StateKind::kExpAvg ? 1
                                              : 2];
}

void* DeviceAdam::state(int parameter, StateKind kind) const {
  if (kind == StateKind::kParam) return parameters_[parameter].weights;
  const Array& of_all = array(kind);
  if (of_all.data.data() == nullptr) return nullptr;
  return of_all.data.as<char>() +
         positions_[parameter] * ByteSize(*of_all.type);
}

float* DeviceAdam::scales(int parameter, StateKind kind) const {
  if (kind == StateKind::kParam) return nullptr;
  float* const of_all = array(kind).scales.as<float>();
  return of_all == nullptr ? nullptr : of_all + leaf_positions_[parameter];
}

StateType DeviceAdam::state_type(StateKind kind) const {
  if (kind == StateKind::kParam) return WeightsStateType(options_.weights_type);
  return array(kind).type.value_or(StateType::kFloat32);
}

// --- Errors ---

absl::Status DeviceAdam::CheckUsable() const {
  const absl::Status& error = use_->unusable;
  if (error.ok()) return error;
  return absl::Status(error.code(), absl::StrCat("the optimizer is unusable: ",
                                                 error.message()));
}

absl::Status DeviceAdam::CheckChangeable() const {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  const int leases = use_->leases;
  if (leases == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("state is leased, leases: ", leases));
}

absl::Status DeviceAdam::CheckGroup(int group) const {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (!options_.step_and_lr_on_device) {
    return absl::FailedPreconditionError(
        "step_and_lr_on_device is off: there are none on the device");
  }
  if (group >= 0 && group < groups_) return absl::OkStatus();
  return Invalid(
      absl::StrCat("group is ", group, ", expected 0 to ", groups_ - 1));
}

absl::Status DeviceAdam::Fail(const absl::Status& error) {
  use_->unusable.Update(error);
  return error;
}

// --- Pieces ---

absl::Status DeviceAdam::ForEachPiece(absl::FunctionRef<void(const Piece&)> add,
                                      absl::FunctionRef<absl::Status()> run) {
  const size_t most = updates_in_place_ ? 1 : kOperationsOfPiece;
  const auto run_all = [&]() -> absl::Status {
    if (operations_.empty()) return absl::OkStatus();
    const absl::Status status = run();
    operations_.clear();
    return status;
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t numel = parameters_[i].numel;
    const int64_t step = updates_in_place_ ? numel : chunk_numel_;
    for (int64_t offset = 0; offset < numel; offset += step) {
      if (operations_.size() + most > operations_.capacity()) {
        ONEPASS_RETURN_IF_ERROR(run_all());
      }
      add({static_cast<int>(i), offset, std::min(step, numel - offset)});
    }
  }
  return run_all();
}

absl::Status DeviceAdam::RunPieces(Stream& stream,
                                   absl::FunctionRef<void(const Piece&)> add) {
  operations_.clear();
  return ForEachPiece(add, [&] { return stream.Run(operations_); });
}

void* DeviceAdam::Values(const Piece& piece, StateKind kind) const {
  const Array& of_all = array(kind);
  if (of_all.scratch.data() != nullptr) return of_all.scratch.data();
  return of_all.type.has_value() ? Stored(piece, kind) : Weights(piece);
}

void* DeviceAdam::Stored(const Piece& piece, StateKind kind) const {
  return static_cast<char*>(state(piece.parameter, kind)) +
         piece.offset * ByteSize(state_type(kind));
}

float* DeviceAdam::Scales(const Piece& piece, StateKind kind) const {
  return scales(piece.parameter, kind) + piece.offset / kLeafNumel;
}

void* DeviceAdam::Weights(const Piece& piece) const {
  return static_cast<char*>(parameters_[piece.parameter].weights) +
         piece.offset * ByteSize(options_.weights_type);
}

void DeviceAdam::AddLoad(const Piece& piece, StateKind kind) {
  const Array& of_all = array(kind);
  float* const values = of_all.scratch.as<float>();
  if (values == nullptr) return;
  if (!of_all.type.has_value()) {
    operations_.push_back(CastArgs{piece.numel, Weights(piece), values,
                                   options_.weights_type, DType::kFloat32});
  } else if (*of_all.type == kRemainder) {
    operations_.push_back(JoinRemainderArgs{
        piece.numel, static_cast<const uint16_t*>(Weights(piece)),
        static_cast<const int16_t*>(Stored(piece, kind)), values});
  } else {
    operations_.push_back(DequantizeArgs{piece.numel, Stored(piece, kind),
                                         Scales(piece, kind), values,
                                         ElementType(*of_all.type)});
  }
}

void DeviceAdam::AddStore(const Piece& piece, StateKind kind) {
  const Array& of_all = array(kind);
  const float* const values = of_all.scratch.as<float>();
  // Without masters the update has stored the weights as its copy.
  if (values == nullptr || !of_all.type.has_value()) return;
  if (*of_all.type == kRemainder) {
    operations_.push_back(SplitRemainderArgs{
        piece.numel, values, static_cast<uint16_t*>(Weights(piece)),
        static_cast<int16_t*>(Stored(piece, kind))});
  } else {
    AddQuantize(piece, kind, values);
  }
}

void DeviceAdam::AddQuantize(const Piece& piece, StateKind kind,
                             const float* values) {
  operations_.push_back(QuantizeArgs{piece.numel, values, Stored(piece, kind),
                                     Scales(piece, kind),
                                     ElementType(state_type(kind))});
}

void DeviceAdam::AddWeights(const Piece& piece) {
  const DType type = options_.weights_type;
  const float* values = nullptr;
  if (options_.master_type == StateType::kFloat32) {
    values = static_cast<const float*>(Stored(piece, StateKind::kMaster));
  } else if (options_.master_type == StateType::kScaledFloat16) {
    float* const out = type == DType::kFloat32
                           ? static_cast<float*>(Weights(piece))
                           : arrays_[0].scratch.as<float>();
    operations_.push_back(
        DequantizeArgs{piece.numel, Stored(piece, StateKind::kMaster),
                       Scales(piece, StateKind::kMaster), out});
    values = out;
  }
  if (values == nullptr || type == DType::kFloat32) return;
  operations_.push_back(
      CastArgs{piece.numel, values, Weights(piece), DType::kFloat32, type});
}

absl::Status DeviceAdam::CopyMasters(Stream& stream, bool to_weights) {
  if (options_.weights_type != DType::kFloat32 ||
      options_.master_type != StateType::kFloat32) {
    return absl::OkStatus();
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    void* const weights = parameters_[i].weights;
    void* const master = state(static_cast<int>(i), StateKind::kMaster);
    ONEPASS_RETURN_IF_ERROR(stream.CopyOnDevice(
        to_weights ? weights : master, to_weights ? master : weights,
        parameters_[i].numel * kFloatBytes));
  }
  return absl::OkStatus();
}

// --- Initial state ---

absl::Status DeviceAdam::Clear(Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckChangeable());
  for (const Array& of_all : arrays_) {
    // Quantized zeros have scales that are not 0.
    const DeviceBuffer& zeros =
        of_all.scales.data() == nullptr ? of_all.data : of_all.scratch;
    ONEPASS_RETURN_IF_ERROR(stream.SetZero(zeros.data(), zeros.bytes()));
  }
  ONEPASS_RETURN_IF_ERROR(
      stream.SetZero(schedules_.data(), schedules_.bytes()));
  return RunPieces(stream, [&](const Piece& piece) {
    for (const StateKind kind : kArrayKinds) {
      if (array(kind).scales.data() == nullptr) continue;
      AddQuantize(piece, kind, array(kind).scratch.as<float>());
    }
  });
}

absl::Status DeviceAdam::SetMastersFromWeights(Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckChangeable());
  if (!options_.master_type.has_value()) return absl::OkStatus();
  if (*options_.master_type == kRemainder) {
    return stream.SetZero(arrays_[0].data.data(), arrays_[0].data.bytes());
  }
  ONEPASS_RETURN_IF_ERROR(CopyMasters(stream, /*to_weights=*/false));
  return RunPieces(stream, [&](const Piece& piece) {
    const DType type = options_.weights_type;
    auto* values = static_cast<float*>(Values(piece, StateKind::kMaster));
    if (type != DType::kFloat32) {
      operations_.push_back(
          CastArgs{piece.numel, Weights(piece), values, type, DType::kFloat32});
    }
    if (*options_.master_type != StateType::kScaledFloat16) return;
    if (type == DType::kFloat32) values = static_cast<float*>(Weights(piece));
    AddQuantize(piece, StateKind::kMaster, values);
    AddWeights(piece);
  });
}

// --- The step ---

absl::Status DeviceAdam::Step(Stream& stream,
                              absl::Span<const void* const> gradients,
                              DType grad_type,
                              absl::Span<const AdamConstants> constants,
                              float grad_scale) {
  if (options_.step_and_lr_on_device) {
    return absl::FailedPreconditionError(
        "step_and_lr_on_device is on: CapturableStep() takes this step");
  }
  return RunStep(stream, {gradients, grad_type, constants, {}, grad_scale});
}

absl::Status DeviceAdam::CapturableStep(Stream& stream,
                                        absl::Span<const void* const> gradients,
                                        DType grad_type,
                                        absl::Span<const AdamOptions> groups,
                                        float grad_scale) {
  if (!options_.step_and_lr_on_device) {
    return absl::FailedPreconditionError(
        "step_and_lr_on_device is off: Step() takes this step");
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    AdamOptions options = groups[g];
    options.lr = 0;
    if (absl::Status status = ValidateAdamOptions(options); !status.ok()) {
      return Invalid(absl::StrCat("group ", g, ": ", status.message()));
    }
  }
  return RunStep(stream, {gradients, grad_type, {}, groups, grad_scale});
}

absl::Status DeviceAdam::RunStep(Stream& stream, const StepInput& input) {
  ONEPASS_RETURN_IF_ERROR(CheckChangeable());
  if (input.gradients.size() != parameters_.size()) {
    return Invalid(absl::StrCat(input.gradients.size(),
                                " gradients, expected those of ",
                                parameters_.size(), " parameters"));
  }
  const size_t groups = options_.step_and_lr_on_device ? input.options.size()
                                                       : input.constants.size();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const DeviceAdamParameter& parameter = parameters_[i];
    if (parameter.numel == 0 || static_cast<size_t>(parameter.group) < groups) {
      continue;
    }
    return Invalid(absl::StrCat(
        "parameter ", i, " is of group ", parameter.group, ", and there are ",
        options_.step_and_lr_on_device ? "options" : "constants", " of ",
        groups));
  }
  // Where it is more than one run, all are checked before the first.
  bool put = false;
  for (const bool only_check : {true, false}) {
    if (only_check && updates_in_place_) continue;
    operations_.clear();
    AddSchedules(input);
    const absl::Status status =
        ForEachPiece([&](const Piece& piece) { AddStep(piece, input); },
                     [&] {
                       if (only_check) {
                         return CheckOperations(stream.device(), operations_);
                       }
                       absl::Status run = stream.Run(operations_);
                       put |= run.ok();
                       return run;
                     });
    if (!status.ok()) return put ? Fail(status) : status;
  }
  const absl::Status status = CopyMasters(stream, /*to_weights=*/true);
  return status.ok() ? status : Fail(status);
}

void DeviceAdam::AddSchedules(const StepInput& input) {
  if (!options_.step_and_lr_on_device) return;
  const int64_t groups =
      std::min(groups_, static_cast<int64_t>(input.options.size()));
  for (int64_t g = 0; g < groups; ++g) {
    Schedule* const of_group = schedule(static_cast<int>(g));
    operations_.push_back(AdvanceStepArgs{&of_group->step, &of_group->lr,
                                          &of_group->constants,
                                          ToAdamRule(input.options[g])});
  }
}

void DeviceAdam::AddStep(const Piece& piece, const StepInput& input) {
  const int group = parameters_[piece.parameter].group;
  for (const StateKind kind : kArrayKinds) AddLoad(piece, kind);
  const auto type = [&](StateKind kind) {
    return array(kind).scratch.data() == nullptr ? ElementType(state_type(kind))
                                                 : DType::kFloat32;
  };
  AdamStepArgs args;
  args.numel = piece.numel;
  args.param = static_cast<float*>(Values(piece, StateKind::kMaster));
  args.grad =
      At(input.gradients[piece.parameter], input.grad_type, piece.offset);
  args.exp_avg = Values(piece, StateKind::kExpAvg);
  args.exp_avg_sq = Values(piece, StateKind::kExpAvgSq);
  args.grad_type = input.grad_type;
  args.exp_avg_type = type(StateKind::kExpAvg);
  args.exp_avg_sq_type = type(StateKind::kExpAvgSq);
  if (options_.weights_type != DType::kFloat32 &&
      options_.master_type.value_or(StateType::kFloat32) ==
          StateType::kFloat32) {
    args.copy = Weights(piece);
    args.copy_type = options_.weights_type;
  }
  args.grad_scale = input.grad_scale;
  if (options_.step_and_lr_on_device) {
    args.constants.decay_mode = ToAdamRule(input.options[group]).decay_mode;
    operations_.push_back(
        DeferredAdamStepArgs{args, &schedule(group)->constants});
  } else {
    args.constants = input.constants[group];
    operations_.push_back(args);
  }
  for (const StateKind kind : kArrayKinds) AddStore(piece, kind);
  if (options_.master_type == StateType::kScaledFloat16) AddWeights(piece);
}

// --- Step and learning rate on the device ---

DeviceAdam::Schedule* DeviceAdam::schedule(int group) const {
  return reinterpret_cast<Schedule*>(schedules_.as<char>() +
                                     group * kScheduleBytes);
}

int64_t* DeviceAdam::device_step(int group) const {
  return schedules_.data() == nullptr ? nullptr : &schedule(group)->step;
}

float* DeviceAdam::device_lr(int group) const {
  return schedules_.data() == nullptr ? nullptr : &schedule(group)->lr;
}

absl::StatusOr<int64_t> DeviceAdam::GetStep(Stream& stream, int group) const {
  ONEPASS_RETURN_IF_ERROR(CheckGroup(group));
  int64_t step = 0;
  ONEPASS_RETURN_IF_ERROR(
      stream.CopyToHost(&step, device_step(group), sizeof(step)));
  ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
  return step;
}

absl::StatusOr<float> DeviceAdam::GetLr(Stream& stream, int group) const {
  ONEPASS_RETURN_IF_ERROR(CheckGroup(group));
  float lr = 0;
  ONEPASS_RETURN_IF_ERROR(stream.CopyToHost(&lr, device_lr(group), sizeof(lr)));
  ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
  return lr;
}

absl::Status DeviceAdam::SetStep(Stream& stream, int group, int64_t step) {
  ONEPASS_RETURN_IF_ERROR(CheckGroup(group));
  if (step < 0) {
    return Invalid(absl::StrCat("step is ", step, ", expected at least 0"));
  }
  ONEPASS_RETURN_IF_ERROR(
      stream.CopyToDevice(device_step(group), &step, sizeof(step)));
  return stream.Synchronize();
}

absl::Status DeviceAdam::SetLr(Stream& stream, int group, float lr) {
  ONEPASS_RETURN_IF_ERROR(CheckGroup(group));
  if (!std::isfinite(lr) || lr < 0) {
    return Invalid(
        absl::StrCat("lr is ", lr, ", expected a finite number of at least 0"));
  }
  ONEPASS_RETURN_IF_ERROR(
      stream.CopyToDevice(device_lr(group), &lr, sizeof(lr)));
  return stream.Synchronize();
}

// --- Views ---

absl::StatusOr<StateLease> DeviceAdam::LeaseState(Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckUsable());
  if (use_->restoring) {
    return absl::FailedPreconditionError("state is being restored");
  }
  ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<StateView> views;
  ONEPASS_RETURN_IF_ERROR(ForEachView([&](StateView view, void*, float*) {
    views.push_back(std::move(view));
  }));
  ONEPASS_RETURN_IF_ERROR(CheckScales(stream));
  ++use_->leases;
  return StateLease(std::move(views), [use = use_.get()] { --use->leases; });
}

absl::StatusOr<StateRestore> DeviceAdam::RestoreState(Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckChangeable());
  ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<StateTarget> targets;
  ONEPASS_RETURN_IF_ERROR(
      ForEachView([&](StateView view, void* data, float* scales) {
        targets.push_back({std::move(view), data, scales});
      }));
  ++use_->leases;
  use_->restoring = true;
  StateRestore::Owner owner;
  owner.commit = [this, &stream] {
    const absl::Status status = Commit(stream);
    return status.ok() ? status : Fail(status);
  };
  owner.end = [use = use_.get()](bool written, bool committed) {
    --use->leases;
    use->restoring = false;
    if (written && !committed) {
      use->unusable.Update(
          absl::AbortedError("a restore ended before all state was there"));
    }
  };
  return StateRestore(std::move(targets), std::move(owner));
}

absl::Status DeviceAdam::ForEachView(
    absl::FunctionRef<void(StateView view, void* data, float* scales)> add)
    const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const DeviceAdamParameter& parameter = parameters_[i];
    const int index = static_cast<int>(i);
    if (parameter.name.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("parameter ", i, " has no name for its state"));
    }
    const bool weights_are_state = !options_.master_type.has_value() ||
                                   *options_.master_type == kRemainder;
    for (const StateKind kind : {StateKind::kParam, StateKind::kMaster,
                                 StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      if (kind == StateKind::kParam && !weights_are_state) continue;
      if (kind == StateKind::kMaster && !options_.master_type.has_value()) {
        continue;
      }
      StateView view;
      view.name = StateName(parameter, kind);
      view.type = state_type(kind);
      view.shape = parameter.shape;
      view.box = parameter.box;
      view.offset = 0;
      view.numel = parameter.numel;
      view.on_device = true;
      view.data = state(index, kind);
      view.scales = scales(index, kind);
      add(std::move(view), state(index, kind), scales(index, kind));
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceAdam::CheckScales(Stream& stream) const {
  std::vector<float> on_host;
  for (const StateKind kind : kArrayKinds) {
    const DeviceBuffer& of_all = array(kind).scales;
    if (of_all.data() == nullptr) continue;
    on_host.resize(leaves_);
    ONEPASS_RETURN_IF_ERROR(
        stream.CopyToHost(on_host.data(), of_all.data(), of_all.bytes()));
    ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      for (int64_t leaf = 0; leaf < LeafCount(parameters_[i].numel); ++leaf) {
        const float scale = on_host[leaf_positions_[i] + leaf];
        if (std::isfinite(scale)) continue;
        return absl::FailedPreconditionError(absl::StrCat(
            StateName(parameters_[i], kind), " is not finite: leaf ", leaf,
            " of ", kLeafNumel, " elements has the scale ", scale));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceAdam::Commit(Stream& stream) {
  ONEPASS_RETURN_IF_ERROR(CheckScales(stream));
  ONEPASS_RETURN_IF_ERROR(CopyMasters(stream, /*to_weights=*/true));
  ONEPASS_RETURN_IF_ERROR(
      RunPieces(stream, [&](const Piece& piece) { AddWeights(piece); }));
  return stream.Synchronize();
}

}  // namespace onepass

#include "offload/device_adam.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace onepass {
namespace {

char* At(const DeviceBuffer& buffer, DType type, int64_t position) {
  return buffer.as<char>() + position * ByteSize(type);
}

absl::Status CheckType(const char* name, DType type, DTypeSet expected) {
  if (expected.Contains(type)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " is ", Name(type), ", which Adam on this device does not take"));
}

}  // namespace

absl::StatusOr<DeviceAdam> DeviceAdam::Create(
    Device& device, const DeviceAdamOptions& options,
    std::vector<DeviceAdamParameter> parameters) {
  for (const absl::Status& status :
       {CheckType("exp_avg_type", options.exp_avg_type, device.moment_types()),
        CheckType("exp_avg_sq_type", options.exp_avg_sq_type,
                  device.moment_types()),
        options.weights_type == DType::kFloat32
            ? absl::OkStatus()
            : CheckType("weights_type", options.weights_type,
                        device.copy_types())}) {
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const DeviceAdamParameter& parameter = parameters[i];
    if (parameter.numel < 0 || parameter.group < 0 ||
        (parameter.numel > 0 && parameter.weights == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", i, " has numel ", parameter.numel,
                       ", group ", parameter.group, " and weights ",
                       parameter.weights == nullptr ? "null" : "set",
                       ", expected numel and group of at least 0 and weights"));
    }
  }
  DeviceAdam adam(options, std::move(parameters));
  const std::pair<DeviceBuffer*, DType> arrays[] = {
      {&adam.master_, DType::kFloat32},
      {&adam.exp_avg_, options.exp_avg_type},
      {&adam.exp_avg_sq_, options.exp_avg_sq_type}};
  for (const auto& [buffer, type] : arrays) {
    absl::StatusOr<DeviceBuffer> allocated =
        device.Allocate(adam.numel_ * ByteSize(type));
    if (!allocated.ok()) return allocated.status();
    *buffer = *std::move(allocated);
  }
  return adam;
}

DeviceAdam::DeviceAdam(const DeviceAdamOptions& options,
                       std::vector<DeviceAdamParameter> parameters)
    : options_(options), parameters_(std::move(parameters)) {
  for (const DeviceAdamParameter& parameter : parameters_) {
    positions_.push_back(numel_);
    numel_ += AlignedNumel(parameter.numel);
  }
  operations_.reserve(parameters_.size());
}

absl::Status DeviceAdam::Clear(Stream& stream) {
  for (const DeviceBuffer* buffer : {&master_, &exp_avg_, &exp_avg_sq_}) {
    if (absl::Status status = stream.SetZero(buffer->data(), buffer->bytes());
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

void* DeviceAdam::state(int parameter, StateKind kind) const {
  const DeviceBuffer& buffer = kind == StateKind::kMaster   ? master_
                               : kind == StateKind::kExpAvg ? exp_avg_
                                                            : exp_avg_sq_;
  return At(buffer, state_type(kind), positions_[parameter]);
}

DType DeviceAdam::state_type(StateKind kind) const {
  return kind == StateKind::kMaster   ? DType::kFloat32
         : kind == StateKind::kExpAvg ? options_.exp_avg_type
                                      : options_.exp_avg_sq_type;
}

absl::Status DeviceAdam::Step(Stream& stream,
                              absl::Span<const void* const> gradients,
                              DType grad_type,
                              absl::Span<const AdamConstants> constants,
                              float grad_scale) {
  if (gradients.size() != parameters_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(gradients.size(), " gradients, expected those of ",
                     parameters_.size(), " parameters"));
  }
  operations_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const DeviceAdamParameter& parameter = parameters_[i];
    if (parameter.numel == 0) continue;
    if (static_cast<size_t>(parameter.group) >= constants.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", i, " is of group ", parameter.group,
                       ", and there are constants of ", constants.size()));
    }
    const int index = static_cast<int>(i);
    AdamStepArgs args;
    args.numel = parameter.numel;
    args.param = static_cast<float*>(state(index, StateKind::kMaster));
    args.grad = gradients[i];
    args.exp_avg = state(index, StateKind::kExpAvg);
    args.exp_avg_sq = state(index, StateKind::kExpAvgSq);
    args.grad_type = grad_type;
    args.exp_avg_type = options_.exp_avg_type;
    args.exp_avg_sq_type = options_.exp_avg_sq_type;
    if (options_.weights_type != DType::kFloat32) {
      args.copy = parameter.weights;
      args.copy_type = options_.weights_type;
    }
    args.grad_scale = grad_scale;
    args.constants = constants[parameter.group];
    operations_.push_back(args);
  }
  if (absl::Status status = stream.Run(operations_); !status.ok()) {
    return status;
  }
  if (options_.weights_type != DType::kFloat32) return absl::OkStatus();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const absl::Status status = stream.CopyOnDevice(
        parameters_[i].weights, state(static_cast<int>(i), StateKind::kMaster),
        parameters_[i].numel * static_cast<int64_t>(sizeof(float)));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace onepass

// Adam on a device: masters, moments and the update all there, with the bits of
// the CPU.
//
//   ASSIGN_OR_RETURN(DeviceAdam adam,
//                    DeviceAdam::Create(device, options, {{numel, 0,
//                    weights}}));
//   RETURN_IF_ERROR(stream->CopyToDevice(
//       adam.state(0, StateKind::kMaster), values, numel * sizeof(float)));
//   ASSIGN_OR_RETURN(AdamConstants constants, ComputeAdamConstants(group, t));
//   RETURN_IF_ERROR(adam.Step(*stream, {gradient}, DType::kBFloat16,
//                             {constants}, factor));

#ifndef ONEPASS_OFFLOAD_DEVICE_ADAM_H_
#define ONEPASS_OFFLOAD_DEVICE_ADAM_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/state.h"

namespace onepass {

struct DeviceAdamOptions {
  DType weights_type = DType::kBFloat16;    // bf16, fp16 or fp32
  DType exp_avg_type = DType::kFloat32;     // one of Device::moment_types()
  DType exp_avg_sq_type = DType::kFloat32;  // one of Device::moment_types()
};

struct DeviceAdamParameter {
  int64_t numel = 0;
  int group = 0;            // index of the constants of a step
  void* weights = nullptr;  // device memory of weights_type, the caller's
};

class DeviceAdam {
 public:
  // Elements that an array of `numel` takes among others: the next begins where
  // memory of a device would, whatever its type.
  static constexpr int64_t AlignedNumel(int64_t numel) {
    return (numel + Device::kAlignment - 1) / Device::kAlignment *
           Device::kAlignment;
  }

  // Takes the memory of all state: 4 bytes and both moments an element, of
  // AlignedNumel() a parameter. It is not initialised before the caller sets
  // it, or Clear(). `device` must outlive the result. InvalidArgument, naming
  // the option or the parameter: a type that the device has not, a numel or
  // group below 0, weights that are null. ResourceExhausted: memory.
  static absl::StatusOr<DeviceAdam> Create(
      Device& device, const DeviceAdamOptions& options,
      std::vector<DeviceAdamParameter> parameters);

  // Puts zeros into masters and moments.
  absl::Status Clear(Stream& stream);

  // Puts on `stream` the update of all parameters, each gradient multiplied by
  // `grad_scale`, and their weights: in the same operation where these are of
  // 16 bits. gradients[i]: device memory, numel of grad_type, of parameter i;
  // of any value where that has none. constants[g]: of group g. Allocates
  // nothing. InvalidArgument, with nothing put there: another number of
  // gradients, a group without constants, as in dispatch/operations.h.
  absl::Status Step(Stream& stream, absl::Span<const void* const> gradients,
                    DType grad_type, absl::Span<const AdamConstants> constants,
                    float grad_scale);

  // Device memory: numel elements of state_type().
  void* state(int parameter, StateKind kind) const;
  DType state_type(StateKind kind) const;

  const std::vector<DeviceAdamParameter>& parameters() const {
    return parameters_;
  }

 private:
  DeviceAdam(const DeviceAdamOptions& options,
             std::vector<DeviceAdamParameter> parameters);

  DeviceAdamOptions options_;
  std::vector<DeviceAdamParameter> parameters_;
  std::vector<int64_t> positions_;  // of each in the arrays, in elements
  int64_t numel_ = 0;               // of the arrays
  DeviceBuffer master_;
  DeviceBuffer exp_avg_;
  DeviceBuffer exp_avg_sq_;
  std::vector<DeviceOperation> operations_;  // of a step: room for them
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_DEVICE_ADAM_H_

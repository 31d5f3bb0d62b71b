#include "dispatch/device.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

absl::Status CheckBytes(absl::string_view call, int64_t bytes) {
  if (bytes >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(call, ": bytes is ", bytes, ", expected at least 0"));
}

absl::Status CheckNotNull(absl::string_view call, absl::string_view name,
                          const void* data, int64_t bytes) {
  if (data != nullptr || bytes == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(call, ": ", name, " is null, bytes is ", bytes));
}

// The check of the operation that there is.
struct OperationCheck {
  absl::Status operator()(const AdamStepArgs& args) const {
    return CheckAdam(args);
  }
  absl::Status operator()(const DeferredAdamStepArgs& args) const {
    return CheckAdam(args);
  }
  template <typename Args>
  absl::Status operator()(const Args& args) const {
    return CheckArgs(args);
  }

  template <typename Args>
  absl::Status CheckAdam(const Args& args) const {
    return CheckAdamStep(device.gradient_types(), device.moment_types(),
                         device.copy_types(), args);
  }

  const Device& device;
};

}  // namespace

absl::Status CheckCopy(absl::string_view call, const void* to, const void* from,
                       int64_t bytes) {
  ONEPASS_RETURN_IF_ERROR(CheckBytes(call, bytes));
  ONEPASS_RETURN_IF_ERROR(CheckNotNull(call, "to", to, bytes));
  ONEPASS_RETURN_IF_ERROR(CheckNotNull(call, "from", from, bytes));
  if (!MemoryOverlaps(to, bytes, from, bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(call, ": to overlaps from, bytes is ", bytes));
}

absl::Status CheckSetZero(const void* data, int64_t bytes) {
  constexpr absl::string_view kCall = "set_zero";
  ONEPASS_RETURN_IF_ERROR(CheckBytes(kCall, bytes));
  return CheckNotNull(kCall, "device", data, bytes);
}

absl::Status CheckOperations(const Device& device,
                             absl::Span<const DeviceOperation> operations) {
  for (const DeviceOperation& operation : operations) {
    ONEPASS_RETURN_IF_ERROR(std::visit(OperationCheck{device}, operation));
  }
  return absl::OkStatus();
}

absl::Status CheckEvent(absl::string_view call, const Event& event,
                        const Device& device) {
  if (&event.device() == &device) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      call, ": the event is of another device (", event.device().name(),
      "), expected one of this (", device.name(), ")"));
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  device_->FreeBytes(data_, bytes_);
  device_->device_memory_.Subtract(bytes_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  // What `other` holds now goes with `taken` where it is this very buffer, too.
  DeviceBuffer taken(std::move(other));
  std::swap(device_, taken.device_);
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (data() == nullptr) return;
  device_->Unpin(data(), bytes());
  device_->pinned_memory_.Subtract(bytes());
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      buffer_(std::move(other.buffer_)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  PinnedBuffer taken(std::move(other));
  std::swap(device_, taken.device_);
  std::swap(buffer_, taken.buffer_);
  return *this;
}

absl::StatusOr<DeviceBuffer> Device::Allocate(int64_t bytes) {
  ONEPASS_RETURN_IF_ERROR(CheckBytes("allocate", bytes));
  DeviceBuffer buffer;
  if (bytes == 0) return buffer;
  absl::StatusOr<void*> data = AllocateBytes(bytes);
  if (!data.ok()) return data.status();
  device_memory_.Add(bytes);
  buffer.device_ = this;
  buffer.data_ = *data;
  buffer.bytes_ = bytes;
  return buffer;
}

absl::StatusOr<PinnedBuffer> Device::AllocatePinned(
    ThreadPool& pool, int64_t bytes, const HostBufferOptions& options) {
  absl::StatusOr<HostBuffer> memory = HostBuffer::Create(pool, bytes, options);
  if (!memory.ok()) return memory.status();
  PinnedBuffer buffer;
  if (bytes == 0) return buffer;
  ONEPASS_RETURN_IF_ERROR(Pin(memory->data(), bytes));
  pinned_memory_.Add(bytes);
  buffer.device_ = this;
  buffer.buffer_ = *std::move(memory);
  return buffer;
}

void Device::ResetPeaks() {
  device_memory_.ResetPeak();
  pinned_memory_.ResetPeak();
}

void Device::Counter::Add(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  use_.in_use += bytes;
  use_.peak = std::max(use_.peak, use_.in_use);
  ++use_.allocations;
}

void Device::Counter::Subtract(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  use_.in_use -= bytes;
}

void Device::Counter::ResetPeak() {
  std::lock_guard<std::mutex> lock(mutex_);
  use_.peak = use_.in_use;
}

MemoryUse Device::Counter::use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return use_;
}

}  // namespace onepass

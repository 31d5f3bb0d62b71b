#include "checkpoint/memory_budget.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace onepass {
namespace {

absl::Status CheckNotNegative(MemoryBudget::Bytes bytes) {
  if (bytes.device >= 0 && bytes.host >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("memory budget: ", bytes.device, " bytes of the device and ",
                   bytes.host, " of the host, expected at least 0 of each"));
}

}  // namespace

MemoryBudget::Share::Share(Share&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)),
      bytes_(std::exchange(other.bytes_, {})) {}

MemoryBudget::Share& MemoryBudget::Share::operator=(Share&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

void MemoryBudget::Share::Release() {
  if (budget_ == nullptr) return;
  budget_->Give(bytes_);
  budget_ = nullptr;
}

absl::StatusOr<std::unique_ptr<MemoryBudget>> MemoryBudget::Create(
    Bytes limit) {
  if (absl::Status status = CheckNotNegative(limit); !status.ok()) {
    return status;
  }
  return absl::WrapUnique(new MemoryBudget(limit));
}

absl::StatusOr<MemoryBudget::Share> MemoryBudget::Take(Bytes bytes) {
  if (absl::Status status = CheckNotNegative(bytes); !status.ok()) {
    return status;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (bytes.device > limit_.device || bytes.host > limit_.host) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "memory budget: ", bytes.device, " bytes of the device and ",
        bytes.host, " of the host are needed at once, of ", limit_.device,
        " and ", limit_.host));
  }
  const int64_t number = next_number_++;
  changed_.wait(lock, [&] {
    return !cancelled_.ok() || (serving_ == number && Fits(bytes));
  });
  if (!cancelled_.ok()) return cancelled_;
  ++serving_;
  in_use_.device += bytes.device;
  in_use_.host += bytes.host;
  peak_.device = std::max(peak_.device, in_use_.device);
  peak_.host = std::max(peak_.host, in_use_.host);
  // There may be enough for the next one as well.
  changed_.notify_all();
  return Share(this, bytes);
}

void MemoryBudget::Cancel(const absl::Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  cancelled_.Update(error);
  changed_.notify_all();
}

void MemoryBudget::Give(Bytes bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  in_use_.device -= bytes.device;
  in_use_.host -= bytes.host;
  changed_.notify_all();
}

MemoryBudget::Bytes MemoryBudget::in_use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

int64_t MemoryBudget::waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next_number_ - serving_;
}

MemoryBudget::Bytes MemoryBudget::peak() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

}  // namespace onepass

#include "dispatch/state.h"

#include "absl/strings/str_cat.h"

namespace onepass {

const char* Name(StateKind kind) {
  switch (kind) {
    case StateKind::kMaster:
      return "master_param";
    case StateKind::kExpAvg:
      return "exp_avg";
    case StateKind::kExpAvgSq:
      return "exp_avg_sq";
    case StateKind::kParam:
      return "param";
  }
  return "unknown";
}

int64_t ByteSize(StateType type) {
  switch (type) {
    case StateType::kFloat32:
      return 4;
    case StateType::kBFloat16:
    case StateType::kFloat16:
    case StateType::kScaledFloat16:
    case StateType::kInt16Remainder:
      return 2;
    case StateType::kScaledFloat8E4M3:
      return 1;
  }
  return 0;
}

const char* Name(StateType type) {
  switch (type) {
    case StateType::kFloat32:
      return "fp32";
    case StateType::kBFloat16:
      return "bf16";
    case StateType::kFloat16:
      return "fp16";
    case StateType::kScaledFloat16:
      return "scaled fp16";
    case StateType::kScaledFloat8E4M3:
      return "scaled e4m3";
    case StateType::kInt16Remainder:
      return "int16 remainder";
  }
  return "unknown";
}

absl::StatusOr<int64_t> CheckBox(absl::Span<const int64_t> shape,
                                 const Box& box) {
  const auto product = [&](absl::Span<const int64_t> sizes, int64_t* result) {
    *result = 1;
    for (const int64_t size : sizes) {
      if (size < 0 || __builtin_mul_overflow(*result, size, result)) {
        return false;
      }
    }
    return true;
  };
  int64_t whole;
  int64_t numel;
  if (!product(shape, &whole) || !product(box.extent, &numel) ||
      box.offset.size() != box.extent.size()) {
    return absl::InvalidArgumentError(
        "shape or box has a negative size, or does not fit 64 bits");
  }
  // Of as many dimensions as the tensor, or a range of its elements.
  const bool flat = box.extent.size() == 1 && shape.size() != 1;
  const int64_t flat_shape[] = {whole};
  const absl::Span<const int64_t> within =
      flat ? absl::Span<const int64_t>(flat_shape) : shape;
  if (box.extent.size() != within.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "box has ", box.extent.size(), " dimensions, expected 1 or the ",
        shape.size(), " of its shape"));
  }
  for (size_t i = 0; i < within.size(); ++i) {
    if (box.offset[i] < 0 || box.extent[i] > within[i] ||
        box.offset[i] > within[i] - box.extent[i]) {
      return absl::InvalidArgumentError(
          absl::StrCat("box has [", box.offset[i], ", ", box.offset[i], " + ",
                       box.extent[i], ") in dimension ", i, " of ", within[i]));
    }
  }
  return numel;
}

bool HasLeavesOfTensor(absl::Span<const int64_t> shape, const Box& box) {
  if (box.numel() == 0) return true;
  if (shape == absl::MakeConstSpan(box.extent)) return true;
  if (box.extent.size() != 1) return false;
  int64_t whole = 1;
  for (const int64_t size : shape) whole *= size;
  return box.offset[0] % kLeafNumel == 0 &&
         (box.extent[0] % kLeafNumel == 0 ||
          box.offset[0] + box.extent[0] == whole);
}

absl::Status StateFences::BeginReading() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (cancelled_.ok()) reading_ = true;
  return cancelled_;
}

void StateFences::EndReading() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reading_ = false;
  }
  changed_.notify_all();
}

void StateFences::Open(int fence) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_[fence].store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void StateFences::OpenAllLocked() {
  for (std::atomic<bool>& open : open_) {
    open.store(true, std::memory_order_release);
  }
}

void StateFences::OpenAll() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    OpenAllLocked();
  }
  changed_.notify_all();
}

bool StateFences::Wait(int fence, std::chrono::milliseconds timeout) {
  const std::atomic<bool>& open = open_[fence];
  if (open.load(std::memory_order_acquire)) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  const bool in_time = changed_.wait_for(
      lock, timeout, [&] { return open.load(std::memory_order_relaxed); });
  lock.unlock();
  if (!in_time) {
    Cancel(absl::DeadlineExceededError(
        "state was not read by when its owner, who waited for it, had to "
        "change it: reading is cancelled"));
  }
  return true;
}

void StateFences::Cancel(const absl::Status& reason) {
  std::unique_lock<std::mutex> lock(mutex_);
  cancelled_.Update(reason);
  changed_.wait(lock, [&] { return !reading_; });
  OpenAllLocked();
  lock.unlock();
  changed_.notify_all();
}

bool StateFences::all_open() const {
  for (const std::atomic<bool>& open : open_) {
    if (!open.load(std::memory_order_acquire)) return false;
  }
  return true;
}

}  // namespace onepass

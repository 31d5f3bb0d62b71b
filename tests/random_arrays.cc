#include "tests/random_arrays.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "tools/bench/random_at.h"

namespace onepass {
namespace {

constexpr int64_t kPage = 4096;

// Array i begins this many bytes times i after a page's begin, the last back at
// the first: large blocks would otherwise all begin alike, and loads seem to
// depend on stores to the same place of another page.
constexpr int64_t kStagger = 9 * 64;
constexpr int64_t kStaggered = kPage / kStagger;

// `value` with no more than `kMantissa` bits of mantissa, the others cut off,
// and an exponent of that bias, which it fits into.
template <typename Bits, int kMantissa, int kBias>
Bits Truncate(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t magnitude = ((bits & 0x7fffffff) >> (23 - kMantissa)) -
                             ((uint32_t{127} - kBias) << kMantissa);
  return static_cast<Bits>(bits >> 31 << (8 * sizeof(Bits) - 1) | magnitude);
}

// Writes elements [begin, end) of `array`, numbers `first` + begin and on.
template <typename Bits, int kMantissa, int kBias>
void Fill(void* array, int64_t begin, int64_t end, int64_t first,
          bool positive) {
  for (int64_t i = begin; i < end; ++i) {
    const float value = RandomAt(first + i);
    static_cast<Bits*>(array)[i] =
        Truncate<Bits, kMantissa, kBias>(positive ? std::fabs(value) : value);
  }
}

void Fill(DType type, void* array, int64_t begin, int64_t end, int64_t first,
          bool positive) {
  switch (type) {
    case DType::kFloat32:
      return Fill<uint32_t, 23, 127>(array, begin, end, first, positive);
    case DType::kBFloat16:
      return Fill<uint16_t, 7, 127>(array, begin, end, first, positive);
    case DType::kFloat16:
      return Fill<uint16_t, 10, 15>(array, begin, end, first, positive);
    case DType::kFloat8E4M3:
      return Fill<uint8_t, 3, 7>(array, begin, end, first, positive);
  }
}

}  // namespace

void* RandomArrays::Allocate(DType type, int64_t numel, bool positive) {
  const int64_t offset =
      static_cast<int64_t>(buffers_.size()) % kStaggered * kStagger;
  HostBufferOptions options;
  options.element_bytes = ByteSize(type);
  absl::StatusOr<HostBuffer> buffer =
      HostBuffer::Create(pool_, offset + numel * ByteSize(type), options);
  if (!buffer.ok()) {
    status_.Update(buffer.status());
    return nullptr;
  }
  void* const array = buffer->as<char>() + offset;
  buffers_.push_back(*std::move(buffer));
  pool_.ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    Fill(type, array, begin, end, numbers_, positive);
  });
  numbers_ += numel;
  return array;
}

}  // namespace onepass

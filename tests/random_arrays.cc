#include "tests/random_arrays.h"

#include <algorithm>

#include "dispatch/kernel.h"

namespace onepass {
namespace {

constexpr size_t kPage = 4096;

// Array i begins this many bytes times i after a page's begin, the last back at
// the first: large blocks would otherwise all begin alike, and loads seem to
// depend on stores to the same place of another page.
constexpr size_t kStagger = 9 * 64;
constexpr size_t kStaggered = kPage / kStagger;

// Writes `numel` numbers with `kMantissa` bits of mantissa and exponents of
// that bias.
template <typename Bits, int kMantissa, int kBias>
void Fill(Bits* out, int64_t numel, uint64_t state, bool positive) {
  constexpr int kSign = 8 * sizeof(Bits) - 1;
  for (int64_t i = 0; i < numel; ++i) {
    // A linear congruential generator, whose upper bits are the good ones.
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint32_t random = static_cast<uint32_t>(state >> 32);
    const uint32_t sign = positive ? 0 : random >> 31;
    const uint32_t exponent = kBias - 1 - (random >> 29 & 3);
    const uint32_t mantissa = random & ((uint32_t{1} << kMantissa) - 1);
    out[i] =
        static_cast<Bits>(sign << kSign | exponent << kMantissa | mantissa);
  }
}

void FillLeaf(DType type, void* array, int64_t begin, int64_t numel,
              uint64_t state, bool positive) {
  switch (type) {
    case DType::kFloat32:
      return Fill<uint32_t, 23, 127>(static_cast<uint32_t*>(array) + begin,
                                     numel, state, positive);
    case DType::kBFloat16:
      return Fill<uint16_t, 7, 127>(static_cast<uint16_t*>(array) + begin,
                                    numel, state, positive);
    case DType::kFloat16:
      return Fill<uint16_t, 10, 15>(static_cast<uint16_t*>(array) + begin,
                                    numel, state, positive);
    case DType::kFloat8E4M3:
      return Fill<uint8_t, 3, 7>(static_cast<uint8_t*>(array) + begin, numel,
                                 state, positive);
  }
}

}  // namespace

void* RandomArrays::Allocate(DType type, int64_t numel, bool positive) {
  const size_t index = blocks_.size();
  const size_t offset = index % kStaggered * kStagger;
  const size_t bytes = offset + static_cast<size_t>(numel * ByteSize(type));
  void* block = nullptr;
  if (posix_memalign(&block, kPage, bytes) != 0) {
    ok_ = false;
    return nullptr;
  }
  blocks_.emplace_back(block);
  void* array = static_cast<char*>(block) + offset;
  pool_.ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    for (int64_t leaf = begin; leaf < end; leaf += kLeafNumel) {
      // Of its own for each leaf of each array.
      const uint64_t seed =
          (static_cast<uint64_t>(index) << 40 | leaf) * 0x9e3779b97f4a7c15u + 1;
      FillLeaf(type, array, leaf, std::min(kLeafNumel, end - leaf), seed,
               positive);
    }
  });
  return array;
}

}  // namespace onepass

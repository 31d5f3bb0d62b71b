#include "dispatch/norm_sum.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace onepass {
namespace {

// IEEE 754 binary64.
constexpr int kMantissaBits = 52;
constexpr int kExponentBias = 1023;
constexpr int kNonFiniteExponent = 0x7ff;
constexpr uint64_t kImplicitBit = uint64_t{1} << kMantissaBits;

}  // namespace

void NormSum::Add(double leaf_sum) {
  uint64_t bits;
  std::memcpy(&bits, &leaf_sum, sizeof(bits));
  const int exponent = static_cast<int>(bits >> kMantissaBits) & 0x7ff;
  uint64_t mantissa = bits & (kImplicitBit - 1);
  if (exponent == kNonFiniteExponent) {
    (mantissa == 0 ? has_infinity_ : has_nan_) = true;
    return;
  }
  if (exponent == 0 && mantissa == 0) return;  // of either sign
  mantissa |= kImplicitBit;
  // Where bit 0 of the mantissa falls. Bits below 2^-298 must be zeros.
  int position = exponent - kExponentBias - kMantissaBits - kLeastExponent;
  const int below = std::clamp(-position, 0, kMantissaBits + 1);
  const bool lost = (mantissa & ((uint64_t{1} << below) - 1)) != 0;
  if ((bits >> 63) != 0 || exponent - kExponentBias > kMostExponent || lost) {
    has_infinity_ = true;
    return;
  }
  mantissa >>= below;
  position = std::max(position, 0);
  const int limb = position / kLimbBits;
  const unsigned __int128 shifted = static_cast<unsigned __int128>(mantissa)
                                    << (position % kLimbBits);
  limbs_[limb] += static_cast<uint32_t>(shifted);
  limbs_[limb + 1] += static_cast<uint32_t>(shifted >> 32);
  limbs_[limb + 2] += static_cast<uint32_t>(shifted >> 64);
  CountAddition();
}

void NormSum::Merge(const NormSum& other) {
  NormSum carried = other;
  carried.Carry();
  for (int i = 0; i < kLimbs; ++i) limbs_[i] += carried.limbs_[i];
  has_infinity_ |= other.has_infinity_;
  has_nan_ |= other.has_nan_;
  CountAddition();
}

double NormSum::Total() const {
  if (has_nan_) return std::numeric_limits<double>::quiet_NaN();
  if (has_infinity_) return std::numeric_limits<double>::infinity();
  NormSum carried = *this;
  carried.Carry();
  const std::array<uint64_t, kLimbs>& limbs = carried.limbs_;
  int top = kLimbs - 1;
  while (top >= 0 && limbs[top] == 0) --top;
  if (top < 0) return 0.0;

  // The uppermost 64 bits from the leading one down, and whether any bit below
  // them is set.
  auto limb = [&limbs](int i) {
    return static_cast<unsigned __int128>(i >= 0 ? limbs[i] : 0);
  };
  const unsigned __int128 window =
      (limb(top) << 64) | (limb(top - 1) << 32) | limb(top - 2);
  const int leading =
      64 + 63 - __builtin_clzll(static_cast<uint64_t>(window >> 64));
  const uint64_t upper = static_cast<uint64_t>(window >> (leading - 63));
  bool rest = (window << (127 - leading + 64)) != 0;
  for (int i = top - 3; i >= 0 && !rest; --i) rest = limbs[i] != 0;

  // Round to 53 bits, nearest even, in integers: no environment can change it.
  uint64_t kept = upper >> 11;
  const uint64_t dropped = upper & 0x7ff;
  if (dropped > 0x400 || (dropped == 0x400 && (rest || (kept & 1) != 0))) {
    ++kept;
  }
  const int exponent = kLeastExponent + kLimbBits * (top - 2) + leading;
  // A carry out of the mantissa moves into the exponent, as it should.
  const uint64_t bits =
      (static_cast<uint64_t>(exponent + kExponentBias) << kMantissaBits) +
      (kept - kImplicitBit);
  double total;
  std::memcpy(&total, &bits, sizeof(total));
  return total;
}

bool operator==(const NormSum& a, const NormSum& b) {
  NormSum x = a;
  NormSum y = b;
  x.Carry();
  y.Carry();
  return x.limbs_ == y.limbs_ && x.has_infinity_ == y.has_infinity_ &&
         x.has_nan_ == y.has_nan_;
}

void NormSum::CountAddition() {
  constexpr uint32_t kMostAdditions = uint32_t{1} << 24;
  if (++additions_ == kMostAdditions) Carry();
}

void NormSum::Carry() {
  uint64_t carry = 0;
  for (int i = 0; i < kLimbs - 1; ++i) {
    const uint64_t sum = limbs_[i] + carry;
    limbs_[i] = static_cast<uint32_t>(sum);
    carry = sum >> kLimbBits;
  }
  limbs_[kLimbs - 1] += carry;
  additions_ = 0;
}

}  // namespace onepass

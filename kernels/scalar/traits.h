// One lane, for every architecture: the reference that the others are held to.

#ifndef ONEPASS_KERNELS_SCALAR_TRAITS_H_
#define ONEPASS_KERNELS_SCALAR_TRAITS_H_

#include <cstdint>

#include "kernels/generic/kernel.h"

namespace onepass {
namespace {

struct Scalar {
  using F32 = float;
  using U32 = uint32_t;
  using Mask = bool;
  struct AllLanes {};

  static constexpr int64_t kLeastLanes = 1;
  static constexpr int kUnroll = 2;
  static constexpr int64_t kPrefetchNumel = 0;
  static constexpr bool kHardwareHalf = false;
  static constexpr bool kTestsBits = false;
  static constexpr bool kStoresPairs = false;
  static constexpr bool kStreams = false;

  ONEPASS_INLINE static int64_t Lanes() { return kLeastLanes; }
  ONEPASS_INLINE static AllLanes All() { return {}; }
  // A part of one lane does not exist.
  ONEPASS_INLINE static AllLanes First(int64_t) { return {}; }

  // By bytes: callers keep 16-bit elements as types of their own.
  ONEPASS_INLINE static F32 LoadF32(const float* p, AllLanes) {
    return LoadAs<float>(p);
  }
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, AllLanes) {
    return LoadAs<uint16_t>(p);
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, AllLanes) { return *p; }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, AllLanes) {
    __builtin_memcpy(p, &x, sizeof(x));
  }
  ONEPASS_INLINE static void StoreU16(uint16_t* p, U32 x, AllLanes) {
    const uint16_t low = static_cast<uint16_t>(x);
    __builtin_memcpy(p, &low, sizeof(low));
  }
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 x, AllLanes lanes) {
    StoreU16(p, x >> 16, lanes);
  }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, AllLanes) {
    *p = static_cast<uint8_t>(x);
  }

  ONEPASS_INLINE static F32 Set(float x) { return x; }
  ONEPASS_INLINE static F32 Add(F32 a, F32 b) { return a + b; }
  ONEPASS_INLINE static F32 Mul(F32 a, F32 b) { return a * b; }
  ONEPASS_INLINE static F32 Div(F32 a, F32 b) { return a / b; }
  ONEPASS_INLINE static F32 Sqrt(F32 a) { return __builtin_sqrtf(a); }

  // Where the build has no fma instruction: the product of two floats is exact
  // in double, its sum with a third float is rounded to odd there, and a value
  // of 53 bits rounded to odd rounds to 24 bits as the exact one does (Boldo
  // and Melquiond 2008). Far cheaper than the call to libm.
  ONEPASS_INLINE static F32 Fma(F32 a, F32 b, F32 c) {
    // clang does not say __FP_FAST_FMAF where the baseline has it.
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA) || defined(__riscv_f)
    return __builtin_fmaf(a, b, c);
#else
    const double product = static_cast<double>(a) * b;
    const double addend = c;
    double sum = product + addend;
    // What rounding lost (Knuth's two-sum), NaN where the sum is not finite.
    const double virtual_addend = sum - product;
    const double lost =
        (product - (sum - virtual_addend)) + (addend - virtual_addend);
    uint64_t bits;
    __builtin_memcpy(&bits, &sum, sizeof(bits));
    if ((lost < 0 || lost > 0) && (bits & 1) == 0) {
      // Towards what was lost; away from zero is one bit up.
      bits += (lost > 0) == (sum > 0) ? 1 : -1;
      __builtin_memcpy(&sum, &bits, sizeof(sum));
    }
    return static_cast<F32>(sum);
#endif
  }

  ONEPASS_INLINE static Mask IsNaN(F32 a) { return a != a; }

  ONEPASS_INLINE static U32 SetU32(uint32_t x) { return x; }
  ONEPASS_INLINE static U32 ZeroU32() { return 0; }
  ONEPASS_INLINE static U32 Add(U32 a, U32 b) { return a + b; }
  ONEPASS_INLINE static U32 Sub(U32 a, U32 b) { return a - b; }
  ONEPASS_INLINE static U32 And(U32 a, U32 b) { return a & b; }
  ONEPASS_INLINE static U32 Or(U32 a, U32 b) { return a | b; }
  template <int n>
  ONEPASS_INLINE static U32 ShiftLeft(U32 a) {
    return a << n;
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftRight(U32 a) {
    return a >> n;
  }
  ONEPASS_INLINE static Mask Greater(U32 a, U32 b) { return a > b; }
  ONEPASS_INLINE static U32 Select(Mask mask, U32 a, U32 b) {
    return mask ? a : b;
  }
  ONEPASS_INLINE static U32 Max(U32 a, U32 b) { return a > b ? a : b; }
  ONEPASS_INLINE static uint32_t ReduceMax(U32 a) { return a; }
  ONEPASS_INLINE static U32 Bits(F32 x) { return LoadAs<uint32_t>(&x); }
  ONEPASS_INLINE static F32 FromBits(U32 x) { return LoadAs<float>(&x); }

  using Sums = double;
  ONEPASS_INLINE static Sums ZeroSums() { return 0; }
  ONEPASS_INLINE static Sums AddSquares(Sums sums, F32 x) {
    return sums + static_cast<double>(x) * x;
  }
  ONEPASS_INLINE static void StoreSums(double* p, Sums sums) { *p = sums; }

 private:
  template <typename Value>
  ONEPASS_INLINE static Value LoadAs(const void* p) {
    Value value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
  }
};

}  // namespace
}  // namespace onepass

#endif  // ONEPASS_KERNELS_SCALAR_TRAITS_H_

// NEON (Advanced SIMD), which every aarch64 has: 4 lanes. It has no masks:
// tails pass through 16 bytes on the stack.

#ifndef ONEPASS_KERNELS_NEON_TRAITS_H_
#define ONEPASS_KERNELS_NEON_TRAITS_H_

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/generic/kernel.h"

namespace onepass {
namespace {

struct Neon {
  using F32 = float32x4_t;
  using U32 = uint32x4_t;
  // Clear where the condition holds: NEON compares for "equal", which NaN is
  // not, but not for "unordered".
  using Mask = uint32x4_t;
  struct AllLanes {};
  struct FirstLanes {
    int64_t n;
  };

  static constexpr int64_t kLeastLanes = 4;
  static constexpr int kUnroll = 2;
  static constexpr int64_t kPrefetchNumel = 0;
  static constexpr bool kHardwareHalf = true;
  static constexpr bool kTestsBits = false;
  static constexpr bool kStoresPairs = true;
  static constexpr bool kStreams = false;

  ONEPASS_INLINE static int64_t Lanes() { return kLeastLanes; }
  ONEPASS_INLINE static AllLanes All() { return {}; }
  ONEPASS_INLINE static FirstLanes First(int64_t n) { return {n}; }

  ONEPASS_INLINE static F32 LoadF32(const float* p, AllLanes) {
    return vld1q_f32(p);
  }
  ONEPASS_INLINE static F32 LoadF32(const float* p, FirstLanes lanes) {
    return vreinterpretq_f32_u8(LoadBytes(p, lanes.n * 4));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, WhichLanes lanes) {
    return vmovl_u16(Load16(p, lanes));
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, AllLanes) {
    return LoadU8(p, FirstLanes{4});
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, FirstLanes lanes) {
    const uint8x8_t codes = vget_low_u8(LoadBytes(p, lanes.n));
    return vmovl_u16(vget_low_u16(vmovl_u8(codes)));
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, AllLanes) {
    vst1q_f32(p, x);
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, FirstLanes lanes) {
    StoreBytes(p, &x, lanes.n * 4);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreU16(uint16_t* p, U32 x, WhichLanes lanes) {
    Store16(p, vmovn_u32(x), lanes);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 x,
                                           WhichLanes lanes) {
    Store16(p, vshrn_n_u32(x, 16), lanes);
  }
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 a, U32 b) {
    // The upper half of a lane is the odd one.
    vst1q_u16(p,
              vuzp2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, AllLanes) {
    StoreU8(p, x, FirstLanes{4});
  }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, FirstLanes lanes) {
    const uint16x4_t codes = vmovn_u32(x);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(codes, codes));
    StoreBytes(p, &bytes, lanes.n);
  }

  ONEPASS_INLINE static F32 Set(float x) { return vdupq_n_f32(x); }
  ONEPASS_INLINE static F32 Add(F32 a, F32 b) { return vaddq_f32(a, b); }
  ONEPASS_INLINE static F32 Mul(F32 a, F32 b) { return vmulq_f32(a, b); }
  ONEPASS_INLINE static F32 Div(F32 a, F32 b) { return vdivq_f32(a, b); }
  ONEPASS_INLINE static F32 Sqrt(F32 a) { return vsqrtq_f32(a); }
  ONEPASS_INLINE static F32 Fma(F32 a, F32 b, F32 c) {
    return vfmaq_f32(c, a, b);
  }
  ONEPASS_INLINE static Mask IsNaN(F32 a) { return vceqq_f32(a, a); }

  ONEPASS_INLINE static U32 SetU32(uint32_t x) { return vdupq_n_u32(x); }
  ONEPASS_INLINE static U32 ZeroU32() { return vdupq_n_u32(0); }
  ONEPASS_INLINE static U32 Add(U32 a, U32 b) { return vaddq_u32(a, b); }
  ONEPASS_INLINE static U32 Sub(U32 a, U32 b) { return vsubq_u32(a, b); }
  ONEPASS_INLINE static U32 And(U32 a, U32 b) { return vandq_u32(a, b); }
  ONEPASS_INLINE static U32 Or(U32 a, U32 b) { return vorrq_u32(a, b); }
  template <int n>
  ONEPASS_INLINE static U32 ShiftLeft(U32 a) {
    return vshlq_n_u32(a, n);
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftRight(U32 a) {
    return vshrq_n_u32(a, n);
  }
  ONEPASS_INLINE static Mask Greater(U32 a, U32 b) { return vcleq_u32(a, b); }
  ONEPASS_INLINE static U32 Select(Mask mask, U32 a, U32 b) {
    return vbslq_u32(mask, b, a);
  }
  ONEPASS_INLINE static U32 Max(U32 a, U32 b) { return vmaxq_u32(a, b); }
  ONEPASS_INLINE static uint32_t ReduceMax(U32 a) { return vmaxvq_u32(a); }
  ONEPASS_INLINE static U32 Bits(F32 x) { return vreinterpretq_u32_f32(x); }
  ONEPASS_INLINE static F32 FromBits(U32 x) { return vreinterpretq_f32_u32(x); }

  template <typename WhichLanes>
  ONEPASS_INLINE static F32 LoadHalf(const uint16_t* p, WhichLanes lanes) {
    return vcvt_f32_f16(vreinterpret_f16_u16(Load16(p, lanes)));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreHalf(uint16_t* p, F32 x, WhichLanes lanes) {
    Store16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)), lanes);
  }

  struct Sums {
    float64x2_t low;
    float64x2_t high;
  };
  ONEPASS_INLINE static Sums ZeroSums() {
    return {vdupq_n_f64(0), vdupq_n_f64(0)};
  }
  ONEPASS_INLINE static Sums AddSquares(Sums sums, F32 x) {
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(x));
    const float64x2_t high = vcvt_high_f64_f32(x);
    // The square of a float is exact in double, so fused or not is the same.
    return {vfmaq_f64(sums.low, low, low), vfmaq_f64(sums.high, high, high)};
  }
  ONEPASS_INLINE static void StoreSums(double* p, Sums sums) {
    vst1q_f64(p, sums.low);
    vst1q_f64(p + 2, sums.high);
  }

 private:
  ONEPASS_INLINE static uint16x4_t Load16(const uint16_t* p, AllLanes) {
    return vld1_u16(p);
  }
  ONEPASS_INLINE static uint16x4_t Load16(const uint16_t* p, FirstLanes lanes) {
    return vget_low_u16(vreinterpretq_u16_u8(LoadBytes(p, lanes.n * 2)));
  }
  ONEPASS_INLINE static void Store16(uint16_t* p, uint16x4_t x, AllLanes) {
    vst1_u16(p, x);
  }
  ONEPASS_INLINE static void Store16(uint16_t* p, uint16x4_t x,
                                     FirstLanes lanes) {
    StoreBytes(p, &x, lanes.n * 2);
  }
  ONEPASS_INLINE static uint8x16_t LoadBytes(const void* p, int64_t bytes) {
    uint8x16_t x = vdupq_n_u8(0);
    __builtin_memcpy(&x, p, static_cast<size_t>(bytes));
    return x;
  }
  ONEPASS_INLINE static void StoreBytes(void* p, const void* x, int64_t bytes) {
    __builtin_memcpy(p, x, static_cast<size_t>(bytes));
  }
};

}  // namespace
}  // namespace onepass

#endif  // ONEPASS_KERNELS_NEON_TRAITS_H_

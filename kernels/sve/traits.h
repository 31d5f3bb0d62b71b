// SVE, of any vector length that is a power of two: 4 to 64 lanes, tails by
// predicates. Narrow elements are widened by their load and narrowed by their
// store.

#ifndef ONEPASS_KERNELS_SVE_TRAITS_H_
#define ONEPASS_KERNELS_SVE_TRAITS_H_

#include <arm_sve.h>

#include <cstdint>

#include "kernels/generic/kernel.h"

namespace onepass {
namespace {

struct Sve {
  using F32 = svfloat32_t;
  using U32 = svuint32_t;
  using Mask = svbool_t;

  static constexpr int64_t kLeastLanes = 4;
  // Loads and stores take an index beside their base; the addresses of a second
  // vector would be computed.
  static constexpr int kUnroll = 1;
  static constexpr int64_t kPrefetchNumel = 0;
  static constexpr bool kHardwareHalf = true;
  static constexpr bool kTestsBits = false;
  static constexpr bool kStoresPairs = false;
  static constexpr bool kStreams = false;

  ONEPASS_INLINE static int64_t Lanes() {
    return static_cast<int64_t>(svcntw());
  }
  ONEPASS_INLINE static svbool_t All() { return svptrue_b32(); }
  ONEPASS_INLINE static svbool_t First(int64_t n) {
    return svwhilelt_b32(int64_t{0}, n);
  }

  ONEPASS_INLINE static F32 LoadF32(const float* p, svbool_t lanes) {
    return svld1_f32(lanes, p);
  }
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, svbool_t lanes) {
    return svld1uh_u32(lanes, p);
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, svbool_t lanes) {
    return svld1ub_u32(lanes, p);
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, svbool_t lanes) {
    svst1_f32(lanes, p, x);
  }
  ONEPASS_INLINE static void StoreU16(uint16_t* p, U32 x, svbool_t lanes) {
    svst1h_u32(lanes, p, x);
  }
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 x, svbool_t lanes) {
    StoreU16(p, ShiftRight<16>(x), lanes);
  }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, svbool_t lanes) {
    svst1b_u32(lanes, p, x);
  }

  // Lanes that were not loaded are computed with, too, and are never stored.
  ONEPASS_INLINE static F32 Set(float x) { return svdup_n_f32(x); }
  ONEPASS_INLINE static F32 Add(F32 a, F32 b) {
    return svadd_f32_x(All(), a, b);
  }
  ONEPASS_INLINE static F32 Mul(F32 a, F32 b) {
    return svmul_f32_x(All(), a, b);
  }
  ONEPASS_INLINE static F32 Div(F32 a, F32 b) {
    return svdiv_f32_x(All(), a, b);
  }
  ONEPASS_INLINE static F32 Sqrt(F32 a) { return svsqrt_f32_x(All(), a); }
  ONEPASS_INLINE static F32 Fma(F32 a, F32 b, F32 c) {
    return svmad_f32_x(All(), a, b, c);
  }
  ONEPASS_INLINE static Mask IsNaN(F32 a) { return svcmpuo_f32(All(), a, a); }

  ONEPASS_INLINE static U32 SetU32(uint32_t x) { return svdup_n_u32(x); }
  ONEPASS_INLINE static U32 ZeroU32() { return svdup_n_u32(0); }
  ONEPASS_INLINE static U32 Add(U32 a, U32 b) {
    return svadd_u32_x(All(), a, b);
  }
  ONEPASS_INLINE static U32 Sub(U32 a, U32 b) {
    return svsub_u32_x(All(), a, b);
  }
  ONEPASS_INLINE static U32 And(U32 a, U32 b) {
    return svand_u32_x(All(), a, b);
  }
  ONEPASS_INLINE static U32 Or(U32 a, U32 b) {
    return svorr_u32_x(All(), a, b);
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftLeft(U32 a) {
    return svlsl_n_u32_x(All(), a, n);
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftRight(U32 a) {
    return svlsr_n_u32_x(All(), a, n);
  }
  ONEPASS_INLINE static Mask Greater(U32 a, U32 b) {
    return svcmpgt_u32(All(), a, b);
  }
  ONEPASS_INLINE static U32 Select(Mask mask, U32 a, U32 b) {
    return svsel_u32(mask, a, b);
  }
  ONEPASS_INLINE static U32 Max(U32 a, U32 b) {
    return svmax_u32_x(All(), a, b);
  }
  ONEPASS_INLINE static uint32_t ReduceMax(U32 a) {
    return svmaxv_u32(All(), a);
  }
  ONEPASS_INLINE static U32 Bits(F32 x) { return svreinterpret_u32_f32(x); }
  ONEPASS_INLINE static F32 FromBits(U32 x) { return svreinterpret_f32_u32(x); }

  // A half lies in the lower half of its lane.
  ONEPASS_INLINE static F32 LoadHalf(const uint16_t* p, svbool_t lanes) {
    return svcvt_f32_f16_x(All(), svreinterpret_f16_u32(LoadU16(p, lanes)));
  }
  ONEPASS_INLINE static void StoreHalf(uint16_t* p, F32 x, svbool_t lanes) {
    StoreU16(p, svreinterpret_u32_f16(svcvt_f16_f32_x(All(), x)), lanes);
  }

  // Of the lanes of even and odd numbers: fp32 is widened in its place.
  using Sums = svfloat64x2_t;
  ONEPASS_INLINE static Sums ZeroSums() {
    return svcreate2_f64(svdup_n_f64(0), svdup_n_f64(0));
  }
  ONEPASS_INLINE static Sums AddSquares(Sums sums, F32 x) {
    const svbool_t all = svptrue_b64();
    const svfloat64_t even = svcvt_f64_f32_x(all, x);
    const svfloat64_t odd =
        svcvt_f64_f32_x(all, svreinterpret_f32_u64(svlsr_n_u64_x(
                                 all, svreinterpret_u64_f32(x), 32)));
    // The square of a float is exact in double, so fused or not is the same.
    return svcreate2_f64(svmla_f64_x(all, svget2_f64(sums, 0), even, even),
                         svmla_f64_x(all, svget2_f64(sums, 1), odd, odd));
  }
  ONEPASS_INLINE static void StoreSums(double* p, Sums sums) {
    svst2_f64(svwhilelt_b64(0, generic::kRow / 2), p, sums);
  }
};

}  // namespace
}  // namespace onepass

#endif  // ONEPASS_KERNELS_SVE_TRAITS_H_

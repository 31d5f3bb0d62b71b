// The RISC-V vector extension 1.0, of any vector length: groups of four
// registers, 16 lanes and more, tails by the vector length. Constants are
// scalar operands, which leaves the registers to the elements.

#ifndef ONEPASS_KERNELS_RVV_TRAITS_H_
#define ONEPASS_KERNELS_RVV_TRAITS_H_

#include "kernels/generic/kernel.h"

#if !defined(__riscv_v_intrinsic) || __riscv_v_intrinsic < 12000
#error "the RVV kernel needs the vector intrinsics of clang 17 or g++ 14"
#endif

#include <riscv_vector.h>

#include <cstddef>
#include <cstdint>

namespace onepass {
namespace {

struct Rvv {
  using F32 = vfloat32m4_t;
  using U32 = vuint32m4_t;
  using Mask = vbool8_t;
  struct AllLanes {};
  struct FirstLanes {
    size_t n;
  };

  static constexpr int64_t kLeastLanes = 16;
  // A group of four registers is unrolled enough.
  static constexpr int kUnroll = 1;
  static constexpr int64_t kPrefetchNumel = 0;
  // A part of Zvfhmin, which the base extension lacks.
  static constexpr bool kHardwareHalf = false;
  static constexpr bool kTestsBits = false;
  static constexpr bool kStoresPairs = false;
  static constexpr bool kStreams = false;

  ONEPASS_INLINE static int64_t Lanes() {
    return static_cast<int64_t>(Vlmax());
  }
  ONEPASS_INLINE static AllLanes All() { return {}; }
  ONEPASS_INLINE static FirstLanes First(int64_t n) {
    return {static_cast<size_t>(n)};
  }

  ONEPASS_INLINE static F32 LoadF32(const float* p, AllLanes) {
    return __riscv_vle32_v_f32m4(p, Vlmax());
  }
  ONEPASS_INLINE static F32 LoadF32(const float* p, FirstLanes lanes) {
    return __riscv_vle32_v_f32m4_tu(FromBits(ZeroU32()), p, lanes.n);
  }
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, AllLanes) {
    return __riscv_vzext_vf2_u32m4(__riscv_vle16_v_u16m2(p, Vlmax()), Vlmax());
  }
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, FirstLanes lanes) {
    const vuint16m2_t zero = __riscv_vmv_v_x_u16m2(0, Vlmax());
    return __riscv_vzext_vf2_u32m4(__riscv_vle16_v_u16m2_tu(zero, p, lanes.n),
                                   Vlmax());
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, AllLanes) {
    return __riscv_vzext_vf4_u32m4(__riscv_vle8_v_u8m1(p, Vlmax()), Vlmax());
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, FirstLanes lanes) {
    const vuint8m1_t zero = __riscv_vmv_v_x_u8m1(0, Vlmax());
    return __riscv_vzext_vf4_u32m4(__riscv_vle8_v_u8m1_tu(zero, p, lanes.n),
                                   Vlmax());
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, WhichLanes lanes) {
    __riscv_vse32_v_f32m4(p, x, Count(lanes));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreU16(uint16_t* p, U32 x, WhichLanes lanes) {
    __riscv_vse16_v_u16m2(p, __riscv_vncvt_x_x_w_u16m2(x, Vlmax()),
                          Count(lanes));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 x,
                                           WhichLanes lanes) {
    __riscv_vse16_v_u16m2(p, __riscv_vnsrl_wx_u16m2(x, 16, Vlmax()),
                          Count(lanes));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, WhichLanes lanes) {
    const vuint16m2_t codes = __riscv_vncvt_x_x_w_u16m2(x, Vlmax());
    __riscv_vse8_v_u8m1(p, __riscv_vncvt_x_x_w_u8m1(codes, Vlmax()),
                        Count(lanes));
  }

  // Lanes that were not loaded are computed with, too, and are never stored.
  ONEPASS_INLINE static float Set(float x) { return x; }
  ONEPASS_INLINE static F32 Add(F32 a, F32 b) {
    return __riscv_vfadd_vv_f32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static F32 Add(F32 a, float b) {
    return __riscv_vfadd_vf_f32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static F32 Mul(F32 a, F32 b) {
    return __riscv_vfmul_vv_f32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static F32 Mul(F32 a, float b) {
    return __riscv_vfmul_vf_f32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static F32 Div(F32 a, F32 b) {
    return __riscv_vfdiv_vv_f32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static F32 Div(F32 a, float b) {
    return __riscv_vfdiv_vf_f32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static F32 Sqrt(F32 a) {
    return __riscv_vfsqrt_v_f32m4(a, Vlmax());
  }
  ONEPASS_INLINE static F32 Fma(F32 a, float b, F32 c) {
    return __riscv_vfmacc_vf_f32m4(c, b, a, Vlmax());
  }
  ONEPASS_INLINE static F32 Fma(F32 a, float b, float c) {
    return Fma(a, b, __riscv_vfmv_v_f_f32m4(c, Vlmax()));
  }
  ONEPASS_INLINE static Mask IsNaN(F32 a) {
    return __riscv_vmfne_vv_f32m4_b8(a, a, Vlmax());
  }

  ONEPASS_INLINE static uint32_t SetU32(uint32_t x) { return x; }
  ONEPASS_INLINE static U32 ZeroU32() {
    return __riscv_vmv_v_x_u32m4(0, Vlmax());
  }
  ONEPASS_INLINE static U32 Add(U32 a, U32 b) {
    return __riscv_vadd_vv_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static U32 Add(U32 a, uint32_t b) {
    return __riscv_vadd_vx_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static U32 Sub(U32 a, U32 b) {
    return __riscv_vsub_vv_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static U32 Sub(U32 a, uint32_t b) {
    return __riscv_vsub_vx_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static U32 And(U32 a, uint32_t b) {
    return __riscv_vand_vx_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static U32 Or(U32 a, U32 b) {
    return __riscv_vor_vv_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static U32 Or(U32 a, uint32_t b) {
    return __riscv_vor_vx_u32m4(a, b, Vlmax());
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftLeft(U32 a) {
    return __riscv_vsll_vx_u32m4(a, n, Vlmax());
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftRight(U32 a) {
    return __riscv_vsrl_vx_u32m4(a, n, Vlmax());
  }
  ONEPASS_INLINE static Mask Greater(U32 a, uint32_t b) {
    return __riscv_vmsgtu_vx_u32m4_b8(a, b, Vlmax());
  }
  ONEPASS_INLINE static Mask Greater(uint32_t a, U32 b) {
    return __riscv_vmsltu_vx_u32m4_b8(b, a, Vlmax());
  }
  ONEPASS_INLINE static U32 Select(Mask mask, U32 a, U32 b) {
    return __riscv_vmerge_vvm_u32m4(b, a, mask, Vlmax());
  }
  ONEPASS_INLINE static U32 Select(Mask mask, uint32_t a, U32 b) {
    return __riscv_vmerge_vxm_u32m4(b, a, mask, Vlmax());
  }
  ONEPASS_INLINE static U32 Max(U32 a, U32 b) {
    return __riscv_vmaxu_vv_u32m4(a, b, Vlmax());
  }
  ONEPASS_INLINE static uint32_t ReduceMax(U32 a) {
    const vuint32m1_t zero = __riscv_vmv_s_x_u32m1(0, 1);
    return __riscv_vmv_x_s_u32m1_u32(
        __riscv_vredmaxu_vs_u32m4_u32m1(a, zero, Vlmax()));
  }
  ONEPASS_INLINE static U32 Bits(F32 x) {
    return __riscv_vreinterpret_v_f32m4_u32m4(x);
  }
  ONEPASS_INLINE static F32 FromBits(U32 x) {
    return __riscv_vreinterpret_v_u32m4_f32m4(x);
  }
  ONEPASS_INLINE static float FromBits(uint32_t x) {
    float value;
    __builtin_memcpy(&value, &x, sizeof(value));
    return value;
  }

  // Four registers of 128 bits and more hold a row.
  using Sums = vfloat64m8_t;
  ONEPASS_INLINE static Sums ZeroSums() {
    return __riscv_vfmv_v_f_f64m8(0, generic::kRow);
  }
  ONEPASS_INLINE static Sums AddSquares(Sums sums, F32 x) {
    // The square of a float is exact in double, so fused or not is the same.
    return __riscv_vfwmacc_vv_f64m8(sums, x, x, generic::kRow);
  }
  ONEPASS_INLINE static void StoreSums(double* p, Sums sums) {
    __riscv_vse64_v_f64m8(p, sums, generic::kRow);
  }

 private:
  ONEPASS_INLINE static size_t Vlmax() { return __riscv_vsetvlmax_e32m4(); }
  ONEPASS_INLINE static size_t Count(AllLanes) { return Vlmax(); }
  ONEPASS_INLINE static size_t Count(FirstLanes lanes) { return lanes.n; }
};

}  // namespace
}  // namespace onepass

#endif  // ONEPASS_KERNELS_RVV_TRAITS_H_

// AVX-512 F, BW, DQ, VL: 16 lanes, tails by mask registers.

#ifndef ONEPASS_KERNELS_AVX512_TRAITS_H_
#define ONEPASS_KERNELS_AVX512_TRAITS_H_

#if defined(__GNUC__) && !defined(__clang__)
// The intrinsics of g++-12 initialise what they leave undefined with itself.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "kernels/generic/kernel.h"

namespace onepass {
namespace {

struct Avx512 {
  using F32 = __m512;
  using U32 = __m512i;
  using Mask = __mmask16;
  struct AllLanes {};
  struct FirstLanes {
    __mmask16 mask;
  };

  static constexpr int64_t kLeastLanes = 16;
  static constexpr int kUnroll = 4;
  static constexpr int64_t kPrefetchNumel = 512;
  static constexpr bool kHardwareHalf = true;
  static constexpr bool kTestsBits = true;
  static constexpr bool kStoresPairs = true;
  static constexpr bool kStreams = true;

  ONEPASS_INLINE static int64_t Lanes() { return kLeastLanes; }
  ONEPASS_INLINE static AllLanes All() { return {}; }
  ONEPASS_INLINE static FirstLanes First(int64_t n) {
    return {static_cast<__mmask16>((1u << n) - 1)};
  }

  ONEPASS_INLINE static F32 LoadF32(const float* p, AllLanes) {
    return _mm512_loadu_ps(p);
  }
  ONEPASS_INLINE static F32 LoadF32(const float* p, FirstLanes lanes) {
    return _mm512_maskz_loadu_ps(lanes.mask, p);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, WhichLanes lanes) {
    return _mm512_cvtepu16_epi32(Load16(p, lanes));
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, AllLanes) {
    return _mm512_cvtepu8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, FirstLanes lanes) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes.mask, p));
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, AllLanes) {
    _mm512_storeu_ps(p, x);
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, FirstLanes lanes) {
    _mm512_mask_storeu_ps(p, lanes.mask, x);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreU16(uint16_t* p, U32 x, WhichLanes lanes) {
    Store16(p, _mm512_cvtepi32_epi16(x), lanes);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 x,
                                           WhichLanes lanes) {
    StoreU16(p, ShiftRight<16>(x), lanes);
  }
  // A pair fills a cache line.
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 a, U32 b) {
    _mm512_storeu_si512(p, UpperHalves(a, b));
  }
  ONEPASS_INLINE static void StreamUpperU16(uint16_t* p, U32 a, U32 b) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), UpperHalves(a, b));
  }
  ONEPASS_INLINE static void EndStreaming() { _mm_sfence(); }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, AllLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, FirstLanes lanes) {
    _mm_mask_storeu_epi8(p, lanes.mask, _mm512_cvtepi32_epi8(x));
  }

  ONEPASS_INLINE static F32 Set(float x) { return _mm512_set1_ps(x); }
  ONEPASS_INLINE static F32 Add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  ONEPASS_INLINE static F32 Mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  ONEPASS_INLINE static F32 Div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
  ONEPASS_INLINE static F32 Sqrt(F32 a) { return _mm512_sqrt_ps(a); }
  ONEPASS_INLINE static F32 Fma(F32 a, F32 b, F32 c) {
    return _mm512_fmadd_ps(a, b, c);
  }
  ONEPASS_INLINE static Mask IsNaN(F32 a) {
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  }

  ONEPASS_INLINE static U32 SetU32(uint32_t x) {
    return _mm512_set1_epi32(static_cast<int32_t>(x));
  }
  ONEPASS_INLINE static U32 ZeroU32() { return _mm512_setzero_si512(); }
  ONEPASS_INLINE static U32 Add(U32 a, U32 b) { return _mm512_add_epi32(a, b); }
  ONEPASS_INLINE static U32 Sub(U32 a, U32 b) { return _mm512_sub_epi32(a, b); }
  ONEPASS_INLINE static U32 And(U32 a, U32 b) { return _mm512_and_epi32(a, b); }
  ONEPASS_INLINE static U32 Or(U32 a, U32 b) { return _mm512_or_epi32(a, b); }
  template <int n>
  ONEPASS_INLINE static U32 ShiftLeft(U32 a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftRight(U32 a) {
    return _mm512_srli_epi32(a, n);
  }
  ONEPASS_INLINE static Mask Greater(U32 a, U32 b) {
    return _mm512_cmpgt_epi32_mask(a, b);
  }
  template <int n>
  ONEPASS_INLINE static Mask TestBit(U32 a) {
    return _mm512_test_epi32_mask(a, SetU32(uint32_t{1} << n));
  }
  ONEPASS_INLINE static U32 Select(Mask mask, U32 a, U32 b) {
    return _mm512_mask_blend_epi32(mask, b, a);
  }
  ONEPASS_INLINE static U32 Max(U32 a, U32 b) { return _mm512_max_epi32(a, b); }
  ONEPASS_INLINE static uint32_t ReduceMax(U32 a) {
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(a));
  }
  ONEPASS_INLINE static U32 Bits(F32 x) { return _mm512_castps_si512(x); }
  ONEPASS_INLINE static F32 FromBits(U32 x) { return _mm512_castsi512_ps(x); }

  template <typename WhichLanes>
  ONEPASS_INLINE static F32 LoadHalf(const uint16_t* p, WhichLanes lanes) {
    return _mm512_cvtph_ps(Load16(p, lanes));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreHalf(uint16_t* p, F32 x, WhichLanes lanes) {
    Store16(p, ToHalf(x), lanes);
  }
  ONEPASS_INLINE static void StreamHalf(uint16_t* p, F32 a, F32 b) {
    _mm512_stream_si512(
        reinterpret_cast<__m512i*>(p),
        _mm512_inserti64x4(_mm512_castsi256_si512(ToHalf(a)), ToHalf(b), 1));
  }

  struct Sums {
    __m512d low;
    __m512d high;
  };
  ONEPASS_INLINE static Sums ZeroSums() {
    return {_mm512_setzero_pd(), _mm512_setzero_pd()};
  }
  ONEPASS_INLINE static Sums AddSquares(Sums sums, F32 x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    // The square of a float is exact in double, so fused or not is the same.
    return {_mm512_fmadd_pd(low, low, sums.low),
            _mm512_fmadd_pd(high, high, sums.high)};
  }
  ONEPASS_INLINE static void StoreSums(double* p, Sums sums) {
    _mm512_storeu_pd(p, sums.low);
    _mm512_storeu_pd(p + 8, sums.high);
  }

 private:
  // The upper 16 bits of all lanes of a, then of b.
  ONEPASS_INLINE static __m512i UpperHalves(U32 a, U32 b) {
    // Words 1, 3, ..., 63 of the pair.
    const __m512i odd = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29,
        27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(a, odd, b);
  }
  ONEPASS_INLINE static __m256i ToHalf(F32 x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  ONEPASS_INLINE static __m256i Load16(const uint16_t* p, AllLanes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  ONEPASS_INLINE static __m256i Load16(const uint16_t* p, FirstLanes lanes) {
    return _mm256_maskz_loadu_epi16(lanes.mask, p);
  }
  ONEPASS_INLINE static void Store16(uint16_t* p, __m256i x, AllLanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
  ONEPASS_INLINE static void Store16(uint16_t* p, __m256i x, FirstLanes lanes) {
    _mm256_mask_storeu_epi16(p, lanes.mask, x);
  }
};

}  // namespace
}  // namespace onepass

#endif  // ONEPASS_KERNELS_AVX512_TRAITS_H_

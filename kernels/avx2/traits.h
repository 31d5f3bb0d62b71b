// AVX2 with FMA and F16C: 8 lanes. Tails of 32-bit elements are masked; AVX2
// has no masks for narrower ones, whose tails pass through 16 bytes on the
// stack.

#ifndef ONEPASS_KERNELS_AVX2_TRAITS_H_
#define ONEPASS_KERNELS_AVX2_TRAITS_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/generic/kernel.h"

namespace onepass {
namespace {

struct Avx2 {
  using F32 = __m256;
  using U32 = __m256i;
  using Mask = __m256i;
  struct AllLanes {};
  struct FirstLanes {
    int64_t n;
  };

  static constexpr int64_t kLeastLanes = 8;
  static constexpr int kUnroll = 4;
  static constexpr int64_t kPrefetchNumel = 512;
  static constexpr bool kHardwareHalf = true;
  static constexpr bool kTestsBits = false;
  static constexpr bool kStoresPairs = true;
  static constexpr bool kStreams = true;

  ONEPASS_INLINE static int64_t Lanes() { return kLeastLanes; }
  ONEPASS_INLINE static AllLanes All() { return {}; }
  ONEPASS_INLINE static FirstLanes First(int64_t n) { return {n}; }

  ONEPASS_INLINE static F32 LoadF32(const float* p, AllLanes) {
    return _mm256_loadu_ps(p);
  }
  ONEPASS_INLINE static F32 LoadF32(const float* p, FirstLanes lanes) {
    return _mm256_maskload_ps(p, MaskOf(lanes));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static U32 LoadU16(const uint16_t* p, WhichLanes lanes) {
    return _mm256_cvtepu16_epi32(Load16(p, lanes));
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, AllLanes) {
    return _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  ONEPASS_INLINE static U32 LoadU8(const uint8_t* p, FirstLanes lanes) {
    return _mm256_cvtepu8_epi32(LoadBytes(p, lanes.n));
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, AllLanes) {
    _mm256_storeu_ps(p, x);
  }
  ONEPASS_INLINE static void StoreF32(float* p, F32 x, FirstLanes lanes) {
    _mm256_maskstore_ps(p, MaskOf(lanes), x);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreU16(uint16_t* p, U32 x, WhichLanes lanes) {
    Store16(p, Narrow(x), lanes);
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 x,
                                           WhichLanes lanes) {
    StoreU16(p, ShiftRight<16>(x), lanes);
  }
  ONEPASS_INLINE static void StoreUpperU16(uint16_t* p, U32 a, U32 b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), UpperHalves(a, b));
  }
  ONEPASS_INLINE static void StreamUpperU16(uint16_t* p, U32 a, U32 b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), UpperHalves(a, b));
  }
  ONEPASS_INLINE static void EndStreaming() { _mm_sfence(); }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, AllLanes) {
    const __m128i codes = Narrow(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi16(codes, codes));
  }
  ONEPASS_INLINE static void StoreU8(uint8_t* p, U32 x, FirstLanes lanes) {
    const __m128i codes = Narrow(x);
    StoreBytes(p, _mm_packus_epi16(codes, codes), lanes.n);
  }

  ONEPASS_INLINE static F32 Set(float x) { return _mm256_set1_ps(x); }
  ONEPASS_INLINE static F32 Add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
  ONEPASS_INLINE static F32 Mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
  ONEPASS_INLINE static F32 Div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
  ONEPASS_INLINE static F32 Sqrt(F32 a) { return _mm256_sqrt_ps(a); }
  ONEPASS_INLINE static F32 Fma(F32 a, F32 b, F32 c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  ONEPASS_INLINE static Mask IsNaN(F32 a) {
    return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }

  ONEPASS_INLINE static U32 SetU32(uint32_t x) {
    return _mm256_set1_epi32(static_cast<int32_t>(x));
  }
  ONEPASS_INLINE static U32 ZeroU32() { return _mm256_setzero_si256(); }
  ONEPASS_INLINE static U32 Add(U32 a, U32 b) { return _mm256_add_epi32(a, b); }
  ONEPASS_INLINE static U32 Sub(U32 a, U32 b) { return _mm256_sub_epi32(a, b); }
  ONEPASS_INLINE static U32 And(U32 a, U32 b) { return _mm256_and_si256(a, b); }
  ONEPASS_INLINE static U32 Or(U32 a, U32 b) { return _mm256_or_si256(a, b); }
  template <int n>
  ONEPASS_INLINE static U32 ShiftLeft(U32 a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  ONEPASS_INLINE static U32 ShiftRight(U32 a) {
    return _mm256_srli_epi32(a, n);
  }
  ONEPASS_INLINE static Mask Greater(U32 a, U32 b) {
    return _mm256_cmpgt_epi32(a, b);
  }
  ONEPASS_INLINE static U32 Select(Mask mask, U32 a, U32 b) {
    return _mm256_blendv_epi8(b, a, mask);
  }
  ONEPASS_INLINE static U32 Max(U32 a, U32 b) { return _mm256_max_epi32(a, b); }
  ONEPASS_INLINE static uint32_t ReduceMax(U32 a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a),
                              _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
  }
  ONEPASS_INLINE static U32 Bits(F32 x) { return _mm256_castps_si256(x); }
  ONEPASS_INLINE static F32 FromBits(U32 x) { return _mm256_castsi256_ps(x); }

  template <typename WhichLanes>
  ONEPASS_INLINE static F32 LoadHalf(const uint16_t* p, WhichLanes lanes) {
    return _mm256_cvtph_ps(Load16(p, lanes));
  }
  template <typename WhichLanes>
  ONEPASS_INLINE static void StoreHalf(uint16_t* p, F32 x, WhichLanes lanes) {
    Store16(p, ToHalf(x), lanes);
  }
  ONEPASS_INLINE static void StreamHalf(uint16_t* p, F32 a, F32 b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_set_m128i(ToHalf(b), ToHalf(a)));
  }

  struct Sums {
    __m256d low;
    __m256d high;
  };
  ONEPASS_INLINE static Sums ZeroSums() {
    return {_mm256_setzero_pd(), _mm256_setzero_pd()};
  }
  ONEPASS_INLINE static Sums AddSquares(Sums sums, F32 x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    // The square of a float is exact in double, so fused or not is the same.
    return {_mm256_fmadd_pd(low, low, sums.low),
            _mm256_fmadd_pd(high, high, sums.high)};
  }
  ONEPASS_INLINE static void StoreSums(double* p, Sums sums) {
    _mm256_storeu_pd(p, sums.low);
    _mm256_storeu_pd(p + 4, sums.high);
  }

 private:
  ONEPASS_INLINE static __m256i MaskOf(FirstLanes lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes.n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // The upper 16 bits of all lanes of a, then of b.
  ONEPASS_INLINE static __m256i UpperHalves(U32 a, U32 b) {
    return _mm256_permute4x64_epi64(
        _mm256_packus_epi32(ShiftRight<16>(a), ShiftRight<16>(b)), 0xd8);
  }
  ONEPASS_INLINE static __m128i ToHalf(F32 x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  ONEPASS_INLINE static __m128i Narrow(U32 x) {
    // Packing works within halves of 128 bits; the codes are below 2^16.
    return _mm256_castsi256_si128(
        _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08));
  }
  ONEPASS_INLINE static __m128i Load16(const uint16_t* p, AllLanes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  ONEPASS_INLINE static __m128i Load16(const uint16_t* p, FirstLanes lanes) {
    return LoadBytes(p, lanes.n * 2);
  }
  ONEPASS_INLINE static void Store16(uint16_t* p, __m128i x, AllLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }
  ONEPASS_INLINE static void Store16(uint16_t* p, __m128i x, FirstLanes lanes) {
    StoreBytes(p, x, lanes.n * 2);
  }
  ONEPASS_INLINE static __m128i LoadBytes(const void* p, int64_t bytes) {
    __m128i x = _mm_setzero_si128();
    __builtin_memcpy(&x, p, static_cast<size_t>(bytes));
    return x;
  }
  ONEPASS_INLINE static void StoreBytes(void* p, __m128i x, int64_t bytes) {
    __builtin_memcpy(p, &x, static_cast<size_t>(bytes));
  }
};

}  // namespace
}  // namespace onepass

#endif  // ONEPASS_KERNELS_AVX2_TRAITS_H_

#include "dispatch/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace onepass {

#if defined(__x86_64__)
namespace {

// Bits of XCR0, Intel SDM volume 1, chapter 13.
constexpr uint64_t kYmmState = 0x06;  // xmm, upper halves of ymm
constexpr uint64_t kZmmState = 0xe6;  // and k0-7, upper zmm, zmm16-31

uint64_t ReadXcr0() {
  uint32_t low;
  uint32_t high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

}  // namespace

CpuFeatures DetectCpu() {
  CpuFeatures features;
  uint32_t a, b, c1, b7, c, d;
  if (!__get_cpuid(1, &a, &b, &c1, &d) || (c1 & bit_OSXSAVE) == 0 ||
      !__get_cpuid_count(7, 0, &a, &b7, &c, &d)) {
    return features;
  }
  const uint64_t state = ReadXcr0();
  const uint32_t leaf1 = bit_AVX | bit_FMA | bit_F16C;
  features.avx2 = (c1 & leaf1) == leaf1 && (b7 & bit_AVX2) != 0 &&
                  (state & kYmmState) == kYmmState;
  const uint32_t leaf7 =
      bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  features.avx512 = features.avx2 && (b7 & leaf7) == leaf7 &&
                    (state & kZmmState) == kZmmState;
  return features;
}

#else

CpuFeatures DetectCpu() { return {}; }

#endif

}  // namespace onepass

// What this processor can execute and this operating system lets it.
//
//   bool Avx2Supported() { return DetectCpu().avx2; }
//
// To add a feature: a field, and its bit in cpu_features.cc.

#ifndef ONEPASS_DISPATCH_CPU_FEATURES_H_
#define ONEPASS_DISPATCH_CPU_FEATURES_H_

namespace onepass {

// All false on other architectures than x86-64.
struct CpuFeatures {
  // AVX2, FMA and F16C, with the operating system saving ymm registers.
  bool avx2 = false;
  // The above and AVX-512 F, BW, DQ, VL, with zmm and mask registers saved.
  bool avx512 = false;
};

// Asks CPUID and XCR0: a hypervisor or a kernel option can leave the
// instructions in CPUID while using their registers traps.
CpuFeatures DetectCpu();

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_CPU_FEATURES_H_

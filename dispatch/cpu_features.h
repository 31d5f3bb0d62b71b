// What this processor can execute and this operating system lets it.
//
//   bool Avx2Supported() { return DetectCpu().avx2; }
//
// To add a feature: a field, and its bit in cpu_features.cc.

#ifndef ONEPASS_DISPATCH_CPU_FEATURES_H_
#define ONEPASS_DISPATCH_CPU_FEATURES_H_

namespace onepass {

// What another architecture has is false or 0.
struct CpuFeatures {
  // AVX2, FMA and F16C, with the operating system saving ymm registers.
  bool avx2 = false;
  // The above and AVX-512 F, BW, DQ, VL, with zmm and mask registers saved.
  bool avx512 = false;
  // Bits of an SVE vector in the calling thread, 0 without SVE. What the
  // operating system grants, which may be less than the processor has. A thread
  // that changes its length (PR_SVE_SET_VL) must not call a kernel that was
  // registered by one of another length.
  int sve_bits = 0;
  // Bits of a vector register of RISC-V (VLEN), 0 without version 1.0 of the
  // extension, or where the operating system has turned it off for the thread.
  int rvv_bits = 0;
};

// x86-64: asks CPUID and XCR0, since a hypervisor or a kernel option can leave
// the instructions in CPUID while using their registers traps. Elsewhere: asks
// the operating system, and on RISC-V the processor for the version.
CpuFeatures DetectCpu();

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_CPU_FEATURES_H_

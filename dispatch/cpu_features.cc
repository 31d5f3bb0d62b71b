#include "dispatch/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__riscv)
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <unistd.h>
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

#elif defined(__aarch64__)
namespace {

// Linux, Documentation/arch/arm64/sve.rst. Headers may be older than SVE.
constexpr unsigned long kHwcapSve = 1ul << 22;  // of AT_HWCAP
constexpr int kPrSveGetVl = 51;
constexpr int kPrSveVlMask = 0xffff;  // bytes; flags are above

}  // namespace

CpuFeatures DetectCpu() {
  CpuFeatures features;
  if ((getauxval(AT_HWCAP) & kHwcapSve) != 0) {
    const int result = prctl(kPrSveGetVl, 0, 0, 0, 0);
    if (result > 0) features.sve_bits = (result & kPrSveVlMask) * 8;
  }
  return features;
}

#elif defined(__riscv)
namespace {

// Linux, Documentation/arch/riscv/hwprobe.rst, vector.rst and uabi.rst. Headers
// may be older than all of them.
constexpr long kSysRiscvHwprobe = 258;
constexpr int64_t kHwprobeKeyImaExt0 = 4;
constexpr uint64_t kHwprobeImaV = 1 << 2;
constexpr unsigned long kHwcapV = 1ul << ('V' - 'A');  // of AT_HWCAP
constexpr int kPrRiscvVGetControl = 70;
constexpr int kVstateCurrentMask = 3;
constexpr int kVstateOff = 1;

struct HwprobePair {
  int64_t key;
  uint64_t value;
};

// Whether there are vector instructions, of any version, and they do not trap.
bool HasVectors() {
  HwprobePair extensions = {kHwprobeKeyImaExt0, 0};
  if (syscall(kSysRiscvHwprobe, &extensions, 1, 0, nullptr, 0) == 0) {
    if ((extensions.value & kHwprobeImaV) == 0) return false;
  } else if ((getauxval(AT_HWCAP) & kHwcapV) == 0) {
    return false;  // a kernel before 6.4, or an emulator
  }
  // Refused by kernels that turn vectors off for nobody.
  const int control = prctl(kPrRiscvVGetControl, 0, 0, 0, 0);
  return control < 0 || (control & kVstateCurrentMask) != kVstateOff;
}

// VLEN, or 0 where version 1.0 of the extension is not understood. Not inlined:
// the caller may itself be compiled for vectors, and expects their
// configuration to change in calls only.
[[gnu::noinline]] int VectorBits() {
  // Encoded by numbers, which the assembler takes without the extension:
  // vsetvli vl, x0, e8, m1, ta, ma. The last two are newer than 0.7, which
  // processors of some vendors report as V; there vtype becomes negative.
  unsigned long vl;
  long vtype;
  asm volatile(
      ".insn i 0x57, 7, %0, x0, 0x0c0\n\t"
      "csrr %1, 0xc21"
      : "=r"(vl), "=r"(vtype));
  return vtype < 0 ? 0 : static_cast<int>(vl * 8);
}

}  // namespace

CpuFeatures DetectCpu() {
  CpuFeatures features;
  if (HasVectors()) features.rvv_bits = VectorBits();
  return features;
}

#else

CpuFeatures DetectCpu() { return {}; }

#endif

}  // namespace onepass

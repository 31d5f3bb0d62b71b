// The SVE kernel: when it runs and what it takes.

#include "dispatch/cpu_features.h"
#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kSveOperations;

extern const Kernel kSveKernel = {
    "sve",
    // Above NEON only where its vectors are longer: of the same length NEON
    // needs fewer instructions, having loads and stores of pairs.
    /*rank=*/[] { return DetectCpu().sve_bits > 128 ? 300 : 100; },
    // SVE1 allows all multiples of 128 bits, whose lanes may not fill a row of
    // 16 accumulators evenly.
    /*supported=*/
    [] {
      const int bits = DetectCpu().sve_bits;
      return bits > 0 && (bits & (bits - 1)) == 0;
    },
    kGradientTypes, kMomentTypes, kCopyTypes, &kSveOperations};

}  // namespace onepass

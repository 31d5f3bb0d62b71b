// The RVV kernel: when it runs and what it takes.

#include "dispatch/cpu_features.h"
#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kRvvOperations;

extern const Kernel kRvvKernel = {
    "rvv",
    /*rank=*/[] { return 300; },
    // Embedded profiles have shorter vectors, too short for a row of 16
    // accumulators.
    /*supported=*/
    [] {
      const int bits = DetectCpu().rvv_bits;
      return bits >= 128 && (bits & (bits - 1)) == 0;
    },
    kGradientTypes, kMomentTypes, kCopyTypes, &kRvvOperations};

}  // namespace onepass

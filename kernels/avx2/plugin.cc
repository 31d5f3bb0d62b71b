// The AVX2 kernel: when it runs and what it takes.

#include "dispatch/cpu_features.h"
#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kAvx2Operations;

extern const Kernel kAvx2Kernel = {
    "avx2",
    /*rank=*/[] { return 200; },
    /*supported=*/[] { return DetectCpu().avx2; },
    kGradientTypes,
    kMomentTypes,
    kCopyTypes,
    &kAvx2Operations};

}  // namespace onepass

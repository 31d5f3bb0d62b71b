// The AVX-512 kernel: when it runs and what it takes.

#include "dispatch/cpu_features.h"
#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kAvx512Operations;

extern const Kernel kAvx512Kernel = {
    "avx512",
    /*rank=*/[] { return 300; },
    /*supported=*/[] { return DetectCpu().avx512; },
    kGradientTypes,
    kMomentTypes,
    kCopyTypes,
    &kAvx512Operations};

}  // namespace onepass

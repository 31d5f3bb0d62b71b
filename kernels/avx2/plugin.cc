// The AVX2 kernel: when it runs and what it takes.

#include "dispatch/cpu_features.h"
#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kAvx2Operations;

extern const Kernel kAvx2Kernel = {
    "avx2",
    /*rank=*/200,
    /*supported=*/[] { return DetectCpu().avx2; },
    /*gradient_types=*/{DType::kFloat32, DType::kBFloat16, DType::kFloat16},
    /*moment_types=*/{DType::kFloat32, DType::kBFloat16},
    /*copy_types=*/{DType::kBFloat16, DType::kFloat16},
    &kAvx2Operations};

}  // namespace onepass

// The AVX-512 kernel: when it runs and what it takes.

#include "dispatch/cpu_features.h"
#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kAvx512Operations;

extern const Kernel kAvx512Kernel = {
    "avx512",
    /*rank=*/300,
    /*supported=*/[] { return DetectCpu().avx512; },
    /*gradient_types=*/{DType::kFloat32, DType::kBFloat16, DType::kFloat16},
    /*moment_types=*/{DType::kFloat32, DType::kBFloat16},
    /*copy_types=*/{DType::kBFloat16, DType::kFloat16},
    &kAvx512Operations};

}  // namespace onepass

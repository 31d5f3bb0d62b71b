// The scalar kernel: runs everywhere, chosen last.

#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kScalarOperations;

extern const Kernel kScalarKernel = {
    "scalar",
    /*rank=*/0,
    /*supported=*/[] { return true; },
    /*gradient_types=*/{DType::kFloat32, DType::kBFloat16, DType::kFloat16},
    /*moment_types=*/{DType::kFloat32, DType::kBFloat16},
    /*copy_types=*/{DType::kBFloat16, DType::kFloat16},
    &kScalarOperations};

}  // namespace onepass

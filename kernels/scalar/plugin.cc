// The scalar kernel: runs everywhere, chosen last.

#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kScalarOperations;

extern const Kernel kScalarKernel = {"scalar",
                                     /*rank=*/[] { return 0; },
                                     /*supported=*/[] { return true; },
                                     kGradientTypes,
                                     kMomentTypes,
                                     kCopyTypes,
                                     &kScalarOperations};

}  // namespace onepass

// The NEON kernel: when it runs and what it takes.

#include "dispatch/kernel.h"

namespace onepass {

extern const KernelOperations kNeonOperations;

extern const Kernel kNeonKernel = {"neon",
                                   /*rank=*/[] { return 200; },
                                   // A part of the architecture's baseline.
                                   /*supported=*/[] { return true; },
                                   kGradientTypes, kMomentTypes, kCopyTypes,
                                   &kNeonOperations};

}  // namespace onepass

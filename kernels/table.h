// The built-in kernels of this architecture, generated from kernels.bzl.

#ifndef ONEPASS_KERNELS_TABLE_H_
#define ONEPASS_KERNELS_TABLE_H_

#include "dispatch/kernel.h"

namespace onepass {

extern const Kernel* const kBuiltinKernels[];
extern const int kBuiltinKernelCount;

}  // namespace onepass

#endif  // ONEPASS_KERNELS_TABLE_H_

// The kernels that a test or benchmark runs over, and whether this machine is
// the one that the environment asks for:
//
//   ONEPASS_KERNEL       the name of the only kernel
//   ONEPASS_VECTOR_BITS  the length of vectors, where it depends on the machine

#ifndef ONEPASS_TESTS_RUNNABLE_KERNELS_H_
#define ONEPASS_TESTS_RUNNABLE_KERNELS_H_

#include <vector>

#include "absl/status/status.h"
#include "dispatch/kernel.h"

namespace onepass {

// All built-in kernels that can run here, the best first; where ONEPASS_KERNEL
// pins one, that one (none if it cannot run here).
std::vector<const Kernel*> RunnableKernels();

// FailedPrecondition: this processor cannot run the pinned kernel, or its
// vectors are of another length; tests are then skipped. NotFound: no kernel
// has that name.
absl::Status PinnedStatus();

}  // namespace onepass

#endif  // ONEPASS_TESTS_RUNNABLE_KERNELS_H_

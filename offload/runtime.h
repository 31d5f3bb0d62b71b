// What an optimizer runs on.

#ifndef ONEPASS_OFFLOAD_RUNTIME_H_
#define ONEPASS_OFFLOAD_RUNTIME_H_

#include "dispatch/device.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"

namespace onepass {

// All outlive the optimizer. Several optimizers may share them.
struct Runtime {
  const Kernel& kernel;
  Device& device;
  ThreadPool& pool;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_RUNTIME_H_

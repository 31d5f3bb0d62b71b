// What optimizers and checkpoints run on.

#ifndef ONEPASS_DISPATCH_RUNTIME_H_
#define ONEPASS_DISPATCH_RUNTIME_H_

#include "dispatch/device.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"

namespace onepass {

// All outlive whatever runs on them. Several may share them.
struct Runtime {
  const Kernel& kernel;
  Device& device;
  ThreadPool& pool;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_RUNTIME_H_

// Ranks for a test: threads, each with a device, a pool and a communicator of
// its own.
//
//   RankOptions options;
//   options.world = 4;
//   RunRanks(options, [&](Rank& rank) {
//     ... rank.runtime(), *rank.communicator ...
//   });

#ifndef ONEPASS_TESTS_RANK_THREADS_H_
#define ONEPASS_TESTS_RANK_THREADS_H_

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/runtime.h"
#include "dispatch/thread_communicator.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {

struct RankOptions {
  int world = 1;
  int threads = 1;                 // of each rank's pool
  const Kernel* kernel = nullptr;  // null: the best of the machine
  HostDeviceOptions device;
  // Of the communicators: so long that only who never comes is late.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

struct Rank {
  int rank() const { return communicator->rank(); }
  int world() const { return communicator->size(); }
  Runtime runtime() const { return {*kernel, *device, *pool}; }

  const Kernel* kernel;
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Communicator> communicator;
};

// Calls `work` on a thread for each rank. A rank whose call returns is gone:
// its communicator, too.
inline void RunRanks(const RankOptions& options,
                     absl::FunctionRef<void(Rank& rank)> work) {
  CommunicatorOptions communicator_options;
  communicator_options.timeout = options.timeout;
  auto communicators =
      CreateThreadCommunicators(options.world, communicator_options);
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  const Kernel& kernel =
      options.kernel != nullptr ? *options.kernel : *RunnableKernels().front();
  std::vector<std::thread> threads;
  for (std::unique_ptr<Communicator>& communicator : *communicators) {
    threads.emplace_back([&, mine = std::move(communicator)]() mutable {
      absl::StatusOr<std::unique_ptr<HostDevice>> device =
          HostDevice::Create(kernel, options.device);
      ASSERT_TRUE(device.ok()) << device.status();
      absl::StatusOr<std::unique_ptr<Stream>> stream =
          (*device)->CreateStream("test");
      ASSERT_TRUE(stream.ok()) << stream.status();
      Rank rank = {&kernel, MakePool(options.threads), *std::move(device),
                   *std::move(stream), std::move(mine)};
      work(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace onepass

#endif  // ONEPASS_TESTS_RANK_THREADS_H_

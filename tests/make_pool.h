// A thread pool for a test.

#ifndef ONEPASS_TESTS_MAKE_POOL_H_
#define ONEPASS_TESTS_MAKE_POOL_H_

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"

namespace onepass {

// Fails the test, and ends it, where the pool cannot be created.
inline std::unique_ptr<ThreadPool> MakePool(int threads) {
  absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
      ThreadPool::Create({threads});
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

}  // namespace onepass

#endif  // ONEPASS_TESTS_MAKE_POOL_H_

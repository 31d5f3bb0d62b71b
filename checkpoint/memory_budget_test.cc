#include "checkpoint/memory_budget.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

using Bytes = MemoryBudget::Bytes;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

std::unique_ptr<MemoryBudget> Make(Bytes limit) {
  auto budget = MemoryBudget::Create(limit);
  EXPECT_TRUE(budget.ok()) << budget.status();
  return *std::move(budget);
}

void ExpectInUse(const MemoryBudget& budget, Bytes bytes) {
  EXPECT_EQ(budget.in_use().device, bytes.device);
  EXPECT_EQ(budget.in_use().host, bytes.host);
}

TEST(MemoryBudgetTest, CountsWhatIsTaken) {
  const auto budget = Make({100, 50});
  {
    auto a = budget->Take({60, 10});
    ASSERT_TRUE(a.ok());
    EXPECT_EQ(a->bytes().device, 60);
    EXPECT_EQ(a->bytes().host, 10);
    auto b = budget->Take({40, 40});
    ASSERT_TRUE(b.ok());
    ExpectInUse(*budget, {100, 50});
    *b = {};
    ExpectInUse(*budget, {60, 10});
    MemoryBudget::Share moved = *std::move(a);
    ExpectInUse(*budget, {60, 10});
  }
  ExpectInUse(*budget, {0, 0});
  EXPECT_EQ(budget->peak().device, 100);
  EXPECT_EQ(budget->peak().host, 50);
}

TEST(MemoryBudgetTest, BadNumbersAreNamed) {
  for (const Bytes bytes : {Bytes{-1, 0}, Bytes{0, -7}}) {
    EXPECT_EQ(MemoryBudget::Create(bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(Make({10, 10})->Take(bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  const auto budget = Make({10, 20});
  for (const Bytes bytes : {Bytes{11, 0}, Bytes{0, 21}, Bytes{kMost, kMost}}) {
    const absl::Status status = budget->Take(bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(absl::StrContains(status.message(), "of 10 and 20")) << status;
  }
  ExpectInUse(*budget, {0, 0});
}

// Until `condition` holds, or it is clear that it never will.
template <typename Condition>
bool Eventually(const Condition& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(MemoryBudgetTest, WaitsForBothAtOnce) {
  const auto budget = Make({10, 10});
  auto device = budget->Take({8, 0});
  auto host = budget->Take({0, 8});
  std::atomic<bool> taken{false};
  std::thread waiter([&] {
    const auto share = budget->Take({5, 5});
    EXPECT_TRUE(share.ok());
    taken = true;
  });
  *device = {};
  // It holds none of the device's while it waits for the host's.
  EXPECT_FALSE(taken);
  ExpectInUse(*budget, {0, 8});
  *host = {};
  waiter.join();
  EXPECT_TRUE(taken);
  ExpectInUse(*budget, {0, 0});
}

// A large one that waits is not passed over for small ones that would fit.
TEST(MemoryBudgetTest, GoesByTurns) {
  const auto budget = Make({10, 0});
  auto held = budget->Take({5, 0});
  std::atomic<int> order{0};
  std::atomic<int> large{0};
  std::atomic<int> small{0};
  std::thread first([&] {
    auto share = budget->Take({10, 0});
    EXPECT_TRUE(share.ok());
    large = ++order;
  });
  EXPECT_TRUE(Eventually([&] { return budget->waiting() == 1; }));
  std::thread second([&] {
    auto share = budget->Take({1, 0});
    EXPECT_TRUE(share.ok());
    small = ++order;
  });
  EXPECT_TRUE(Eventually([&] { return budget->waiting() == 2; }));
  EXPECT_EQ(order, 0);
  *held = {};
  first.join();
  second.join();
  EXPECT_EQ(large, 1);
  EXPECT_EQ(small, 2);
}

TEST(MemoryBudgetTest, CancelEndsWaitsForGood) {
  const auto budget = Make({10, 10});
  auto held = budget->Take({10, 10});
  std::vector<std::thread> waiters;
  std::atomic<int> ended{0};
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&] {
      EXPECT_EQ(budget->Take({1, 1}).status(), absl::CancelledError("stop"));
      ++ended;
    });
  }
  budget->Cancel(absl::CancelledError("stop"));
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(ended, 3);
  budget->Cancel(absl::InternalError("later"));
  *held = {};
  EXPECT_EQ(budget->Take({1, 1}).status(), absl::CancelledError("stop"));
  ExpectInUse(*budget, {0, 0});
}

TEST(MemoryBudgetTest, ManyThreadsStayWithin) {
  const auto budget = Make({1000, 700});
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 200; ++round) {
        const auto share = budget->Take(
            {(i * 37 + round * 11) % 1001, (i * 53 + round * 7) % 701});
        ASSERT_TRUE(share.ok());
        EXPECT_LE(budget->in_use().device, 1000);
        EXPECT_LE(budget->in_use().host, 700);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectInUse(*budget, {0, 0});
  EXPECT_LE(budget->peak().device, 1000);
  EXPECT_LE(budget->peak().host, 700);
}

}  // namespace
}  // namespace onepass

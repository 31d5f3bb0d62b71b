#include "tools/ranks.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/communicator.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

TEST(RanksTest, EachRunsOnAThreadOfItsOwn) {
  std::mutex mutex;
  std::set<int> ranks;
  std::set<std::thread::id> threads;
  const absl::Status status =
      RunThreadRanks(5, [&](Communicator& communicator) {
        EXPECT_EQ(communicator.size(), 5);
        const std::lock_guard<std::mutex> lock(mutex);
        ranks.insert(communicator.rank());
        threads.insert(std::this_thread::get_id());
        if (communicator.rank() == 0) {
          threads.erase(std::this_thread::get_id());
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3, 4}));
  EXPECT_EQ(threads.size(), 4);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0);
}

TEST(RanksTest, TheFirstErrorIsReturnedAndEndsTheOthers) {
  for (const int bad : {0, 2}) {
    std::atomic<int> others{0};
    const absl::Status status =
        RunThreadRanks(3, [&](Communicator& communicator) {
          if (communicator.rank() == bad) return absl::DataLossError("struck");
          const absl::Status status = communicator.Barrier();
          others += status.ok() ? 0 : 1;
          return status;
        });
    EXPECT_EQ(status, absl::DataLossError("struck"));
    EXPECT_EQ(others, 2);
  }
}

// Others may hear that a rank is gone before it can say why.
TEST(RanksTest, TheCauseGoesBeforeWhatFollowsFromIt) {
  const absl::Status status =
      RunThreadRanks(2, [&](Communicator& communicator) -> absl::Status {
        auto own = communicator.Duplicate();
        if (!own.ok()) return own.status();
        if (communicator.rank() == 0) {
          own->reset();  // the other is told, and returns
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          return absl::DataLossError("struck");
        }
        return (*own)->Barrier();
      });
  EXPECT_EQ(status, absl::DataLossError("struck"));
}

TEST(RanksTest, AnErrorThatAllAreToldIsOne) {
  const absl::Status status = RunThreadRanks(
      2, [&](Communicator&) { return absl::AbortedError("told"); });
  EXPECT_EQ(status, absl::AbortedError("told"));
}

TEST(RanksTest, WhatARankThrowsGoesToTheCaller) {
  for (const int bad : {0, 1}) {
    std::atomic<int> others{0};
    EXPECT_THROW(RunThreadRanks(2,
                                [&](Communicator& communicator) {
                                  if (communicator.rank() == bad) {
                                    throw std::bad_alloc();
                                  }
                                  const absl::Status status =
                                      communicator.Barrier();
                                  others += status.ok() ? 0 : 1;
                                  return status;
                                })
                     .IgnoreError(),
                 std::bad_alloc);
    EXPECT_EQ(others, 1);
  }
}

TEST(RanksTest, NumbersThatMakeNoSense) {
  for (const int ranks : {-1, 0, kMaxThreadRanks + 1}) {
    const absl::Status status = RunThreadRanks(
        ranks, [](Communicator&) { return absl::InternalError("ran"); });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "ranks is")) << status;
  }
}

TEST(RanksTest, ThreadsOfAProcessShareItsProcessors) {
  const absl::Status status = RunThreadRanks(3, [](Communicator& communicator) {
    const auto neighbours = FindNeighbours(communicator);
    if (!neighbours.ok()) return neighbours.status();
    EXPECT_EQ(neighbours->on_host, 3);
    EXPECT_EQ(neighbours->on_processors, 3);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A rank that may run elsewhere only shares with nobody.
TEST(RanksTest, ProcessorsOfItsOwnAreNotShared) {
  const absl::Status status = RunThreadRanks(3, [](Communicator& communicator) {
    cpu_set_t allowed;
    EXPECT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    const int rank = communicator.rank();
    const bool several = CPU_COUNT(&allowed) > 1;
    if (rank == 2 && several) {
      for (int i = 0; i < CPU_SETSIZE; ++i) {
        if (!CPU_ISSET(i, &allowed)) continue;
        CPU_CLR(i, &allowed);
        break;
      }
      EXPECT_EQ(sched_setaffinity(0, sizeof(allowed), &allowed), 0);
    }
    const auto neighbours = FindNeighbours(communicator);
    if (!neighbours.ok()) return neighbours.status();
    EXPECT_EQ(neighbours->on_host, 3);
    EXPECT_EQ(neighbours->on_processors, !several ? 3 : rank == 2 ? 1 : 2);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RanksTest, AllRanksHearWhoDiffers) {
  for (const int bad : {-1, 0, 2}) {
    std::atomic<int> named{0};
    const absl::Status status =
        RunThreadRanks(3, [&](Communicator& communicator) {
          const bool differs = communicator.rank() == bad;
          const absl::Status same = CheckSameOnAllRanks(
              communicator, "text", differs ? "abc" : "abd");
          named += same.message() == absl::StrCat("rank ", bad == 0 ? 1 : bad,
                                                  " has another text than "
                                                  "rank 0");
          return same;
        });
    EXPECT_EQ(status.code(), bad < 0 ? absl::StatusCode::kOk
                                     : absl::StatusCode::kInvalidArgument)
        << status;
    EXPECT_EQ(named, bad < 0 ? 0 : 3) << status;
  }
}

}  // namespace
}  // namespace onepass

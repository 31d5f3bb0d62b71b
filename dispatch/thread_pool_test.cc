#include "dispatch/thread_pool.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "tests/allocation_counter.h"
#include "tests/hostile_fp_environment.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

// Longer than the workers look for work before they sleep.
void LetWorkersSleep() {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

struct Range {
  int64_t begin;
  int64_t end;
  std::thread::id thread;

  bool operator<(const Range& other) const { return begin < other.begin; }
  bool operator==(const Range& other) const {
    return begin == other.begin && end == other.end && thread == other.thread;
  }
};

// The calls of ParallelFor, in order of their beginnings.
std::vector<Range> Ranges(ThreadPool& pool, int64_t numel, int64_t grain) {
  std::mutex mutex;
  std::vector<Range> ranges;
  pool.ParallelFor(numel, grain, [&](int64_t begin, int64_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    ranges.push_back({begin, end, std::this_thread::get_id()});
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

TEST(ThreadPoolTest, RunCallsEachWorkerOnceOnItsOwnThread) {
  for (int threads : {1, 2, 3, 7}) {
    const auto pool = MakePool(threads);
    ASSERT_EQ(pool->threads(), threads);
    std::vector<std::thread::id> first(threads);
    for (int run = 0; run < 50; ++run) {
      std::vector<int> calls(threads);
      std::vector<std::thread::id> ids(threads);
      pool->Run([&](int worker) {
        ++calls[worker];
        ids[worker] = std::this_thread::get_id();
      });
      ASSERT_EQ(calls, std::vector<int>(threads, 1));
      ASSERT_EQ(ids[0], std::this_thread::get_id());
      if (run == 0) first = ids;
      ASSERT_EQ(ids, first);
      std::sort(ids.begin(), ids.end());
      ASSERT_EQ(std::unique(ids.begin(), ids.end()), ids.end());
    }
  }
}

TEST(ThreadPoolTest, ParallelForCutsEvenlyAtGrains) {
  std::mt19937_64 random(1);
  auto uniform = [&random](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int threads : {1, 2, 3, 7}) {
    const auto pool = MakePool(threads);
    for (int i = 0; i < 300; ++i) {
      const int64_t grain = uniform(1, i % 2 == 0 ? 8 : 5000);
      // From less than one grain to many a worker.
      const int64_t numel = uniform(1, grain * uniform(1, 40));
      const std::vector<Range> ranges = Ranges(*pool, numel, grain);
      const int64_t grains = (numel + grain - 1) / grain;
      ASSERT_EQ(static_cast<int64_t>(ranges.size()),
                std::min<int64_t>(grains, threads))
          << numel << " " << grain;
      int64_t covered = 0;
      for (const Range& range : ranges) {
        ASSERT_EQ(range.begin, covered) << numel << " " << grain;
        ASSERT_EQ(range.begin % grain, 0);
        const int64_t share = (range.end - range.begin + grain - 1) / grain;
        ASSERT_GE(share, grains / threads);
        ASSERT_LE(share, (grains + threads - 1) / threads);
        covered = range.end;
      }
      ASSERT_EQ(covered, numel);
      ASSERT_EQ(Ranges(*pool, numel, grain), ranges) << "not the same again";
    }
  }
}

TEST(ThreadPoolTest, ParallelForOfNothingAndOfTheMost) {
  const auto pool = MakePool(3);
  EXPECT_TRUE(Ranges(*pool, 0, 8).empty());
  EXPECT_TRUE(Ranges(*pool, -1, 8).empty());
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (int64_t grain : {int64_t{1}, int64_t{4096}, kMost - 1, kMost}) {
    const std::vector<Range> ranges = Ranges(*pool, kMost, grain);
    ASSERT_EQ(ranges.size(),
              std::min<uint64_t>(3, kMost / grain + (kMost % grain != 0)));
    EXPECT_EQ(ranges.front().begin, 0);
    EXPECT_EQ(ranges.back().end, kMost);
    for (size_t i = 1; i < ranges.size(); ++i) {
      EXPECT_EQ(ranges[i].begin, ranges[i - 1].end);
    }
  }
}

TEST(ThreadPoolTest, OneGrainRunsOnTheCallingThread) {
  const auto pool = MakePool(3);
  for (int i = 0; i < 20; ++i) {
    const std::vector<Range> ranges = Ranges(*pool, 100, 100);
    ASSERT_EQ(ranges.size(), 1u);
    ASSERT_EQ(ranges[0].thread, std::this_thread::get_id());
  }
}

TEST(ThreadPoolTest, OneGrainWaitsForNobody) {
  const auto pool = MakePool(2);
  std::promise<void> started;
  std::promise<void> done;
  std::thread other([&] {
    pool->Run([&](int worker) {
      if (worker != 0) return;
      started.set_value();
      done.get_future().wait();
    });
  });
  started.get_future().wait();
  EXPECT_EQ(Ranges(*pool, 100, 100).size(), 1u);
  done.set_value();
  other.join();
}

TEST(ThreadPoolTest, NestedRunStaysOnItsWorker) {
  const auto pool = MakePool(3);
  std::atomic<int> parts{0};
  std::atomic<int> elsewhere{0};
  pool->Run([&](int) {
    const std::thread::id outer = std::this_thread::get_id();
    pool->Run([&](int) {
      ++parts;
      if (std::this_thread::get_id() != outer) ++elsewhere;
    });
  });
  EXPECT_EQ(parts, 9);
  EXPECT_EQ(elsewhere, 0);
}

TEST(ThreadPoolTest, RunInsideAnotherPoolSpreads) {
  const auto outer = MakePool(2);
  const auto inner = MakePool(3);
  for (int i = 0; i < 100; ++i) {
    std::atomic<int> parts{0};
    std::atomic<int> nested{0};
    outer->Run([&](int) {
      inner->Run([&](int) { ++parts; });
      outer->Run([&](int) { ++nested; });  // still known to be nested
    });
    ASSERT_EQ(parts, 6);
    ASSERT_EQ(nested, 4);
    std::vector<std::thread::id> ids(2);
    outer->Run([&](int i) { ids[i] = std::this_thread::get_id(); });
    ASSERT_NE(ids[0], ids[1]) << "taken for nested afterwards";
  }
}

TEST(ThreadPoolTest, NestedRunIsKnownThroughAnotherPool) {
  const auto outer = MakePool(2);
  const auto inner = MakePool(2);
  std::atomic<int> parts{0};
  outer->Run([&](int) {
    const std::thread::id caller = std::this_thread::get_id();
    inner->Run([&](int) {
      // On the caller, which works for both pools; on the other worker of the
      // inner pool it would wait for the outer one.
      if (std::this_thread::get_id() == caller) {
        outer->Run([&](int) { ++parts; });
      }
    });
  });
  EXPECT_EQ(parts, 4);
}

TEST(ThreadPoolTest, WorkRunsInTheDefaultFpEnvironment) {
  HostileFpEnvironment hostile;  // workers are started in it, too
  const auto pool = MakePool(3);
  volatile float third = 3.0f;
  std::atomic<int> wrong{0};
  // 2 / 3 rounds up, which rounding toward zero does not.
  auto work = [&] { wrong += 2.0f / third != 0x1.555556p-1f; };
  pool->Run([&](int) { work(); });
  pool->ParallelFor(1, 1, [&](int64_t, int64_t) { work(); });
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(hostile.Intact());
}

TEST(ThreadPoolTest, ConcurrentRunsTakeTurns) {
  const auto pool = MakePool(3);
  const int kRuns = UnderSanitizer() ? 100 : 1000;
  std::atomic<int> wrong{0};
  int turns = 0;  // not atomic: one Run() at a time
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int run = 0; run < kRuns; ++run) {
        std::vector<int> calls(3);
        pool->Run([&](int worker) {
          ++calls[worker];
          if (worker == 1) ++turns;
        });
        if (calls != std::vector<int>(3, 1)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(turns, 4 * kRuns);
}

// What one run writes without synchronisation the next one reads on another
// thread, be the workers awake or asleep.
TEST(ThreadPoolTest, ManyTinyRuns) {
  const auto pool = MakePool(4);
  const int kRuns = UnderSanitizer() ? 2000 : 20000;
  std::vector<int64_t> values(4);
  for (int run = 0; run < kRuns; ++run) {
    std::vector<int64_t> next(4);
    pool->Run([&](int worker) { next[worker] = values[(worker + 1) % 4] + 1; });
    values = next;
    if (run % 500 == 0) LetWorkersSleep();
  }
  EXPECT_EQ(values, std::vector<int64_t>(4, kRuns));
}

TEST(ThreadPoolTest, CallerSleepsUntilASlowWorkerIsDone) {
  const auto pool = MakePool(2);
  for (int run = 0; run < 5; ++run) {
    bool done = false;
    pool->Run([&](int worker) {
      if (worker == 0) return;
      LetWorkersSleep();
      done = true;
    });
    ASSERT_TRUE(done);
  }
}

TEST(ThreadPoolTest, StopsWhenNewAndWhenAsleep) {
  for (int i = 0; i < 100; ++i) MakePool(4).reset();
  for (int i = 0; i < 5; ++i) {
    auto pool = MakePool(4);
    pool->Run([](int) {});
    LetWorkersSleep();
    pool.reset();
  }
}

TEST(ThreadPoolTest, RefusesBadOptions) {
  for (int threads :
       {-1, std::numeric_limits<int>::min(), ThreadPool::kMaxThreads + 1}) {
    const absl::Status status = ThreadPool::Create({threads}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(status.message().find(std::to_string(threads)),
              absl::string_view::npos)
        << status;
  }
}

// Processors of the calling thread's affinity mask, by number.
std::vector<int> Allowed() {
  cpu_set_t mask;
  std::vector<int> processors;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return processors;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &mask)) processors.push_back(i);
  }
  return processors;
}

TEST(ThreadPoolTest, DefaultsToTheProcessorsOfTheAffinityMask) {
  const std::vector<int> all = Allowed();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(MakePool(0)->threads(), static_cast<int>(all.size()));
  // Masks of one processor, and ones with holes at the beginning and inside.
  std::vector<std::vector<int>> masks = {{all.front()}, {all.back()}, {}, {}};
  for (size_t i = 0; i < all.size(); ++i) masks[2 + i % 2].push_back(all[i]);
  for (const std::vector<int>& processors : masks) {
    if (processors.empty()) continue;
    int threads = 0;
    std::thread([&] {
      cpu_set_t mask;
      CPU_ZERO(&mask);
      for (int i : processors) CPU_SET(i, &mask);
      ASSERT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
      threads = MakePool(0)->threads();
    }).join();
    EXPECT_EQ(threads, static_cast<int>(processors.size()));
  }
}

TEST(ThreadPoolTest, RunAllocatesNothing) {
  const auto pool = MakePool(3);
  std::vector<int64_t> sums(3);
  auto run = [&] {
    pool->Run([&](int worker) { ++sums[worker]; });
    pool->ParallelFor(300, 1, [&](int64_t begin, int64_t end) {
      sums[begin / 100] += end - begin;
    });
  };
  run();
  const int64_t before = AllocationCount();
  for (int i = 0; i < 20; ++i) {
    run();
    if (i % 4 == 0) LetWorkersSleep();
  }
  EXPECT_EQ(AllocationCount(), before);
  EXPECT_EQ(sums, std::vector<int64_t>(3, 21 * 101));
}

int CountThreads() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "Threads:") continue;
    int count = 0;
    status >> count;
    return count;
  }
  return 0;
}

TEST(ThreadPoolTest, ARefusedThreadIsAnErrorAndLeavesNone) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "memory of a sanitizer or emulator breaks the limit here";
  }
  const int before = CountThreads();
  rlimit saved;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &saved), 0);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limited = saved;
  // Stacks of some threads only.
  limited.rlim_cur = pages * sysconf(_SC_PAGESIZE) + (rlim_t{256} << 20);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limited), 0);
  const absl::Status status =
      ThreadPool::Create({ThreadPool::kMaxThreads}).status();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &saved), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(CountThreads(), before);
}

}  // namespace
}  // namespace onepass

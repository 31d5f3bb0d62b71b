#include "dispatch/host_buffer.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

static_assert(!std::is_copy_constructible_v<HostBuffer>);
static_assert(!std::is_copy_assignable_v<HostBuffer>);

constexpr int64_t kHuge = HostBuffer::kHugePageBytes;

int64_t PageBytes() { return sysconf(_SC_PAGESIZE); }

HostBuffer MakeBuffer(ThreadPool& pool, int64_t bytes,
                      const HostBufferOptions& options = {}) {
  absl::StatusOr<HostBuffer> buffer = HostBuffer::Create(pool, bytes, options);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

HostBufferOptions ElementsOf(int64_t bytes, int64_t piece_numel = 0) {
  HostBufferOptions options;
  options.element_bytes = bytes;
  options.piece_numel = piece_numel;
  return options;
}

bool AllZero(const HostBuffer& buffer) {
  const auto bytes = buffer.span<const char>();
  return std::all_of(bytes.begin(), bytes.end(),
                     [](char byte) { return byte == 0; });
}

// A number of /proc/self/statm: 0 is mapped, 1 is resident, in pages.
int64_t Pages(int field) {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  for (int i = 0; i <= field; ++i) statm >> pages;
  return pages;
}

TEST(HostBufferTest, IsAlignedZeroAndWritable) {
  for (int threads : {1, 3}) {
    const auto pool = MakePool(threads);
    for (int64_t bytes :
         {int64_t{1}, int64_t{100}, int64_t{5000}, int64_t{100003}, kHuge - 1,
          kHuge, kHuge + 1, 3 * kHuge + 12345}) {
      const HostBuffer buffer = MakeBuffer(*pool, bytes, ElementsOf(1));
      ASSERT_EQ(buffer.bytes(), bytes);
      const auto address = reinterpret_cast<uintptr_t>(buffer.data());
      EXPECT_EQ(address % PageBytes(), 0u) << bytes;
      if (bytes >= kHuge) {
        EXPECT_EQ(address % kHuge, 0u) << bytes;
      }
      EXPECT_TRUE(AllZero(buffer)) << bytes;
      std::fill_n(buffer.as<char>(), bytes, 'x');
    }
  }
}

TEST(HostBufferTest, SpansHoldWhatFits) {
  const auto pool = MakePool(1);
  const HostBuffer buffer = MakeBuffer(*pool, 10, ElementsOf(2));
  EXPECT_EQ(buffer.as<float>(), buffer.data());
  EXPECT_EQ(buffer.span<float>().data(), buffer.data());
  EXPECT_EQ(buffer.span<float>().size(), 2u);
  EXPECT_EQ(buffer.span<uint16_t>().size(), 5u);
}

TEST(HostBufferTest, NothingIsEmpty) {
  const auto pool = MakePool(2);
  for (const HostBuffer& buffer : {HostBuffer(), MakeBuffer(*pool, 0)}) {
    EXPECT_EQ(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), 0);
    EXPECT_FALSE(buffer.huge_pages());
    EXPECT_TRUE(buffer.span<float>().empty());
  }
  EXPECT_TRUE(FirstTouch(*pool, nullptr, 0).ok());
}

TEST(HostBufferTest, MovesLeaveTheSourceEmpty) {
  const auto pool = MakePool(2);
  HostBuffer a = MakeBuffer(*pool, kHuge);
  void* const memory = a.data();
  const bool huge_pages = a.huge_pages();
  a.as<int>()[0] = 7;
  HostBuffer b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a move leaves is specified
  EXPECT_EQ(a.bytes(), 0);
  EXPECT_FALSE(a.huge_pages());
  EXPECT_EQ(b.data(), memory);
  HostBuffer c = MakeBuffer(*pool, 100);
  c = std::move(b);
  EXPECT_EQ(b.data(), nullptr);  // NOLINT
  EXPECT_EQ(c.data(), memory);
  EXPECT_EQ(c.bytes(), kHuge);
  EXPECT_EQ(c.huge_pages(), huge_pages);
  HostBuffer& itself = c;
  c = std::move(itself);
  ASSERT_EQ(c.data(), memory);
  EXPECT_EQ(c.as<int>()[0], 7);
}

TEST(HostBufferTest, HugePagesAreAskedForWhereTheyFit) {
  const auto pool = MakePool(1);
  HostBufferOptions usual;
  usual.huge_pages = false;
  EXPECT_FALSE(MakeBuffer(*pool, 8 * kHuge, usual).huge_pages());
  EXPECT_FALSE(MakeBuffer(*pool, kHuge - 4).huge_pages());
  // A system without them refuses the advice.
  const bool exist =
      std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good();
  EXPECT_EQ(MakeBuffer(*pool, kHuge).huge_pages(), exist);
}

TEST(HostBufferTest, BadInputIsNamed) {
  const auto pool = MakePool(1);
  const auto error = [&pool](int64_t bytes, const HostBufferOptions& options) {
    const absl::Status status =
        HostBuffer::Create(*pool, bytes, options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    char byte = 1;
    EXPECT_EQ(FirstTouch(*pool, &byte, bytes, options), status);
    EXPECT_EQ(byte, 1);
    return std::string(status.message());
  };
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  EXPECT_TRUE(absl::StrContains(error(-1, {}), "bytes is -1"));
  EXPECT_TRUE(
      absl::StrContains(error(kLeast, {}), absl::StrCat("is ", kLeast)));
  EXPECT_TRUE(absl::StrContains(error(4, ElementsOf(0)), "element_bytes is 0"));
  EXPECT_TRUE(absl::StrContains(error(6, ElementsOf(4)), "bytes is 6"));
  EXPECT_TRUE(
      absl::StrContains(error(4, ElementsOf(4, -3)), "piece_numel is -3"));
  EXPECT_TRUE(
      absl::StrContains(FirstTouch(*pool, nullptr, 8).message(), "null"));
}

TEST(HostBufferTest, WhatDoesNotFitIsRefusedAndLeavesNothing) {
  const auto pool = MakePool(2);
  MakeBuffer(*pool, kHuge);
  const int64_t before = Pages(0);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (int64_t bytes : {int64_t{1} << 60, kMost - kHuge, kMost}) {
    const absl::Status status =
        HostBuffer::Create(*pool, bytes, ElementsOf(1)).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(bytes)))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "Cannot allocate memory"))
        << status;
  }
  if (UnderSanitizer() || UnderEmulator()) return;  // their memory, too
  EXPECT_EQ(Pages(0), before);
}

TEST(HostBufferTest, MemoryIsReturned) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "memory of a sanitizer or emulator counts here";
  }
  const auto pool = MakePool(2);
  constexpr int64_t kBytes = 4 * kHuge + 20000;
  const auto create_and_move = [&pool] {
    HostBuffer buffer = MakeBuffer(*pool, kBytes);
    HostBuffer other = MakeBuffer(*pool, 30000);
    other = std::move(buffer);
  };
  create_and_move();
  const int64_t mapped = Pages(0);
  const int64_t resident = Pages(1);
  for (int i = 0; i < 100; ++i) create_and_move();
  EXPECT_EQ(Pages(0), mapped);
  // Less than what one of them has.
  EXPECT_LT(Pages(1) - resident, kBytes / PageBytes() / 2);
  // It is there while it lasts, and no more than that.
  const HostBuffer buffer = MakeBuffer(*pool, kBytes);
  EXPECT_EQ(Pages(0) - mapped, (kBytes + PageBytes() - 1) / PageBytes());
  EXPECT_GE(Pages(1) - resident, kBytes / PageBytes() / 2);
}

// Unreadable memory whose pages become readable as they are touched, and the
// worker that touched each.
class TouchRecorder {
 public:
  static constexpr int64_t kPages = 1024;

  explicit TouchRecorder(ThreadPool& pool) {
    page_ = PageBytes();
    void* memory = mmap(nullptr, kPages * page_, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    base_ = static_cast<char*>(memory);
    for (std::atomic<int>& toucher : touchers_) toucher = -1;
    pool.Run([](int worker) { worker_ = worker; });
    struct sigaction action = {};
    action.sa_sigaction = &OnFault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &saved_);
  }
  ~TouchRecorder() {
    sigaction(SIGSEGV, &saved_, nullptr);
    munmap(base_, kPages * page_);
  }

  char* memory() const { return base_; }
  // By page; -1: nobody.
  std::vector<int> Touchers() const {
    return std::vector<int>(std::begin(touchers_), std::end(touchers_));
  }

 private:
  static void OnFault(int, siginfo_t* info, void*) {
    const int64_t page = (static_cast<char*>(info->si_addr) - base_) / page_;
    if (page < 0 || page >= kPages) std::abort();
    int nobody = -1;
    touchers_[page].compare_exchange_strong(nobody, worker_);
    mprotect(base_ + page * page_, page_, PROT_READ | PROT_WRITE);
  }

  static thread_local int worker_;
  static char* base_;
  static int64_t page_;
  static std::atomic<int> touchers_[kPages];
  struct sigaction saved_;
};

thread_local int TouchRecorder::worker_ = -1;
char* TouchRecorder::base_ = nullptr;
int64_t TouchRecorder::page_ = 0;
std::atomic<int> TouchRecorder::touchers_[kPages];

class FirstTouchTest : public testing::Test {
 protected:
  void SetUp() override {
    if (kLeafNumel * sizeof(float) % PageBytes() != 0) {
      GTEST_SKIP() << "ranges share pages of " << PageBytes() << " bytes";
    }
  }
};

TEST_F(FirstTouchTest, EachPageByTheWorkerThatUpdatesIt) {
  const Kernel& kernel = ScalarKernel();
  for (int threads : {1, 2, 3, 5}) {
    const auto pool = MakePool(threads);
    for (int64_t numel : {int64_t{1}, int64_t{3000}, kLeafNumel, kLeafNumel + 1,
                          4 * kLeafNumel, 17 * kLeafNumel + 333}) {
      const int64_t bytes = numel * static_cast<int64_t>(sizeof(float));
      std::vector<int> expected;
      {
        const TouchRecorder recorder(*pool);
        auto* const x = reinterpret_cast<float*>(recorder.memory());
        ASSERT_TRUE(Scale(kernel, *pool, {numel, x, x, 2.0f}).ok());
        expected = recorder.Touchers();
      }
      const TouchRecorder recorder(*pool);
      ASSERT_TRUE(
          FirstTouch(*pool, recorder.memory(), bytes, ElementsOf(4)).ok());
      EXPECT_EQ(recorder.Touchers(), expected) << numel << " " << threads;
    }
  }
}

TEST_F(FirstTouchTest, EachPageOfAPieceByTheWorkerThatUpdatesIt) {
  const Kernel& kernel = ScalarKernel();
  const auto pool = MakePool(3);
  constexpr int64_t kNumel = 40 * kLeafNumel + 77;
  constexpr int64_t kPiece = 7 * kLeafNumel;
  std::vector<int> expected;
  {
    const TouchRecorder recorder(*pool);
    auto* const x = reinterpret_cast<float*>(recorder.memory());
    for (int64_t i = 0; i < kNumel; i += kPiece) {
      const int64_t numel = std::min(kPiece, kNumel - i);
      ASSERT_TRUE(Scale(kernel, *pool, {numel, x + i, x + i, 2.0f}).ok());
    }
    expected = recorder.Touchers();
  }
  const TouchRecorder recorder(*pool);
  ASSERT_TRUE(FirstTouch(*pool, recorder.memory(), kNumel * sizeof(float),
                         ElementsOf(4, kPiece))
                  .ok());
  EXPECT_EQ(recorder.Touchers(), expected);
}

TEST_F(FirstTouchTest, PagesThatRangesShareAreTouchedOnce) {
  // Elements of 3 bytes, and memory that begins inside a page.
  const auto pool = MakePool(4);
  const TouchRecorder recorder(*pool);
  constexpr int64_t kNumel = 9 * kLeafNumel + 1;
  ASSERT_TRUE(
      FirstTouch(*pool, recorder.memory() + 100, 3 * kNumel, ElementsOf(3))
          .ok());
  const std::vector<int> touchers = recorder.Touchers();
  const int64_t pages = (100 + 3 * kNumel + PageBytes() - 1) / PageBytes();
  for (int64_t page = 0; page < TouchRecorder::kPages; ++page) {
    EXPECT_EQ(touchers[page] >= 0, page < pages) << page;
  }
  EXPECT_TRUE(std::is_sorted(touchers.begin(), touchers.begin() + pages));
}

// Page faults of each worker so far.
std::vector<int64_t> Faults(ThreadPool& pool) {
  std::vector<int64_t> faults(pool.threads());
  pool.Run([&faults](int worker) {
    rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) != 0) std::abort();
    faults[worker] = usage.ru_minflt + usage.ru_majflt;
  });
  return faults;
}

class FaultTest : public testing::Test {
 protected:
  void SetUp() override {
    if (UnderSanitizer() || UnderEmulator()) {
      GTEST_SKIP() << "faults of a sanitizer or emulator count here";
    }
  }
};

TEST_F(FaultTest, CreateTakesThoseOfEachRangeOnItsWorker) {
  // Elements of this size make pages enough that others do not matter.
  constexpr int64_t kElement = 256;
  constexpr int64_t kOthers = 16;
  const int64_t leaf = kLeafNumel * kElement / PageBytes();
  HostBufferOptions options = ElementsOf(kElement);
  options.huge_pages = false;
  for (int threads : {1, 2, 3}) {
    const auto pool = MakePool(threads);
    MakeBuffer(*pool, 8 * kLeafNumel * kElement, options);
    for (int64_t leaves : {1, 2, 4, 5}) {
      const int64_t numel = leaves * kLeafNumel;
      // The system's own (balancing of memory between nodes) come seldom.
      std::vector<int64_t> least(threads, std::numeric_limits<int64_t>::max());
      for (int attempt = 0; attempt < 5; ++attempt) {
        const std::vector<int64_t> before = Faults(*pool);
        const HostBuffer buffer = MakeBuffer(*pool, numel * kElement, options);
        const std::vector<int64_t> after = Faults(*pool);
        for (int worker = 0; worker < threads; ++worker) {
          least[worker] =
              std::min(least[worker], after[worker] - before[worker]);
        }
      }
      for (int worker = 0; worker < threads; ++worker) {
        const int64_t own =
            leaf * (leaves / threads + (worker < leaves % threads ? 1 : 0));
        EXPECT_GE(least[worker], own) << leaves;
        EXPECT_LE(least[worker], own + kOthers) << leaves;
      }
    }
  }
}

TEST_F(FaultTest, TheFirstStepTakesNone) {
  const std::vector<const Kernel*> kernels = RunnableKernels();
  ASSERT_FALSE(kernels.empty());
  const Kernel& kernel = *kernels.front();
  const auto pool = MakePool(2);
  constexpr int64_t kNumel = 200 * kLeafNumel + 100;
  for (bool huge_pages : {false, true}) {
    // The system's own (balancing of memory between nodes) come seldom.
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int attempt = 0; attempt < 5; ++attempt) {
      HostBufferOptions fp32 = ElementsOf(4);
      HostBufferOptions bf16 = ElementsOf(2);
      fp32.huge_pages = bf16.huge_pages = huge_pages;
      const HostBuffer param = MakeBuffer(*pool, 4 * kNumel, fp32);
      const HostBuffer grad = MakeBuffer(*pool, 4 * kNumel, fp32);
      const HostBuffer exp_avg = MakeBuffer(*pool, 4 * kNumel, fp32);
      const HostBuffer exp_avg_sq = MakeBuffer(*pool, 4 * kNumel, fp32);
      const HostBuffer copy = MakeBuffer(*pool, 2 * kNumel, bf16);
      AdamStepArgs args;
      args.numel = kNumel;
      args.param = param.as<float>();
      args.grad = grad.data();
      args.exp_avg = exp_avg.data();
      args.exp_avg_sq = exp_avg_sq.data();
      args.copy = copy.data();
      const std::vector<int64_t> before = Faults(*pool);
      ASSERT_TRUE(AdamStep(kernel, *pool, args).ok());
      const std::vector<int64_t> after = Faults(*pool);
      least = std::min(
          least, std::accumulate(after.begin(), after.end(), int64_t{0}) -
                     std::accumulate(before.begin(), before.end(), int64_t{0}));
    }
    EXPECT_EQ(least, 0) << huge_pages;
  }
}

}  // namespace
}  // namespace onepass

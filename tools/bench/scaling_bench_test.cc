#include "tools/bench/scaling_bench.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "tools/bench/measure.h"

namespace onepass {
namespace {

const Kernel& SelectedKernel() { return **CreateDefaultDispatcher()->Select(); }

ScalingOptions SmallOptions() {
  ScalingOptions options;
  options.max_numel = 50000;
  options.threads = 3;
  options.rounds = 2;
  options.slice_s = 0.001;
  return options;
}

// A kernel of another step.
class OtherStep {
 public:
  explicit OtherStep(void (*adam_step)(const AdamStepArgs&))
      : operations_(*SelectedKernel().operations), kernel_(SelectedKernel()) {
    operations_.adam_step = adam_step;
    kernel_.operations = &operations_;
  }
  OtherStep(const OtherStep&) = delete;
  OtherStep& operator=(const OtherStep&) = delete;

  const Kernel& kernel() const { return kernel_; }
  void set_streams_copies(bool streams) {
    operations_.streams_copies = streams;
  }

 private:
  KernelOperations operations_;
  Kernel kernel_;
};

const pid_t test_process = getpid();

// Of this process.
std::atomic<int64_t> stepped{0};
std::atomic<int64_t> bad{0};

bool IsNormal(float value) { return std::fpclassify(value) == FP_NORMAL; }

void CountingStep(const AdamStepArgs& args) {
  stepped += args.numel;
  const auto* grad = static_cast<const float*>(args.grad);
  const auto* exp_avg = static_cast<const float*>(args.exp_avg);
  const auto* exp_avg_sq = static_cast<const float*>(args.exp_avg_sq);
  for (int64_t i = 0; i < args.numel; ++i) {
    bad += !IsNormal(args.param[i]) + !IsNormal(grad[i]) +
           !IsNormal(exp_avg[i]) + !IsNormal(exp_avg_sq[i]);
  }
  bad += args.copy == nullptr;
  bad += args.copy_type != DType::kBFloat16;
  bad += args.grad_type != DType::kFloat32;
  bad += args.exp_avg_type != DType::kFloat32;
  bad += args.exp_avg_sq_type != DType::kFloat32;
  SelectedKernel().operations->adam_step(args);
}

void ExpectOrdered(const Spread& spread) {
  EXPECT_GT(spread.p10, 0);
  EXPECT_LE(spread.p10, spread.median);
  EXPECT_LE(spread.median, spread.p90);
  EXPECT_TRUE(std::isfinite(spread.p90));
}

TEST(ScalingBenchTest, MeasuresEachPoint) {
  const absl::StatusOr<ScalingReport> report =
      MeasureScaling(SelectedKernel(), SmallOptions());
  ASSERT_TRUE(report.ok()) << report.status();

  std::vector<int64_t> sizes;
  for (const ElementsPoint& point : report->elements) {
    sizes.push_back(point.numel);
    ExpectOrdered(point.ns_per_element);
    // 30 bytes an element.
    EXPECT_DOUBLE_EQ(point.gb_per_s * point.ns_per_element.median, 30);
  }
  EXPECT_EQ(sizes, (std::vector<int64_t>{4096, 16384, 50000}));

  std::vector<int> threads;
  for (const ThreadsPoint& point : report->threads) {
    threads.push_back(point.threads);
    ExpectOrdered(point.speedup);
    EXPECT_GT(point.gb_per_s, 0);
  }
  EXPECT_EQ(threads, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(report->threads[0].speedup.p10, 1);
  EXPECT_EQ(report->threads[0].speedup.p90, 1);

  std::vector<std::pair<int, int>> processes;
  for (const ProcessesPoint& point : report->processes) {
    processes.emplace_back(point.processes, point.threads);
    ExpectOrdered(point.ratio);
    EXPECT_GT(point.gb_per_s, 0);
    const bool aggregate = point.processes == 3 && point.threads == 1;
    EXPECT_EQ(point.target, aggregate ? ">= 0.90" : "");
    EXPECT_EQ(point.reached, aggregate && point.ratio.median >= 0.9);
  }
  EXPECT_EQ(processes,
            (std::vector<std::pair<int, int>>{{1, 3}, {1, 1}, {3, 1}, {3, 3}}));
  EXPECT_EQ(report->processes[0].ratio.p10, 1);
  EXPECT_EQ(report->processes[0].ratio.p90, 1);

  EXPECT_EQ(report->store, "ordinary");
  EXPECT_EQ(report->pool.threads, 3);
  ExpectOrdered(report->pool.awake_us);
  ExpectOrdered(report->pool.asleep_us);
}

TEST(ScalingBenchTest, StepsOverAllElementsOfNormalNumbers) {
  const OtherStep counting(&CountingStep);
  stepped = 0;
  bad = 0;
  ASSERT_TRUE(MeasureScaling(counting.kernel(), SmallOptions()).ok());
  // A round that is not counted and two, each: a quarter of the most elements,
  // but each size at least once; and all elements on 1, 2 and 3 threads.
  constexpr int64_t kQuarter = 50000 / 4;
  EXPECT_EQ(stepped, 3 * (kQuarter / 4096 * 4096 + 16384 + 50000) +
                         3 * 3 * int64_t{50000});
  EXPECT_EQ(bad, 0);
}

// Elements that steps stored ordinarily and streaming, in this process and in
// its children.
struct Stored {
  std::atomic<int64_t> ordinary[2];
  std::atomic<int64_t> streaming[2];
};
Stored* stored = nullptr;

void StoringStep(const AdamStepArgs& args) {
  auto& of = args.stream_copy ? stored->streaming : stored->ordinary;
  of[getpid() == test_process ? 0 : 1] += args.numel;
  AdamStepArgs ordinary = args;
  ordinary.stream_copy = false;
  SelectedKernel().operations->adam_step(ordinary);
}

TEST(ScalingBenchTest, StoresAsTheStepDoes) {
  void* shared = mmap(nullptr, sizeof(Stored), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  stored = new (shared) Stored{};
  OtherStep storing(&StoringStep);
  ScalingOptions options = SmallOptions();
  // A process takes it in one step that would stream by itself, and a rest.
  options.max_numel = (int64_t{1} << 20) + 4096;
  options.threads = 1;
  options.rounds = 1;
  for (const bool streams : {false, true}) {
    storing.set_streams_copies(streams);
    stored = new (shared) Stored{};
    const absl::StatusOr<ScalingReport> report =
        MeasureScaling(storing.kernel(), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->store, streams ? "streaming" : "ordinary");
    // Of sizes from 4096 on, the last and the one before copy 1 MiB and more.
    EXPECT_EQ(report->elements.size(), 6u);
    const int64_t most = report->elements[5].numel + report->elements[4].numel;
    EXPECT_EQ(stored->streaming[0],
              streams ? 2 * (most + options.max_numel) : 0);
    EXPECT_GT(stored->ordinary[0], 0);
    EXPECT_EQ(stored->streaming[1] > 0, streams);
    EXPECT_EQ(stored->ordinary[1] > 0, !streams);
  }
  EXPECT_EQ(munmap(shared, sizeof(Stored)), 0);
}

// A step that takes a millisecond, or more, bounds what is said of it: units
// are right.
TEST(ScalingBenchTest, SaysWhatTheClockSays) {
  const OtherStep slow([](const AdamStepArgs&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  ScalingOptions options = SmallOptions();
  options.max_numel = ScalingOptions::kLeastNumel;
  options.threads = 1;
  const auto begin = std::chrono::steady_clock::now();
  const absl::StatusOr<ScalingReport> report =
      MeasureScaling(slow.kernel(), options);
  const std::chrono::duration<double, std::nano> elapsed =
      std::chrono::steady_clock::now() - begin;
  ASSERT_TRUE(report.ok()) << report.status();
  const double least_ns = 1e6 / ScalingOptions::kLeastNumel;
  const double most_ns = elapsed.count() / ScalingOptions::kLeastNumel;
  const Spread& ns = report->elements[0].ns_per_element;
  EXPECT_GE(ns.p10, least_ns);
  EXPECT_LE(ns.p90, most_ns);
  for (const double gb_per_s :
       {report->elements[0].gb_per_s, report->threads[0].gb_per_s,
        report->processes[0].gb_per_s}) {
    EXPECT_LE(gb_per_s, 30 / least_ns);
    EXPECT_GE(gb_per_s, 30 / most_ns);
  }
  EXPECT_LE(report->pool.asleep_us.p90, elapsed.count() / 1e3);
}

TEST(ScalingBenchTest, OneThreadIsEnough) {
  ScalingOptions options = SmallOptions();
  options.max_numel = ScalingOptions::kLeastNumel;
  options.threads = 1;
  options.rounds = 1;
  const absl::StatusOr<ScalingReport> report =
      MeasureScaling(SelectedKernel(), options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->elements.size(), 1u);
  EXPECT_EQ(report->threads.size(), 1u);
  EXPECT_EQ(report->processes.size(), 4u);
  for (const ProcessesPoint& point : report->processes) {
    EXPECT_EQ(point.target, "") << "one process is no aggregate";
  }
  EXPECT_EQ(report->pool.threads, 1);
}

TEST(ScalingBenchTest, AProcessThatEndsIsAnErrorAndLeavesNone) {
  const OtherStep ending([](const AdamStepArgs& args) {
    if (getpid() != test_process) raise(SIGKILL);
    SelectedKernel().operations->adam_step(args);
  });
  const absl::Status status =
      MeasureScaling(ending.kernel(), SmallOptions()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(
      status.message(),
      absl::StrCat("process 1 of 1 with 3 threads was ended by signal ",
                   SIGKILL)))
      << status;
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(ScalingBenchTest, BytesAreThoseOfTheStates) {
  ScalingOptions options;
  options.threads = 2;
  options.max_numel = int64_t{1} << 24;
  const absl::StatusOr<int64_t> some = ScalingBytes(options);
  options.max_numel *= 2;
  const absl::StatusOr<int64_t> twice = ScalingBytes(options);
  ASSERT_TRUE(some.ok()) << some.status();
  ASSERT_TRUE(twice.ok()) << twice.status();
  // One process of 2 threads, one of 1, 2 of 1, 2 of 2, each of them over all
  // elements together; 18 bytes an element.
  EXPECT_EQ(*twice - *some, (int64_t{1} << 24) * 18 * 4);
}

TEST(ScalingBenchTest, BadInputIsNamed) {
  const auto error = [](auto change) {
    ScalingOptions options = SmallOptions();
    change(options);
    const absl::Status status = ScalingBytes(options).status();
    EXPECT_EQ(MeasureScaling(SelectedKernel(), options).status(), status);
    return status;
  };
  const struct {
    absl::Status status;
    const char* problem;
  } cases[] = {
      {error([](ScalingOptions& o) { o.max_numel = 4095; }),
       "--max_numel is 4095, expected at least 4096"},
      {error([](ScalingOptions& o) { o.threads = -1; }), "--threads is -1"},
      {error([](ScalingOptions& o) { o.threads = 5000; }), "--threads is 5000"},
      {error([](ScalingOptions& o) { o.rounds = 0; }), "--rounds is 0"},
      {error([](ScalingOptions& o) { o.slice_s = 0; }), "slice_s is 0"},
      {error([](ScalingOptions& o) { o.slice_s = std::nan(""); }),
       "slice_s is nan"},
  };
  for (const auto& c : cases) {
    EXPECT_TRUE(absl::IsInvalidArgument(c.status)) << c.status;
    EXPECT_TRUE(absl::StrContains(c.status.message(), c.problem)) << c.status;
  }
  const absl::Status huge = error([](ScalingOptions& o) {
    o.max_numel = std::numeric_limits<int64_t>::max();
  });
  EXPECT_TRUE(absl::IsOutOfRange(huge)) << huge;
  EXPECT_TRUE(absl::StrContains(huge.message(), "--max_numel")) << huge;

  Kernel without_copies = SelectedKernel();
  without_copies.copy_types = {};
  const absl::Status status =
      MeasureScaling(without_copies, SmallOptions()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), without_copies.name));
}

}  // namespace
}  // namespace onepass

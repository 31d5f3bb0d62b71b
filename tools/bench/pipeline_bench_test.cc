#include "tools/bench/pipeline_bench.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "tests/test_kernels.h"
#include "tools/bench/measure.h"

namespace onepass {
namespace {

constexpr int64_t kNumel = PipelineBenchOptions::kLeastNumel;

PipelineBenchOptions SmallOptions() {
  PipelineBenchOptions options;
  options.numel = kNumel;
  options.rounds = 2;
  return options;
}

// The scalar kernel with another step.
class OtherStep {
 public:
  explicit OtherStep(void (*adam_step)(const AdamStepArgs&))
      : operations_(*ScalarKernel().operations), kernel_(ScalarKernel()) {
    operations_.adam_step = adam_step;
    kernel_.operations = &operations_;
  }
  OtherStep(const OtherStep&) = delete;
  OtherStep& operator=(const OtherStep&) = delete;

  const Kernel& kernel() const { return kernel_; }

 private:
  KernelOperations operations_;
  Kernel kernel_;
};

// A step that takes as long as its elements say, whatever the machine.
constexpr std::chrono::nanoseconds kSpinPerElement(50);
void Spin(const AdamStepArgs& args) {
  const auto end =
      std::chrono::steady_clock::now() + args.numel * kSpinPerElement;
  while (std::chrono::steady_clock::now() < end) continue;
}

void ExpectOrdered(const Spread& spread) {
  EXPECT_GT(spread.p10, 0);
  EXPECT_LE(spread.p10, spread.median);
  EXPECT_LE(spread.median, spread.p90);
  EXPECT_TRUE(std::isfinite(spread.p90));
}

TEST(PipelineBoundTest, IsTheLongerAndAPieceOfTheOther) {
  EXPECT_EQ(PipelineBound(1, 4, 32), 4 + 1.0 / 32);
  EXPECT_EQ(PipelineBound(4, 1, 32), 4 + 1.0 / 32);
  EXPECT_EQ(PipelineBound(3, 3, 4), 3.75);
  // In one piece nothing runs beside anything.
  EXPECT_EQ(PipelineBound(3, 5, 1), 8);
  // What 32 pieces may gain where both take as long.
  EXPECT_NEAR(2 / PipelineBound(1, 1, 32), 1.94, 0.005);
}

TEST(CopiesAreRealTest, WhereAProcessorIsLeft) {
  EXPECT_FALSE(CopiesAreReal(1, 1));
  EXPECT_TRUE(CopiesAreReal(1, 2));
  EXPECT_FALSE(CopiesAreReal(2, 2));
  EXPECT_TRUE(CopiesAreReal(2, 64));
}

// All threads from now on, this one's too, run on one processor.
class OneProcessor {
 public:
  OneProcessor() {
    EXPECT_EQ(sched_getaffinity(0, sizeof(before_), &before_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++i) {
      if (CPU_ISSET(i, &before_)) CPU_SET(i, &one);
    }
    EXPECT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  }
  ~OneProcessor() { sched_setaffinity(0, sizeof(before_), &before_); }

 private:
  cpu_set_t before_;
};

TEST(PipelineBenchTest, MeasuresEachPoint) {
  const absl::StatusOr<PipelineReport> report =
      RunPipelineBench(**CreateDefaultDispatcher()->Select(), SmallOptions());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->threads, 1);
  EXPECT_GT(report->cpu_gb_per_s, 0);

  // The link, buffers, and what is to be reached.
  std::vector<std::tuple<double, int, double, double>> points;
  for (const PipelinePoint& point : report->points) {
    EXPECT_EQ(point.pieces, 32);
    ExpectOrdered(point.ms);
    ExpectOrdered(point.bound_over_measured);
    ExpectOrdered(point.serial_over_pipelined);
    const PipelineTarget& bound = point.bound_target;
    const PipelineTarget& serial = point.serial_target;
    points.emplace_back(point.link_over_cpu, point.buffers, bound.at_least,
                        serial.at_least);
    EXPECT_EQ(bound.reached,
              bound.at_least > 0 &&
                  point.bound_over_measured.median >= bound.at_least);
    EXPECT_EQ(serial.reached,
              serial.at_least > 0 &&
                  point.serial_over_pipelined.median >= serial.at_least);
  }
  EXPECT_EQ(points, (std::vector<std::tuple<double, int, double, double>>{
                        {0.25, 2, 0.95, 0},
                        {0.5, 2, 0.95, 0},
                        {1, 2, 0.92, 1.8},
                        {1, 1, 0, 0},
                        {2, 2, 0.95, 0},
                        {10, 2, 0.95, 0}}));

  std::vector<std::pair<int64_t, int>> ranks;
  for (const RanksPoint& point : report->ranks) {
    ranks.emplace_back(point.numel, point.ranks);
    ExpectOrdered(point.ms);
    ExpectOrdered(point.speedup);
    EXPECT_DOUBLE_EQ(point.ns_per_element * static_cast<double>(point.numel),
                     point.ms.median * 1e6);
    if (point.ranks == 1) {
      EXPECT_EQ(point.speedup.p10, 1);
      EXPECT_EQ(point.speedup.p90, 1);
    }
  }
  std::vector<std::pair<int64_t, int>> expected;
  for (const int64_t part : {64, 16, 4}) {
    for (const int count : {1, 2, 4})
      expected.emplace_back(kNumel / part, count);
  }
  EXPECT_EQ(ranks, expected);
}

TEST(PipelineBenchTest, OtherPiecesHaveNoTargetsAndSpeedupIsOfOneRank) {
  const OtherStep slow(&Spin);
  PipelineBenchOptions options = SmallOptions();
  options.pieces = 8;
  options.rounds = 1;
  const absl::StatusOr<PipelineReport> report =
      RunPipelineBench(slow.kernel(), options);
  ASSERT_TRUE(report.ok()) << report.status();
  for (const PipelinePoint& point : report->points) {
    EXPECT_EQ(point.pieces, 8);
    EXPECT_EQ(point.bound_target.at_least, 0);
    EXPECT_EQ(point.serial_target.at_least, 0);
  }
  // Of one round medians are its times.
  for (size_t i = 0; i < report->ranks.size(); ++i) {
    const RanksPoint& point = report->ranks[i];
    EXPECT_NEAR(point.speedup.median,
                report->ranks[i - i % 3].ms.median / point.ms.median, 1e-9);
  }
}

// --- What steps do, in what order. ---

// What a step did, by its updates and copies over a link.
struct StepOrder {
  int64_t numel = 0;
  int64_t updates = 0;
  int64_t copies = 0;
  // Updates that began while a copy had not ended.
  int64_t overlapping = 0;
  std::set<const void*> buffers;
};

// Steps one after the other, each of kNumel elements in all.
class OrderLog {
 public:
  void Update(const AdamStepArgs& args) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (steps_.empty() || steps_.back().numel == kNumel) {
      in_flight_.clear();
      steps_.emplace_back();
    }
    StepOrder& step = steps_.back();
    step.numel += args.numel;
    ++step.updates;
    step.overlapping += !in_flight_.empty();
    step.buffers.insert(args.copy);
    // From now on, whenever its stream gets to it.
    in_flight_.insert(args.copy);
  }

  void Copy(const HostDeviceCopy& copy, bool begins) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Others come when an optimizer is created.
    if (begins || steps_.empty() ||
        steps_.back().buffers.count(copy.from) == 0) {
      return;
    }
    ++steps_.back().copies;
    in_flight_.erase(copy.from);
  }

  std::vector<StepOrder> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(steps_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<StepOrder> steps_;
  std::set<const void*> in_flight_;
};

OrderLog& order_log() {
  static auto& log = *new OrderLog;
  return log;
}

TEST(PipelineBenchTest, OneBufferIsSerialAndTwoAreNot) {
  const OtherStep logging([](const AdamStepArgs& args) {
    order_log().Update(args);
    Spin(args);
  });
  PipelineBenchOptions options = SmallOptions();
  options.rounds = 1;
  options.observer = [](const HostDeviceCopy& copy, bool begins) {
    order_log().Copy(copy, begins);
  };
  order_log().Take();
  const absl::StatusOr<PipelineReport> report =
      RunPipelineBench(logging.kernel(), options);
  ASSERT_TRUE(report.ok()) << report.status();
  // How many steps over a link there were, by updates and buffers.
  std::map<std::pair<int64_t, size_t>, int64_t> steps;
  int64_t overlapping = 0;
  for (const StepOrder& step : order_log().Take()) {
    if (step.copies == 0) continue;  // without a link, or of ranks
    EXPECT_EQ(step.copies, step.updates);
    ++steps[{step.updates, step.buffers.size()}];
    if (step.buffers.size() == 1) {
      EXPECT_EQ(step.overlapping, 0);
    } else {
      overlapping += step.overlapping;
    }
  }
  // To warm up and in the round: five links, one of them with a row of one
  // buffer. Before them a link of five rounds.
  EXPECT_EQ(steps,
            (std::map<std::pair<int64_t, size_t>, int64_t>{
                {{32, 2}, 5 + 2 * 5}, {{32, 1}, 2}, {{1, 1}, 5 + 2 * 5}}));
  // Of the slowest link alone there are twice as many.
  EXPECT_GE(overlapping, 31);
}

std::atomic<int64_t> zeros{0};

// Zero gradients, and moments after the first step, are another measurement.
TEST(PipelineBenchTest, GradientsArriveWhetherCopiesAreRealOrNot) {
  const OtherStep checking([](const AdamStepArgs& args) {
    const auto* grad = static_cast<const uint16_t*>(args.grad);
    zeros += args.grad_type != DType::kBFloat16;
    for (int64_t i = 0; i < args.numel; ++i) zeros += (grad[i] & 0x7fff) == 0;
  });
  PipelineBenchOptions options = SmallOptions();
  options.rounds = 1;
  for (const char* way : {"as it is", "one processor", "timestamps"}) {
    SCOPED_TRACE(way);
    const bool one = absl::string_view(way) == "one processor";
    options.timestamps = absl::string_view(way) == "timestamps";
    std::optional<OneProcessor> processor;
    if (one) processor.emplace();
    zeros = 0;
    const absl::StatusOr<PipelineReport> report =
        RunPipelineBench(checking.kernel(), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->real_copies,
              !one && !options.timestamps &&
                  CopiesAreReal(1, ThreadPool::AllowedProcessors()));
    EXPECT_EQ(zeros, 0);
  }
}

// An update that takes as long as its elements say, whatever the machine,
// bounds what is said of it.
TEST(PipelineBenchTest, SaysWhatTheClockSays) {
  const OtherStep slow(&Spin);
  PipelineBenchOptions options = SmallOptions();
  options.rounds = 3;
  // Ratios hold where nothing else takes the processors: in some run they do.
  bool ratios_held = false;
  for (int run = 0; run < 10 && !ratios_held; ++run) {
    const absl::StatusOr<PipelineReport> report =
        RunPipelineBench(slow.kernel(), options);
    ASSERT_TRUE(report.ok()) << report.status();
    // 2 bytes in 50 ns or more.
    EXPECT_LE(report->cpu_gb_per_s, 0.04);
    const double least_ms = kNumel * 50e-6;
    // The slowest link, and the fastest.
    EXPECT_GE(report->points.front().ms.p10, 4 * least_ms);
    EXPECT_GE(report->points.back().ms.p10, least_ms);
    const PipelinePoint& two = report->points[2];
    const PipelinePoint& one = report->points[3];
    ASSERT_EQ(one.link_over_cpu, 1);
    ASSERT_EQ(one.buffers, 1);
    for (const RanksPoint& point : report->ranks) {
      // Of one rank, of four.
      EXPECT_GE(point.ns_per_element, 50.0 / point.ranks);
    }
    ratios_held =
        report->points.back().ms.median <
            report->points.front().ms.median / 1.5 &&
        two.bound_over_measured.median > 1.2 * one.bound_over_measured.median &&
        two.serial_over_pipelined.median > 1.2 &&
        one.serial_over_pipelined.median < 1.2;
  }
  EXPECT_TRUE(ratios_held);
}

// --- Options. ---

TEST(PipelineBenchBytesTest, AreThoseOfTheOptimizers) {
  const auto bytes = [](int64_t numel, int64_t pieces) {
    PipelineBenchOptions options;
    options.numel = numel;
    options.pieces = pieces;
    const absl::StatusOr<int64_t> bytes = PipelineBenchBytes(options);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.value_or(0);
  };
  constexpr int64_t kMany = int64_t{1} << 26;
  // Four optimizers of 16 bytes an element, two gradients, a staging buffer for
  // all; and five of a piece.
  EXPECT_EQ(bytes(2 * kMany, 32) - bytes(kMany, 32),
            kMany * (4 * 16 + 2 * 2 + 2) + 5 * 2 * kMany / 32);
  EXPECT_EQ(bytes(kMany, 1) - bytes(kMany, 2), 5 * 2 * kMany / 2);
}

TEST(PipelineBenchBytesTest, NamesTheFlag) {
  const auto problem = [](auto change) {
    PipelineBenchOptions options = SmallOptions();
    change(options);
    const absl::Status status = PipelineBenchBytes(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(RunPipelineBench(ScalarKernel(), options).status(), status);
    return std::string(status.message());
  };
  using Options = PipelineBenchOptions;
  EXPECT_TRUE(
      absl::StartsWith(problem([](Options& o) { o.numel = kNumel - 1; }),
                       "--numel is 131071, expected 131072 to "));
  EXPECT_TRUE(absl::StartsWith(problem([](Options& o) {
                                 o.numel = std::numeric_limits<int64_t>::max();
                               }),
                               "--numel is 9223"));
  EXPECT_EQ(problem([](Options& o) { o.pieces = 0; }),
            "--pieces is 0, expected 1 to 1024");
  EXPECT_EQ(problem([](Options& o) { o.pieces = 1025; }),
            "--pieces is 1025, expected 1 to 1024");
  EXPECT_EQ(problem([](Options& o) { o.threads = -1; }),
            "--threads is -1, expected 0 to 4096");
  EXPECT_EQ(problem([](Options& o) { o.rounds = 0; }),
            "--rounds is 0, expected at least 1");
}

TEST(PipelineBenchTest, AKernelWithoutTheTypesIsNamed) {
  for (DTypeSet Kernel::*types :
       {&Kernel::copy_types, &Kernel::gradient_types}) {
    Kernel without = ScalarKernel();
    without.*types = {DType::kFloat32};
    const absl::Status status =
        RunPipelineBench(without, SmallOptions()).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "kernel scalar"));
  }
}

}  // namespace
}  // namespace onepass

// What of a step runs beside what: copies out of staging buffers are over
// before these are filled again, and all before the step returns; a trace shows
// when each part ran.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "offload/shard_optimizer.h"
#include "offload/shard_optimizer_rig.h"
#include "offload/step_trace.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;

// --- The order of waits. ---

// Compares the source of each copy to the device when the copy begins and when
// it has ended.
class CopyWatcher {
 public:
  std::function<void(const HostDeviceCopy&, bool)> observer() {
    return [this](const HostDeviceCopy& copy, bool begins) {
      if (copy.direction != HostDeviceCopy::Direction::kToDevice) return;
      const auto* bytes = static_cast<const char*>(copy.from);
      const absl::string_view source(bytes, copy.bytes);
      const std::lock_guard<std::mutex> lock(mutex_);
      // One after the other on the thread of a stream.
      std::string& at_begin = at_begin_[std::this_thread::get_id()];
      if (begins) {
        at_begin = std::string(source);
      } else {
        changed_ += source != at_begin;
        ++copies_;
        sources_.insert(copy.from);
      }
    };
  }

  // Sources that were written during their copy, and copies, since the last
  // call.
  std::pair<int64_t, int64_t> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {std::exchange(changed_, 0), std::exchange(copies_, 0)};
  }
  // Where copies began, since the last call.
  std::set<const void*> TakeSources() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(sources_, {});
  }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, std::string> at_begin_;
  int64_t changed_ = 0;
  int64_t copies_ = 0;
  std::set<const void*> sources_;
};

// Takes some 2 ms for a piece.
void SlowDown(RigConfig& config) { config.device.link_bytes_per_s = 1e6; }

TEST(ShardOptimizerWaitsTest, NoBufferIsRefilledBeforeItsCopyHasEnded) {
  CopyWatcher watcher;
  RigConfig config;
  SlowDown(config);
  config.device.observer = watcher.observer();
  for (const StepPath path : kStepPaths) {
    for (const int buffers : {1, 2, 3}) {
      config.options.path = path;
      config.options.staging_buffers = buffers;
      SCOPED_TRACE(testing::Message()
                   << Name(path) << ", " << buffers << " buffers");
      Reference reference(config);
      Rig rig(config);
      ASSERT_TRUE(rig.Create().ok());
      watcher.Take();
      for (int64_t step = 1; step <= 2; ++step) {
        const int64_t waits = HostWaits(rig.device());
        const absl::StatusOr<StepReport> report = rig.Step(step, AllGradients);
        ASSERT_TRUE(report.ok()) << report.status();
        EXPECT_EQ(HostWaits(rig.device()) - waits, 2 + report->buffer_waits);
        EXPECT_EQ(rig.device().WorkInFlight(), 0);
        const auto [changed, copies] = watcher.Take();
        EXPECT_EQ(changed, 0) << "of " << copies << " copies";
        EXPECT_GE(copies, report->pieces);
        EXPECT_GT(report->pieces, 20);
        EXPECT_EQ(report->host_waits, 2);
        // The link is slower than the update but under an emulator.
        if (!UnderEmulator()) {
          EXPECT_EQ(report->most_buffers_in_flight, buffers);
          EXPECT_GT(report->buffer_waits, 0);
        }
        reference.Step(step, AllGradients);
      }
      ExpectSame(rig.Take(), reference.Take());
    }
  }
}

TEST(ShardOptimizerWaitsTest, NoMoreBuffersAreInFlightThanThereAre) {
  CopyWatcher watcher;
  RigConfig config;
  // Whole pieces, each of which is one copy.
  config.numels = {10 * kLeafNumel};
  config.options.piece_numel = kLeafNumel;
  config.device.link_bytes_per_s = 4e6;  // 2 ms for a piece
  config.device.observer = watcher.observer();
  for (const StepPath path : kStepPaths) {
    for (const int buffers : {1, 2, 3}) {
      config.options.path = path;
      config.options.staging_buffers = buffers;
      SCOPED_TRACE(testing::Message()
                   << Name(path) << ", " << buffers << " buffers");
      Rig rig(config);
      ASSERT_TRUE(rig.Create().ok());
      watcher.TakeSources();
      const absl::StatusOr<StepReport> report = rig.Step(1, AllGradients);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->pieces, 10);
      // A buffer holds one piece until its copy has ended (see above), so no
      // more can be in flight than copies came from.
      EXPECT_EQ(static_cast<int>(watcher.TakeSources().size()), buffers);
      EXPECT_LE(report->most_buffers_in_flight, buffers);
      if (!UnderEmulator()) {
        EXPECT_EQ(report->most_buffers_in_flight, buffers);
      }
    }
  }
}

// A kernel whose updates and casts wait until nothing is in flight.
class PatientKernel {
 public:
  PatientKernel() : operations_(*BestKernel().operations) {
    operations_.adam_step = [](const AdamStepArgs& args) {
      AwaitDevice();
      BestKernel().operations->adam_step(args);
    };
    operations_.cast = [](const CastArgs& args) {
      AwaitDevice();
      BestKernel().operations->cast(args);
    };
    kernel_.operations = &operations_;
  }

  const Kernel& kernel() const { return kernel_; }
  // For whose work they wait; null: for none.
  void SetDevice(const HostDevice* device) { device_ = device; }

 private:
  static void AwaitDevice() {
    while (device_ != nullptr && device_->WorkInFlight() > 0) {
      std::this_thread::yield();
    }
  }

  static const HostDevice* device_;

  KernelOperations operations_;
  Kernel kernel_ = BestKernel();
};

const HostDevice* PatientKernel::device_ = nullptr;

TEST(ShardOptimizerWaitsTest, OneBufferIsInFlightWhereCopiesEndBeforeUpdates) {
  PatientKernel patient;
  RigConfig config;
  config.kernel = &patient.kernel();
  config.device_kernel = &BestKernel();
  config.options.staging_buffers = 3;
  for (const StepPath path : kStepPaths) {
    config.options.path = path;
    SCOPED_TRACE(Name(path));
    Rig rig(config);
    ASSERT_TRUE(rig.Create().ok());
    patient.SetDevice(&rig.device());
    const absl::StatusOr<StepReport> report = rig.Step(1, AllGradients);
    patient.SetDevice(nullptr);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_GT(report->pieces, 20);
    EXPECT_EQ(report->most_buffers_in_flight, 1);
    EXPECT_EQ(report->buffer_waits, 0);
  }
}

TEST(ShardOptimizerWaitsTest, NothingIsInFlightWhenAStepReturns) {
  CopyWatcher watcher;
  RigConfig config;
  SlowDown(config);
  config.device.observer = watcher.observer();
  for (const DType weights : {kBF16, kF32}) {
    for (const double ratio : {0.0, kCutRatio, 1.0}) {
      config.options.weights_type = weights;
      config.options.cpu_ratio = ratio;
      // All in one piece.
      config.options.piece_numel = 100'000;
      Rig rig(config);
      ASSERT_TRUE(rig.Create().ok());
      watcher.Take();
      ASSERT_TRUE(rig.Step(1, AllGradients).ok());
      EXPECT_EQ(rig.device().WorkInFlight(), 0);
      const auto [changed, copies] = watcher.Take();
      EXPECT_EQ(changed, 0);
      EXPECT_EQ(copies > 0, ratio > 0);
      // Nor when gradients were missing, and zeros put there instead.
      rig.Fill(2,
               [](int, int64_t, int64_t, int64_t) { return TestGradient(); });
      ASSERT_TRUE(rig.Add().ok());
      ASSERT_TRUE(rig.optimizer().LocalNorm().ok());
      EXPECT_EQ(rig.device().WorkInFlight(), 0);
      StepInput skip;
      skip.found_inf = true;
      ASSERT_TRUE(rig.Finish(skip).ok());
      EXPECT_EQ(rig.device().WorkInFlight(), 0);
    }
  }
}

TEST(ShardOptimizerWaitsTest, MicroBatchesWaitForThoseBefore) {
  RigConfig config;
  SlowDown(config);
  config.options.micro_batches = 3;
  config.options.cpu_ratio = kCutRatio;
  Reference reference(config);
  Rig rig(config);
  ASSERT_TRUE(rig.Create().ok());
  for (int64_t step = 1; step <= 2; ++step) {
    const int64_t waits = HostWaits(rig.device());
    const absl::StatusOr<StepReport> report = rig.Step(step, AllGradients);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->host_waits, 2);
    EXPECT_EQ(HostWaits(rig.device()) - waits,
              2 + report->gradient_waits + report->buffer_waits);
    // At most one for each gradient but the first of a shard on the CPU.
    EXPECT_LE(report->gradient_waits, 2 * 4);
    if (!UnderEmulator()) {
      EXPECT_GT(report->gradient_waits, 0);
    }
    reference.Step(step, AllGradients);
  }
  ExpectSame(rig.Take(), reference.Take());
}

TEST(ShardOptimizerWaitsTest, DestructionWaitsForWhatIsInFlight) {
  RigConfig config;
  config.device.link_bytes_per_s = 1e5;  // a third of a second for all
  config.options.cpu_ratio = kCutRatio;
  Rig rig(config);
  ASSERT_TRUE(rig.Create().ok());
  rig.Fill(1, AllGradients);
  ASSERT_TRUE(rig.Add().ok());
  EXPECT_GT(rig.device().WorkInFlight(), 0);
  rig.Destroy();
  EXPECT_EQ(rig.device().WorkInFlight(), 0);
}

// --- The trace. ---

class TraceTest : public testing::Test {
 protected:
  TraceTest() { config_.options.cpu_ratio = kCutRatio; }

  int64_t Count(TraceRow row, absl::string_view name) const {
    return std::count_if(trace_.spans.begin(), trace_.spans.end(),
                         [&](const TraceSpan& span) {
                           return span.row == row && span.name == name;
                         });
  }
  int64_t Numel(TraceRow row, absl::string_view name) const {
    int64_t numel = 0;
    for (const TraceSpan& span : trace_.spans) {
      if (span.row == row && span.name == name) numel += span.numel;
    }
    return numel;
  }

  RigConfig config_;
  StepTrace trace_;
};

TEST_F(TraceTest, HasASpanForEachPart) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
  const absl::StatusOr<StepReport> report = rig.Step(1, AllGradients);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(Count(TraceRow::kGradients, "gradient"), 6);  // one has none
  EXPECT_EQ(Numel(TraceRow::kGradients, "gradient"), Sum(config_.numels));
  EXPECT_EQ(Count(TraceRow::kHost, "wait for gradients"), 1);
  EXPECT_EQ(Count(TraceRow::kHost, "update"), report->pieces);
  EXPECT_GE(Numel(TraceRow::kHost, "update"), report->cpu_numel);
  EXPECT_EQ(Count(TraceRow::kCopies, "copy"), report->pieces);
  EXPECT_GE(Numel(TraceRow::kCopies, "copy"), report->cpu_numel);
  EXPECT_EQ(Count(TraceRow::kDevice, "update"), 1);
  EXPECT_EQ(Numel(TraceRow::kDevice, "update"), report->device_numel);
  EXPECT_EQ(Count(TraceRow::kHost, "wait for a buffer"), report->buffer_waits);
  EXPECT_EQ(Count(TraceRow::kHost, "wait for the last copy"), 1);
  EXPECT_EQ(static_cast<int64_t>(trace_.spans.size()),
            6 + 1 + 2 * report->pieces + 1 + report->buffer_waits + 1);
  // One after the other in a row.
  std::map<TraceRow, std::vector<std::pair<double, double>>> rows;
  for (const TraceSpan& span : trace_.spans) {
    EXPECT_GE(span.begin_s, 0) << span.name;
    EXPECT_LE(span.begin_s, span.end_s) << span.name;
    rows[span.row].push_back({span.begin_s, span.end_s});
  }
  for (auto& [row, spans] : rows) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) {
      EXPECT_LE(spans[i - 1].second, spans[i].first)
          << "row " << static_cast<int>(row);
    }
  }
}

TEST_F(TraceTest, ThreePassesHaveSpansOfTheirOwn) {
  config_.options.path = StepPath::kSeparate;
  config_.options.micro_batches = 2;
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
  const absl::StatusOr<StepReport> report = rig.Step(1, AllGradients);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(Count(TraceRow::kGradients, "gradient"), 2 * 6);
  // Of the four shards that have a part on the CPU, each micro-batch.
  EXPECT_EQ(Count(TraceRow::kHost, "sum"), 2 * 4);
  EXPECT_EQ(Numel(TraceRow::kHost, "sum"), 2 * report->cpu_numel);
  EXPECT_EQ(Count(TraceRow::kHost, "widen"), 0);
  EXPECT_EQ(Count(TraceRow::kHost, "scale"), 1);  // a sub-group
  EXPECT_EQ(Count(TraceRow::kHost, "update"), report->pieces);
  EXPECT_EQ(Count(TraceRow::kHost, "cast"), report->pieces);
  EXPECT_EQ(Count(TraceRow::kCopies, "copy"), report->pieces);
  EXPECT_EQ(Count(TraceRow::kHost, "wait for gradients"),
            1 + report->gradient_waits);
}

TEST_F(TraceTest, WideningIsAPassOfItsOwn) {
  config_.options.path = StepPath::kSeparate;
  config_.options.grad_type = kBF16;
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
  ASSERT_TRUE(rig.Step(1, AllGradients).ok());
  EXPECT_EQ(Count(TraceRow::kHost, "sum"), 0);
  EXPECT_EQ(Count(TraceRow::kHost, "widen"), 1);  // a sub-group
  EXPECT_EQ(Numel(TraceRow::kHost, "widen"), Numel(TraceRow::kHost, "scale"));
}

TEST_F(TraceTest, ChangesNoBitAndEnds) {
  Reference reference(config_);
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  size_t spans = 0;
  for (int64_t step = 1; step <= 4; ++step) {
    // Steps 2 and 3 are traced; from the middle of step 2 on.
    rig.Fill(step);
    ASSERT_TRUE(rig.Add().ok());
    if (step == 2) {
      ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
    }
    if (step == 4) {
      ASSERT_TRUE(rig.optimizer().SetTrace(nullptr).ok());
    }
    ASSERT_TRUE(rig.Finish().ok());
    EXPECT_EQ(trace_.spans.size() > spans, step == 2 || step == 3);
    EXPECT_EQ(Count(TraceRow::kGradients, "gradient") > 0, step >= 3);
    spans = trace_.spans.size();
    reference.Step(step);
  }
  ExpectSame(rig.Take(), reference.Take());
}

TEST_F(TraceTest, HasTheGradientsOfASkippedStep) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
  StepInput skip;
  skip.found_inf = true;
  ASSERT_TRUE(rig.Step(1, AllGradients, skip).ok());
  EXPECT_EQ(Count(TraceRow::kGradients, "gradient"), 6);
  EXPECT_EQ(Count(TraceRow::kHost, "wait for gradients"), 1);
  EXPECT_EQ(trace_.spans.size(), 7u);
}

// Spans in the order in which they were, with one copy for each update.
struct Pipeline {
  std::vector<TraceSpan> updates;
  std::vector<TraceSpan> copies;
};

class PipelineTraceTest : public TraceTest {
 protected:
  PipelineTraceTest() {
    // Whole pieces, whose copies take 4 ms.
    config_.numels = {kPieces * kLeafNumel};
    config_.options.piece_numel = kLeafNumel;
    config_.options.cpu_ratio = 1;
    config_.device.link_bytes_per_s = 2e6;
  }

  void TraceStep(Rig& rig, int64_t step, Pipeline& pipeline) {
    trace_.spans.clear();
    pipeline = {};
    ASSERT_TRUE(rig.Step(step, AllGradients).ok());
    for (const TraceSpan& span : trace_.spans) {
      if (span.name == absl::string_view("update")) {
        pipeline.updates.push_back(span);
      } else if (span.name == absl::string_view("copy")) {
        pipeline.copies.push_back(span);
      }
    }
    ASSERT_EQ(static_cast<int>(pipeline.updates.size()), kPieces);
    ASSERT_EQ(static_cast<int>(pipeline.copies.size()), kPieces);
  }

  static constexpr int kPieces = 10;
};

TEST_F(PipelineTraceTest, UpdatesLieInCopiesOfPiecesBefore) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
  // The host may be kept from going on for some pieces, but not in all steps.
  int most = 0;
  for (int64_t step = 1; step <= 20 && most <= kPieces / 2; ++step) {
    Pipeline pipeline;
    ASSERT_NO_FATAL_FAILURE(TraceStep(rig, step, pipeline));
    int inside = 0;
    for (int i = 1; i < kPieces; ++i) {
      const TraceSpan& update = pipeline.updates[i];
      inside += std::any_of(
          pipeline.copies.begin(), pipeline.copies.begin() + i,
          [&](const TraceSpan& copy) {
            return copy.begin_s <= update.begin_s && update.end_s <= copy.end_s;
          });
    }
    most = std::max(most, inside);
  }
  EXPECT_GT(most, kPieces / 2);
}

// With one buffer each piece waits for the copy of the one before.
TEST_F(PipelineTraceTest, OneBufferOverlapsNothing) {
  config_.options.staging_buffers = 1;
  config_.device.link_bytes_per_s = 20e6;  // 0.4 ms for a piece
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  for (int64_t step = 1; step <= 20; ++step) {
    // The clocks are set anew.
    ASSERT_TRUE(rig.optimizer().SetTrace(&trace_).ok());
    Pipeline pipeline;
    ASSERT_NO_FATAL_FAILURE(TraceStep(rig, step, pipeline));
    for (int i = 0; i < kPieces; ++i) {
      // The clocks are read within some microseconds of one another.
      EXPECT_LE(pipeline.updates[i].end_s, pipeline.copies[i].begin_s + 1e-4)
          << "step " << step << ", piece " << i;
      if (i > 0) {
        EXPECT_LE(pipeline.copies[i - 1].end_s, pipeline.updates[i].begin_s)
            << "step " << step << ", piece " << i;
      }
    }
  }
}

}  // namespace
}  // namespace onepass

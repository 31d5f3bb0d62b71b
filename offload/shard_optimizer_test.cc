#include "offload/shard_optimizer.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "offload/gradient_clip.h"
#include "offload/loss_scaler.h"
#include "offload/shard_optimizer_rig.h"
#include "tests/counting_kernel.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = TestGradient::Kind;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// --- What was fused, and why not. ---

// Operations of the CPU.
struct Counts {
  int64_t adam_step, with_copy, streaming, accumulate, scale, cast,
      squared_norm;
};

Counts CountsNow() {
  const OperationCounter& counts = OperationCounts<0>();
  return {counts.adam_step,
          counts.adam_step_with_copy,
          counts.adam_step_streaming,
          counts.accumulate,
          counts.scale,
          counts.cast,
          counts.squared_norm};
}

class StepReportTest : public testing::Test {
 protected:
  StepReportTest() {
    config_.kernel = &kernel_;
    config_.device_kernel = &BestKernel();
    config_.options.max_norm = 1;
  }

  // Of a second step. `prepare` is called before creation.
  void Run(const std::function<void(HostDevice&)>& prepare = nullptr) {
    Rig rig(config_);
    if (prepare) prepare(rig.device());
    const absl::Status created = rig.Create();
    ASSERT_TRUE(created.ok()) << created;
    ASSERT_TRUE(rig.Step(1, AllGradients).ok());
    rig.Fill(2, AllGradients);
    const Counts before = CountsNow();
    const int64_t waits_before = HostWaits(rig.device());
    ASSERT_TRUE(rig.Add().ok());
    const absl::StatusOr<StepReport> report = rig.Finish();
    const int64_t waits = HostWaits(rig.device()) - waits_before;
    const Counts after = CountsNow();
    ASSERT_TRUE(report.ok()) << report.status();
    report_ = *report;
    scale_reason_ = std::string(report->scale_reason);
    copy_reason_ = std::string(report->copy_reason);
    counts_ = {after.adam_step - before.adam_step,
               after.with_copy - before.with_copy,
               after.streaming - before.streaming,
               after.accumulate - before.accumulate,
               after.scale - before.scale,
               after.cast - before.cast,
               after.squared_norm - before.squared_norm};
    pinning_error_ = rig.optimizer().pinning_error();
    EXPECT_EQ(report_.host_waits, 2);
    EXPECT_EQ(report_.gradient_waits, 0);
    EXPECT_EQ(waits, 2 + report_.buffer_waits);
    EXPECT_FALSE(report_.skipped);
    EXPECT_EQ(report_.skip_reason, "");
    EXPECT_GT(report_.norm, 1);
    EXPECT_LT(report_.factor, 1);
    EXPECT_EQ(report_.loss_scale, 1);
    EXPECT_GE(report_.seconds, 0);
    // The norm costs no pass of its own over CPU memory.
    EXPECT_EQ(counts_.squared_norm, 0);
    EXPECT_EQ(counts_.accumulate, 0);
  }

  // Copies are a pass of their own, the scale is not.
  void ExpectOnlyScaleFused(const std::string& reason) {
    EXPECT_TRUE(report_.scale_fused);
    EXPECT_EQ(scale_reason_, "");
    EXPECT_FALSE(report_.copy_fused);
    EXPECT_THAT(copy_reason_, HasSubstr(reason));
    EXPECT_GT(counts_.adam_step, 0);
    EXPECT_EQ(counts_.with_copy, 0);
    EXPECT_EQ(counts_.scale, 0);
  }

  Kernel kernel_ = MakeCountingKernel<0>(BestKernel(), "counting");
  RigConfig config_;
  StepReport report_;
  std::string scale_reason_, copy_reason_;
  Counts counts_;
  absl::Status pinning_error_;
};

TEST_F(StepReportTest, OnePassHasScaleAndCopiesInIt) {
  Run();
  EXPECT_TRUE(report_.scale_fused);
  EXPECT_EQ(scale_reason_, "");
  EXPECT_TRUE(report_.copy_fused);
  EXPECT_EQ(copy_reason_, "");
  EXPECT_FALSE(report_.streaming_stores);
  EXPECT_GT(report_.pieces, 20);
  EXPECT_GE(report_.most_buffers_in_flight, 1);
  EXPECT_LE(report_.most_buffers_in_flight, 2);
  EXPECT_LE(report_.buffer_waits, report_.pieces - 2);
  EXPECT_GE(counts_.adam_step, report_.pieces);
  EXPECT_EQ(counts_.with_copy, counts_.adam_step);
  EXPECT_EQ(counts_.streaming, 0);
  EXPECT_EQ(counts_.scale, 0);
  EXPECT_EQ(counts_.cast, 0);
}

TEST_F(StepReportTest, ThreePassesAreThree) {
  config_.options.path = StepPath::kSeparate;
  for (const DType grad_type : {kBF16, kF32}) {
    config_.options.grad_type = grad_type;
    Run();
    EXPECT_FALSE(report_.scale_fused);
    EXPECT_EQ(scale_reason_, "the separate path was asked for");
    EXPECT_FALSE(report_.copy_fused);
    EXPECT_EQ(copy_reason_, "the separate path was asked for");
    EXPECT_GT(counts_.adam_step, 0);
    EXPECT_EQ(counts_.with_copy, 0);
    EXPECT_GT(counts_.scale, 0);
    EXPECT_GE(counts_.cast, report_.pieces);
  }
}

TEST_F(StepReportTest, LargePiecesAreStreamedWhereTheKernelCan) {
  const int64_t streamed = kStreamedCopyBytes / ByteSize(kBF16);
  config_.numels = {streamed + 5000};
  const bool can = kernel_.operations->streams_copies;
  for (const int64_t piece_numel : {streamed / 2, streamed}) {
    config_.options.piece_numel = piece_numel;
    Run();
    EXPECT_TRUE(report_.copy_fused);
    EXPECT_EQ(report_.streaming_stores, can && piece_numel == streamed);
    EXPECT_EQ(counts_.streaming,
              report_.streaming_stores ? counts_.with_copy : 0);
  }
}

TEST_F(StepReportTest, AKernelMayWriteNoCopies) {
  for (const DType weights : {kBF16, kF16}) {
    config_.options.weights_type = weights;
    kernel_.copy_types = {};
    Run();
    ExpectOnlyScaleFused(
        absl::StrCat("kernel counting writes no copies in ", Name(weights)));
    EXPECT_GE(counts_.cast, report_.pieces);
    // The other type alone is as little.
    kernel_.copy_types = {weights == kBF16 ? kF16 : kBF16};
    Run();
    ExpectOnlyScaleFused("kernel counting writes no copies in ");
  }
}

TEST_F(StepReportTest, MemoryMayNotBePinned) {
  config_.options.pin_memory = false;
  Run();
  ExpectOnlyScaleFused("memory is not pinned: pin_memory is off");
  EXPECT_GE(counts_.cast, report_.pieces);
  EXPECT_TRUE(pinning_error_.ok());
}

TEST_F(StepReportTest, PinningMayBeRefused) {
  const absl::Status error = absl::ResourceExhaustedError("no pages to lock");
  for (const int64_t skip : {0, 1, 2}) {  // gradients, staging, norm
    Run([&](HostDevice& device) {
      device.RefuseCall(HostDeviceCall::kPin, skip, error);
    });
    ExpectOnlyScaleFused("memory is not pinned: no pages to lock");
    EXPECT_GE(counts_.cast, report_.pieces);
    EXPECT_EQ(pinning_error_, error);
  }
}

TEST_F(StepReportTest, MastersAreTheCopyWhereWeightsAreFp32) {
  config_.options.weights_type = kF32;
  Run();
  ExpectOnlyScaleFused("weights are fp32: the masters themselves are copied");
  EXPECT_EQ(counts_.cast, 0);
  EXPECT_EQ(report_.most_buffers_in_flight, 0);
}

TEST_F(StepReportTest, TheCpuMayHaveNothingToDo) {
  config_.options.cpu_ratio = 0;
  Run();
  EXPECT_TRUE(report_.scale_fused);
  EXPECT_FALSE(report_.copy_fused);
  EXPECT_EQ(copy_reason_, "the CPU updates nothing");
  EXPECT_EQ(report_.cpu_numel, 0);
  EXPECT_EQ(report_.device_numel, Sum(config_.numels));
  EXPECT_EQ(report_.pieces, 0);
  EXPECT_EQ(counts_.adam_step + counts_.cast + counts_.scale, 0);
}

// --- Gradients that are not finite. ---

// All, with one value in the place of another.
GradientSource WithBad(int bad_shard, int64_t element, float value,
                       int64_t bad_micro_batch) {
  return [=](int shard, int64_t numel, int64_t step, int64_t micro_batch) {
    TestGradient gradient = AllGradients(shard, numel, step, micro_batch);
    if (shard == bad_shard && micro_batch == bad_micro_batch) {
      gradient.values[element] = value;
    }
    return gradient;
  };
}

class NonFiniteTest : public testing::Test {
 protected:
  NonFiniteTest() {
    config_.options.cpu_ratio = kCutRatio;
    config_.options.loss_scale =
        LossScale(LossScaleOptions::Mode::kDynamic, 65536);
  }

  // Two such steps between good ones.
  void ExpectSkipped(const GradientSource& bad) {
    Reference reference(config_);
    Rig rig(config_);
    ASSERT_TRUE(rig.Create().ok());
    ASSERT_TRUE(rig.Step(1).ok());
    reference.Step(1);
    const Snapshot before = rig.Take();
    int64_t skipped_steps = 0;
    for (const double scale_after : {65536.0, 32768.0}) {
      EXPECT_EQ(rig.optimizer().skipped_steps(), skipped_steps);
      const absl::StatusOr<StepReport> report = rig.Step(2, bad);
      ASSERT_TRUE(report.ok()) << report.status();
      reference.Step(2, bad);
      EXPECT_TRUE(reference.skipped());
      EXPECT_TRUE(report->skipped);
      EXPECT_EQ(report->skip_reason, "the norm of the gradient is not finite");
      EXPECT_FALSE(std::isfinite(report->norm));
      EXPECT_EQ(report->factor, 0);
      EXPECT_EQ(report->loss_scale, 65536);
      EXPECT_EQ(report->host_waits, 1);
      EXPECT_EQ(report->cpu_numel + report->device_numel, Sum(config_.numels));
      EXPECT_EQ(rig.optimizer().step(0), 1);
      EXPECT_EQ(rig.optimizer().skipped_steps(), ++skipped_steps);
      // Halved at the second.
      EXPECT_EQ(rig.optimizer().LossScale(), scale_after);
      EXPECT_EQ(rig.device().WorkInFlight(), 0);
      ExpectSame(rig.Take(), before);
    }
    const absl::StatusOr<StepReport> report = rig.Step(3);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_FALSE(report->skipped);
    EXPECT_EQ(report->loss_scale, 32768);
    EXPECT_EQ(rig.optimizer().skipped_steps(), 2);
    reference.Step(3);
    ExpectSame(rig.Take(), reference.Take());
    EXPECT_EQ(rig.optimizer().LossScale(), reference.loss_scale());
  }

  RigConfig config_;
};

TEST_F(NonFiniteTest, OneElementAnywhereSkipsTheStep) {
  const struct {
    const char* what;
    int shard;
    int64_t element;
  } places[] = {{"a shard of one", 0, 0},
                {"within a large one", 1, 7000},
                {"its last", 1, 3 * kLeafNumel + 36},
                {"the device's part of one", 4, 4999},
                {"the device's own", 5, 0}};
  // Of seven combinations one, which has each value at least once.
  const int stride = LongTestStride() == 1 ? 1 : 7;
  int combination = 0;
  for (const DType type : {kBF16, kF16, kF32}) {
    config_.options.grad_type = type;
    for (const int64_t micro_batches : {1, 3}) {
      config_.options.micro_batches = micro_batches;
      for (const auto& place : places) {
        for (const double value : {kInfinity, -kInfinity, kNaN}) {
          if (combination++ % stride != 0) continue;
          SCOPED_TRACE(testing::Message()
                       << value << " in " << place.what << ", " << Name(type)
                       << ", micro-batches " << micro_batches);
          ExpectSkipped(WithBad(place.shard, place.element,
                                static_cast<float>(value), micro_batches / 2));
        }
      }
    }
  }
}

TEST_F(NonFiniteTest, SumsThatOverflowSkipTheStep) {
  config_.options.micro_batches = 2;
  config_.options.grad_type = kF32;
  for (const int shard : {1, 5}) {
    ExpectSkipped([shard](int of, int64_t numel, int64_t step, int64_t micro) {
      TestGradient gradient = AllGradients(of, numel, step, micro);
      if (of == shard) gradient.values[11] = 3e38f;
      return gradient;
    });
  }
}

TEST_F(NonFiniteTest, TheCallerMayHaveFoundOne) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  const Snapshot before = rig.Take();
  StepInput found;
  found.found_inf = true;
  for (const double scale_after : {65536.0, 32768.0}) {
    const absl::StatusOr<StepReport> report = rig.Step(1, AllGradients, found);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->skipped);
    EXPECT_EQ(report->skip_reason,
              "the caller found infinity in the gradients (found_inf)");
    EXPECT_TRUE(std::isfinite(report->norm));
    EXPECT_EQ(rig.optimizer().step(0), 0);
    EXPECT_EQ(rig.optimizer().LossScale(), scale_after);
    ExpectSame(rig.Take(), before);
  }
  // Whoever found it may know no norm.
  ASSERT_TRUE(rig.Add().ok());
  EXPECT_TRUE(rig.optimizer().Step(found).ok());
  EXPECT_EQ(rig.optimizer().skipped_steps(), 3);
}

TEST_F(NonFiniteTest, AnotherNormThanThatOfAllRanksIsRefused) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  const Snapshot before = rig.Take();
  const auto expect_refused = [&rig](const StepInput& input,
                                     const std::string& message) {
    const absl::Status status = rig.optimizer().Step(input).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  rig.Fill(1, AllGradients);
  ASSERT_TRUE(rig.Add().ok());
  expect_refused({}, "norm has a sum of squares of 0, expected at least the ");
  StepInput less;
  less.norm.Add(1000);
  expect_refused(less, "norm has a sum of squares of 1000, expected");
  EXPECT_EQ(rig.optimizer().skipped_steps(), 0);
  ExpectSame(rig.Take(), before);
  EXPECT_TRUE(rig.Finish().ok());  // with the right one

  rig.Fill(2, WithBad(1, 5, static_cast<float>(kNaN), 0));
  ASSERT_TRUE(rig.Add().ok());
  less.norm.Add(1e9);
  expect_refused(less, "expected at least the nan of this rank");
  EXPECT_TRUE(rig.Finish()->skipped);

  // Of others, it may be more, or not finite.
  StepInput more;
  more.norm.Add(kInfinity);
  rig.Fill(3, AllGradients);
  ASSERT_TRUE(rig.Add().ok());
  EXPECT_TRUE(rig.optimizer().Step(more)->skipped);
  more = {};
  more.norm.Add(1e12);
  ASSERT_TRUE(rig.Add().ok());
  const auto report = rig.optimizer().Step(more);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->norm * report->loss_scale, 1e6);
}

TEST_F(NonFiniteTest, AnotherLossScalerIsUsedInstead) {
  config_.options.max_norm = 1e-3;
  StepInput input;
  input.inv_scale = 1.0 / 512;
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  absl::StatusOr<StepReport> report = rig.Step(1, AllGradients, input);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->loss_scale, 512);
  config_.options.loss_scale = LossScale(LossScaleOptions::Mode::kStatic, 512);
  Reference reference(config_);
  reference.Step(1, AllGradients);
  EXPECT_EQ(report->factor, reference.factor());
  ExpectSame(rig.Take(), reference.Take());
  // The optimizer's own is as it was, also where the step is skipped.
  input.found_inf = true;
  for (int i = 0; i < 3; ++i) {
    report = rig.Step(2, AllGradients, input);
    ASSERT_TRUE(report.ok() && report->skipped) << report.status();
  }
  EXPECT_EQ(rig.optimizer().skipped_steps(), 3);
  EXPECT_EQ(rig.optimizer().LossScale(), 65536);
  EXPECT_EQ(rig.optimizer().loss_scale_state().clean_steps, 0);
  EXPECT_EQ(rig.optimizer().loss_scale_state().hysteresis_left, 2);
}

TEST_F(NonFiniteTest, AScaleThatMakesNoSenseIsRefused) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  const Snapshot before = rig.Take();
  rig.Fill(1, AllGradients);
  ASSERT_TRUE(rig.Add().ok());
  for (const double bad : {0.0, -1.0, kInfinity, kNaN, 1e-310}) {
    StepInput input;
    input.inv_scale = bad;
    const absl::Status status = rig.Finish(input).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith("inv_scale is "));
  }
  StepInput large;
  large.inv_scale = 1e39;
  const absl::Status status = rig.Finish(large).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("clip factor is inf"));
  ExpectSame(rig.Take(), before);
  // The gradients are still there.
  EXPECT_TRUE(rig.Finish().ok());
  Reference reference(config_);
  reference.Step(1, AllGradients);
  ExpectSame(rig.Take(), reference.Take());
}

// --- Gradients that are missing, null, or too many. ---

class GradientsTest : public testing::Test {
 protected:
  GradientsTest() { config_.options.cpu_ratio = kCutRatio; }

  static void ExpectFailedPrecondition(const absl::Status& status,
                                       const std::string& message) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  RigConfig config_;
};

TEST_F(GradientsTest, WhatIsMissingOrNullIsZero) {
  config_.options.micro_batches = 3;
  for (const double ratio : {0.0, kCutRatio, 1.0}) {
    config_.options.cpu_ratio = ratio;
    for (const StepPath path : kStepPaths) {
      config_.options.path = path;
      Reference reference(config_);
      Rig rig(config_);
      ASSERT_TRUE(rig.Create().ok());
      // After gradients for all, each pattern of null ones; then none at all.
      for (int step = 1; step <= 10; ++step) {
        SCOPED_TRACE(testing::Message() << "ratio " << ratio << ", "
                                        << Name(path) << ", step " << step);
        const GradientSource source = [step](int shard, int64_t numel, int64_t,
                                             int64_t micro) {
          if (step == 10 || (shard == 6 && step % 2 == 0)) {
            return TestGradient{Kind::kMissing, {}};
          }
          if (step > 1 && (((step - 2) >> micro) & 1) != 0) {
            return TestGradient{Kind::kNull, {}};
          }
          return AllGradients(shard, numel, step, micro);
        };
        const absl::StatusOr<StepReport> report = rig.Step(step, source);
        ASSERT_TRUE(report.ok()) << report.status();
        reference.Step(step, source);
        EXPECT_EQ(report->norm, GradientNorm(reference.norm()));
        ExpectSame(rig.Take(), reference.Take());
      }
    }
  }
}

TEST_F(GradientsTest, OneTooManyIsRefusedByName) {
  for (const int64_t micro_batches : {1, 3}) {
    config_.options.micro_batches = micro_batches;
    Rig rig(config_);
    ASSERT_TRUE(rig.Create().ok());
    rig.Fill(1, AllGradients);
    ASSERT_TRUE(rig.Add().ok());
    for (const void* gradient : {static_cast<const void*>(rig.gradient(4, 0)),
                                 static_cast<const void*>(nullptr)}) {
      ExpectFailedPrecondition(
          rig.optimizer().AddGradient(4, gradient, rig.stream()).status(),
          absl::StrCat("\"", Rig::ShardName(4),
                       "\" is one too many: there are ", micro_batches));
    }
    ASSERT_TRUE(rig.optimizer().LocalNorm().ok());
    ExpectFailedPrecondition(
        rig.optimizer().AddGradient(4, nullptr, rig.stream()).status(),
        "comes after the norm of this step was taken");
    ASSERT_TRUE(rig.Finish().ok());
    Reference reference(config_);
    reference.Step(1, AllGradients);
    ExpectSame(rig.Take(), reference.Take());
  }
}

TEST_F(GradientsTest, TooFewAreRefusedByName) {
  config_.options.micro_batches = 3;
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  rig.Fill(1, AllGradients);
  const auto add = [&rig](int shard, int64_t micro) {
    return rig.optimizer()
        .AddGradient(shard, rig.gradient(shard, micro), rig.stream())
        .status();
  };
  const int shards = static_cast<int>(config_.numels.size());
  for (int shard = 0; shard < shards; ++shard) {
    for (int micro = 0; micro < 3; ++micro) {
      if (shard == 4 && micro == 2) continue;
      ASSERT_TRUE(add(shard, micro).ok());
    }
  }
  const std::string message =
      absl::StrCat("\"", Rig::ShardName(4), "\" has 2 gradients, expected 3");
  ExpectFailedPrecondition(rig.optimizer().LocalNorm().status(), message);
  StepInput found;
  found.found_inf = true;
  ExpectFailedPrecondition(rig.optimizer().Step(found).status(), message);
  ASSERT_TRUE(add(4, 2).ok());
  ASSERT_TRUE(rig.Finish().ok());
  Reference reference(config_);
  reference.Step(1, AllGradients);
  ExpectSame(rig.Take(), reference.Take());
}

TEST_F(GradientsTest, DroppedOnesAreForgotten) {
  for (const int64_t micro_batches : {1, 3}) {
    config_.options.micro_batches = micro_batches;
    Reference reference(config_);
    Rig rig(config_);
    ASSERT_TRUE(rig.Create().ok());
    ASSERT_TRUE(rig.Step(1).ok());
    reference.Step(1);
    // One of each, or all and their norm.
    for (const bool all : {false, true}) {
      rig.Fill(7, AllGradients);
      if (all) {
        ASSERT_TRUE(rig.Add().ok());
        ASSERT_TRUE(rig.optimizer().LocalNorm().ok());
      } else {
        for (const int shard : {5, 1}) {
          ASSERT_TRUE(
              rig.optimizer()
                  .AddGradient(shard, rig.gradient(shard, 0), rig.stream())
                  .ok());
        }
      }
      ASSERT_TRUE(rig.optimizer().DropGradients().ok());
      const int step = all ? 3 : 2;
      const auto report = rig.Step(step);
      ASSERT_TRUE(report.ok()) << report.status();
      reference.Step(step);
      EXPECT_EQ(report->norm, GradientNorm(reference.norm()));
      ExpectSame(rig.Take(), reference.Take());
    }
  }
}

TEST_F(GradientsTest, TheNormIsTakenOnce) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  Reference reference(config_);
  reference.Step(1);
  rig.Fill(1);
  ASSERT_TRUE(rig.Add().ok());
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<NormSum> norm = rig.optimizer().LocalNorm();
    ASSERT_TRUE(norm.ok()) << norm.status();
    EXPECT_EQ(*norm, reference.norm());
  }
  const auto report = rig.Finish();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->host_waits, 2);
}

TEST_F(GradientsTest, WhatMakesNoSenseIsRefused) {
  Rig rig(config_);
  Rig other(config_);
  ASSERT_TRUE(rig.Create().ok());
  rig.Fill(1, AllGradients);
  const auto expect_invalid = [](const absl::StatusOr<Event*>& result,
                                 const std::string& message) {
    EXPECT_TRUE(absl::IsInvalidArgument(result.status())) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(message));
  };
  ShardOptimizer& optimizer = rig.optimizer();
  for (const int shard : {-1, 7}) {
    expect_invalid(optimizer.AddGradient(shard, nullptr, rig.stream()),
                   absl::StrCat("shard is ", shard, ", expected one of 7"));
  }
  expect_invalid(
      optimizer.AddGradient(1, static_cast<char*>(rig.gradient(1, 0)) + 1,
                            rig.stream()),
      absl::StrCat("\"", Rig::ShardName(1), "\" is not aligned"));
  expect_invalid(optimizer.AddGradient(1, rig.gradient(1, 0), other.stream()),
                 absl::StrCat("\"", Rig::ShardName(1),
                              "\" is on a stream of device host"));
  ASSERT_TRUE(rig.Add().ok());
  ASSERT_TRUE(rig.Finish().ok());
  Reference reference(config_);
  reference.Step(1, AllGradients);
  ExpectSame(rig.Take(), reference.Take());
}

TEST_F(GradientsTest, MemoryMayBeReusedWhenTheEventIsOver) {
  config_.device.link_bytes_per_s = 20e6;
  for (const int64_t micro_batches : {1, 3}) {
    config_.options.micro_batches = micro_batches;
    Reference reference(config_);
    Rig rig(config_);
    ASSERT_TRUE(rig.Create().ok());
    for (int64_t step = 1; step <= 2; ++step) {
      rig.Fill(step, AllGradients);
      for (int64_t micro = 0; micro < micro_batches; ++micro) {
        for (int shard = 0; shard < 7; ++shard) {
          const absl::StatusOr<Event*> copied = rig.optimizer().AddGradient(
              shard, rig.gradient(shard, micro), rig.stream());
          ASSERT_TRUE(copied.ok()) << copied.status();
          // Behind the event on the stream itself, or after it on the host.
          const int64_t bytes =
              config_.numels[shard] * ByteSize(config_.options.grad_type);
          if (shard % 2 == 0) {
            ASSERT_TRUE(rig.stream().Wait(**copied).ok());
            ASSERT_TRUE(
                rig.stream().SetZero(rig.gradient(shard, micro), bytes).ok());
          } else {
            ASSERT_TRUE((*copied)->Wait().ok());
            std::memset(rig.gradient(shard, micro), 0xff, bytes);
          }
        }
      }
      const auto report = rig.Finish();
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->skipped, false);
      reference.Step(step, AllGradients);
      ASSERT_TRUE(rig.stream().Synchronize().ok());
    }
    ExpectSame(rig.Take(), reference.Take());
  }
}

TEST_F(GradientsTest, AreReadAfterWhatIsOnTheirStream) {
  // Written by the caller's stream, behind a copy that takes its time.
  config_.device.link_bytes_per_s = 10e6;
  Reference reference(config_);
  reference.Step(1, AllGradients);
  const Snapshot expected = reference.Take();
  // Of the device, or wrapped: one like it, and the default stream.
  enum class Origin { kOwn, kWrapped, kDefault };
  for (const Origin origin :
       {Origin::kOwn, Origin::kWrapped, Origin::kDefault}) {
    SCOPED_TRACE(static_cast<int>(origin));
    Rig rig(config_);
    ASSERT_TRUE(rig.Create().ok());
    std::unique_ptr<Stream> wrapped;
    if (origin != Origin::kOwn) {
      auto stream = rig.device().WrapStream(
          origin == Origin::kWrapped ? rig.stream().native() : nullptr);
      ASSERT_TRUE(stream.ok()) << stream.status();
      wrapped = *std::move(stream);
    }
    Stream& stream = wrapped != nullptr ? *wrapped : rig.stream();
    rig.Fill(1, AllGradients);
    constexpr int kShard = 5;
    const int64_t bytes =
        config_.numels[kShard] * ByteSize(config_.options.grad_type);
    Bytes values(bytes);
    std::memcpy(values.data(), rig.gradient(kShard, 0), bytes);
    std::memset(rig.gradient(kShard, 0), 0x11, bytes);
    std::vector<char> other(100'000);
    absl::StatusOr<DeviceBuffer> slow = rig.device().Allocate(100'000);
    ASSERT_TRUE(slow.ok()) << slow.status();
    ASSERT_TRUE(stream.CopyToDevice(slow->data(), other.data(), 100'000).ok());
    ASSERT_TRUE(
        stream.CopyToDevice(rig.gradient(kShard, 0), values.data(), bytes)
            .ok());
    for (size_t i = 0; i < config_.numels.size(); ++i) {
      const int shard = static_cast<int>(i);
      ASSERT_TRUE(rig.optimizer()
                      .AddGradient(shard, rig.gradient(shard, 0), stream)
                      .ok());
    }
    ASSERT_TRUE(rig.Finish().ok());
    ExpectSame(rig.Take(), expected);
  }
}

// --- Creation. ---

class CreationTest : public testing::Test {
 protected:
  absl::Status Create(const ShardOptimizerOptions& options,
                      std::vector<Shard> shards) {
    return ShardOptimizer::Create({BestKernel(), rig_.device(), rig_.pool()},
                                  options, std::move(shards))
        .status();
  }
  void ExpectRefused(const std::function<void(ShardOptimizerOptions&)>& change,
                     const std::string& message) {
    ShardOptimizerOptions options = config_.options;
    change(options);
    ExpectInvalid(Create(options, rig_.MakeShards()), message);
  }
  // Shard 1 with something wrong.
  void ExpectShardRefused(const std::function<void(Shard&)>& change,
                          const std::string& message) {
    std::vector<Shard> shards = rig_.MakeShards();
    change(shards[1]);
    ExpectInvalid(Create(config_.options, shards), message);
  }
  static void ExpectInvalid(const absl::Status& status,
                            const std::string& message) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  const RigConfig config_;
  Rig rig_{config_};
};

TEST_F(CreationTest, OptionsThatMakeNoSenseAreNamed) {
  using Options = ShardOptimizerOptions;
  ExpectRefused([](Options& o) { o.groups.clear(); }, "groups is empty");
  ExpectRefused([](Options& o) { o.groups[1].beta1 = 1; }, "group 1: beta1 is");
  ExpectRefused([](Options& o) { o.weights_type = kE4M3; },
                "weights_type is e4m3");
  ExpectRefused([](Options& o) { o.grad_type = kE4M3; }, "grad_type is e4m3");
  ExpectRefused([](Options& o) { o.exp_avg_type = kF16; },
                "exp_avg_type is fp16");
  ExpectRefused([](Options& o) { o.exp_avg_sq_type = kF16; },
                "exp_avg_sq_type is fp16");
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, -kMost}) {
    const std::string is = absl::StrCat(" is ", bad, ", expected at least 1");
    ExpectRefused([=](Options& o) { o.micro_batches = bad; },
                  "micro_batches" + is);
    ExpectRefused([=](Options& o) { o.piece_numel = bad; }, "piece_numel" + is);
    ExpectRefused([=](Options& o) { o.sub_group_numel = bad; },
                  "sub_group_numel" + is);
  }
  ExpectRefused([](Options& o) { o.staging_buffers = 0; },
                "staging_buffers is 0");
  for (const double bad : {-1.0, kInfinity, kNaN}) {
    ExpectRefused([=](Options& o) { o.max_norm = bad; }, "max_norm is ");
    ExpectRefused([=](Options& o) { o.cpu_ratio = bad; }, "cpu_ratio is ");
  }
  ExpectRefused([](Options& o) { o.cpu_ratio = 1.01; }, "cpu_ratio is 1.01");
  ExpectRefused(
      [](Options& o) {
        o.loss_scale = LossScale(LossScaleOptions::Mode::kDynamic, 3);
      },
      "initial_scale");
}

TEST_F(CreationTest, TypesThatTheDeviceDoesNotTakeAreNamed) {
  const auto create = [](const std::function<void(Kernel&)>& limit,
                         double cpu_ratio, int64_t micro_batches) {
    Kernel kernel = BestKernel();
    limit(kernel);
    RigConfig config;
    config.device_kernel = &kernel;
    config.options.cpu_ratio = cpu_ratio;
    config.options.micro_batches = micro_batches;
    Rig rig(config);
    const absl::Status status = rig.Create();
    EXPECT_EQ(rig.device().pinned_memory().allocations > 0, status.ok());
    return status;
  };
  const auto only_fp32 = [](Kernel& k) { k.gradient_types = {kF32}; };
  const auto only_bf16 = [](Kernel& k) { k.gradient_types = {kBF16}; };
  const auto moments = [](Kernel& k) { k.moment_types = {kBF16}; };
  const auto no_copies = [](Kernel& k) { k.copy_types = {}; };
  ExpectInvalid(create(only_fp32, kCutRatio, 1),
                "grad_type is bf16, which device host does not update with: it "
                "has a part, by a cpu_ratio of 0.6");
  // Sums are fp32, whatever they are of.
  EXPECT_TRUE(create(only_fp32, kCutRatio, 3).ok());
  ExpectInvalid(create(only_bf16, kCutRatio, 3),
                "the sum of micro_batches is fp32, which device host");
  EXPECT_TRUE(create(only_bf16, kCutRatio, 1).ok());
  ExpectInvalid(create(moments, 0, 1), "exp_avg_type is fp32, which device");
  ExpectInvalid(create(no_copies, 0, 1), "weights_type is bf16, which device");
  // A device without a part updates nothing.
  for (const auto& limit : std::vector<std::function<void(Kernel&)>>{
           only_fp32, only_bf16, moments, no_copies}) {
    for (const int64_t micro_batches : {1, 3}) {
      EXPECT_TRUE(create(limit, 1, micro_batches).ok());
    }
  }
}

TEST_F(CreationTest, ShardsThatMakeNoSenseAreNamed) {
  const std::string name = absl::StrCat("shard \"", Rig::ShardName(1), "\"");
  ExpectShardRefused([](Shard& s) { s.name = ""; }, "a shard has no name");
  ExpectShardRefused(
      [](Shard& s) { s.name = Rig::ShardName(0); },
      absl::StrCat("\"", Rig::ShardName(0), "\" is there twice"));
  for (const int group : {-1, 2}) {
    ExpectShardRefused([=](Shard& s) { s.group = group; },
                       absl::StrCat(name, ": group is ", group));
  }
  ExpectShardRefused([](Shard& s) { s.weights = nullptr; },
                     name + ": weights is null");
  ExpectShardRefused(
      [](Shard& s) { s.weights = static_cast<char*>(s.weights) + 1; },
      name + ": weights is not aligned");
  ExpectShardRefused([](Shard& s) { s.values = nullptr; },
                     name + ": values is not set");
  ExpectShardRefused([](Shard& s) { s.box.extent[0] += 1; },
                     name + ": box has [0, 0 + ");
  ExpectShardRefused([](Shard& s) { s.box.offset[0] = 1; },
                     name + ": box has [1, 1 + ");
  ExpectShardRefused([](Shard& s) { s.box.offset[0] = -1; },
                     name + ": box has [-1, ");
  ExpectShardRefused([](Shard& s) { s.box.offset[0] = kMost; },
                     name + ": box has [");
  ExpectShardRefused([](Shard& s) { s.box.extent[0] = -1; },
                     name + ": shape or box has a negative size");
  ExpectShardRefused([](Shard& s) { s.shape = {-4}; },
                     name + ": shape or box has a negative size");
  ExpectShardRefused([](Shard& s) { s.box.offset = {}; },
                     name + ": shape or box");
  ExpectShardRefused(
      [](Shard& s) {
        s.shape = {kMost, 2};
      },
      name + ": shape or box");
  ExpectShardRefused(
      [](Shard& s) {
        s.box = {{0, 0}, {1, 1}};
      },
      name + ": box has 2 dimensions, expected 1 or the 1");
  ExpectShardRefused(
      [](Shard& s) {
        s.values = [](int64_t, absl::Span<float>) {
          return absl::InvalidArgumentError("no such file");
        };
      },
      name + ": no such file");
  ExpectShardRefused(
      [](Shard& s) { s.values = ValuesOf(absl::Span<const float>()); },
      name + ": there are 0 values, of ");
}

TEST_F(CreationTest, MoreElementsThanThereCanBeAreRefused) {
  for (const int64_t numel : {(int64_t{1} << 44) + 1, kMost}) {
    std::vector<Shard> shards = rig_.MakeShards();
    shards[1].shape = {numel};
    shards[1].box.extent = {numel};
    const absl::Status status = Create(config_.options, shards);
    EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr(Rig::ShardName(1)), HasSubstr(absl::StrCat(numel))));
  }
}

// Creates one of a single shard, and reads its initial values back.
TEST_F(CreationTest, AShardMayBeABoxOrARange) {
  const struct {
    std::vector<int64_t> shape;
    Box box;
  } cases[] = {{{}, {{}, {}}},
               {{}, {{0}, {1}}},  // flat
               {{7}, {{3}, {4}}},
               {{4, 5}, {{1, 2}, {3, 2}}},
               {{4, 5}, {{7}, {13}}},  // flat
               {{4, 5, 6}, {{0, 0, 0}, {4, 0, 6}}}};
  for (const auto& one : cases) {
    const int64_t numel = one.box.numel();
    std::vector<float> values(numel);
    std::iota(values.begin(), values.end(), 1.0f);
    Shard shard;
    shard.name = "w";
    shard.shape = one.shape;
    shard.box = one.box;
    shard.values = ValuesOf(values);
    shard.weights = rig_.gradient(1, 0);  // memory enough
    auto optimizer = ShardOptimizer::Create(
        {BestKernel(), rig_.device(), rig_.pool()}, config_.options, {shard});
    ASSERT_TRUE(optimizer.ok()) << optimizer.status();
    std::vector<float> masters(numel);
    EXPECT_TRUE((*optimizer)
                    ->GetState("w", StateKind::kMaster, absl::MakeSpan(masters))
                    .ok());
    EXPECT_EQ(masters, values);
    EXPECT_EQ((*optimizer)->shards()[0].box.extent, one.box.extent);
    EXPECT_FALSE((*optimizer)->shards()[0].values);
  }
}

TEST_F(CreationTest, WritesTheWeights) {
  for (const DType weights : {kBF16, kF16, kF32}) {
    for (const double ratio : {0.0, kCutRatio, 1.0}) {
      RigConfig config;
      // More than goes through a buffer at a time.
      config.numels = {5, 600'000, 300'000};
      config.options.weights_type = weights;
      config.options.cpu_ratio = ratio;
      Rig rig(config);
      ASSERT_TRUE(rig.Create().ok());
      ExpectSame(rig.Take(), Reference(config).Take());
    }
  }
}

TEST_F(CreationTest, OptionsOfGroupsAreCheckedAndKept) {
  ASSERT_TRUE(rig_.Create().ok());
  ShardOptimizer& optimizer = rig_.optimizer();
  AdamOptions options = GroupOptions(1, 5);
  for (const int group : {-1, 2}) {
    ExpectInvalid(optimizer.SetGroupOptions(group, options),
                  absl::StrCat("group is ", group, ", expected one of 2"));
    ExpectInvalid(optimizer.SetStep(group, 1),
                  absl::StrCat("group is ", group));
  }
  options.eps = -1;
  ExpectInvalid(optimizer.SetGroupOptions(1, options), "group 1: eps is -1");
  EXPECT_EQ(optimizer.groups()[1].eps, GroupOptions(1, 1).eps);
  options.eps = 0.5;
  EXPECT_TRUE(optimizer.SetGroupOptions(1, options).ok());
  EXPECT_EQ(optimizer.groups()[1].eps, 0.5);
  for (const int64_t step : {int64_t{-1}, kMost}) {
    ExpectInvalid(optimizer.SetStep(0, step), absl::StrCat("step is ", step));
  }
  LossScaleState state = optimizer.loss_scale_state();
  state.scale = 3;
  EXPECT_TRUE(absl::IsInvalidArgument(optimizer.SetLossScaleState(state)));
  EXPECT_EQ(optimizer.LossScale(), 1);
}

TEST_F(CreationTest, ConstantsThatDoNotFitAreRefusedByTheStep) {
  ASSERT_TRUE(rig_.Create().ok());
  AdamOptions options = GroupOptions(1, 1);
  options.lr = 3e38;  // over 1 - beta1 it is infinite
  ASSERT_TRUE(rig_.optimizer().SetGroupOptions(1, options).ok());
  const Snapshot before = rig_.Take();
  ExpectInvalid(rig_.Step(1, AllGradients).status(), "group 1: ");
  ExpectSame(rig_.Take(), before);
  ASSERT_TRUE(rig_.optimizer().SetGroupOptions(1, GroupOptions(1, 1)).ok());
  EXPECT_TRUE(rig_.Finish().ok());
  Reference reference(config_);
  reference.Step(1, AllGradients);
  ExpectSame(rig_.Take(), reference.Take());
}

}  // namespace
}  // namespace onepass

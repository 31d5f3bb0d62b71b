// The bits of ShardOptimizer are those of a plain reference, whatever is
// chosen.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "gtest/gtest.h"
#include "offload/gradient_clip.h"
#include "offload/loss_scaler.h"
#include "offload/shard_optimizer.h"
#include "offload/shard_optimizer_rig.h"
#include "tests/hostile_fp_environment.h"
#include "tests/pairwise.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// --- Bits: whatever is chosen, those of the reference. ---

using Axis = onepass::Axis<RigConfig>;

template <typename T>
Axis OptionAxis(const char* name, std::initializer_list<T> values,
                T ShardOptimizerOptions::*option) {
  return AxisOf<RigConfig>(name, values, [option](RigConfig& config, T value) {
    config.options.*option = value;
  });
}

std::vector<Axis> Axes() {
  using Options = ShardOptimizerOptions;
  std::vector<Axis> axes = {
      OptionAxis<double>("cpu_ratio", {0, 0.3, 0.5, kCutRatio, 1},
                         &Options::cpu_ratio),
      OptionAxis<int64_t>("piece_numel", {1000, kLeafNumel, 20'000, kMost},
                          &Options::piece_numel),
      OptionAxis<int64_t>("sub_group_numel", {1, 10'000, int64_t{1} << 28},
                          &Options::sub_group_numel),
      OptionAxis<int>("staging_buffers", {1, 2, 3}, &Options::staging_buffers),
      OptionAxis<int64_t>("micro_batches", {1, 3}, &Options::micro_batches),
      OptionAxis<DType>("gradients", {kBF16, kF16, kF32}, &Options::grad_type),
      OptionAxis<DType>("weights", {kBF16, kF16, kF32}, &Options::weights_type),
      OptionAxis<DType>("exp_avg", {kF32, kBF16}, &Options::exp_avg_type),
      OptionAxis<DType>("exp_avg_sq", {kF32, kBF16}, &Options::exp_avg_sq_type),
      OptionAxis<bool>("pin_memory", {true, false}, &Options::pin_memory)};
  Axis& kernels = axes.emplace_back();
  for (const Kernel* kernel : RunnableKernels()) {
    kernels.push_back(
        {absl::StrCat("kernel ", kernel->name),
         [kernel](RigConfig& config) { config.kernel = kernel; }});
  }
  Axis& threads = axes.emplace_back();
  for (const int count : {1, 3}) {
    threads.push_back({absl::StrCat("threads ", count),
                       [count](RigConfig& config) { config.threads = count; }});
  }
  Axis& scales = axes.emplace_back();
  for (const auto mode :
       {LossScaleOptions::Mode::kNone, LossScaleOptions::Mode::kStatic}) {
    scales.push_back({absl::StrCat("loss scale mode ", static_cast<int>(mode)),
                      [mode](RigConfig& config) {
                        config.options.loss_scale = LossScale(mode, 1024);
                      }});
  }
  return axes;
}

bool IsCompared(int64_t step) { return step == 1 || step == 3 || step == 20; }

// What the reference has after a step; its state where it is compared.
struct Expected {
  NormSum norm;
  float factor;
  Snapshot state;
};

std::vector<Expected> RunReference(const RigConfig& config, int64_t steps) {
  Reference reference(config);
  std::vector<Expected> expected;
  for (int64_t step = 1; step <= steps; ++step) {
    for (int group : {0, 1}) {
      reference.SetGroupOptions(group, GroupOptions(group, step));
    }
    reference.Step(step);
    expected.push_back({reference.norm(), reference.factor(),
                        IsCompared(step) ? reference.Take() : Snapshot()});
  }
  return expected;
}

void ExpectBits(const RigConfig& config,
                const std::vector<Expected>& expected) {
  Rig rig(config);
  const absl::Status created = rig.Create();
  ASSERT_TRUE(created.ok()) << created;
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t step = static_cast<int64_t>(i) + 1;
    for (int group : {0, 1}) {
      ASSERT_TRUE(rig.optimizer()
                      .SetGroupOptions(group, GroupOptions(group, step))
                      .ok());
    }
    const absl::StatusOr<StepReport> report = rig.Step(step);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_FALSE(report->skipped);
    EXPECT_EQ(report->factor, expected[i].factor);
    EXPECT_EQ(report->norm,
              GradientNorm(expected[i].norm) / report->loss_scale);
    EXPECT_EQ(rig.optimizer().step(0), step);
    EXPECT_EQ(rig.optimizer().step(1), step);
    const int64_t all = Sum(config.numels);
    EXPECT_EQ(report->cpu_numel + report->device_numel, all);
    EXPECT_LE(std::abs(static_cast<double>(report->cpu_numel) -
                       config.options.cpu_ratio * static_cast<double>(all)),
              kLeafNumel);
    EXPECT_LE(report->most_buffers_in_flight, config.options.staging_buffers);
    if (!IsCompared(step)) continue;
    SCOPED_TRACE(testing::Message() << "step " << step);
    ExpectSame(rig.Take(), expected[i].state);
  }
}

TEST(ShardOptimizerBitsTest, AreThoseOfTheReferenceWhateverIsChosen) {
  const std::vector<Axis> axes = Axes();
  std::vector<std::vector<size_t>> rows = Pairwise(axes);
  // The same cases again, or under an emulator: some of them, and not for long.
  const bool whole = LongTestStride() == 1;
  const int64_t steps = whole ? 20 : 3;
  if (!whole) rows = EachValueOnce(rows);
  size_t choices = 0;
  for (const auto& axis : axes) choices += axis.size();
  ASSERT_EQ(ValuesOf(rows).size(), choices);
  for (size_t row = 0; row < rows.size(); ++row) {
    RigConfig config;
    const std::string names = SetRow(axes, rows[row], config);
    // Clipped to almost nothing, by exactly 1, and not at all.
    for (const double max_norm : {1e-3, 1e6, 0.0}) {
      config.options.max_norm = max_norm;
      const std::vector<Expected> expected = RunReference(config, steps);
      const float unclipped =
          config.options.loss_scale.mode == LossScaleOptions::Mode::kNone
              ? 1
              : 1.0f / 1024;
      for (const Expected& one : expected) {
        if (max_norm == 1e-3) {
          EXPECT_LT(one.factor, unclipped);
        } else {
          EXPECT_EQ(one.factor, unclipped);
        }
      }
      for (const StepPath path : kStepPaths) {
        config.options.path = path;
        SCOPED_TRACE(testing::Message() << names << ", max_norm " << max_norm
                                        << ", " << Name(path));
        ExpectBits(config, expected);
      }
    }
  }
}

TEST(ShardOptimizerBitsTest, TheCallersFpEnvironmentChangesNothing) {
  RigConfig config;
  config.options.cpu_ratio = kCutRatio;
  config.options.max_norm = 0.01;
  for (const StepPath path : kStepPaths) {
    config.options.path = path;
    StepInput input;
    input.inv_scale = 1.0 / 49;
    Rig expected(config);
    ASSERT_TRUE(expected.Create().ok());
    const auto report = expected.Step(1, AllGradients, input);
    ASSERT_TRUE(report.ok()) << report.status();
    Rig rig(config);
    rig.Fill(1, AllGradients);
    absl::StatusOr<StepReport> hostile_report;
    {
      const HostileFpEnvironment hostile;
      ASSERT_TRUE(rig.Create().ok());
      ASSERT_TRUE(rig.Add().ok());
      hostile_report = rig.Finish(input);
      EXPECT_TRUE(hostile.Intact());
    }
    ASSERT_TRUE(hostile_report.ok()) << hostile_report.status();
    EXPECT_EQ(hostile_report->loss_scale, report->loss_scale);
    EXPECT_EQ(hostile_report->factor, report->factor);
    EXPECT_EQ(hostile_report->norm, report->norm);
    ExpectSame(rig.Take(), expected.Take());
  }
}

TEST(ShardOptimizerBitsTest, ShardsMayBeFewOrNone) {
  for (const std::vector<int64_t>& numels : std::vector<std::vector<int64_t>>{
           {}, {0}, {0, 0, 0}, {1}, {0, 1, 0}, {kLeafNumel}}) {
    for (const double ratio : {0.0, 1.0}) {
      for (const StepPath path : kStepPaths) {
        for (const DType weights : {kBF16, kF32}) {
          RigConfig config;
          config.numels = numels;
          config.options.cpu_ratio = ratio;
          config.options.path = path;
          config.options.weights_type = weights;
          SCOPED_TRACE(testing::Message()
                       << testing::PrintToString(numels) << ", ratio " << ratio
                       << ", " << Name(path) << ", " << Name(weights));
          Reference reference(config);
          Rig rig(config);
          ASSERT_TRUE(rig.Create().ok());
          for (int64_t step = 1; step <= 2; ++step) {
            reference.Step(step, AllGradients);
            const auto report = rig.Step(step, AllGradients);
            ASSERT_TRUE(report.ok()) << report.status();
            EXPECT_EQ(report->host_waits, 2);
            EXPECT_EQ(report->pieces > 0, ratio == 1 && Sum(numels) > 0);
          }
          ExpectSame(rig.Take(), reference.Take());
        }
      }
    }
  }
}

}  // namespace
}  // namespace onepass

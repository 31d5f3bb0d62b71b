// The bits of ShardOptimizer are those of a plain reference, whatever is
// chosen.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <type_traits>
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
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// --- Bits: whatever is chosen, those of the reference. ---

// What an option may be, in words and in a config.
struct Choice {
  std::string name;
  std::function<void(RigConfig&)> set;
};
using Axis = std::vector<Choice>;

template <typename T>
Axis AxisOf(const char* name, const std::vector<T>& values,
            T ShardOptimizerOptions::*option) {
  Axis axis;
  for (const T value : values) {
    std::string text;
    if constexpr (std::is_same_v<T, DType>) {
      text = Name(value);
    } else {
      text = absl::StrCat(value);
    }
    axis.push_back(
        {absl::StrCat(name, " ", text), [option, value](RigConfig& config) {
           config.options.*option = value;
         }});
  }
  return axis;
}

std::vector<Axis> Axes() {
  using Options = ShardOptimizerOptions;
  std::vector<Axis> axes = {
      AxisOf<double>("cpu_ratio", {0, 0.3, 0.5, kCutRatio, 1},
                     &Options::cpu_ratio),
      AxisOf<int64_t>("piece_numel", {1000, kLeafNumel, 20'000, kMost},
                      &Options::piece_numel),
      AxisOf<int64_t>("sub_group_numel", {1, 10'000, int64_t{1} << 28},
                      &Options::sub_group_numel),
      AxisOf<int>("staging_buffers", {1, 2, 3}, &Options::staging_buffers),
      AxisOf<int64_t>("micro_batches", {1, 3}, &Options::micro_batches),
      AxisOf<DType>("gradients", {kBF16, kF16, kF32}, &Options::grad_type),
      AxisOf<DType>("weights", {kBF16, kF16, kF32}, &Options::weights_type),
      AxisOf<DType>("exp_avg", {kF32, kBF16}, &Options::exp_avg_type),
      AxisOf<DType>("exp_avg_sq", {kF32, kBF16}, &Options::exp_avg_sq_type),
      AxisOf<bool>("pin_memory", {true, false}, &Options::pin_memory)};
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

// Rows of one index an axis, so that each pair of values of two axes is in one
// of them: greedily, each row from a pair that is left.
std::vector<std::vector<size_t>> Pairwise(const std::vector<size_t>& sizes) {
  using Pair = std::array<size_t, 4>;  // axis, value, axis after it, value
  std::set<Pair> left;
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = a + 1; b < sizes.size(); ++b) {
      for (size_t i = 0; i < sizes[a]; ++i) {
        for (size_t j = 0; j < sizes[b]; ++j) left.insert({a, i, b, j});
      }
    }
  }
  constexpr size_t kUnset = std::numeric_limits<size_t>::max();
  std::vector<std::vector<size_t>> rows;
  while (!left.empty()) {
    const Pair first = *left.begin();
    std::vector<size_t> row(sizes.size(), kUnset);
    row[first[0]] = first[1];
    row[first[2]] = first[3];
    const auto pair = [&row](size_t a, size_t i, size_t b) {
      return a < b ? Pair{a, i, b, row[b]} : Pair{b, row[b], a, i};
    };
    for (size_t a = 0; a < sizes.size(); ++a) {
      if (row[a] != kUnset) continue;
      size_t best = 0;
      size_t most = 0;
      for (size_t i = 0; i < sizes[a]; ++i) {
        // Begins at another one in each row, for where all are as good.
        const size_t value = (i + rows.size()) % sizes[a];
        size_t covers = 1;
        for (size_t b = 0; b < sizes.size(); ++b) {
          covers += b != a && row[b] != kUnset && left.count(pair(a, value, b));
        }
        if (covers > most) {
          most = covers;
          best = value;
        }
      }
      row[a] = best;
    }
    for (size_t a = 0; a < sizes.size(); ++a) {
      for (size_t b = a + 1; b < sizes.size(); ++b) {
        left.erase({a, row[a], b, row[b]});
      }
    }
    rows.push_back(row);
  }
  return rows;
}

using Value = std::pair<size_t, size_t>;  // axis, value

std::set<Value> ValuesOfRow(const std::vector<size_t>& row) {
  std::set<Value> values;
  for (size_t axis = 0; axis < row.size(); ++axis) {
    values.insert({axis, row[axis]});
  }
  return values;
}

// Some of the rows, so that each value that is in all is in one of them:
// greedily, the one with most of those that are left.
std::vector<std::vector<size_t>> EachValue(
    const std::vector<std::vector<size_t>>& rows) {
  std::set<Value> left;
  for (const std::vector<size_t>& row : rows) left.merge(ValuesOfRow(row));
  const auto gain = [&left](const std::vector<size_t>& row) {
    size_t covers = 0;
    for (const Value& value : ValuesOfRow(row)) covers += left.count(value);
    return covers;
  };
  std::vector<std::vector<size_t>> chosen;
  while (!left.empty()) {
    chosen.push_back(*std::max_element(
        rows.begin(), rows.end(),
        [&](const auto& a, const auto& b) { return gain(a) < gain(b); }));
    for (const Value& value : ValuesOfRow(chosen.back())) left.erase(value);
  }
  return chosen;
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
  std::vector<size_t> sizes;
  for (const Axis& axis : axes) sizes.push_back(axis.size());
  std::vector<std::vector<size_t>> rows = Pairwise(sizes);
  // The same cases again, or under an emulator: some of them, and not for long.
  const bool whole = LongTestStride() == 1;
  const int64_t steps = whole ? 20 : 3;
  if (!whole) rows = EachValue(rows);
  std::set<Value> values;
  for (const std::vector<size_t>& row : rows) values.merge(ValuesOfRow(row));
  ASSERT_EQ(values.size(),
            std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
  for (size_t row = 0; row < rows.size(); ++row) {
    RigConfig config;
    std::string names = absl::StrCat("row ", row);
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      const Choice& choice = axes[axis][rows[row][axis]];
      choice.set(config);
      absl::StrAppend(&names, ", ", choice.name);
    }
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

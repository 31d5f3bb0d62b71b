#include "offload/loss_scaler.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Mode = LossScaleOptions::Mode;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

LossScaleOptions Static(double scale) {
  LossScaleOptions options;
  options.mode = Mode::kStatic;
  options.initial_scale = scale;
  return options;
}

// With bounds of 1 and 64 and a short interval.
LossScaleOptions Dynamic(double initial_scale, int64_t hysteresis,
                         int64_t growth_interval = 3) {
  LossScaleOptions options;
  options.mode = Mode::kDynamic;
  options.initial_scale = initial_scale;
  options.hysteresis = hysteresis;
  options.growth_interval = growth_interval;
  options.max_scale = 64;
  return options;
}

LossScaleOptions Within(double min_scale, double max_scale,
                        LossScaleOptions options) {
  options.min_scale = min_scale;
  options.max_scale = max_scale;
  return options;
}

LossScaler Scaler(const LossScaleOptions& options) {
  absl::StatusOr<LossScaler> scaler = LossScaler::Create(options);
  EXPECT_TRUE(scaler.ok()) << scaler.status();
  return *std::move(scaler);
}

void ExpectSameState(const LossScaler& actual, const LossScaler& expected) {
  ASSERT_EQ(actual.scale(), expected.scale());
  ASSERT_EQ(actual.state().scale, expected.state().scale);
  ASSERT_EQ(actual.state().hysteresis_left, expected.state().hysteresis_left);
  ASSERT_EQ(actual.state().clean_steps, expected.state().clean_steps);
}

TEST(LossScalerTest, ScalesStepByStep) {
  struct Case {
    std::string name;
    LossScaleOptions options;
    std::string steps;           // x: with an overflow
    std::vector<double> scales;  // after each
  };
  const Case cases[] = {
      {"doubled after each interval",
       Dynamic(4, 2),
       "......",
       {4, 4, 8, 8, 8, 16}},
      {"halved at the second overflow and each further one",
       Dynamic(64, 2),
       "xxxx",
       {64, 32, 16, 8}},
      {"steps between overflows do not refill",
       Dynamic(64, 2),
       "x.x..x",
       {64, 64, 32, 32, 32, 16}},
      {"growth refills",
       Dynamic(16, 2),
       "xx...xx...xxx",
       {16, 8, 8, 8, 16, 16, 8, 8, 8, 16, 16, 8, 4}},
      {"an overflow without consequence starts the interval anew",
       Dynamic(16, 2),
       "..x..x...",
       {16, 16, 16, 16, 16, 8, 8, 8, 16}},
      {"so does one that halves",
       Dynamic(16, 1),
       "..x..x...",
       {16, 16, 8, 8, 8, 4, 4, 4, 8}},
      {"hysteresis of 1", Dynamic(16, 1), "xx...xx", {8, 4, 4, 4, 8, 4, 2}},
      {"hysteresis of 3",
       Dynamic(16, 3),
       "xxxx...xxx",
       {16, 16, 8, 4, 4, 4, 8, 8, 8, 4}},
      {"an interval of 1",
       Dynamic(4, 2, 1),
       "..x.xx.",
       {8, 16, 16, 32, 32, 16, 32}},
      {"never below 1", Dynamic(2, 1), "xxx...x", {1, 1, 1, 1, 1, 2, 1}},
      {"never below the least",
       Within(4, 64, Dynamic(8, 2)),
       "xxxx...xx",
       {8, 4, 4, 4, 4, 4, 8, 8, 4}},
      {"a least below 1",
       Within(0.25, 64, Dynamic(1, 1)),
       "xxxx",
       {0.5, 0.25, 0.25, 0.25}},
      {"never above the most",
       Dynamic(32, 1),
       ".........x",
       {32, 32, 64, 64, 64, 64, 64, 64, 64, 32}},
      {"refilled at the most, too",
       Dynamic(64, 2),
       "x...xx",
       {64, 64, 64, 64, 64, 32}},
      {"no room",
       Within(16, 16, Dynamic(16, 1)),
       "xx......x",
       {16, 16, 16, 16, 16, 16, 16, 16, 16}},
      {"static", Static(16), "xx......x", {16, 16, 16, 16, 16, 16, 16, 16, 16}},
      {"none", LossScaleOptions(), "xx......x", {1, 1, 1, 1, 1, 1, 1, 1, 1}},
  };
  for (const Case& c : cases) {
    LossScaler scaler = Scaler(c.options);
    EXPECT_EQ(scaler.scale(),
              c.options.mode == Mode::kNone ? 1 : c.options.initial_scale)
        << c.name;
    std::vector<double> scales;
    for (char step : c.steps) {
      scaler.Update(step == 'x');
      scales.push_back(scaler.scale());
    }
    EXPECT_EQ(scales, c.scales) << c.name;
  }
}

TEST(LossScalerTest, Defaults) {
  LossScaleOptions options;
  options.mode = Mode::kDynamic;
  LossScaler scaler = Scaler(options);
  EXPECT_EQ(scaler.scale(), 65536);
  const auto run_clean = [&scaler](int steps) {
    for (int i = 0; i < steps; ++i) scaler.Update(false);
  };
  run_clean(999);
  EXPECT_EQ(scaler.scale(), 65536);
  run_clean(1);
  EXPECT_EQ(scaler.scale(), 2 * 65536);
  run_clean(999);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 2 * 65536);
  run_clean(999);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 65536);
  for (int exponent = 15; exponent > 0; --exponent) scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 2);
  scaler.Update(true);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 1);
  run_clean(63 * 1000);
  EXPECT_EQ(scaler.scale(), 0x1p63);
  run_clean(2 * 1000);
  EXPECT_EQ(scaler.scale(), 0x1p64);
}

// DeepSpeed's rule as it tells it: by the numbers of the steps.
class ByStepNumbers {
 public:
  explicit ByStepNumbers(const LossScaleOptions& options)
      : options_(options), scale_(options.initial_scale) {}

  double scale() const { return scale_; }

  void Update(bool overflow) {
    ++step_;
    if (overflow) {
      last_overflow_ = step_;
      ++overflows_;
      if (overflows_ < options_.hysteresis) return;
      if (scale_ > options_.min_scale) scale_ *= 0.5;
    } else if ((step_ - last_overflow_) % options_.growth_interval == 0) {
      overflows_ = 0;
      if (scale_ < options_.max_scale) scale_ *= 2;
    }
  }

 private:
  LossScaleOptions options_;
  double scale_;
  int64_t step_ = 0;
  int64_t last_overflow_ = 0;
  int64_t overflows_ = 0;  // since the last growth
};

using Random = std::mt19937_64;

LossScaleOptions AnyDynamic(Random& random) {
  const auto any = [&random](int64_t most) {
    return static_cast<int64_t>(random() % most);
  };
  const double min_scale = static_cast<double>(1 << any(4));
  const double initial_scale = min_scale * static_cast<double>(1 << any(8));
  const double max_scale = initial_scale * static_cast<double>(1 << any(8));
  return Within(min_scale, max_scale,
                Dynamic(initial_scale, 1 + any(4), 1 + any(7)));
}

TEST(LossScalerTest, FollowsDeepSpeedsRule) {
  Random random(1);
  for (int64_t round = 0; round < 2000; round += LongTestStride()) {
    const LossScaleOptions options = AnyDynamic(random);
    const uint64_t one_in = 2 + random() % 12;
    LossScaler scaler = Scaler(options);
    ByStepNumbers expected(options);
    for (int step = 0; step < 200; ++step) {
      const bool overflow = random() % one_in == 0;
      scaler.Update(overflow);
      expected.Update(overflow);
      ASSERT_EQ(scaler.scale(), expected.scale()) << round << " " << step;
    }
  }
}

TEST(LossScalerTest, GoesOnFromItsState) {
  Random random(2);
  for (int64_t round = 0; round < 2000; round += LongTestStride()) {
    LossScaleOptions options = AnyDynamic(random);
    if (round % 8 == 1) options.mode = Mode::kStatic;
    if (round % 8 == 2) options.mode = Mode::kNone;
    const uint64_t one_in = 2 + random() % 12;
    LossScaler uninterrupted = Scaler(options);
    LossScaler resumed = uninterrupted;
    for (int step = 0; step < 200; ++step) {
      if (random() % 4 == 0) {
        LossScaler fresh = Scaler(options);
        const absl::Status status = fresh.SetState(resumed.state());
        ASSERT_TRUE(status.ok()) << status;
        resumed = fresh;
      }
      const bool overflow = random() % one_in == 0;
      uninterrupted.Update(overflow);
      resumed.Update(overflow);
      ASSERT_NO_FATAL_FAILURE(ExpectSameState(resumed, uninterrupted))
          << round << " " << step;
    }
  }
}

TEST(LossScalerTest, StatesAreWhatTheySay) {
  const LossScaleState initial;
  EXPECT_TRUE(Scaler({}).SetState(initial).ok());
  LossScaler scaler = Scaler(Dynamic(16, 3, 5));
  const auto expect = [&scaler](double scale, int64_t hysteresis_left,
                                int64_t clean_steps) {
    EXPECT_EQ(scaler.state().scale, scale);
    EXPECT_EQ(scaler.state().hysteresis_left, hysteresis_left);
    EXPECT_EQ(scaler.state().clean_steps, clean_steps);
  };
  expect(16, 3, 0);
  scaler.Update(false);
  scaler.Update(false);
  expect(16, 3, 2);
  scaler.Update(true);
  expect(16, 2, 0);
  scaler.Update(true);
  expect(16, 1, 0);
  scaler.Update(true);
  expect(8, 1, 0);
  for (int i = 0; i < 4; ++i) scaler.Update(false);
  expect(8, 1, 4);
  scaler.Update(false);
  expect(16, 3, 0);
}

// `refused` is set on a scaler in the middle of its way, which goes on as one
// on which nothing was set.
void ExpectRefused(const LossScaleOptions& options,
                   const LossScaleState& refused, const std::string& message) {
  LossScaler scaler = Scaler(options);
  for (char step : std::string("..x....x.")) scaler.Update(step == 'x');
  LossScaler untouched = scaler;
  const absl::Status status = scaler.SetState(refused);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith(message));
  EXPECT_THAT(std::string(status.message()), HasSubstr(", expected "));
  for (char step : std::string("x...x.........xxx")) {
    ASSERT_NO_FATAL_FAILURE(ExpectSameState(scaler, untouched));
    scaler.Update(step == 'x');
    untouched.Update(step == 'x');
  }
}

TEST(LossScalerTest, RefusesStatesOfOtherOptions) {
  const LossScaleOptions dynamic = Within(2, 64, Dynamic(16, 3, 5));
  const LossScaleState good = {8, 2, 4};
  EXPECT_TRUE(Scaler(dynamic).SetState(good).ok());
  EXPECT_TRUE(Scaler(dynamic).SetState({2, 1, 0}).ok());
  EXPECT_TRUE(Scaler(dynamic).SetState({64, 3, 4}).ok());
  for (double scale :
       {0.0, -8.0, 1.0, 128.0, 3.0, 24.0, 0x1.0000001p3, kNaN, kInfinity}) {
    LossScaleState state = good;
    state.scale = scale;
    ExpectRefused(dynamic, state, "loss scaler: scale is ");
  }
  for (int64_t left : {int64_t{0}, int64_t{-1}, int64_t{4}, kMost}) {
    LossScaleState state = good;
    state.hysteresis_left = left;
    ExpectRefused(dynamic, state,
                  "loss scaler: hysteresis_left is " + std::to_string(left));
  }
  for (int64_t steps : {int64_t{-1}, int64_t{5}, kMost}) {
    LossScaleState state = good;
    state.clean_steps = steps;
    ExpectRefused(dynamic, state,
                  "loss scaler: clean_steps is " + std::to_string(steps));
  }
  for (const LossScaleOptions& options : {Static(16), LossScaleOptions()}) {
    const LossScaleState own = Scaler(options).state();
    ExpectRefused(options, {own.scale * 2, 1, 0}, "loss scaler: scale is ");
    ExpectRefused(options, {own.scale / 2, 1, 0}, "loss scaler: scale is ");
    ExpectRefused(options, {own.scale, 2, 0},
                  "loss scaler: hysteresis_left is");
    ExpectRefused(options, {own.scale, 1, 1}, "loss scaler: clean_steps is ");
  }
}

void ExpectOptionsRefused(const LossScaleOptions& options,
                          const std::string& name) {
  const absl::Status status = LossScaler::Create(options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << name << status;
  EXPECT_THAT(std::string(status.message()),
              StartsWith("loss scaler: " + name + " is "));
  EXPECT_THAT(std::string(status.message()), HasSubstr(", expected "));
}

TEST(LossScalerTest, RefusesEachBadOptionByName) {
  const std::pair<std::string, double LossScaleOptions::*> scales[] = {
      {"initial_scale", &LossScaleOptions::initial_scale},
      {"min_scale", &LossScaleOptions::min_scale},
      {"max_scale", &LossScaleOptions::max_scale},
  };
  for (const auto& [name, scale] : scales) {
    for (double bad : {0.0, -1.0, 3.0, 65535.0, 0x1p-127, 0x1p127, 0x1p-1074,
                       kNaN, kInfinity, -kInfinity}) {
      LossScaleOptions options = Dynamic(16, 2);
      options.*scale = bad;
      ExpectOptionsRefused(options, name);
    }
  }
  const std::pair<std::string, int64_t LossScaleOptions::*> counts[] = {
      {"hysteresis", &LossScaleOptions::hysteresis},
      {"growth_interval", &LossScaleOptions::growth_interval},
  };
  for (const auto& [name, count] : counts) {
    for (int64_t bad : {int64_t{0}, int64_t{-1}, -kMost}) {
      LossScaleOptions options = Dynamic(16, 2);
      options.*count = bad;
      ExpectOptionsRefused(options, name);
    }
  }
  ExpectOptionsRefused(Dynamic(0.5, 2), "initial_scale");
  ExpectOptionsRefused(Dynamic(128, 2), "initial_scale");
  ExpectOptionsRefused(Within(64, 1, Dynamic(16, 2)), "initial_scale");
  EXPECT_EQ(LossScaler::Create(Dynamic(128, 2)).status().message(),
            "loss scaler: initial_scale is 128, expected a power of two from "
            "min_scale, 1, to max_scale, 64");
}

TEST(LossScalerTest, LooksAtTheOptionsOfItsModeOnly) {
  LossScaleOptions bad = Within(kNaN, -1, Dynamic(3, 0, -5));
  bad.mode = Mode::kNone;
  EXPECT_EQ(Scaler(bad).scale(), 1);
  bad.mode = Mode::kStatic;
  ExpectOptionsRefused(bad, "initial_scale");
  bad.initial_scale = 16;
  EXPECT_EQ(Scaler(bad).scale(), 16);
}

TEST(LossScalerTest, AcceptsTheEdges) {
  LossScaler scaler = Scaler(Within(0x1p-126, 0x1p126, Dynamic(1, 1, 1)));
  for (int i = 0; i < 200; ++i) scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 0x1p126);
  for (int i = 0; i < 400; ++i) scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 0x1p-126);
  EXPECT_EQ(Scaler(Static(0x1p126)).scale(), 0x1p126);
  EXPECT_EQ(Scaler(Static(0x1p-126)).scale(), 0x1p-126);
  LossScaler patient = Scaler(Dynamic(16, kMost, kMost));
  patient.Update(true);
  EXPECT_EQ(patient.state().hysteresis_left, kMost - 1);
  ASSERT_TRUE(patient.SetState({16, 1, kMost - 1}).ok());
  patient.Update(false);
  EXPECT_EQ(patient.scale(), 32);
  EXPECT_EQ(patient.state().hysteresis_left, kMost);
}

}  // namespace
}  // namespace onepass

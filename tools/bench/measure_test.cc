#include "tools/bench/measure.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Variants that write down when they are called, on a clock that only they
// move.
class MeasureInterleavedTest : public testing::Test {
 protected:
  // `seconds` a run.
  Variant MakeVariant(const std::string& name, double seconds) {
    Variant variant;
    variant.name = name;
    variant.run = [this, name, seconds] {
      absl::StrAppend(&log_, name);
      // Not the same in any two rounds.
      now_ += seconds + static_cast<double>(++runs_) / 1024;
      return absl::OkStatus();
    };
    return variant;
  }

  absl::StatusOr<Timings> Measure(const std::vector<Variant>& variants,
                                  int64_t rounds) {
    return MeasureInterleaved(variants, rounds, [this] { return now_; });
  }

  std::string log_;
  double now_ = 5;
  int runs_ = 0;
};

TEST_F(MeasureInterleavedTest, OrderMovesOnByOneAfterAWarmUp) {
  const absl::StatusOr<Timings> seconds = Measure(
      {MakeVariant("a", 1), MakeVariant("b", 2), MakeVariant("c", 4)}, 4);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_EQ(log_,
            "abc"
            "abc"
            "bac"
            "cab"
            "acb");
  // Runs 1 to 3 are the warm-up; these are numbers 4, 8, 11, 13, and so on.
  const auto runs = [](double base, std::vector<int> numbers) {
    std::vector<double> expected;
    for (const int n : numbers) expected.push_back(base + n / 1024.);
    return expected;
  };
  ASSERT_EQ(seconds->size(), 3);
  EXPECT_EQ((*seconds)[0], runs(1, {4, 8, 11, 13}));
  EXPECT_EQ((*seconds)[1], runs(2, {5, 7, 12, 15}));
  EXPECT_EQ((*seconds)[2], runs(4, {6, 9, 10, 14}));
}

TEST_F(MeasureInterleavedTest, BadArgumentsAreNamedAndNothingRuns) {
  const auto problem = [this](const std::vector<Variant>& variants,
                              int64_t rounds) {
    const absl::Status status = Measure(variants, rounds).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(log_, "");
    return std::string(status.message());
  };
  EXPECT_EQ(problem({}, 3), "no variants to measure");
  EXPECT_EQ(problem({MakeVariant("a", 1)}, 0),
            "rounds is 0, expected at least 1");
  EXPECT_EQ(problem({MakeVariant("a", 1)}, -7),
            "rounds is -7, expected at least 1");
  EXPECT_EQ(problem({MakeVariant("a", 1), {"b", nullptr}}, 1),
            "b: run is null");
}

TEST_F(MeasureInterleavedTest, AnErrorOfAVariantEndsItAndIsNamed) {
  Variant failing = MakeVariant("b", 1);
  failing.run = [this] {
    log_.append("b");
    // In the round after the warm-up.
    return log_.size() > 3 ? absl::DataLossError("as asked") : absl::OkStatus();
  };
  EXPECT_EQ(Measure({MakeVariant("a", 1), failing}, 9).status(),
            absl::DataLossError("b: as asked"));
  EXPECT_EQ(log_,
            "ab"
            "ab");
}

TEST_F(MeasureInterleavedTest, WhatIsPreparedIsNotTimed) {
  Variant variant = MakeVariant("b", 1);
  variant.prepare = [this] {
    absl::StrAppend(&log_, "p");
    now_ += 100;
  };
  const absl::StatusOr<Timings> seconds =
      Measure({MakeVariant("a", 1), variant}, 2);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_EQ(log_,
            "apb"
            "apb"
            "pba");
  for (const double s : seconds->at(1)) EXPECT_LT(s, 2);
}

TEST(MonotonicMeasureInterleavedTest, EveryRoundTakesTime) {
  volatile double sink = 0;
  const absl::StatusOr<Timings> seconds =
      MeasureInterleaved({{"work",
                           [&sink] {
                             for (int i = 0; i < 10000; ++i) sink = sink + 1;
                             return absl::OkStatus();
                           }}},
                         3);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  ASSERT_EQ(seconds->size(), 1);
  ASSERT_EQ(seconds->front().size(), 3);
  for (const double s : seconds->front()) EXPECT_GT(s, 0);
  EXPECT_EQ(sink, 40000);
}

TEST(SpreadOfTest, QuantilesLieOnTheLineBetweenNeighbours) {
  const auto expect = [](std::vector<double> values, double median, double p10,
                         double p90) {
    const Spread spread = SpreadOf(values);
    EXPECT_DOUBLE_EQ(spread.median, median);
    EXPECT_DOUBLE_EQ(spread.p10, p10);
    EXPECT_DOUBLE_EQ(spread.p90, p90);
  };
  expect({3}, 3, 3, 3);
  expect({4, 1, 2}, 2, 1.2, 3.6);
  expect({2, 1}, 1.5, 1.1, 1.9);
  // Eleven values: the quantiles are values of the sample.
  expect({10, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5}, 5, 1, 9);
  expect({kInfinity, 1, kInfinity}, kInfinity, kInfinity, kInfinity);
}

TEST(SpreadOfTest, WhatIsNoNumberIsTheLargest) {
  const Spread some = SpreadOf({kNaN, 2, 1, kNaN, 0, 3, kNaN, 4, 5, 6, 7});
  EXPECT_EQ(some.p10, 1);
  EXPECT_EQ(some.median, 5);
  EXPECT_TRUE(std::isnan(some.p90));
  const Spread none = SpreadOf({});
  EXPECT_TRUE(std::isnan(none.median));
  EXPECT_TRUE(std::isnan(none.p10));
  EXPECT_TRUE(std::isnan(none.p90));
}

TEST(RatioOfTest, RatiosAreOfEachRound) {
  // A machine that is slow in the second round is slow for both.
  const Spread spread = RatioOf({3, 30, 5}, {2, 20, 2});
  EXPECT_DOUBLE_EQ(spread.median, 1.5);
  EXPECT_DOUBLE_EQ(spread.p10, 1.5);
  EXPECT_DOUBLE_EQ(spread.p90, 2.3);
  EXPECT_EQ(RatioOf({6, 1, 1}, {2}).median, 3);
  EXPECT_TRUE(std::isnan(RatioOf({}, {}).median));
}

}  // namespace
}  // namespace onepass

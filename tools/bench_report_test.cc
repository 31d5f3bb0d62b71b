#include "tools/bench_report.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/bench/measure.h"

namespace onepass {
namespace {

std::string Printed(const BarChart& chart) {
  std::ostringstream out;
  chart.Print(out);
  return out.str();
}

std::string Signs(int count) { return std::string(count, '#'); }

TEST(BarChartTest, BarsAreAsLongAsTheirValues) {
  BarChart chart;
  chart.Add("one", 1);
  chart.Add("a half", 0.5, "of the one");
  chart.Add("two", 2);
  EXPECT_EQ(Printed(chart), "one     " + Signs(20) + "\na half  " + Signs(10) +
                                "\n    of the one\ntwo     " + Signs(40) +
                                "\n");
}

TEST(BarChartTest, OneFarAboveTheOthersLeavesThemReadable) {
  BarChart chart;
  chart.Add("a", 1);
  chart.Add("b", 1.25);
  chart.Add("c", 17);
  chart.Add("d", 0.75);
  // The median is 1.125; 5 times that is not above itself.
  chart.Add("e", 1.125);
  EXPECT_EQ(Printed(chart), "a  " + Signs(32) + "\nb  " + Signs(40) + "\nc  " +
                                Signs(39) + ">\nd  " + Signs(24) + "\ne  " +
                                Signs(36) + "\n");
}

TEST(BarChartTest, FiveMediansAreNotClipped) {
  BarChart chart;
  chart.Add("a", 1);
  chart.Add("b", 1);
  chart.Add("c", 5);
  EXPECT_EQ(Printed(chart),
            "a  " + Signs(8) + "\nb  " + Signs(8) + "\nc  " + Signs(40) + "\n");
}

TEST(BarChartTest, WhatHasNoLengthHasNoBar) {
  BarChart chart;
  chart.Add("nan", std::nan(""));
  chart.Add("infinite", std::numeric_limits<double>::infinity());
  chart.Add("none", 0);
  chart.Add("negative", -1);
  EXPECT_EQ(Printed(chart), "nan\ninfinite\nnone\nnegative\n");
  chart.Add("one", 1);
  EXPECT_EQ(Printed(chart),
            "nan\ninfinite\nnone\nnegative\none       " + Signs(40) + "\n");
  EXPECT_EQ(Printed(BarChart()), "");
}

TEST(BarChartTest, BarsKeepToTheLine) {
  BarChart chart;
  chart.Add(std::string(90, 'x'), 3);
  chart.Add("y", 100);
  chart.Add("z", 3);
  EXPECT_EQ(Printed(chart), std::string(90, 'x') + "  " + Signs(8) + "\ny" +
                                std::string(91, ' ') + Signs(7) + ">\nz" +
                                std::string(91, ' ') + Signs(8) + "\n");
  chart.Add(std::string(120, 'x'), 3);
  EXPECT_EQ(Printed(chart).find('#'), std::string::npos);
}

TEST(BenchReportTest, BytesHaveAUnit) {
  EXPECT_EQ(FormatBytes(1 << 19), "0.5 MiB");
  EXPECT_EQ(FormatBytes(int64_t{64} << 20), "64.0 MiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 29), "1.5 GiB");
}

TEST(BenchReportTest, SpreadsHaveTheirThreeNumbers) {
  Spread spread;
  spread.median = 2;
  spread.p10 = 1.5;
  spread.p90 = 3;
  EXPECT_EQ(SpreadJson(spread).dump(), R"({"median":2.0,"p10":1.5,"p90":3.0})");
}

}  // namespace
}  // namespace onepass

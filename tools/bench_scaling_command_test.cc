#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/test_kernels.h"
#include "tools/commands.h"
#include "tools/run_command.h"

namespace onepass {
namespace {

using nlohmann::json;

using Result = CommandResult;

Result BenchScaling(const std::vector<std::string>& flags) {
  return RunCommand(&NewBenchScalingCommand, flags);
}

TEST(BenchScalingCommandTest, JsonHasAllPoints) {
  const Result result =
      BenchScaling({"--json", "--rounds", "1", "--max_numel", "16384",
                    "--threads", "2", "--kernel", ScalarKernel().name});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(result.err, "MiB of memory")) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(Keys(report),
            (std::set<std::string>{"kernel", "store", "rounds", "elements",
                                   "threads", "processes", "pool"}));
  EXPECT_EQ(report.at("store"), "ordinary");
  EXPECT_EQ(report.at("kernel"), "scalar");
  EXPECT_EQ(report.at("rounds"), 1);
  ASSERT_EQ(report.at("elements").size(), 2u);
  EXPECT_EQ(report.at("elements").at(1).at("numel"), 16384);
  ASSERT_EQ(report.at("threads").size(), 2u);
  EXPECT_EQ(report.at("threads").at(1).at("threads"), 2);
  ASSERT_EQ(report.at("processes").size(), 4u);
  EXPECT_EQ(report.at("processes").at(2).at("processes"), 2);
  EXPECT_EQ(report.at("processes").at(2).at("threads"), 1);
  const auto expect_points = [&](const char* of, std::set<std::string> keys,
                                 const char* spread) {
    keys.insert(spread);
    keys.insert("gb_per_s");
    for (const json& point : report.at(of)) {
      EXPECT_EQ(Keys(point), keys);
      EXPECT_EQ(Keys(point.at(spread)),
                (std::set<std::string>{"median", "p10", "p90"}));
      EXPECT_GT(point.at(spread).at("p10"), 0) << of;
    }
  };
  expect_points("elements", {"numel"}, "ns_per_element");
  expect_points("threads", {"threads"}, "speedup");
  expect_points("processes", {"processes", "threads"}, "ratio");
  EXPECT_EQ(report.at("pool").at("threads"), 2);
  for (const char* state : {"awake_us", "asleep_us"}) {
    for (const char* of : {"median", "p10", "p90"}) {
      EXPECT_GT(report.at("pool").at(state).at(of), 0) << state << of;
    }
  }
}

TEST(BenchScalingCommandTest, TableHasARowAPoint) {
  const Result result =
      BenchScaling({"--rounds", "1", "--max_numel", "16384", "--threads", "2"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  for (const char* part :
       {"     4096  ", "    16384  ", "     1 x 2  ", "     1 x 1  ",
        "     2 x 1  ", "     2 x 2  ", "  1.00 (1.00 to 1.00)", "GB/s", "#",
        "ordinary stores", "  >= 0.90 ", "a pool of 2 threads"}) {
    EXPECT_TRUE(absl::StrContains(result.out, part))
        << "no '" << part << "' in\n"
        << result.out;
  }
  EXPECT_NE(absl::StrContains(result.out, " reached "),
            absl::StrContains(result.out, " MISSED "))
      << result.out;
}

TEST(BenchScalingCommandTest, BadInputIsNamedBeforeAnyWork) {
  const struct {
    std::vector<std::string> flags;
    const char* problem;
  } cases[] = {
      {{"--rounds", "0"}, "--rounds is 0"},
      {{"--max_numel", "5"}, "--max_numel is 5"},
      {{"--max_numel", "1000000000000000"},
       "MiB are available; lower --max_numel"},
      {{"--max_numel", "9000000000000000000"}, "64 bits"},
      {{"--threads", "-1"}, "--threads is -1, expected 0 to 4096"},
      {{"--threads", "4294967297"}, "--threads is 4294967297"},
      {{"--kernel", "scalr"}, "did you mean scalar?"},
  };
  for (const auto& c : cases) {
    const Result result = BenchScaling(c.flags);
    EXPECT_EQ(result.out, "") << c.problem;
    EXPECT_TRUE(absl::StrContains(result.status.message(), c.problem))
        << "expected '" << c.problem << "', got " << result.status;
  }
}

}  // namespace
}  // namespace onepass

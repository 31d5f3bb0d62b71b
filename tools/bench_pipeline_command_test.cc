#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/test_kernels.h"
#include "tools/commands.h"
#include "tools/run_command.h"

namespace onepass {
namespace {

using nlohmann::json;

using Result = CommandResult;

Result BenchPipeline(const std::vector<std::string>& flags) {
  return RunCommand(&NewBenchPipelineCommand, flags);
}

void ExpectSpread(const json& spread) {
  EXPECT_EQ(Keys(spread), (std::set<std::string>{"median", "p10", "p90"}));
  EXPECT_GT(spread.at("p10"), 0);
  EXPECT_GE(spread.at("median"), spread.at("p10"));
  EXPECT_GE(spread.at("p90"), spread.at("median"));
}

TEST(BenchPipelineCommandTest, JsonHasAllPoints) {
  const Result result =
      BenchPipeline({"--json", "--rounds", "2", "--numel", "140000", "--pieces",
                     "5", "--threads", "2", "--kernel", ScalarKernel().name});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(result.err, "MiB of memory")) << result.err;
  EXPECT_TRUE(absl::StrContains(result.err, "2 rounds")) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(Keys(report), (std::set<std::string>{
                              "numel", "threads", "rounds", "kernel", "copies",
                              "cpu_gb_per_s", "results", "ranks"}));
  EXPECT_EQ(report.at("numel"), 140000);
  EXPECT_EQ(report.at("threads"), 2);
  EXPECT_EQ(report.at("rounds"), 2);
  EXPECT_EQ(report.at("kernel"), "scalar");
  EXPECT_EQ(report.at("copies"),
            ThreadPool::AllowedProcessors() > 2 ? "real" : "timestamps");
  EXPECT_GT(report.at("cpu_gb_per_s"), 0);

  ASSERT_EQ(report.at("results").size(), 6u);
  json links = json::array();
  for (const json& point : report.at("results")) {
    EXPECT_EQ(Keys(point),
              (std::set<std::string>{"link_over_cpu", "pieces", "buffers", "ms",
                                     "bound_over_measured",
                                     "serial_over_pipelined", "spreads"}));
    ExpectSpread(point.at("ms"));
    links.push_back({point.at("link_over_cpu"), point.at("buffers")});
    EXPECT_EQ(point.at("pieces"), 5);
    const json& spreads = point.at("spreads");
    EXPECT_EQ(Keys(spreads), (std::set<std::string>{"bound_over_measured",
                                                    "serial_over_pipelined"}));
    for (const auto& [name, spread] : spreads.items()) {
      ExpectSpread(spread);
      EXPECT_EQ(point.at(name), spread.at("median"));
    }
  }
  EXPECT_EQ(links, json::parse("[[0.25,2],[0.5,2],[1,2],[1,1],[2,2],[10,2]]"));

  ASSERT_EQ(report.at("ranks").size(), 9u);
  for (const json& point : report.at("ranks")) {
    EXPECT_EQ(Keys(point),
              (std::set<std::string>{"numel", "ranks", "ms", "ns_per_element",
                                     "speedup"}));
    ExpectSpread(point.at("ms"));
    ExpectSpread(point.at("speedup"));
    EXPECT_GT(point.at("ns_per_element"), 0);
  }
  EXPECT_EQ(report.at("ranks").at(8).at("numel"), 35000);
  EXPECT_EQ(report.at("ranks").at(8).at("ranks"), 4);
}

TEST(BenchPipelineCommandTest, TableHasARowAPoint) {
  const Result result =
      BenchPipeline({"--rounds", "1", "--numel", "131072", "--timestamps"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  for (const char* part :
       {"131072 elements, 1 rounds, 1 thread, kernel ",
        "over a link copies are timestamps: they\ntake", "bound/measured",
        "serial/pipelined", "    0.25      32        2  ",
        "    0.50      32        2  ", "    1.00      32        2  ",
        "    1.00      32        1  ", "    2.00      32        2  ",
        "   10.00      32        2  ", "  >= 0.95 ", "  >= 0.92 ", "  >= 1.80 ",
        "      2048      1  ", "     32768      4  ", "  1.00 (1.00 to 1.00)",
        "#"}) {
    EXPECT_TRUE(absl::StrContains(result.out, part))
        << "no '" << part << "' in\n"
        << result.out;
  }
  int targets = 0;
  for (const auto line : absl::StrSplit(result.out, '\n')) {
    EXPECT_LE(line.size(), 100u) << line;
    EXPECT_FALSE(absl::EndsWith(line, " ")) << line;
    targets += absl::StrContains(line, " reached") !=
               absl::StrContains(line, " MISSED");
  }
  EXPECT_EQ(targets, 6) << result.out;
}

TEST(BenchPipelineCommandTest, BadInputIsNamedBeforeAnyWork) {
  const struct {
    std::vector<std::string> flags;
    const char* problem;
  } cases[] = {
      {{"--rounds", "0"}, "--rounds is 0"},
      {{"--numel", "5"}, "--numel is 5, expected 131072 to"},
      {{"--numel", "10000000000000"}, "MiB are available; lower --numel"},
      {{"--numel", "9223372036854775807"}, "--numel is 9223372036854775807"},
      {{"--pieces", "0"}, "--pieces is 0"},
      {{"--threads", "-1"}, "--threads is -1, expected 0 to 4096"},
      {{"--threads", "4294967297"}, "--threads is 4294967297"},
      {{"--kernel", "scalr"}, "did you mean scalar?"},
  };
  for (const auto& c : cases) {
    const Result result = BenchPipeline(c.flags);
    EXPECT_EQ(result.out, "") << c.problem;
    EXPECT_TRUE(absl::StrContains(result.status.message(), c.problem))
        << "expected '" << c.problem << "', got " << result.status;
  }
}

}  // namespace
}  // namespace onepass

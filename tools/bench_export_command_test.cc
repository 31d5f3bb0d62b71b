// `onepass bench export`, over little: what it says, and what it leaves.

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"
#include "tools/commands.h"
#include "tools/run_command.h"

namespace onepass {
namespace {

using nlohmann::json;

class BenchExportCommandTest : public testing::Test {
 protected:
  CommandResult Run(const std::vector<std::string>& flags) {
    std::vector<std::string> all = {"--kernel", ScalarKernel().name};
    all.insert(all.end(), flags.begin(), flags.end());
    return RunCommand(&NewBenchExportCommand, all);
  }
  std::vector<std::string> Little() const {
    return {"--numel",  "100000", "--chunk_bytes", "16384",
            "--rounds", "2",      "--dir",         directory_.path()};
  }

  const TempDirectory directory_;
};

TEST_F(BenchExportCommandTest, JsonHasAllRatios) {
  std::vector<std::string> flags = Little();
  flags.push_back("--json");
  const CommandResult result = Run(flags);
  ASSERT_TRUE(result.status.ok()) << result.status;
  const json report = json::parse(result.out);
  for (const char* name :
       {"direct_reference/export", "checksum/none", "small_tensors/one"}) {
    EXPECT_GT(report["ratios"][name].get<double>(), 0) << name;
    EXPECT_GE(report["spreads"][name]["p90"].get<double>(),
              report["spreads"][name]["p10"].get<double>());
  }
  EXPECT_EQ(report["ratios"].size(), 3u);
  EXPECT_EQ(report["budget_bytes"].get<int>(), 3 * 16384);
  EXPECT_GT(report["gb_per_s"].get<double>(), 0);
  if (!UnderSanitizer() && !UnderEmulator()) {
    // What is 400 kB could not be much more even if all of it were taken; that
    // the bound holds where it is many times the buffers, the table says.
    EXPECT_LE(report["extra_rss_bytes"].get<int>(), 8 << 20);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(BenchExportCommandTest, TableNamesTargets) {
  const CommandResult result = Run(Little());
  ASSERT_TRUE(result.status.ok()) << result.status;
  for (const char* text : {"direct_reference/export", ">= 0.90", "<= 1.03",
                           "<= 1.25", "extra resident memory"}) {
    EXPECT_TRUE(absl::StrContains(result.out, text)) << result.out;
  }
}

TEST_F(BenchExportCommandTest, BadFlagsAreNamed) {
  const std::pair<const char*, const char*> kBad[] = {
      {"--numel", "5"},
      {"--chunk_bytes", "100"},
      {"--rounds", "0"},
      {"--dir", "/nowhere/at/all"}};
  for (const auto& [flag, value] : kBad) {
    std::vector<std::string> flags = Little();
    *(std::find(flags.begin(), flags.end(), flag) + 1) = value;
    const absl::Status status = Run(flags).status;
    EXPECT_FALSE(status.ok()) << flag;
    EXPECT_TRUE(absl::StrContains(status.message(), flag)) << status;
  }
}

}  // namespace
}  // namespace onepass

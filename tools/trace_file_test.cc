#include "tools/trace_file.h"

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/communicator.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "offload/step_trace.h"
#include "tools/chrome_trace.h"
#include "tools/ranks.h"

namespace onepass {
namespace {

using nlohmann::json;

constexpr int kRanks = 3;
constexpr char kSpan[] = "update";

// How often each rank and step is there.
using Steps = std::map<std::pair<int, int>, int>;

Steps StepsOf(const std::string& text) {
  Steps steps;
  for (const json& event : json::parse(text)) {
    if (event.at("name") != kSpan) continue;
    ++steps[{event.at("pid").get<int>(),
             event.at("args").at("step").get<int>()}];
  }
  return steps;
}

// Of a run that was resumed after this step.
constexpr int kBefore = 7;

Steps AllOnce(int steps) {
  Steps all;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int step = 1; step <= steps; ++step) all[{rank, kBefore + step}] = 1;
  }
  return all;
}

class TraceFileTest : public testing::Test {
 protected:
  static void AddSpan(TraceFile& file) {
    file.spans()->spans.push_back({TraceRow::kHost, kSpan, 1, 2, 0});
  }
  std::string Read() const {
    std::ifstream file(path_);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  const std::string path_ = testing::TempDir() + "/trace_file_test.json";
};

TEST_F(TraceFileTest, HasAllStepsOfAllRanks) {
  std::ofstream(path_) << "what was there before";
  const absl::Status status =
      RunThreadRanks(kRanks, [&](Communicator& communicator) {
        auto file = TraceFile::Create(path_, communicator);
        if (!file.ok()) return file.status();
        (*file)->set_step(kBefore);
        for (int step = 1; step <= 5; ++step) {
          AddSpan(**file);
          (*file)->EndStep();
          if (step % 2 == 0) {
            EXPECT_TRUE((*file)->Write().ok());
          }
        }
        return (*file)->End();
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(StepsOf(Read()), AllOnce(5));
}

TEST_F(TraceFileTest, HasTheStepsBeforeAnError) {
  const absl::Status status =
      RunThreadRanks(kRanks, [&](Communicator& communicator) {
        auto file = TraceFile::Create(path_, communicator);
        if (!file.ok()) return file.status();
        (*file)->set_step(kBefore);
        for (int step = 1; step <= 4; ++step) {
          AddSpan(**file);
          // The last one's end is not known.
          if (step < 4) (*file)->EndStep();
          if (step == 2) {
            EXPECT_TRUE((*file)->Write().ok());
          }
        }
        if (communicator.rank() == 1) return absl::InternalError("no more");
        const absl::Status told = (*file)->Write();
        EXPECT_TRUE(absl::IsAborted(told)) << told;
        return told;
      });
  EXPECT_EQ(status.message(), "no more");
  EXPECT_EQ(StepsOf(absl::StrCat(Read(), kTraceEnd)), AllOnce(4));
}

TEST_F(TraceFileTest, SaysWhyItCannotBeWritten) {
  const absl::Status status =
      RunThreadRanks(kRanks, [&](Communicator& communicator) {
        return TraceFile::Create("/nonexistent/trace", communicator).status();
      });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(),
                                "--trace /nonexistent/trace: No such file"))
      << status;
}

}  // namespace
}  // namespace onepass

#include "tools/chrome_trace.h"

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "offload/step_trace.h"

namespace onepass {
namespace {

using nlohmann::json;

TEST(ChromeTraceTest, EventsAreThoseOfTheSpans) {
  const TraceSpan spans[] = {
      {TraceRow::kHost, "update", 1.5, 1.75, 1000},
      {TraceRow::kCopies, "copy", 1.625, 2, 1000},
      {TraceRow::kHost, "wait", 1.75, 2, 0},
  };
  std::string events;
  for (const int rank : {0, 3}) {
    events += TraceHead(rank);
    AppendTraceEvents(rank, /*step=*/7, spans, &events);
  }
  const json file = json::parse(absl::StrCat(events, kTraceEnd));
  std::map<int, std::string> processes;
  std::set<std::pair<int, int>> rows;  // that have a name
  json complete = json::array();
  for (const json& event : file) {
    const int pid = event.at("pid");
    if (event.at("ph") == "X") {
      complete.push_back(event);
      EXPECT_EQ(rows.count({pid, event.at("tid").get<int>()}), 1);
    } else if (event.at("name") == "process_name") {
      processes[pid] = event.at("args").at("name");
    } else if (event.at("name") == "thread_name") {
      EXPECT_TRUE(rows.emplace(pid, event.at("tid").get<int>()).second);
      EXPECT_NE(event.at("args").at("name"), "");
    }
  }
  EXPECT_EQ(processes,
            (std::map<int, std::string>{{0, "rank 0"}, {3, "rank 3"}}));
  EXPECT_EQ(rows.size(), 2 * 4);
  ASSERT_EQ(complete.size(), 6);
  EXPECT_EQ(complete[0], json::parse(R"({
      "ph": "X", "name": "update", "pid": 0, "tid": 0, "ts": 1500000.0,
      "dur": 250000.0, "args": {"step": 7, "numel": 1000}})"));
  EXPECT_EQ(complete[4], json::parse(R"({
      "ph": "X", "name": "copy", "pid": 3, "tid": 2, "ts": 1625000.0,
      "dur": 375000.0, "args": {"step": 7, "numel": 1000}})"));
  EXPECT_EQ(complete[5].at("args"), json::parse(R"({"step": 7})"));
}

TEST(ChromeTraceTest, AFileWithoutEventsIsOne) {
  EXPECT_FALSE(json::parse(absl::StrCat(TraceHead(0), kTraceEnd)).empty());
}

}  // namespace
}  // namespace onepass

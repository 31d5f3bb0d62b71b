#include "tools/chrome_trace.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace onepass {
namespace {

using nlohmann::ordered_json;

constexpr double kMicroseconds = 1e6;

struct Row {
  TraceRow row;
  const char* name;
};

constexpr Row kRows[] = {
    {TraceRow::kHost, "host"},
    {TraceRow::kGradients, "gradients to the host"},
    {TraceRow::kCopies, "weights to the device"},
    {TraceRow::kDevice, "updates on the device"},
};

void Append(const ordered_json& event, std::string* events) {
  absl::StrAppend(events, ",\n", event.dump());
}

}  // namespace

std::string TraceHead(int rank) {
  const ordered_json name = {{"ph", "M"},
                             {"name", "process_name"},
                             {"pid", rank},
                             {"args", {{"name", absl::StrCat("rank ", rank)}}}};
  std::string events = absl::StrCat(rank == 0 ? "[\n" : ",\n", name.dump());
  for (const Row& row : kRows) {
    const int number = static_cast<int>(row.row);
    Append({{"ph", "M"},
            {"name", "thread_name"},
            {"pid", rank},
            {"tid", number},
            {"args", {{"name", row.name}}}},
           &events);
    Append({{"ph", "M"},
            {"name", "thread_sort_index"},
            {"pid", rank},
            {"tid", number},
            {"args", {{"sort_index", number}}}},
           &events);
  }
  return events;
}

void AppendTraceEvents(int rank, int64_t step,
                       absl::Span<const TraceSpan> spans, std::string* events) {
  for (const TraceSpan& span : spans) {
    ordered_json args = {{"step", step}};
    if (span.numel > 0) args["numel"] = span.numel;
    Append({{"ph", "X"},
            {"name", span.name},
            {"pid", rank},
            {"tid", static_cast<int>(span.row)},
            {"ts", span.begin_s * kMicroseconds},
            {"dur", (span.end_s - span.begin_s) * kMicroseconds},
            {"args", std::move(args)}},
           events);
  }
}

}  // namespace onepass

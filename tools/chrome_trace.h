// Traces of steps as the JSON that Chrome's tracing defined ("Trace Event
// Format"), which Perfetto (ui.perfetto.dev) opens: a process for each rank, a
// row for the host and one for each stream.
//
//   std::string events = TraceHead(rank);
//   AppendTraceEvents(rank, step, trace.spans, &events);
//   file << events;     // of all ranks, rank 0 first; as often as you like
//   ...
//   file << kTraceEnd;
//
// Times of each rank are from when its tracing began.
//
// It is the format's array of events, whose end may be missing: a file that was
// not finished opens, too.

#ifndef ONEPASS_TOOLS_CHROME_TRACE_H_
#define ONEPASS_TOOLS_CHROME_TRACE_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "offload/step_trace.h"

namespace onepass {

// Names of a rank and its rows; of rank 0, the beginning of the file.
std::string TraceHead(int rank);
void AppendTraceEvents(int rank, int64_t step,
                       absl::Span<const TraceSpan> spans, std::string* events);

inline constexpr absl::string_view kTraceEnd = "\n]\n";

}  // namespace onepass

#endif  // ONEPASS_TOOLS_CHROME_TRACE_H_

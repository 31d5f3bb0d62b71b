// Traces of steps as the JSON that Chrome's tracing defined ("Trace Event
// Format"), which Perfetto (ui.perfetto.dev) opens: a process for each rank, a
// row for the host and one for each stream.
//
//   std::string events = TraceRowNames(rank);
//   AppendTraceEvents(rank, step, trace.spans, &events);
//   ...
//   file << TraceFile(events);   // of all ranks, one after the other

#ifndef ONEPASS_TOOLS_CHROME_TRACE_H_
#define ONEPASS_TOOLS_CHROME_TRACE_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "offload/step_trace.h"

namespace onepass {

// Events are JSON objects, a line each, with a comma after each.
std::string TraceRowNames(int rank);
void AppendTraceEvents(int rank, int64_t step,
                       absl::Span<const TraceSpan> spans, std::string* events);

// The whole file, with these events.
std::string TraceFile(absl::string_view events);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_CHROME_TRACE_H_

// When each part of a step began and ended.
//
//   StepTrace trace;
//   RETURN_IF_ERROR(optimizer->SetTrace(&trace));
//   ...
//   for (const TraceSpan& span : trace.spans) ...

#ifndef ONEPASS_OFFLOAD_STEP_TRACE_H_
#define ONEPASS_OFFLOAD_STEP_TRACE_H_

#include <cstdint>
#include <vector>

namespace onepass {

// What happens one thing after the other: the host, or a stream.
enum class TraceRow : uint8_t { kHost, kGradients, kCopies, kDevice };

struct TraceSpan {
  TraceRow row;
  // "gradient", "sum", "update", "copy", "wait for a buffer", ...: a literal.
  const char* name;
  // Since tracing began. Of a stream, by the device's clock, to which the
  // host's was set then: what the host did after waiting for a stream comes
  // after it.
  double begin_s;
  double end_s;
  int64_t numel;  // that it is about; 0 for none
};

struct StepTrace {
  std::vector<TraceSpan> spans;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_STEP_TRACE_H_

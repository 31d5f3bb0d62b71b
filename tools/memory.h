// Whether the memory that a run needs is there, asked before it takes any.
//
//   RETURN_IF_ERROR(CheckMemory("training", needed, "lower --hidden"));

#ifndef ONEPASS_TOOLS_MEMORY_H_
#define ONEPASS_TOOLS_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace onepass {

// Bytes that this process may still take without swapping: of the machine, of
// the container (cgroup v2) it runs in, and of its own limit (`ulimit -v`).
// What cannot be read sets no limit.
int64_t AvailableBytes();

// ResourceExhausted where `needed` bytes are more than AvailableBytes(): "WHAT
// needs N MiB of memory, N MiB are available; ADVICE".
absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         absl::string_view advice);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_MEMORY_H_

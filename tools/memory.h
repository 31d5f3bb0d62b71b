// Whether the memory that a run needs is there, asked before it takes any.
//
//   RETURN_IF_ERROR(CheckMemory("training", needed, "lower --hidden"));

#ifndef ONEPASS_TOOLS_MEMORY_H_
#define ONEPASS_TOOLS_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace onepass {

// Bytes that this process may still take without swapping: of the machine, of
// the container (cgroup v2) it runs in, and of its own limit (`ulimit -v`).
// What cannot be read sets no limit.
int64_t AvailableBytes();

// What the limit of a cgroup (v2) leaves, by the files in its folder. Pages of
// files that were not used for a while count as left: they give way. None where
// there is no limit, or none that can be read.
std::optional<int64_t> AvailableBytesOfGroup(const std::string& folder);

// ResourceExhausted where `needed` bytes are more than AvailableBytes(): "WHAT
// needs N MiB of memory, N MiB are available; ADVICE".
absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         absl::string_view advice);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_MEMORY_H_

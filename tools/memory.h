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

// Bytes that may still be taken without swapping: of the machine, and of the
// container (cgroup v2) that this process runs in. What cannot be read sets no
// limit.
int64_t AvailableBytes();

// What the limit of this process (`ulimit -v`) leaves it.
int64_t AvailableBytesOfProcess();

// What the limit of a cgroup (v2) leaves, by the files in its folder. Pages of
// files that were not used for a while count as left: they give way. None where
// there is no limit, or none that can be read.
std::optional<int64_t> AvailableBytesOfGroup(const std::string& folder);

// ResourceExhausted where `needed` bytes are more than AvailableBytes(): "WHAT
// needs N MiB of memory, N MiB are available; ADVICE". The same where
// `of_process` of them, which this process takes, are more than
// AvailableBytesOfProcess().
absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         int64_t of_process, absl::string_view advice);
// Where this process takes all.
absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         absl::string_view advice);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_MEMORY_H_

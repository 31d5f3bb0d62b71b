// Which checkpoints there are: found by looking, without a file that says so.
//
//   ASSIGN_OR_RETURN(std::vector<FoundCheckpoint> found,
//                    FindCheckpoints("runs"));
//   for (const FoundCheckpoint& checkpoint : found) ...     // newest first

#ifndef ONEPASS_CHECKPOINT_FIND_H_
#define ONEPASS_CHECKPOINT_FIND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace onepass {

struct FoundCheckpoint {
  std::string name;
  std::string path;
  int64_t step = -1;  // -1 where the manifest does not say
  // DataLoss: the manifest is damaged, or a file that it lists is not there, of
  // its length. Others: one of them cannot be read. Nothing else was looked
  // into.
  absl::Status status;
};

// Published checkpoints below `parent`, by step and then by name, the newest
// first; those whose manifest does not say last. NotFound: there is no
// `parent`.
absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(
    absl::string_view parent);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_FIND_H_

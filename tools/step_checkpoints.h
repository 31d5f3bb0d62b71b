// The checkpoints of `onepass train`, which are named by their steps, among
// those of a directory (checkpoint/find.h).
//
//   ASSIGN_OR_RETURN(std::vector<FoundCheckpoint> found,
//                    FindStepCheckpoints("runs"));

#ifndef ONEPASS_TOOLS_STEP_CHECKPOINTS_H_
#define ONEPASS_TOOLS_STEP_CHECKPOINTS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/find.h"

namespace onepass {

inline constexpr char kStepPrefix[] = "step-";

// Whether training gives such a name: "step-<digits>", or "step-<digits>-<n>"
// where there was another one of that step.
bool IsStepName(absl::string_view name);

// As FindCheckpoints(), and last each directory IsStepName() that has no
// manifest: what was a checkpoint is damaged, and not passed over in silence.
absl::StatusOr<std::vector<FoundCheckpoint>> FindStepCheckpoints(
    absl::string_view parent);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_STEP_CHECKPOINTS_H_

// Reads all of a checkpoint, and says what is damaged.
//
//   ASSIGN_OR_RETURN(VerifyReport report,
//                    VerifyCheckpoint("runs/step-100", {}));
//   for (const absl::Status& problem : report.problems) ...

#ifndef ONEPASS_CHECKPOINT_VERIFY_H_
#define ONEPASS_CHECKPOINT_VERIFY_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace onepass {

struct VerifyOptions {
  // Of memory that grows with tensors; at least 4096.
  int64_t buffer_bytes = int64_t{8} << 20;
  // Called with what was read, and what there is to read.
  std::function<void(int64_t done, int64_t all)> progress;
};

struct VerifyReport {
  // The first of each file: of indexes, then of what they say together, of
  // files that do not belong there or are missing, of the others. Empty:
  // nothing is damaged.
  std::vector<absl::Status> problems;
  int64_t bytes = 0;  // that were read
};

// A damaged checkpoint is no error: its problems are, each with the name of the
// file: DataLoss of one that is damaged, cut or missing, or that belongs to no
// rank; of others that cannot be read what that gave, as PermissionDenied. Of a
// rank whose index is damaged the other files are only looked for; where the
// manifest is, none is.
//
// NotFound: there is no such directory, or it is none of a checkpoint.
// InvalidArgument: too small a buffer. Others: of the manifest or an index that
// cannot be read.
absl::StatusOr<VerifyReport> VerifyCheckpoint(absl::string_view path,
                                              const VerifyOptions& options);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_VERIFY_H_

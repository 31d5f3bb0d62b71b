// The absl::Status of a system call on a file that failed.
//
//   if (fsync(descriptor) != 0) return FileError(errno, "fsync", path);

#ifndef ONEPASS_CHECKPOINT_FILE_ERROR_H_
#define ONEPASS_CHECKPOINT_FILE_ERROR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace onepass {

// `error` is what errno was; 0 is taken for EIO. The message has the path, the
// call, the offset in bytes where there is one, and the system's text. The code
// is that of absl::ErrnoToStatusCode, as
//
//   ENOSPC, EDQUOT  ResourceExhausted: room can be made
//   EEXIST          AlreadyExists
//   ENOENT          NotFound
//   EACCES, EPERM   PermissionDenied
//
// but of EIO DataLoss: what was written or read there is not to be relied on.
absl::Status FileError(int error, absl::string_view call,
                       absl::string_view path);
absl::Status FileError(int error, absl::string_view call,
                       absl::string_view path, int64_t offset);

// The same of a file that a checkpoint is to have: where it is not there, no
// regular file or too long (NotFound, InvalidArgument) that is damage,
// DataLoss. OK and other errors stay.
absl::Status AsDamage(const absl::Status& status);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_FILE_ERROR_H_

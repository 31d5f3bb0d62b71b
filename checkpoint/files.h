// Small files, reading, and names, for checkpoints.
//
//   RETURN_IF_ERROR(WriteSmallFile(directory + "/manifest", bytes));
//   RETURN_IF_ERROR(SyncDirectory(directory));
//
//   ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
//   RETURN_IF_ERROR(file.ReadAt(offset, absl::MakeSpan(buffer)));
//
// Errors are those of FileError() (checkpoint/file_error.h) where no others are
// named.

#ifndef ONEPASS_CHECKPOINT_FILES_H_
#define ONEPASS_CHECKPOINT_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/file_handle.h"

namespace onepass {

// What Linux takes, in bytes.
inline constexpr size_t kMostNameBytes = 255;

// Whether `name` is that of an entry of a directory: not empty, not "." or
// "..", without '/' and NUL, of kMostNameBytes at most.
bool IsPlainName(absl::string_view name);

// `name` in `directory`.
std::string JoinPath(absl::string_view directory, absl::string_view name);

// A new file with these bytes, on the disk; its name is there after
// SyncDirectory(). Where it fails, part of it may be there. AlreadyExists:
// there is something of that name.
absl::Status WriteSmallFile(const std::string& path, absl::string_view bytes);

// Waits until the names in a directory are on the disk. (Where the filesystem
// cannot wait for that and says so, EINVAL, it does what can be done: nothing.)
absl::Status SyncDirectory(const std::string& path);

// AlreadyExists: there is something at `path`, a symbolic link too.
absl::Status RefuseExisting(const std::string& path);

// Renames a file or directory within its filesystem. AlreadyExists: there is
// something at `to`, if only an empty directory; both stay. On a filesystem
// without renameat2(RENAME_NOREPLACE), as NFS, that is asked first, and what
// another process puts there between that and the renaming may be replaced.
absl::Status RenameToNew(const std::string& from, const std::string& to);

// The names in a directory, in order, but "." and "..".
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path);

// A file that is only read, by any number of threads. Movable.
class InputFile {
 public:
  // Open as nothing.
  InputFile() = default;

  // Regular files only, and none behind a symbolic link: InvalidArgument.
  static absl::StatusOr<InputFile> Open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  // In bytes, when it was opened.
  int64_t size() const { return size_; }

  // Fills `data` with what begins at `offset`. InvalidArgument: an offset below
  // 0. DataLoss, with the offsets: the file ends before.
  absl::Status ReadAt(int64_t offset, absl::Span<char> data) const;

 private:
  FileHandle file_;
  int64_t size_ = 0;
};

// A file of a checkpoint, which has `bytes`. DataLoss: it is not there, or has
// another length; others as InputFile::Open().
absl::StatusOr<InputFile> OpenExpected(const std::string& path, int64_t bytes);

// As InputFile::Open() and ReadAt(). InvalidArgument: more than `most_bytes`,
// of which nothing is read.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          int64_t most_bytes);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_FILES_H_

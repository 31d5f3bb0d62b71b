// An open file or directory and its path: what checkpoint's other files make
// system calls through. Each call is repeated where a signal interrupts it, and
// an error is that of checkpoint/file_error.h.
//
//   ASSIGN_OR_RETURN(FileHandle file, FileHandle::Open(path, O_RDONLY));

#ifndef ONEPASS_CHECKPOINT_FILE_HANDLE_H_
#define ONEPASS_CHECKPOINT_FILE_HANDLE_H_

#include <cerrno>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace onepass {

// The result of call(), which is -1 with an errno where it fails, called again
// as long as that is EINTR.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Movable. Closes on destruction.
class FileHandle {
 public:
  // Open as nothing.
  FileHandle() = default;

  // `flags` are those of open(2); O_CLOEXEC is added. What is created may be
  // read and written by whom the umask lets.
  static absl::StatusOr<FileHandle> Open(std::string path, int flags);

  ~FileHandle();
  // The source is left open as nothing.
  FileHandle(FileHandle&& other) noexcept;
  FileHandle& operator=(FileHandle&& other) noexcept;

  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }

  // One pwrite(2) of at least one byte; its offset advances by what was
  // written, which is returned.
  absl::StatusOr<int64_t> WriteSome(absl::Span<const char> data,
                                    int64_t offset);
  // All of it.
  absl::Status WriteAt(absl::Span<const char> data, int64_t offset);
  // Fills `data`. DataLoss, with the offset: the file ends before.
  absl::Status ReadAt(absl::Span<char> data, int64_t offset) const;

  absl::Status Truncate(int64_t bytes);
  absl::Status Sync();
  // The descriptor is given up also where this fails.
  absl::Status Close();

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_FILE_HANDLE_H_

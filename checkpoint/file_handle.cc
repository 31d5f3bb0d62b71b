#include "checkpoint/file_handle.h"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "checkpoint/file_error.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

// What Linux reads or writes at most in one call, cut to whole blocks, so that
// the rest of a direct write is aligned, too.
constexpr size_t kMostAtOnce = size_t{1} << 30;

// Of which open(2) takes away what the umask has.
constexpr mode_t kMode = 0666;

}  // namespace

absl::StatusOr<FileHandle> FileHandle::Open(std::string path, int flags) {
  FileHandle file;
  file.path_ = std::move(path);
  file.descriptor_ = Uninterrupted(
      [&] { return open(file.path_.c_str(), flags | O_CLOEXEC, kMode); });
  if (file.descriptor_ < 0) return FileError(errno, "open", file.path_);
  return file;
}

FileHandle::~FileHandle() {
  if (descriptor_ >= 0) close(descriptor_);
}

FileHandle::FileHandle(FileHandle&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  FileHandle(std::move(other));
  return *this;
}

absl::StatusOr<int64_t> FileHandle::WriteSome(absl::Span<const char> data,
                                              int64_t offset) {
  const ssize_t written = Uninterrupted([&] {
    return pwrite(descriptor_, data.data(), std::min(data.size(), kMostAtOnce),
                  offset);
  });
  if (written < 0) return FileError(errno, "pwrite", path_, offset);
  // Else a loop around this would never end.
  if (written == 0) return FileError(EIO, "pwrite of nothing", path_, offset);
  return written;
}

absl::Status FileHandle::WriteAt(absl::Span<const char> data, int64_t offset) {
  while (!data.empty()) {
    int64_t written;
    ONEPASS_ASSIGN_OR_RETURN(written, WriteSome(data, offset));
    data.remove_prefix(written);
    offset += written;
  }
  return absl::OkStatus();
}

absl::Status FileHandle::ReadAt(absl::Span<char> data, int64_t offset) const {
  while (!data.empty()) {
    const ssize_t count = Uninterrupted([&] {
      return pread(descriptor_, data.data(), std::min(data.size(), kMostAtOnce),
                   offset);
    });
    if (count < 0) return FileError(errno, "pread", path_, offset);
    if (count == 0) {
      return absl::DataLossError(absl::StrCat(path_, ": ends at offset ",
                                              offset, ", expected ",
                                              data.size(), " bytes more"));
    }
    data.remove_prefix(count);
    offset += count;
  }
  return absl::OkStatus();
}

absl::Status FileHandle::Truncate(int64_t bytes) {
  if (Uninterrupted([&] { return ftruncate(descriptor_, bytes); }) != 0) {
    return FileError(errno, "ftruncate", path_, bytes);
  }
  return absl::OkStatus();
}

absl::Status FileHandle::Sync() {
  if (Uninterrupted([&] { return fsync(descriptor_); }) != 0) {
    return FileError(errno, "fsync", path_);
  }
  return absl::OkStatus();
}

absl::Status FileHandle::Close() {
  // Not repeated: Linux has closed the descriptor also where it says EINTR.
  if (close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) {
    return FileError(errno, "close", path_);
  }
  return absl::OkStatus();
}

}  // namespace onepass

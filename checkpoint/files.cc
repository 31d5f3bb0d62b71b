#include "checkpoint/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/file_error.h"
#include "checkpoint/file_handle.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

absl::Status Existing(absl::string_view path) {
  return absl::AlreadyExistsError(
      absl::StrCat(path, ": exists, expected a new name"));
}

}  // namespace

bool IsPlainName(absl::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.size() <= kMostNameBytes && !absl::StrContains(name, '/') &&
         !absl::StrContains(name, '\0');
}

std::string JoinPath(absl::string_view directory, absl::string_view name) {
  return absl::StrCat(directory, absl::EndsWith(directory, "/") ? "" : "/",
                      name);
}

absl::Status WriteSmallFile(const std::string& path, absl::string_view bytes) {
  FileHandle file;
  ONEPASS_ASSIGN_OR_RETURN(file,
                           FileHandle::Open(path, O_WRONLY | O_CREAT | O_EXCL));
  ONEPASS_RETURN_IF_ERROR(file.WriteAt(bytes, 0));
  ONEPASS_RETURN_IF_ERROR(file.Sync());
  return file.Close();
}

absl::Status SyncDirectory(const std::string& path) {
  FileHandle directory;
  ONEPASS_ASSIGN_OR_RETURN(directory,
                           FileHandle::Open(path, O_RDONLY | O_DIRECTORY));
  const absl::Status status = directory.Sync();
  return absl::IsInvalidArgument(status) ? absl::OkStatus() : status;
}

absl::Status RefuseExisting(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) return Existing(path);
  return errno == ENOENT ? absl::OkStatus() : FileError(errno, "lstat", path);
}

absl::Status RenameToNew(const std::string& from, const std::string& to) {
  const auto status = [&](absl::string_view call, int result) {
    if (result == 0) return absl::OkStatus();
    if (errno == EEXIST || errno == ENOTEMPTY) return Existing(to);
    return FileError(errno, absl::StrCat(call, " to ", to), from);
  };
  const int result =
      renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
  if (result == 0 || (errno != EINVAL && errno != ENOSYS)) {
    return status("renameat2", result);
  }
  // The filesystem, or the system, has no such renaming.
  ONEPASS_RETURN_IF_ERROR(RefuseExisting(to));
  return status("rename", rename(from.c_str(), to.c_str()));
}

absl::StatusOr<InputFile> InputFile::Open(const std::string& path) {
  const auto not_regular = [&path](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected a regular file, is ", what));
  };
  // Without O_NONBLOCK, a named pipe would have to have a writer first.
  auto handle = FileHandle::Open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat status;
  if (!handle.ok()) {
    if (lstat(path.c_str(), &status) == 0 && S_ISLNK(status.st_mode)) {
      return not_regular("a symbolic link");
    }
    return handle.status();
  }
  if (fstat(handle->descriptor(), &status) != 0) {
    return FileError(errno, "fstat", path);
  }
  if (S_ISDIR(status.st_mode)) return not_regular("a directory");
  if (!S_ISREG(status.st_mode)) return not_regular("something else");
  InputFile file;
  file.file_ = *std::move(handle);
  file.size_ = status.st_size;
  return file;
}

absl::Status InputFile::ReadAt(int64_t offset, absl::Span<char> data) const {
  if (offset < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path(), ": offset ", offset, " is below 0"));
  }
  const int64_t bytes = data.size();
  if (offset > size_ || bytes > size_ - offset) {
    return absl::DataLossError(absl::StrCat(path(), ": ends at offset ", size_,
                                            ", expected ", bytes,
                                            " bytes at offset ", offset));
  }
  return file_.ReadAt(data, offset);
}

absl::StatusOr<InputFile> OpenExpected(const std::string& path, int64_t bytes) {
  absl::StatusOr<InputFile> file = InputFile::Open(path);
  ONEPASS_RETURN_IF_ERROR(AsDamage(file.status()));
  if (file->size() == bytes) return file;
  return absl::DataLossError(
      absl::StrCat(path, ": has ", file->size(), " bytes, expected ", bytes));
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          int64_t most_bytes) {
  InputFile file;
  ONEPASS_ASSIGN_OR_RETURN(file, InputFile::Open(path));
  if (file.size() > most_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": ", file.size(), " bytes, expected at most ", most_bytes));
  }
  std::string bytes(file.size(), '\0');
  ONEPASS_RETURN_IF_ERROR(file.ReadAt(0, absl::MakeSpan(bytes)));
  return bytes;
}

absl::StatusOr<std::vector<std::string>> ListDirectory(
    const std::string& path) {
  const auto close_directory = [](DIR* directory) { closedir(directory); };
  const std::unique_ptr<DIR, decltype(close_directory)> directory(
      opendir(path.c_str()), close_directory);
  if (directory == nullptr) return FileError(errno, "opendir", path);
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = readdir(directory.get());
    if (entry == nullptr) break;
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) return FileError(errno, "readdir", path);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace onepass

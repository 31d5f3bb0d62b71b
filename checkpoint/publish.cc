#include "checkpoint/publish.h"

#include <dirent.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "checkpoint/file_error.h"
#include "checkpoint/file_handle.h"
#include "checkpoint/files.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

constexpr absl::string_view kMark = ".partial-";
constexpr size_t kTimeDigits = 16;
constexpr size_t kProcessDigits = 8;
constexpr size_t kRandomDigits = 16;
constexpr size_t kIdSize = kTimeDigits + 1 + kProcessDigits + 1 + kRandomDigits;
constexpr size_t kMostBaseBytes = kMostNameBytes - kMark.size() - kIdSize;

bool IsHex(absl::string_view digits) {
  return std::all_of(digits.begin(), digits.end(), [](char c) {
    return absl::ascii_isdigit(c) || ('a' <= c && c <= 'f');
  });
}

std::string Hex(uint64_t value) {
  return absl::StrCat(absl::Hex(value, absl::kZeroPad16));
}

absl::StatusOr<uint64_t> Random() {
  uint64_t value;
  // As few bytes come whole.
  if (Uninterrupted([&] { return getrandom(&value, sizeof(value), 0); }) !=
      sizeof(value)) {
    return FileError(errno, "getrandom", "random number");
  }
  return value;
}

absl::StatusOr<std::string> PartialName(absl::string_view name) {
  const uint64_t nanoseconds =
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::system_clock::now().time_since_epoch())
          .count();
  uint64_t random;
  ONEPASS_ASSIGN_OR_RETURN(random, Random());
  return absl::StrCat(
      name, kMark, Hex(nanoseconds), "-",
      absl::Hex(static_cast<uint32_t>(getpid()), absl::kZeroPad8), "-",
      Hex(random));
}

absl::Status CheckName(absl::string_view parent, absl::string_view name) {
  if (parent.empty()) {
    return absl::InvalidArgumentError(
        "the directory of checkpoints has an empty name");
  }
  if (!IsPlainName(name) || name.size() > kMostBaseBytes ||
      IsPartialName(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat(parent, ": the name of a checkpoint, '", name,
                     "': expected that of an entry of a directory, at most ",
                     kMostBaseBytes, " bytes, not of a partial checkpoint"));
  }
  return absl::OkStatus();
}

// The last part of `path`.
absl::string_view BaseName(absl::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

// What has this path, a symbolic link itself; NotFound.
absl::StatusOr<struct stat> Look(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) {
    return FileError(errno, "lstat", path);
  }
  return status;
}

absl::StatusOr<bool> IsDirectory(const std::string& path) {
  const auto status = Look(path);
  if (absl::IsNotFound(status.status())) return false;
  if (!status.ok()) return status.status();
  return S_ISDIR(status->st_mode);
}

// Whether `path` is a directory with a manifest.
absl::StatusOr<bool> IsCheckpoint(const std::string& path) {
  bool directory;
  ONEPASS_ASSIGN_OR_RETURN(directory, IsDirectory(path));
  if (!directory) return false;
  const auto manifest = Look(JoinPath(path, kManifestName));
  if (absl::IsNotFound(manifest.status())) return false;
  if (!manifest.ok()) return manifest.status();
  return S_ISREG(manifest->st_mode);
}

// The names of the files in `path`; FailedPrecondition: there is a directory.
absl::StatusOr<std::vector<std::string>> FilesOfFlat(const std::string& path) {
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(path));
  for (const std::string& name : names) {
    bool directory;
    ONEPASS_ASSIGN_OR_RETURN(directory, IsDirectory(JoinPath(path, name)));
    if (directory) {
      return absl::FailedPreconditionError(absl::StrCat(
          JoinPath(path, name),
          ": a directory, expected only files in a checkpoint; not removed"));
    }
  }
  return names;
}

// Not an error: there is none.
absl::Status Unlink(const std::string& path) {
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return FileError(errno, "unlink", path);
  }
  return absl::OkStatus();
}

}  // namespace

bool IsPartialName(absl::string_view name) {
  if (!IsPlainName(name) || name.size() <= kMark.size() + kIdSize) return false;
  const absl::string_view id = name.substr(name.size() - kIdSize);
  name.remove_suffix(kIdSize);
  return absl::EndsWith(name, kMark) && IsHex(id.substr(0, kTimeDigits)) &&
         id[kTimeDigits] == '-' &&
         IsHex(id.substr(kTimeDigits + 1, kProcessDigits)) &&
         id[kTimeDigits + 1 + kProcessDigits] == '-' &&
         IsHex(id.substr(kIdSize - kRandomDigits));
}

bool IsRankFileName(absl::string_view name) {
  const auto number = [&name] {
    size_t digits = 0;
    while (digits < name.size() && absl::ascii_isdigit(name[digits])) ++digits;
    name.remove_prefix(digits);
    return digits >= 5;
  };
  return absl::ConsumePrefix(&name, "rank-") && number() &&
         absl::ConsumePrefix(&name, "-of-") && number() &&
         (absl::StartsWith(name, ".") || absl::StartsWith(name, "-"));
}

std::string RankFilePrefix(int rank, int world) {
  return absl::StrFormat("rank-%05d-of-%05d", rank, world);
}

absl::StatusOr<PartialDirectory> CreatePartial(absl::string_view parent,
                                               absl::string_view name) {
  ONEPASS_RETURN_IF_ERROR(CheckName(parent, name));
  ONEPASS_RETURN_IF_ERROR(RefuseExisting(JoinPath(parent, name)));
  std::string partial_name;
  ONEPASS_ASSIGN_OR_RETURN(partial_name, PartialName(name));
  uint64_t high;
  uint64_t low;
  ONEPASS_ASSIGN_OR_RETURN(high, Random());
  ONEPASS_ASSIGN_OR_RETURN(low, Random());
  PartialDirectory partial = {JoinPath(parent, partial_name),
                              Hex(high) + Hex(low)};
  if (mkdir(partial.path.c_str(), 0777) != 0) {
    return FileError(errno, "mkdir", partial.path);
  }
  const absl::Status status =
      WriteSmallFile(JoinPath(partial.path, kNonceName), partial.nonce);
  if (!status.ok()) {
    // Where that fails, too, it is one of ListPartials().
    RemovePartial(partial.path).IgnoreError();
    return status;
  }
  return partial;
}

absl::Status CheckNonce(absl::string_view path, absl::string_view nonce) {
  const std::string file = JoinPath(path, kNonceName);
  std::string found;
  ONEPASS_ASSIGN_OR_RETURN(found, ReadWholeFile(file, kMostNameBytes));
  if (found != nonce) {
    return absl::FailedPreconditionError(absl::StrCat(
        file, ": expected ", nonce,
        ", found another: this is not the directory of the other ranks"));
  }
  return absl::OkStatus();
}

absl::Status Publish(absl::string_view path, absl::string_view parent,
                     absl::string_view name) {
  ONEPASS_RETURN_IF_ERROR(CheckName(parent, name));
  const std::string from(path);
  const std::string to = JoinPath(parent, name);
  if (!IsPartialName(BaseName(path)) ||
      JoinPath(parent, BaseName(path)) != path) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": to be published as ", to,
                     ", expected a partial checkpoint in the same directory"));
  }
  bool checkpoint;
  ONEPASS_ASSIGN_OR_RETURN(checkpoint, IsCheckpoint(from));
  if (!checkpoint) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": to be published as ", to, ", has no file ", kManifestName));
  }
  ONEPASS_RETURN_IF_ERROR(Unlink(JoinPath(from, kNonceName)));
  ONEPASS_RETURN_IF_ERROR(SyncDirectory(from));
  ONEPASS_RETURN_IF_ERROR(RenameToNew(from, to));
  if (absl::Status status = SyncDirectory(std::string(parent)); !status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrCat(to, ": published, but not known to be on the disk: ",
                     status.message()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListPartials(
    absl::string_view parent) {
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(std::string(parent)));
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    if (!IsPartialName(name)) continue;
    std::string path = JoinPath(parent, name);
    bool directory;
    ONEPASS_ASSIGN_OR_RETURN(directory, IsDirectory(path));
    if (directory) paths.push_back(std::move(path));
  }
  return paths;
}

absl::Status RemovePartial(absl::string_view path) {
  const std::string directory(path);
  struct stat status;
  ONEPASS_ASSIGN_OR_RETURN(status, Look(directory));
  if (!IsPartialName(BaseName(path)) || !S_ISDIR(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": not removed, expected the directory of a partial checkpoint"));
  }
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, FilesOfFlat(directory));
  for (const std::string& name : names) {
    ONEPASS_RETURN_IF_ERROR(Unlink(JoinPath(directory, name)));
  }
  if (rmdir(directory.c_str()) != 0) {
    return FileError(errno, "rmdir", directory);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListPublished(
    absl::string_view parent) {
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(std::string(parent)));
  std::vector<std::string> published;
  for (std::string& name : names) {
    if (IsPartialName(name)) continue;
    const auto checkpoint = IsCheckpoint(JoinPath(parent, name));
    // As of lost+found.
    if (absl::IsPermissionDenied(checkpoint.status())) continue;
    if (!checkpoint.ok()) return checkpoint.status();
    if (*checkpoint) published.push_back(std::move(name));
  }
  return published;
}

absl::Status RemovePublished(absl::string_view parent, absl::string_view name) {
  ONEPASS_RETURN_IF_ERROR(CheckName(parent, name));
  const std::string path = JoinPath(parent, name);
  bool checkpoint;
  ONEPASS_ASSIGN_OR_RETURN(checkpoint, IsCheckpoint(path));
  if (!checkpoint) {
    return absl::NotFoundError(
        absl::StrCat(path, ": expected a checkpoint to remove"));
  }
  ONEPASS_RETURN_IF_ERROR(FilesOfFlat(path).status());
  std::string partial_name;
  ONEPASS_ASSIGN_OR_RETURN(partial_name, PartialName(name));
  const std::string partial = JoinPath(parent, partial_name);
  ONEPASS_RETURN_IF_ERROR(RenameToNew(path, partial));
  // Else files might be gone from the disk before the name is.
  ONEPASS_RETURN_IF_ERROR(SyncDirectory(std::string(parent)));
  return RemovePartial(partial);
}

}  // namespace onepass

#include "tools/step_checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "checkpoint/file_error.h"
#include "checkpoint/files.h"
#include "checkpoint/publish.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

bool IsNumber(absl::string_view digits) {
  return !digits.empty() &&
         std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit);
}

}  // namespace

bool IsStepName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, kStepPrefix)) return false;
  const std::vector<absl::string_view> numbers = absl::StrSplit(name, '-');
  return numbers.size() <= 2 &&
         std::all_of(numbers.begin(), numbers.end(), IsNumber);
}

absl::StatusOr<std::vector<FoundCheckpoint>> FindStepCheckpoints(
    absl::string_view parent) {
  // Listed first: what is published meanwhile is found below, or has a
  // manifest.
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(std::string(parent)));
  std::vector<FoundCheckpoint> found;
  ONEPASS_ASSIGN_OR_RETURN(found, FindCheckpoints(parent));
  const auto is_found = [&found](const std::string& name) {
    return std::any_of(
        found.begin(), found.end(),
        [&name](const FoundCheckpoint& other) { return other.name == name; });
  };
  for (const std::string& name : names) {
    if (!IsStepName(name) || is_found(name)) continue;
    FoundCheckpoint lost;
    lost.name = name;
    lost.path = JoinPath(parent, name);
    lost.status =
        AsDamage(InputFile::Open(JoinPath(lost.path, kManifestName)).status());
    // What is gone now was removed meanwhile.
    std::error_code none;
    if (lost.status.ok() ||
        !fs::is_directory(fs::symlink_status(lost.path, none))) {
      continue;
    }
    found.push_back(std::move(lost));
  }
  return found;
}

}  // namespace onepass

#include "checkpoint/find.h"

#include <algorithm>
#include <tuple>

#include "checkpoint/file_error.h"
#include "checkpoint/files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/publish.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

absl::StatusOr<checkpoint::Manifest> ReadManifest(const std::string& path) {
  const absl::StatusOr<std::string> bytes =
      ReadWholeFile(path, kMostManifestBytes);
  ONEPASS_RETURN_IF_ERROR(AsDamage(bytes.status()));
  return DecodeManifest(*bytes, path);
}

absl::Status FindFiles(const FoundCheckpoint& checkpoint,
                       const checkpoint::Manifest& manifest) {
  for (const checkpoint::File& file : manifest.files()) {
    ONEPASS_RETURN_IF_ERROR(
        OpenExpected(JoinPath(checkpoint.path, file.name()), file.length())
            .status());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(
    absl::string_view parent) {
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, ListPublished(parent));
  std::vector<FoundCheckpoint> found;
  for (const std::string& name : names) {
    FoundCheckpoint& checkpoint = found.emplace_back();
    checkpoint.name = name;
    checkpoint.path = JoinPath(parent, name);
    absl::StatusOr<checkpoint::Manifest> manifest =
        ReadManifest(JoinPath(checkpoint.path, kManifestName));
    checkpoint.status = manifest.status();
    if (!manifest.ok()) continue;
    checkpoint.step = manifest->step();
    checkpoint.status = FindFiles(checkpoint, *manifest);
  }
  std::sort(found.begin(), found.end(),
            [](const FoundCheckpoint& a, const FoundCheckpoint& b) {
              return std::tie(a.step, a.name) > std::tie(b.step, b.name);
            });
  return found;
}

}  // namespace onepass

#include "checkpoint/find.h"

#include <algorithm>
#include <tuple>

#include "checkpoint/files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/publish.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

absl::StatusOr<checkpoint::Manifest> ReadManifest(const std::string& path) {
  std::string bytes;
  ONEPASS_ASSIGN_OR_RETURN(bytes, ReadWholeFile(path, kMostManifestBytes));
  return DecodeManifest(bytes, path);
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
    if (manifest.ok()) checkpoint.step = manifest->step();
  }
  std::sort(found.begin(), found.end(),
            [](const FoundCheckpoint& a, const FoundCheckpoint& b) {
              return std::tie(a.step, a.name) > std::tie(b.step, b.name);
            });
  return found;
}

}  // namespace onepass

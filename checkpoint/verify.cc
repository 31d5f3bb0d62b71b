#include "checkpoint/verify.h"

#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "checkpoint/output_file.h"
#include "checkpoint/publish.h"
#include "dispatch/return_if_error.h"

namespace onepass {

absl::StatusOr<VerifyReport> VerifyCheckpoint(absl::string_view path,
                                              const VerifyOptions& options) {
  if (options.buffer_bytes < kOutputAlignment) {
    return absl::InvalidArgumentError(
        absl::StrCat("buffer_bytes is ", options.buffer_bytes,
                     ", expected at least ", kOutputAlignment));
  }
  VerifyReport report;
  std::vector<std::string> names;
  ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(std::string(path)));
  absl::StatusOr<Checkpoint> opened =
      Checkpoint::OpenDamaged(path, &report.problems);
  if (absl::IsDataLoss(opened.status())) {
    // Without a manifest nothing can be said of the other files.
    report.problems.push_back(opened.status());
    return report;
  }
  ONEPASS_RETURN_IF_ERROR(opened.status());
  absl::flat_hash_set<std::string> expected = {kManifestName};
  int64_t all = 0;
  for (const checkpoint::File& file : opened->manifest().files()) {
    expected.insert(file.name());
  }
  absl::flat_hash_set<std::string> verified;
  for (const Checkpoint::DataFile& file : opened->files()) {
    all += file.entry->length();
    verified.insert(file.entry->name());
  }
  for (const checkpoint::RankIndex& index : opened->manifest().indexes()) {
    verified.insert(index.file());
  }
  // Those of a rank whose index is damaged.
  for (const checkpoint::File& file : opened->manifest().files()) {
    if (verified.contains(file.name())) continue;
    absl::Status status =
        OpenExpected(JoinPath(path, file.name()), file.length()).status();
    if (!status.ok()) report.problems.push_back(std::move(status));
  }
  for (const std::string& name : names) {
    if (expected.contains(name)) continue;
    report.problems.push_back(absl::DataLossError(absl::StrCat(
        "\"", JoinPath(path, name), "\" does not belong to the checkpoint")));
  }
  std::vector<char> buffer(static_cast<size_t>(options.buffer_bytes));
  for (size_t i = 0; i < opened->files().size(); ++i) {
    const absl::Status status = opened->VerifyFile(
        static_cast<int>(i), absl::MakeSpan(buffer), [&](int64_t bytes) {
          report.bytes += bytes;
          if (options.progress) options.progress(report.bytes, all);
        });
    if (!status.ok()) report.problems.push_back(status);
  }
  return report;
}

}  // namespace onepass

// Checkpoints for tests that no save of ours writes.
//
//   EditIndex(path, [](checkpoint::Manifest& manifest,
//                      checkpoint::Index& index) { index.set_leaf(7); });

#ifndef ONEPASS_CHECKPOINT_EDIT_INDEX_H_
#define ONEPASS_CHECKPOINT_EDIT_INDEX_H_

#include <cstdint>
#include <fstream>
#include <string>

#include "absl/functional/function_ref.h"
#include "checkpoint/files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/publish.h"
#include "checkpoint/state_files.h"
#include "gtest/gtest.h"

namespace onepass {

// Changes what rank 0 said of the checkpoint at `path`, and with it all lengths
// and checksums. Fails the test where it fails.
inline void EditIndex(const std::string& path,
                      absl::FunctionRef<void(checkpoint::Manifest& manifest,
                                             checkpoint::Index& index)>
                          edit) {
  const std::string manifest_path = JoinPath(path, kManifestName);
  const auto manifest_bytes = ReadWholeFile(manifest_path, kMostManifestBytes);
  ASSERT_TRUE(manifest_bytes.ok()) << manifest_bytes.status();
  auto manifest = DecodeManifest(*manifest_bytes, manifest_path);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  checkpoint::RankIndex& entry = *manifest->mutable_indexes(0);
  const std::string index_path = JoinPath(path, entry.file());
  const auto index_bytes = ReadWholeFile(index_path, kMostIndexBytes);
  ASSERT_TRUE(index_bytes.ok()) << index_bytes.status();
  auto index = DecodeIndex(*index_bytes, *manifest, 0, index_path);
  ASSERT_TRUE(index.ok()) << index.status();

  edit(*manifest, *index);

  const auto new_index = EncodeIndex(*index);
  ASSERT_TRUE(new_index.ok()) << new_index.status();
  const auto length = static_cast<int64_t>(new_index->size());
  entry.set_length(length);
  entry.set_checksum(Checksum(*new_index));
  for (checkpoint::File& file : *manifest->mutable_files()) {
    if (file.name() == entry.file()) file.set_length(length);
  }
  const auto new_manifest = EncodeManifest(*manifest);
  ASSERT_TRUE(new_manifest.ok()) << new_manifest.status();
  std::ofstream(index_path, std::ios::binary) << *new_index;
  std::ofstream(manifest_path, std::ios::binary) << *new_manifest;
}

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_EDIT_INDEX_H_

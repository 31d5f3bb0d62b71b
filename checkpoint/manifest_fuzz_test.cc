// Any bytes as the messages of a manifest and of indexes, in frames whose
// checksums are right: these alone would keep a fuzzer out. The first byte says
// what the others are: 'm' a manifest, 'i' the index of the only rank, any
// other those of several ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest.pb.h"
#include "tests/fuzz_require.h"
#include "xxhash.h"

namespace onepass {
namespace {

using checkpoint::DataFile;
using checkpoint::File;
using checkpoint::Index;
using checkpoint::Manifest;
using checkpoint::RankIndex;

std::string LittleEndian(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>(value >> (8 * i)));
  }
  return text;
}

std::string Frame(absl::string_view magic, absl::string_view message) {
  std::string bytes = absl::StrCat(magic, LittleEndian(kManifestVersion, 4),
                                   LittleEndian(message.size(), 8), message);
  return bytes + LittleEndian(XXH3_64bits(bytes.data(), bytes.size()), 8);
}

void FuzzManifest(absl::string_view message) {
  const absl::StatusOr<Manifest> manifest =
      DecodeManifest(Frame("1passMan", message), "manifest");
  if (!manifest.ok()) {
    ONEPASS_FUZZ_REQUIRE(absl::IsDataLoss(manifest.status()));
    return;
  }
  // What is taken can be written, and is then the same.
  const absl::StatusOr<std::string> bytes = EncodeManifest(*manifest);
  ONEPASS_FUZZ_REQUIRE(bytes.ok());
  const absl::StatusOr<Manifest> again = DecodeManifest(*bytes, "manifest");
  ONEPASS_FUZZ_REQUIRE(again.ok());
  ONEPASS_FUZZ_REQUIRE(again->SerializeAsString() ==
                       manifest->SerializeAsString());
}

// One that fits the indexes, rank by rank.
Manifest MakeManifest(const std::vector<std::string>& messages) {
  Manifest manifest;
  manifest.set_world(static_cast<int32_t>(messages.size()));
  manifest.set_checksum_algorithm(checkpoint::CHECKSUM_XXH3_64);
  std::vector<File> files;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const std::string bytes = Frame("1passIdx", messages[rank]);
    RankIndex& entry = *manifest.add_indexes();
    entry.set_rank(static_cast<int32_t>(rank));
    entry.set_file(absl::StrCat("index ", rank));
    entry.set_length(static_cast<int64_t>(bytes.size()));
    entry.set_checksum(XXH3_64bits(bytes.data(), bytes.size()));
    files.emplace_back();
    files.back().set_name(entry.file());
    files.back().set_length(entry.length());
    // As much as the parser understands.
    Index index;
    index.ParsePartialFromString(messages[rank]);
    manifest.set_leaf(index.leaf());
    for (const DataFile& file : index.files()) {
      files.emplace_back();
      files.back().set_name(file.name());
      files.back().set_length(file.length());
    }
  }
  std::sort(files.begin(), files.end(),
            [](const File& a, const File& b) { return a.name() < b.name(); });
  for (const File& file : files) *manifest.add_files() = file;
  return manifest;
}

void FuzzIndexes(const std::vector<std::string>& messages) {
  const Manifest manifest = MakeManifest(messages);
  std::vector<Index> indexes;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const absl::StatusOr<Index> index =
        DecodeIndex(Frame("1passIdx", messages[rank]), manifest,
                    static_cast<int>(rank), "index");
    if (!index.ok()) {
      ONEPASS_FUZZ_REQUIRE(absl::IsDataLoss(index.status()));
      return;
    }
    ONEPASS_FUZZ_REQUIRE(EncodeIndex(*index).ok());
    indexes.push_back(*index);
  }
  for (const absl::Status& status :
       {CheckFiles(manifest, indexes, "checkpoint"),
        CheckBoxes(indexes, "checkpoint", 1 << 20)}) {
    ONEPASS_FUZZ_REQUIRE(status.ok() || absl::IsDataLoss(status));
  }
}

// As many messages as there are, each after two bytes of its length.
std::vector<std::string> Split(absl::string_view bytes) {
  std::vector<std::string> messages;
  while (bytes.size() > 2 && messages.size() < 4) {
    const size_t length = static_cast<uint8_t>(bytes[0]) |
                          size_t{static_cast<uint8_t>(bytes[1])} << 8;
    messages.emplace_back(bytes.substr(2, length));
    bytes.remove_prefix(std::min(bytes.size(), 2 + length));
  }
  return messages;
}

void Fuzz(absl::string_view bytes) {
  if (bytes.empty()) return;
  const absl::string_view rest = bytes.substr(1);
  switch (bytes[0]) {
    case 'm':
      return FuzzManifest(rest);
    case 'i':
      return FuzzIndexes({std::string(rest)});
    default:
      return FuzzIndexes(Split(rest));
  }
}

}  // namespace
}  // namespace onepass

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  onepass::Fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}

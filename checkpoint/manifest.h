// The manifest of a checkpoint and the indexes of its ranks, as bytes: what a
// checkpoint holds, and where. The manifest is written last, and is the commit.
//
//   Index index;                        // on each rank: manifest.proto
//   ASSIGN_OR_RETURN(std::string bytes, EncodeIndex(index));
//   ...
//   ASSIGN_OR_RETURN(bytes, EncodeManifest(manifest));
//
//   ASSIGN_OR_RETURN(Manifest manifest, DecodeManifest(bytes, path));
//   for (int rank = 0; rank < manifest.world(); ++rank) {
//     ASSIGN_OR_RETURN(indexes[rank],
//                      DecodeIndex(bytes, manifest, rank, path));
//   }
//   RETURN_IF_ERROR(CheckFiles(manifest, indexes, directory));
//   RETURN_IF_ERROR(CheckBoxes(indexes, directory));
//
// A file is a frame, numbers little endian: 8 bytes that say what it is; the
// version, 4 bytes; the length of the message, 8 bytes; the message; the
// XXH3-64 of all before, 8 bytes. The frame is that of all versions.
//
// Files come from outside. What is decoded here keeps every rule that stands in
// manifest.proto, so that readers need not look again: sums and products fit 64
// bits, boxes lie in shapes, chunks in files. Work and memory are in proportion
// to the bytes given, at most some 30 of memory to one. Nothing recurses.

#ifndef ONEPASS_CHECKPOINT_MANIFEST_H_
#define ONEPASS_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/manifest.pb.h"

namespace onepass {

// What is written. Newer ones are refused, older ones are read.
inline constexpr uint32_t kManifestVersion = 1;

// What there may be. The first two count whole files.
inline constexpr int64_t kMostManifestBytes = int64_t{64} << 20;
inline constexpr int64_t kMostIndexBytes = int64_t{1} << 30;
inline constexpr int kMostRanks = 1 << 20;
inline constexpr int kMostDimensions = 64;
inline constexpr int kMostTensorNameBytes = 4096;  // of tensors and parameters
inline constexpr int kMostFileNameBytes = 255;

// Of one; 0 for what is no type.
int64_t ElementBytes(checkpoint::ElementType type);

// InvalidArgument, with the field: a rule of manifest.proto is broken, or the
// file would be too long. So nothing is written that would not be read.
absl::StatusOr<std::string> EncodeManifest(
    const checkpoint::Manifest& manifest);
absl::StatusOr<std::string> EncodeIndex(const checkpoint::Index& index);

// DataLoss, with `file`, which is what to call it, and the field or byte:
// damaged, too long, newer than this, or a rule is broken.
absl::StatusOr<checkpoint::Manifest> DecodeManifest(absl::string_view bytes,
                                                    absl::string_view file);

// That of `rank`, one of 0 to manifest.world() - 1. DataLoss also: it is not
// the one that the manifest tells of, or they contradict each other.
absl::StatusOr<checkpoint::Index> DecodeIndex(
    absl::string_view bytes, const checkpoint::Manifest& manifest, int rank,
    absl::string_view file);

// Whether the decoded indexes of all ranks, by rank, name all files of the
// manifest, and each once. DataLoss, with `checkpoint`, which is what to call
// it, and the file: they do not.
absl::Status CheckFiles(const checkpoint::Manifest& manifest,
                        absl::Span<const checkpoint::Index> indexes,
                        absl::string_view checkpoint);

// Whether they agree about each tensor, and have each of its elements once.
// DataLoss, with `checkpoint` and the tensor: they do not, or it would take
// more than `most_comparisons` of two boxes in one dimension to find out. (As
// many as there may be by default take seconds: those of a thousand tensors
// that are cut into a hundred by a hundred boxes.)
absl::Status CheckBoxes(absl::Span<const checkpoint::Index> indexes,
                        absl::string_view checkpoint,
                        int64_t most_comparisons = int64_t{1} << 30);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_MANIFEST_H_

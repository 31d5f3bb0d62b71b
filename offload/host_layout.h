// Where each shard's elements lie in the host arrays of an optimizer, and what
// is updated at a time.
//
// All arrays (masters, moments, gradients) have one order of elements: position
// p of one belongs to position p of the others. A sub-group is a stretch of
// positions whose masters and moments are allocations of their own. Within it,
// segments of shards follow one another, each from a multiple of
// kAlignmentNumel on; elements between them belong to nobody. A piece is a
// stretch of a sub-group.

#ifndef ONEPASS_OFFLOAD_HOST_LAYOUT_H_
#define ONEPASS_OFFLOAD_HOST_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace onepass {

class HostLayout {
 public:
  // A cache line of any type, and whole pairs of vectors for streaming stores.
  static constexpr int64_t kAlignmentNumel = 32;

  // Positions [begin, end).
  struct SubGroup {
    int64_t begin;
    int64_t end;
  };

  // Elements [offset, offset + numel), at least 1, of a shard.
  struct Part {
    int shard;
    int64_t offset;
    int64_t numel;
    int64_t position;  // of the first
    int sub_group;
  };

  // Positions [begin, end) of a sub-group, and the parts of shards there.
  struct Piece {
    int sub_group;
    int64_t begin;
    int64_t end;
    absl::Span<const Part> parts;
  };

  // `shard_numels`: of each shard, the elements that lie on the host.
  // piece_numel is a multiple of kAlignmentNumel. InvalidArgument: as
  // CutSubGroups().
  static absl::StatusOr<HostLayout> Create(
      absl::Span<const int64_t> shard_numels, int64_t sub_group_numel,
      int64_t piece_numel);

  HostLayout(HostLayout&&) = default;
  HostLayout& operator=(HostLayout&&) = default;

  // Of all arrays.
  int64_t numel() const {
    return sub_groups_.empty() ? 0 : sub_groups_.back().end;
  }
  // Of the longest piece; 0 where there is none.
  int64_t longest_piece() const { return longest_piece_; }
  const std::vector<SubGroup>& sub_groups() const { return sub_groups_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  // In order.
  absl::Span<const Part> segments_of(int shard) const;
  const std::vector<Part>& segments() const { return segments_; }

 private:
  HostLayout() = default;

  std::vector<SubGroup> sub_groups_;
  std::vector<Part> segments_;         // in order of position
  std::vector<size_t> first_segment_;  // of each shard, and one past the last
  std::vector<Part> parts_;            // of all pieces
  std::vector<Piece> pieces_;
  int64_t longest_piece_ = 0;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_HOST_LAYOUT_H_

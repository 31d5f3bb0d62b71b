#include "offload/host_layout.h"

#include <algorithm>

#include "offload/partition.h"

namespace onepass {

absl::StatusOr<HostLayout> HostLayout::Create(
    absl::Span<const int64_t> shard_numels, int64_t sub_group_numel,
    int64_t piece_numel) {
  const absl::StatusOr<std::vector<std::vector<Segment>>> cut =
      CutSubGroups(shard_numels, sub_group_numel);
  if (!cut.ok()) return cut.status();

  HostLayout layout;
  int64_t position = 0;
  for (const std::vector<Segment>& sub_group : *cut) {
    const int index = static_cast<int>(layout.sub_groups_.size());
    const int64_t begin = position;
    for (const Segment& segment : sub_group) {
      layout.segments_.push_back(
          {segment.shard, segment.offset, segment.numel, position, index});
      position += (segment.numel + kAlignmentNumel - 1) / kAlignmentNumel *
                  kAlignmentNumel;
    }
    layout.sub_groups_.push_back({begin, position});
  }

  // Segments come in the order of shards; a shard without any has an empty
  // stretch of them.
  size_t segment = 0;
  for (size_t shard = 0; shard <= shard_numels.size(); ++shard) {
    while (segment < layout.segments_.size() &&
           static_cast<size_t>(layout.segments_[segment].shard) < shard) {
      ++segment;
    }
    layout.first_segment_.push_back(segment);
  }

  // Parts first, since pieces point at them.
  std::vector<size_t> first_part;
  segment = 0;
  for (size_t i = 0; i < layout.sub_groups_.size(); ++i) {
    const SubGroup& sub_group = layout.sub_groups_[i];
    for (int64_t begin = sub_group.begin, end; begin < sub_group.end;
         begin = end) {
      end = begin + std::min(piece_numel, sub_group.end - begin);
      layout.pieces_.push_back({static_cast<int>(i), begin, end, {}});
      layout.longest_piece_ = std::max(layout.longest_piece_, end - begin);
      first_part.push_back(layout.parts_.size());
      for (; segment < layout.segments_.size(); ++segment) {
        const Part& whole = layout.segments_[segment];
        const int64_t from = std::max(whole.position, begin);
        const int64_t to = std::min(whole.position + whole.numel, end);
        if (from < to) {
          layout.parts_.push_back({whole.shard,
                                   whole.offset + (from - whole.position),
                                   to - from, from, whole.sub_group});
        }
        // The rest of it is in the next piece.
        if (whole.position + whole.numel > end) break;
      }
    }
  }
  first_part.push_back(layout.parts_.size());
  for (size_t i = 0; i < layout.pieces_.size(); ++i) {
    layout.pieces_[i].parts =
        absl::MakeConstSpan(layout.parts_)
            .subspan(first_part[i], first_part[i + 1] - first_part[i]);
  }
  return layout;
}

absl::Span<const HostLayout::Part> HostLayout::segments_of(int shard) const {
  return absl::MakeConstSpan(segments_).subspan(
      first_segment_[shard], first_segment_[shard + 1] - first_segment_[shard]);
}

}  // namespace onepass

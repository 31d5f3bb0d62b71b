// Who owns what: units over ranks, a rank's state over sub-groups, and its
// split between CPU and device. Every cut is at a multiple of a leaf of its
// parameter (kLeafNumel of dispatch/kernel.h), so that sums leaf by leaf do not
// depend on it.
//
//   ASSIGN_OR_RETURN(UnitPartition unit, UnitPartition::Create({n0, n1}, 4));
//   for (const ParameterRange& range : unit.RangesOf(rank)) ...
//
// The rules are those of ZeRO stage 3 (Rajbhandari et al. 2020), over leaves.
// Nothing here takes time or memory by the element.

#ifndef ONEPASS_OFFLOAD_PARTITION_H_
#define ONEPASS_OFFLOAD_PARTITION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace onepass {

// Elements [offset, offset + numel), at least 1, of a parameter.
struct ParameterRange {
  int parameter;   // its index in the unit
  int64_t offset;  // a multiple of kLeafNumel
  int64_t numel;
  int64_t unit_offset;  // of the first of them in the flat unit
};

// The parameters that are gathered together, usually those of a layer,
// flattened one after the other, each from a multiple of kLeafNumel on. The
// gaps between them are zero and belong to nobody. Rank r owns elements [r, r +
// 1) * shard_numel() as far as there are any: the last rank that owns some may
// own fewer, those after it none.
class UnitPartition {
 public:
  // `numels` are those of the parameters, in order; 0 is one of them that owns
  // nothing. InvalidArgument: a numel below 0, world below 1. OutOfRange:
  // padded_numel() would not fit 62 bits.
  static absl::StatusOr<UnitPartition> Create(absl::Span<const int64_t> numels,
                                              int world);

  int world() const { return world_; }
  // Of a parameter in the flat unit; of one without elements, where its first
  // would be.
  int64_t unit_offset(int parameter) const { return unit_offsets_[parameter]; }
  // Of all parameters and the gaps between them; there is none after the last
  // element.
  int64_t numel() const { return numel_; }
  // kLeafNumel * ceil(numel / (kLeafNumel * world)).
  int64_t shard_numel() const { return shard_numel_; }
  // world * shard_numel(): what a collective over the unit moves.
  int64_t padded_numel() const { return world_ * shard_numel_; }

  // What `rank`, of [0, world), owns, in order; no gaps.
  std::vector<ParameterRange> RangesOf(int rank) const;

 private:
  UnitPartition() = default;

  int world_ = 1;
  int64_t numel_ = 0;
  int64_t shard_numel_ = 0;
  std::vector<int64_t> numels_;
  std::vector<int64_t> unit_offsets_;
};

// Elements [offset, offset + numel), at least 1, of one of a rank's shards;
// offset is a multiple of kLeafNumel.
struct Segment {
  int shard;
  int64_t offset;
  int64_t numel;
};

// Cuts shards of these numels, one after the other, into sub-groups, each as
// long as cuts at leaves allow: of at most `sub_group_numel` elements, where
// less than a leaf counts as one. Shards without elements have no segment.
// InvalidArgument: a numel below 0, sub_group_numel below 1.
absl::StatusOr<std::vector<std::vector<Segment>>> CutSubGroups(
    absl::Span<const int64_t> shard_numels, int64_t sub_group_numel);

// Of each shard, how many of its first elements the CPU updates: all of the
// first shards, none of the last, and a multiple of kLeafNumel of the one
// between them, so that the sum is as near to cpu_ratio of all elements, in
// whole ones, as cuts at leaves allow, of two sums the larger: within one leaf
// of it. It never shrinks where cpu_ratio grows. (All elements have the same
// bytes.) InvalidArgument: a numel below 0, cpu_ratio outside [0, 1] or NaN.
// OutOfRange: the sum of the numels does not fit 62 bits.
absl::StatusOr<std::vector<int64_t>> SplitBetweenCpuAndDevice(
    absl::Span<const int64_t> shard_numels, double cpu_ratio);

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_PARTITION_H_

#include "offload/partition.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/kernel.h"

namespace onepass {
namespace {

constexpr int64_t kMaxNumel = (int64_t{1} << 62) - 1;
constexpr int64_t kMaxLeaves = kMaxNumel / kLeafNumel;

// `what` is what one of them is.
absl::Status CheckNumels(absl::string_view what,
                         absl::Span<const int64_t> numels) {
  for (size_t i = 0; i < numels.size(); ++i) {
    if (numels[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, " ", i, " has numel ", numels[i], ", expected at least 0"));
    }
  }
  return absl::OkStatus();
}

// Where a shard of `numel` elements may be cut, nearest to `element`, which is
// one of them.
int64_t NearestCut(int64_t element, int64_t numel) {
  const int64_t below = element / kLeafNumel * kLeafNumel;
  const int64_t above = below + std::min(kLeafNumel, numel - below);
  return element - below < above - element ? below : above;
}

}  // namespace

absl::StatusOr<UnitPartition> UnitPartition::Create(
    absl::Span<const int64_t> numels, int world) {
  if (world < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unit partition: world is ", world, ", expected at least 1"));
  }
  if (absl::Status status = CheckNumels("unit partition: parameter", numels);
      !status.ok()) {
    return status;
  }
  const auto too_large = [&] {
    return absl::OutOfRangeError(absl::StrCat(
        "unit partition: the shards of ", numels.size(), " parameters on ",
        world, " ranks have more elements than ", kMaxNumel));
  };
  UnitPartition unit;
  unit.world_ = world;
  unit.numels_.assign(numels.begin(), numels.end());
  unit.unit_offsets_.reserve(numels.size());
  int64_t leaves = 0;
  for (int64_t numel : numels) {
    const int64_t offset = leaves * kLeafNumel;
    leaves += LeafCount(numel);
    if (leaves > kMaxLeaves) return too_large();
    unit.unit_offsets_.push_back(offset);
    if (numel > 0) unit.numel_ = offset + numel;
  }
  const int64_t shard_leaves = leaves / world + (leaves % world != 0);
  if (world * shard_leaves > kMaxLeaves) return too_large();
  unit.shard_numel_ = shard_leaves * kLeafNumel;
  return unit;
}

std::vector<ParameterRange> UnitPartition::RangesOf(int rank) const {
  const int64_t shard_begin = rank * shard_numel_;
  const int64_t shard_end = shard_begin + shard_numel_;
  std::vector<ParameterRange> ranges;
  for (size_t i = 0; i < numels_.size(); ++i) {
    const int64_t begin = std::max(shard_begin, unit_offsets_[i]);
    const int64_t end = std::min(shard_end, unit_offsets_[i] + numels_[i]);
    if (begin < end) {
      ranges.push_back(
          {static_cast<int>(i), begin - unit_offsets_[i], end - begin, begin});
    }
  }
  return ranges;
}

absl::StatusOr<std::vector<std::vector<Segment>>> CutSubGroups(
    absl::Span<const int64_t> shard_numels, int64_t sub_group_numel) {
  if (sub_group_numel < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("sub-groups: sub_group_numel is ", sub_group_numel,
                     ", expected at least 1"));
  }
  if (absl::Status status = CheckNumels("sub-groups: shard", shard_numels);
      !status.ok()) {
    return status;
  }
  std::vector<std::vector<Segment>> groups;
  int64_t room = 0;  // in the last of them
  for (size_t i = 0; i < shard_numels.size(); ++i) {
    for (int64_t offset = 0; offset < shard_numels[i];) {
      const int64_t rest = shard_numels[i] - offset;
      const int64_t numel =
          rest <= room ? rest : room / kLeafNumel * kLeafNumel;
      if (numel == 0) {
        groups.emplace_back();
        room = std::max(sub_group_numel, kLeafNumel);
        continue;
      }
      groups.back().push_back({static_cast<int>(i), offset, numel});
      offset += numel;
      room -= numel;
    }
  }
  return groups;
}

absl::StatusOr<std::vector<int64_t>> SplitBetweenCpuAndDevice(
    absl::Span<const int64_t> shard_numels, double cpu_ratio) {
  if (!(cpu_ratio >= 0 && cpu_ratio <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "CPU split: cpu_ratio is ", cpu_ratio, ", expected 0 to 1"));
  }
  if (absl::Status status = CheckNumels("CPU split: shard", shard_numels);
      !status.ok()) {
    return status;
  }
  int64_t total = 0;
  for (int64_t numel : shard_numels) {
    if (numel > kMaxNumel - total) {
      return absl::OutOfRangeError(
          absl::StrCat("CPU split: ", shard_numels.size(),
                       " shards have more elements than ", kMaxNumel));
    }
    total += numel;
  }
  // The product is rounded to the nearest integer. One of doubles would be off
  // by hundreds of elements where there are most.
  const auto ratio = static_cast<int64_t>(cpu_ratio * 0x1p62);
  const auto half = int64_t{1} << 61;
  auto wanted = static_cast<int64_t>(
      (static_cast<unsigned __int128>(total) * ratio + half) >> 62);
  std::vector<int64_t> cpu_numels;
  cpu_numels.reserve(shard_numels.size());
  for (int64_t numel : shard_numels) {
    cpu_numels.push_back(wanted < numel ? NearestCut(wanted, numel) : numel);
    wanted -= std::min(wanted, numel);
  }
  return cpu_numels;
}

}  // namespace onepass

#include "offload/partition.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/hostile_fp_environment.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::PrintToString;
using Numels = std::vector<int64_t>;

constexpr int64_t kLeaf = kLeafNumel;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// To the next multiple of a leaf.
int64_t RoundedUp(int64_t numel) { return (numel + kLeaf - 1) & ~(kLeaf - 1); }

using Random = std::mt19937_64;

Numels AnyNumels(Random& random) {
  static constexpr int64_t kEdges[] = {
      0, 0, 1, 2, kLeaf - 1, kLeaf, kLeaf + 1, 2 * kLeaf, 3 * kLeaf - 1};
  Numels numels(random() % 11);
  for (int64_t& numel : numels) {
    numel = random() % 2 == 0 ? kEdges[random() % std::size(kEdges)]
                              : static_cast<int64_t>(random() % (6 * kLeaf));
  }
  return numels;
}

// Some of them as large as no memory is.
Numels AnyHugeNumels(Random& random) {
  Numels numels = AnyNumels(random);
  for (int64_t& numel : numels) {
    if (random() % 3 == 0) numel = static_cast<int64_t>(random() >> 8);
  }
  return numels;
}

// --- Units over ranks. ---

UnitPartition Partition(const Numels& numels, int world) {
  absl::StatusOr<UnitPartition> unit = UnitPartition::Create(numels, world);
  EXPECT_TRUE(unit.ok()) << unit.status();
  return *std::move(unit);
}

// Of each range: parameter, offset, numel, offset in the unit.
using Ranges = std::vector<std::tuple<int, int64_t, int64_t, int64_t>>;

Ranges RangesOf(const UnitPartition& unit, int rank) {
  Ranges ranges;
  for (const ParameterRange& range : unit.RangesOf(rank)) {
    ranges.push_back(
        {range.parameter, range.offset, range.numel, range.unit_offset});
  }
  return ranges;
}

TEST(UnitPartitionTest, CutsAtLeavesOfTheFlatUnit) {
  const UnitPartition unit = Partition({5000, 0, 1, kLeaf}, 2);
  EXPECT_EQ(unit.world(), 2);
  EXPECT_EQ(unit.unit_offset(0), 0);
  EXPECT_EQ(unit.unit_offset(1), 2 * kLeaf);
  EXPECT_EQ(unit.unit_offset(2), 2 * kLeaf);
  EXPECT_EQ(unit.unit_offset(3), 3 * kLeaf);
  EXPECT_EQ(unit.numel(), 4 * kLeaf);
  EXPECT_EQ(unit.shard_numel(), 2 * kLeaf);
  EXPECT_EQ(unit.padded_numel(), 4 * kLeaf);
  EXPECT_EQ(RangesOf(unit, 0), (Ranges{{0, 0, 5000, 0}}));
  EXPECT_EQ(RangesOf(unit, 1),
            (Ranges{{2, 0, 1, 2 * kLeaf}, {3, 0, kLeaf, 3 * kLeaf}}));
}

TEST(UnitPartitionTest, CutsParameters) {
  const UnitPartition unit = Partition({1, 9 * kLeaf + 7}, 4);
  EXPECT_EQ(unit.numel(), 10 * kLeaf + 7);
  EXPECT_EQ(unit.shard_numel(), 3 * kLeaf);
  EXPECT_EQ(unit.padded_numel(), 12 * kLeaf);
  EXPECT_EQ(RangesOf(unit, 0),
            (Ranges{{0, 0, 1, 0}, {1, 0, 2 * kLeaf, kLeaf}}));
  EXPECT_EQ(RangesOf(unit, 1), (Ranges{{1, 2 * kLeaf, 3 * kLeaf, 3 * kLeaf}}));
  EXPECT_EQ(RangesOf(unit, 2), (Ranges{{1, 5 * kLeaf, 3 * kLeaf, 6 * kLeaf}}));
  EXPECT_EQ(RangesOf(unit, 3), (Ranges{{1, 8 * kLeaf, kLeaf + 7, 9 * kLeaf}}));
}

TEST(UnitPartitionTest, RanksMayOwnNothing) {
  const UnitPartition unit = Partition({kLeaf + 1}, 5);
  EXPECT_EQ(unit.shard_numel(), kLeaf);
  EXPECT_EQ(RangesOf(unit, 0), (Ranges{{0, 0, kLeaf, 0}}));
  EXPECT_EQ(RangesOf(unit, 1), (Ranges{{0, kLeaf, 1, kLeaf}}));
  for (int rank : {2, 3, 4}) EXPECT_THAT(RangesOf(unit, rank), IsEmpty());
  constexpr int kManyRanks = std::numeric_limits<int>::max();
  const UnitPartition many = Partition({3}, kManyRanks);
  EXPECT_EQ(many.padded_numel(), kLeaf * kManyRanks);
  EXPECT_EQ(RangesOf(many, 0), (Ranges{{0, 0, 3, 0}}));
  EXPECT_THAT(RangesOf(many, kManyRanks - 1), IsEmpty());
}

TEST(UnitPartitionTest, MayHoldNothing) {
  for (const Numels& numels : {Numels(), Numels{0}, Numels{0, 0, 0}}) {
    const UnitPartition unit = Partition(numels, 3);
    EXPECT_EQ(unit.numel(), 0);
    EXPECT_EQ(unit.shard_numel(), 0);
    EXPECT_EQ(unit.padded_numel(), 0);
    for (size_t i = 0; i < numels.size(); ++i) {
      EXPECT_EQ(unit.unit_offset(static_cast<int>(i)), 0);
    }
    for (int rank : {0, 1, 2}) EXPECT_THAT(RangesOf(unit, rank), IsEmpty());
  }
}

TEST(UnitPartitionTest, EndsWithTheLastElement) {
  EXPECT_EQ(Partition({5}, 1).numel(), 5);
  const UnitPartition unit = Partition({0, 5, 0, 0}, 2);
  EXPECT_EQ(unit.numel(), 5);
  EXPECT_EQ(unit.unit_offset(0), 0);
  EXPECT_EQ(unit.unit_offset(1), 0);
  EXPECT_EQ(unit.unit_offset(2), kLeaf);
  EXPECT_EQ(unit.unit_offset(3), kLeaf);
  EXPECT_EQ(unit.padded_numel(), 2 * kLeaf);
  EXPECT_EQ(RangesOf(unit, 0), (Ranges{{1, 0, 5, 0}}));
  EXPECT_THAT(RangesOf(unit, 1), IsEmpty());
}

// The parameters stand one after the other, each from the next leaf on, and
// shards are the shortest ones of whole leaves that hold them all.
void ExpectLayout(const UnitPartition& unit, const Numels& numels) {
  int64_t next = 0;
  int64_t end = 0;
  for (size_t i = 0; i < numels.size(); ++i) {
    ASSERT_EQ(unit.unit_offset(static_cast<int>(i)), next) << i;
    if (numels[i] > 0) end = next + numels[i];
    next += RoundedUp(numels[i]);
  }
  ASSERT_EQ(unit.numel(), end);
  const int64_t shard = unit.shard_numel();
  ASSERT_EQ(shard % kLeaf, 0);
  ASSERT_GE(shard * unit.world(), end);
  ASSERT_LT((shard - kLeaf) * unit.world(), end);
  ASSERT_EQ(unit.padded_numel(), shard * unit.world());
}

// Through all ranks, the ranges are each parameter from its first element to
// its last, and each rank's lie in its shard.
void ExpectOwnedOnceInOrder(const UnitPartition& unit, const Numels& numels) {
  Numels owned(numels.size());
  int parameter = 0;
  bool ended = false;  // a rank owned less than a whole shard
  for (int rank = 0; rank < unit.world(); ++rank) {
    const int64_t shard_begin = rank * unit.shard_numel();
    int64_t owned_of_shard = 0;  // with the gaps
    for (const ParameterRange& range : unit.RangesOf(rank)) {
      ASSERT_FALSE(ended) << rank;
      ASSERT_GE(range.parameter, parameter);
      parameter = range.parameter;
      ASSERT_LT(parameter, static_cast<int>(numels.size()));
      ASSERT_GE(range.numel, 1);
      ASSERT_EQ(range.offset % kLeaf, 0);
      ASSERT_EQ(range.offset, owned[parameter]);
      owned[parameter] += range.numel;
      ASSERT_LE(owned[parameter], numels[parameter]);
      ASSERT_EQ(range.unit_offset, unit.unit_offset(parameter) + range.offset);
      ASSERT_EQ(range.unit_offset, shard_begin + owned_of_shard);
      owned_of_shard += RoundedUp(range.numel);
    }
    ASSERT_LE(owned_of_shard, unit.shard_numel());
    ended = owned_of_shard < unit.shard_numel();
  }
  ASSERT_EQ(owned, numels);
}

TEST(UnitPartitionTest, AnyUnitOnAnyWorld) {
  Random random(1);
  for (int64_t round = 0; round < 20000; round += LongTestStride()) {
    const Numels numels =
        round % 2 == 0 ? AnyNumels(random) : AnyHugeNumels(random);
    const int world = static_cast<int>(1 + random() % 8);
    SCOPED_TRACE(PrintToString(numels) + " on " + PrintToString(world));
    const UnitPartition unit = Partition(numels, world);
    ASSERT_NO_FATAL_FAILURE(ExpectLayout(unit, numels));
    ASSERT_NO_FATAL_FAILURE(ExpectOwnedOnceInOrder(unit, numels));
  }
}

TEST(UnitPartitionTest, HugeUnits) {
  constexpr int64_t kHuge = int64_t{1} << 60;
  const UnitPartition one = Partition({kHuge}, 8);
  EXPECT_EQ(one.shard_numel(), kHuge / 8);
  EXPECT_EQ(RangesOf(one, 7),
            (Ranges{{0, kHuge / 8 * 7, kHuge / 8, kHuge / 8 * 7}}));
  const UnitPartition three = Partition({kHuge, kHuge, kHuge}, 2);
  EXPECT_EQ(three.shard_numel(), kHuge / 2 * 3);
  EXPECT_EQ(RangesOf(three, 1),
            (Ranges{{1, kHuge / 2, kHuge / 2, kHuge / 2 * 3},
                    {2, 0, kHuge, 2 * kHuge}}));
}

TEST(UnitPartitionTest, HoldsWhatFits62Bits) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  EXPECT_EQ(Partition({kLimit - kLeaf}, 1).padded_numel(), kLimit - kLeaf);
  EXPECT_EQ(Partition({kLimit - 2 * kLeaf, 1}, 1).numel(),
            kLimit - 2 * kLeaf + 1);
  EXPECT_EQ(Partition({kLimit - 2 * kLeaf}, 2).padded_numel(),
            kLimit - 2 * kLeaf);
  struct Case {
    Numels numels;
    int world;
  };
  // 8192 times the most is 2^64 leaves.
  for (const Case& refused :
       {Case{{kLimit - kLeaf + 1}, 1}, Case{{kLimit - kLeaf, 1}, 1},
        Case{{kLimit - kLeaf}, 2}, Case{{kLimit - 2 * kLeaf}, 4},
        Case{{kMost}, 1}, Case{Numels(8192, kMost), 7},
        Case{Numels(1000, kMost / 500), 7}}) {
    SCOPED_TRACE(PrintToString(refused.numels.size()));
    const absl::Status status =
        UnitPartition::Create(refused.numels, refused.world).status();
    EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
    EXPECT_EQ(status.message(),
              "unit partition: the shards of " +
                  PrintToString(refused.numels.size()) + " parameters on " +
                  PrintToString(refused.world) +
                  " ranks have more elements than 4611686018427387903");
  }
}

TEST(UnitPartitionTest, NamesWhatItRefuses) {
  for (int world : {0, -1, std::numeric_limits<int>::min()}) {
    const absl::Status status = UnitPartition::Create({1, 2}, world).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(), "unit partition: world is " +
                                    PrintToString(world) +
                                    ", expected at least 1");
  }
  for (int64_t numel : {int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    const absl::Status status =
        UnitPartition::Create({kMost, 2, numel}, 1).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(), "unit partition: parameter 2 has numel " +
                                    PrintToString(numel) +
                                    ", expected at least 0");
  }
}

// --- Sub-groups. ---

// Of each segment: shard, offset, numel.
using Groups = std::vector<std::vector<std::tuple<int, int64_t, int64_t>>>;

Groups Cut(const Numels& shards, int64_t sub_group_numel) {
  const auto cut = CutSubGroups(shards, sub_group_numel);
  EXPECT_TRUE(cut.ok()) << cut.status();
  Groups groups;
  for (const std::vector<Segment>& group : *cut) {
    groups.emplace_back();
    for (const Segment& segment : group) {
      groups.back().push_back({segment.shard, segment.offset, segment.numel});
    }
  }
  return groups;
}

TEST(SubGroupsTest, AreCutAtLeaves) {
  const Groups of_two_leaves = {{{0, 0, 2 * kLeaf}},
                                {{0, 2 * kLeaf, 1808}, {1, 0, 3}}};
  EXPECT_EQ(Cut({10000, 3}, 2 * kLeaf), of_two_leaves);
  EXPECT_EQ(Cut({10000, 3}, 3 * kLeaf - 1),
            (Groups{{{0, 0, 10000}, {1, 0, 3}}}));
  const Groups of_one_leaf = {
      {{0, 0, kLeaf}}, {{0, kLeaf, kLeaf}}, {{0, 2 * kLeaf, 1808}, {1, 0, 3}}};
  for (int64_t numel : {int64_t{1}, kLeaf - 1, kLeaf, int64_t{5000}}) {
    EXPECT_EQ(Cut({10000, 3}, numel), of_one_leaf) << numel;
  }
  // The end of a shard is a cut, too.
  EXPECT_EQ(Cut({10000, 3}, 5904),
            (Groups{{{0, 0, kLeaf}}, {{0, kLeaf, 5904}}, {{1, 0, 3}}}));
}

TEST(SubGroupsTest, EndWhereTheNextLeafDoesNotFit) {
  EXPECT_EQ(Cut({kLeaf, 904, kLeaf}, kLeaf + 904),
            (Groups{{{0, 0, kLeaf}, {1, 0, 904}}, {{2, 0, kLeaf}}}));
  EXPECT_EQ(Cut({kLeaf, 905, kLeaf}, kLeaf + 904),
            (Groups{{{0, 0, kLeaf}}, {{1, 0, 905}}, {{2, 0, kLeaf}}}));
  // The rest of a shard, cut after what fits of it.
  EXPECT_EQ(Cut({100, 3 * kLeaf}, 2 * kLeaf),
            (Groups{{{0, 0, 100}, {1, 0, kLeaf}}, {{1, kLeaf, 2 * kLeaf}}}));
}

TEST(SubGroupsTest, OfNothingThereAreNone) {
  EXPECT_THAT(Cut({}, 1), IsEmpty());
  EXPECT_THAT(Cut({0, 0}, kMost), IsEmpty());
  EXPECT_EQ(Cut({0, 5, 0, 7, 0}, kLeaf), (Groups{{{1, 0, 5}, {3, 0, 7}}}));
}

TEST(SubGroupsTest, HugeShards) {
  constexpr int64_t kHuge = int64_t{1} << 60;
  EXPECT_EQ(
      Cut({kHuge, 1}, kHuge / 2 + 5),
      (Groups{{{0, 0, kHuge / 2}}, {{0, kHuge / 2, kHuge / 2}, {1, 0, 1}}}));
  EXPECT_EQ(Cut({kMost, kMost}, kMost),
            (Groups{{{0, 0, kMost}}, {{1, 0, kMost}}}));
}

// The segments of all sub-groups are each shard from its first element to its
// last; and what comes after a sub-group had not fitted into it.
void ExpectCoveredByMaximalGroups(const Groups& groups, const Numels& shards,
                                  int64_t sub_group_numel) {
  const int64_t most = std::max(sub_group_numel, kLeaf);
  Numels covered(shards.size());
  int last_shard = 0;
  int64_t room = 0;
  for (const auto& group : groups) {
    ASSERT_FALSE(group.empty());
    const auto [next_shard, next_offset, next_numel] = group.front();
    ASSERT_GT(std::min(kLeaf, shards.at(next_shard) - next_offset), room);
    room = most;
    int group_shard = -1;
    for (const auto& [shard, offset, numel] : group) {
      ASSERT_GT(shard, group_shard);  // in one segment
      group_shard = shard;
      ASSERT_GE(shard, last_shard);
      last_shard = shard;
      ASSERT_GE(numel, 1);
      ASSERT_EQ(offset % kLeaf, 0);
      ASSERT_EQ(offset, covered.at(shard));
      covered[shard] += numel;
      ASSERT_LE(covered[shard], shards[shard]);
      room -= numel;
    }
    ASSERT_GE(room, 0);
  }
  ASSERT_EQ(covered, shards);
}

TEST(SubGroupsTest, AnyShardsInAnyLength) {
  Random random(2);
  for (int64_t round = 0; round < 20000; round += LongTestStride()) {
    Numels shards;
    int64_t sub_group_numel = 0;
    if (round % 2 == 0) {
      shards = AnyNumels(random);
      sub_group_numel = static_cast<int64_t>(1 + random() % (9 * kLeaf));
      if (random() % 2 == 0) {
        sub_group_numel = RoundedUp(sub_group_numel) + random() % 3 - 1;
      }
    } else {
      shards = AnyHugeNumels(random);
      sub_group_numel =
          static_cast<int64_t>((random() >> 6) | (uint64_t{1} << 53));
    }
    SCOPED_TRACE(PrintToString(shards) + " in " +
                 PrintToString(sub_group_numel));
    ASSERT_NO_FATAL_FAILURE(ExpectCoveredByMaximalGroups(
        Cut(shards, sub_group_numel), shards, sub_group_numel));
  }
}

TEST(SubGroupsTest, NameWhatTheyRefuse) {
  for (int64_t numel : {int64_t{0}, int64_t{-5}}) {
    const absl::Status status = CutSubGroups({1, 2}, numel).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(), "sub-groups: sub_group_numel is " +
                                    PrintToString(numel) +
                                    ", expected at least 1");
  }
  const absl::Status status = CutSubGroups({1, -3}, 1).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(),
            "sub-groups: shard 1 has numel -3, expected at least 0");
}

// --- CPU and device. ---

Numels Split(const Numels& shards, double cpu_ratio) {
  const auto split = SplitBetweenCpuAndDevice(shards, cpu_ratio);
  EXPECT_TRUE(split.ok()) << split.status();
  return split.value_or(Numels());
}

// As a double: exact below 2^53.
double Sum(const Numels& numels) {
  double sum = 0;
  for (int64_t numel : numels) sum += static_cast<double>(numel);
  return sum;
}

// A double of [0, 1), of any magnitude every second time.
double AnyRatio(Random& random) {
  const double fraction = static_cast<double>(random() >> 11) * 0x1p-53;
  return random() % 2 == 0
             ? fraction
             : std::ldexp(fraction, -static_cast<int>(random() % 64));
}

TEST(CpuSplitTest, TenthsOfTenShardsAreWhole) {
  // Also where the ratio is a little less than tenths, as 1 - 0.9 is.
  for (int64_t numel : {kLeaf, 3 * kLeaf, int64_t{1}, kLeaf - 1, 3 * kLeaf + 5,
                        int64_t{123456789}}) {
    for (int tenths = 0; tenths <= 10; ++tenths) {
      Numels expected(10);
      std::fill_n(expected.begin(), tenths, numel);
      EXPECT_EQ(Split(Numels(10, numel), tenths / 10.0), expected)
          << numel << " " << tenths;
      EXPECT_EQ(Split(Numels(10, numel), 1 - (10 - tenths) / 10.0), expected)
          << numel << " " << tenths;
    }
  }
}

TEST(CpuSplitTest, CutsOneShardAtTheNearestLeaf) {
  const Numels shards = {2 * kLeaf, 2 * kLeaf, 2 * kLeaf, 2 * kLeaf};
  EXPECT_THAT(Split(shards, 0.375), ElementsAre(2 * kLeaf, kLeaf, 0, 0));
  EXPECT_THAT(Split(shards, 0.43), ElementsAre(2 * kLeaf, kLeaf, 0, 0));
  EXPECT_THAT(Split(shards, 0.44), ElementsAre(2 * kLeaf, 2 * kLeaf, 0, 0));
  EXPECT_THAT(Split(shards, 0.06), ElementsAre(0, 0, 0, 0));
  EXPECT_EQ(Split(shards, 0.99), shards);
  // Of two that are as near, the longer.
  EXPECT_THAT(Split(shards, 0.0625), ElementsAre(kLeaf, 0, 0, 0));
  // The end of a shard is nearer than the next leaf would be.
  EXPECT_THAT(Split({kLeaf + 100}, 0.97), ElementsAre(kLeaf));
  EXPECT_THAT(Split({kLeaf + 100}, 0.99), ElementsAre(kLeaf + 100));
  // In whole elements: 6.3 is 6, 6.65 is 7.
  EXPECT_THAT(Split({6, 1}, 0.9), ElementsAre(6, 0));
  EXPECT_THAT(Split({6, 1}, 0.95), ElementsAre(6, 1));
}

TEST(CpuSplitTest, MayBeOfNothing) {
  for (double ratio : {0.0, -0.0, 0.3, 1.0}) {
    EXPECT_THAT(Split({}, ratio), IsEmpty());
    EXPECT_THAT(Split({0, 0, 0}, ratio), ElementsAre(0, 0, 0));
  }
  EXPECT_THAT(Split({0, 5, 0, 7, 0}, 1), ElementsAre(0, 5, 0, 7, 0));
  EXPECT_THAT(Split({0, 5, 0, 7, 0}, 0), ElementsAre(0, 0, 0, 0, 0));
}

// All of the first shards, none of the last, a cut at a leaf between them.
void ExpectOneCut(const Numels& split, const Numels& shards) {
  ASSERT_EQ(split.size(), shards.size());
  bool ended = false;
  for (size_t i = 0; i < shards.size(); ++i) {
    ASSERT_GE(split[i], 0);
    ASSERT_LE(split[i], ended ? 0 : shards[i]);
    if (split[i] == shards[i]) continue;
    ASSERT_EQ(split[i] % kLeaf, 0);
    ended = true;
  }
}

// How far from `wanted` the nearest sum is that a cut gives.
double NearestDistance(const Numels& shards, double wanted) {
  double nearest = wanted;
  double before = 0;
  for (int64_t numel : shards) {
    for (int64_t cut = 0; cut < numel + kLeaf; cut += kLeaf) {
      const double sum = before + static_cast<double>(std::min(cut, numel));
      nearest = std::min(nearest, std::abs(sum - wanted));
    }
    before += static_cast<double>(numel);
  }
  return nearest;
}

TEST(CpuSplitTest, AnyShardsAreCutNearestToAnyRatio) {
  Random random(3);
  for (int64_t round = 0; round < 20000; round += LongTestStride()) {
    const Numels shards = AnyNumels(random);
    const double ratio = AnyRatio(random);
    SCOPED_TRACE(PrintToString(shards) + " by " + PrintToString(ratio));
    const Numels split = Split(shards, ratio);
    ASSERT_NO_FATAL_FAILURE(ExpectOneCut(split, shards));
    const double wanted = ratio * Sum(shards);
    const double distance = std::abs(Sum(split) - wanted);
    // Whole elements are wanted, so that either cut may seem half of one
    // nearer.
    ASSERT_LT(distance, NearestDistance(shards, wanted) + 1.01);
    ASSERT_LE(distance, kLeaf);
    ASSERT_EQ(Split(shards, 0), Numels(shards.size()));
    ASSERT_EQ(Split(shards, 1), shards);
  }
}

TEST(CpuSplitTest, GrowsWithTheRatio) {
  Random random(4);
  for (int64_t round = 0; round < 2000; round += LongTestStride()) {
    const Numels shards =
        round % 2 == 0 ? AnyNumels(random) : AnyHugeNumels(random);
    std::vector<double> ratios = {0, 1, 1 - 0x1p-53};
    for (int i = 0; i < 20; ++i) ratios.push_back(AnyRatio(random));
    std::sort(ratios.begin(), ratios.end());
    SCOPED_TRACE(PrintToString(shards));
    Numels last(shards.size());
    for (double ratio : ratios) {
      const Numels split = Split(shards, ratio);
      ASSERT_NO_FATAL_FAILURE(ExpectOneCut(split, shards)) << ratio;
      for (size_t i = 0; i < shards.size(); ++i) {
        ASSERT_GE(split[i], last[i]) << ratio;
      }
      last = split;
    }
    ASSERT_EQ(last, shards);
  }
}

TEST(CpuSplitTest, HugeShards) {
  constexpr int64_t kHuge = int64_t{1} << 60;
  EXPECT_THAT(Split({kHuge, kHuge, kHuge}, 0.5),
              ElementsAre(kHuge, kHuge / 2, 0));
  EXPECT_THAT(Split({kHuge, kHuge, kHuge}, 1),
              ElementsAre(kHuge, kHuge, kHuge));
  // 0x555555555555540 elements, of 0x1000 to a leaf.
  EXPECT_THAT(Split({kHuge}, 1.0 / 3), ElementsAre(0x555555555555000));
  EXPECT_THAT(Split({kHuge}, 1 - 0x1p-40), ElementsAre(kHuge - (1 << 20)));
  // No double is as large as these sums.
  EXPECT_THAT(Split({2 * kHuge, 1}, 1), ElementsAre(2 * kHuge, 1));
  EXPECT_THAT(Split({4 * kHuge - 1}, 1), ElementsAre(4 * kHuge - 1));
  EXPECT_THAT(Split({2 * kHuge}, 0x1p-61), ElementsAre(0));
  EXPECT_THAT(Split({2 * kHuge}, 0x1p-48), ElementsAre(2 * kLeaf));
  EXPECT_THAT(Split({2 * kHuge}, std::numeric_limits<double>::denorm_min()),
              ElementsAre(0));
}

TEST(CpuSplitTest, TheCallersEnvironmentChangesNothing) {
  Random random(5);
  for (int round = 0; round < 100; ++round) {
    const Numels shards = AnyHugeNumels(random);
    const double ratio = AnyRatio(random);
    const Numels expected = Split(shards, ratio);
    absl::StatusOr<Numels> actual;
    {
      const HostileFpEnvironment hostile;
      actual = SplitBetweenCpuAndDevice(shards, ratio);
      EXPECT_TRUE(hostile.Intact());
    }
    ASSERT_TRUE(actual.ok()) << actual.status();
    EXPECT_EQ(*actual, expected) << ratio;
  }
}

TEST(CpuSplitTest, NamesWhatItRefuses) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (double ratio : {-0.1, -0x1p-1074, 1 + 0x1p-52, 2.0, kInfinity,
                       -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    const absl::Status status = SplitBetweenCpuAndDevice({1}, ratio).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << ratio << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("CPU split: cpu_ratio is "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(", expected 0 to 1"));
  }
  const absl::Status status =
      SplitBetweenCpuAndDevice({kMost, kMost, -1}, 0.5).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(),
            "CPU split: shard 2 has numel -1, expected at least 0");
  constexpr int64_t kLimit = int64_t{1} << 62;
  for (const Numels& shards :
       {Numels{kLimit}, Numels{kLimit - 1, 1}, Numels{1, kLimit - 1},
        Numels{kMost, kMost, kMost}}) {
    const absl::Status large = SplitBetweenCpuAndDevice(shards, 0.5).status();
    EXPECT_TRUE(absl::IsOutOfRange(large)) << large;
    EXPECT_EQ(large.message(),
              "CPU split: " + PrintToString(shards.size()) +
                  " shards have more elements than 4611686018427387903");
  }
}

}  // namespace
}  // namespace onepass

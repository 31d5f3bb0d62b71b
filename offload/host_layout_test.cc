#include "offload/host_layout.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/kernel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using Part = HostLayout::Part;
using Piece = HostLayout::Piece;
using SubGroup = HostLayout::SubGroup;

constexpr int64_t kAlignment = HostLayout::kAlignmentNumel;
constexpr int64_t kHuge = int64_t{1} << 62;

HostLayout Make(const std::vector<int64_t>& numels, int64_t sub_group_numel,
                int64_t piece_numel) {
  absl::StatusOr<HostLayout> layout =
      HostLayout::Create(numels, sub_group_numel, piece_numel);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

// Parts of each shard follow one another from its first element to its last.
void ExpectCovers(absl::Span<const Part> parts,
                  const std::vector<int64_t>& numels) {
  std::vector<int64_t> next(numels.size(), 0);
  for (const Part& part : parts) {
    ASSERT_GE(part.shard, 0);
    ASSERT_LT(static_cast<size_t>(part.shard), numels.size());
    EXPECT_GE(part.numel, 1);
    EXPECT_EQ(part.offset, next[part.shard]) << "shard " << part.shard;
    next[part.shard] = part.offset + part.numel;
  }
  EXPECT_EQ(next, numels);
}

// Sub-groups, and the segments in them, follow one another.
void CheckSegments(const HostLayout& layout, int64_t sub_group_numel) {
  int64_t position = 0;
  for (const SubGroup& sub_group : layout.sub_groups()) {
    EXPECT_EQ(sub_group.begin, position);
    EXPECT_LT(sub_group.begin, sub_group.end);
    EXPECT_EQ(sub_group.end % kAlignment, 0);
    position = sub_group.end;
  }
  EXPECT_EQ(layout.numel(), position);

  position = 0;
  std::vector<int64_t> elements(layout.sub_groups().size(), 0);
  for (const Part& segment : layout.segments()) {
    EXPECT_EQ(segment.position, position);
    EXPECT_EQ(segment.offset % kLeafNumel, 0);
    const SubGroup& sub_group = layout.sub_groups()[segment.sub_group];
    EXPECT_GE(segment.position, sub_group.begin);
    EXPECT_LE(segment.position + segment.numel, sub_group.end);
    elements[segment.sub_group] += segment.numel;
    position += (segment.numel + kAlignment - 1) / kAlignment * kAlignment;
  }
  EXPECT_EQ(layout.numel(), position);
  for (const int64_t numel : elements) {
    EXPECT_LE(numel, std::max(sub_group_numel, kLeafNumel));
  }
}

void CheckSegmentsOfShards(const HostLayout& layout, size_t shards) {
  auto next = layout.segments().begin();
  for (size_t shard = 0; shard < shards; ++shard) {
    for (const Part& segment : layout.segments_of(static_cast<int>(shard))) {
      ASSERT_NE(next, layout.segments().end());
      EXPECT_EQ(&segment, &*next++);
      EXPECT_EQ(static_cast<size_t>(segment.shard), shard);
    }
  }
  EXPECT_EQ(next, layout.segments().end());
}

// Pieces cut each sub-group; a part is where it is in its segment.
void CheckPieces(const HostLayout& layout, int64_t piece_numel,
                 std::vector<Part>* parts) {
  int64_t position = 0;
  int64_t longest = 0;
  for (const Piece& piece : layout.pieces()) {
    EXPECT_EQ(piece.begin, position);
    const SubGroup& sub_group = layout.sub_groups()[piece.sub_group];
    EXPECT_GE(piece.begin, sub_group.begin);
    EXPECT_EQ(piece.end,
              piece.begin + std::min(piece_numel, sub_group.end - piece.begin));
    EXPECT_FALSE(piece.parts.empty());
    for (const Part& part : piece.parts) {
      EXPECT_EQ(part.sub_group, piece.sub_group);
      EXPECT_GE(part.position, piece.begin);
      EXPECT_LE(part.position + part.numel, piece.end);
      EXPECT_EQ(part.position % kAlignment, 0);
      int segments = 0;
      for (const Part& segment : layout.segments_of(part.shard)) {
        segments +=
            part.offset >= segment.offset &&
            part.offset + part.numel <= segment.offset + segment.numel &&
            part.position - part.offset == segment.position - segment.offset;
      }
      EXPECT_EQ(segments, 1);
    }
    parts->insert(parts->end(), piece.parts.begin(), piece.parts.end());
    position = piece.end;
    longest = std::max(longest, piece.end - piece.begin);
  }
  EXPECT_EQ(layout.numel(), position);
  EXPECT_EQ(layout.longest_piece(), longest);
}

void Check(const HostLayout& layout, const std::vector<int64_t>& numels,
           int64_t sub_group_numel, int64_t piece_numel) {
  ExpectCovers(layout.segments(), numels);
  CheckSegments(layout, sub_group_numel);
  CheckSegmentsOfShards(layout, numels.size());
  std::vector<Part> parts;
  CheckPieces(layout, piece_numel, &parts);
  ExpectCovers(parts, numels);
}

const std::vector<int64_t> kShards[] = {
    {},
    {0},
    {0, 0, 0},
    {1},
    {0, 1, 0},
    {31, 32, 33},
    {kLeafNumel},
    {kLeafNumel - 1, kLeafNumel + 1},
    {5 * kLeafNumel + 7, 0, 1, 1, 1, 3 * kLeafNumel, 70},
    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
    {100'003, 17, 0, 40'000, 1},
};

TEST(HostLayoutTest, EveryElementHasOnePlace) {
  for (const std::vector<int64_t>& numels : kShards) {
    for (const int64_t sub_group_numel :
         {int64_t{1}, kLeafNumel, kLeafNumel + 1, 3 * kLeafNumel,
          int64_t{20'000}, std::numeric_limits<int64_t>::max()}) {
      for (const int64_t piece_numel :
           {kAlignment, 2 * kAlignment, int64_t{992}, kLeafNumel,
            kLeafNumel + kAlignment, 2 * kLeafNumel, int64_t{32'000}, kHuge}) {
        SCOPED_TRACE(testing::Message()
                     << "shards " << testing::PrintToString(numels)
                     << ", sub-groups " << sub_group_numel << ", pieces "
                     << piece_numel);
        Check(Make(numels, sub_group_numel, piece_numel), numels,
              sub_group_numel, piece_numel);
      }
    }
  }
}

TEST(HostLayoutTest, IsTheSameAfterAMove) {
  const std::vector<int64_t> numels = {5000, 31, 12'000};
  HostLayout layout = Make(numels, 8192, 1024);
  HostLayout moved = std::move(layout);
  Check(moved, numels, 8192, 1024);
  HostLayout assigned = Make({}, 1, kAlignment);
  assigned = std::move(moved);
  Check(assigned, numels, 8192, 1024);
}

TEST(HostLayoutTest, LargeShardsTakeNoTimeByTheElement) {
  const std::vector<int64_t> numels = {int64_t{1} << 40,
                                       (int64_t{1} << 33) + 5};
  constexpr int64_t kSubGroup = int64_t{1} << 39;
  constexpr int64_t kPiece = int64_t{1} << 35;
  Check(Make(numels, kSubGroup, kPiece), numels, kSubGroup, kPiece);
}

TEST(HostLayoutTest, GapsAreLessThanTheAlignment) {
  const std::vector<int64_t> numels(100, 1);
  const HostLayout layout = Make(numels, kHuge, 1024);
  EXPECT_EQ(layout.numel(), 100 * kAlignment);
  EXPECT_EQ(layout.sub_groups().size(), 1u);
  const HostLayout exact = Make({64, 32, 4096}, kHuge, 1024);
  EXPECT_EQ(exact.numel(), 64 + 32 + 4096);
}

TEST(HostLayoutTest, ErrorsAreThoseOfCutSubGroups) {
  const auto error = [](const std::vector<int64_t>& numels,
                        int64_t sub_group_numel) {
    const absl::Status status =
        HostLayout::Create(numels, sub_group_numel, kAlignment).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error({1, 2}, 0), HasSubstr("sub_group_numel is 0"));
  EXPECT_THAT(error({1, -2}, 1), HasSubstr("-2"));
}

}  // namespace
}  // namespace onepass

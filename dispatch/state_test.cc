#include "dispatch/state.h"

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

TEST(StateKindTest, NamesAreThoseOfPyTorch) {
  EXPECT_STREQ(Name(StateKind::kMaster), "master_param");
  EXPECT_STREQ(Name(StateKind::kExpAvg), "exp_avg");
  EXPECT_STREQ(Name(StateKind::kExpAvgSq), "exp_avg_sq");
  EXPECT_STREQ(Name(StateKind::kParam), "param");
}

TEST(StateTypeTest, HaveNamesAndSizes) {
  int64_t bytes = 0;
  std::string names;
  for (const StateType type : kAllStateTypes) {
    bytes = 10 * bytes + ByteSize(type);
    names += Name(type);
    names += IsScaled(type) ? "*," : ",";
  }
  EXPECT_EQ(bytes, 422212);
  EXPECT_EQ(names, "fp32,bf16,fp16,scaled fp16*,scaled e4m3*,int16 remainder,");
}

TEST(BoxTest, CountsItsElements) {
  EXPECT_EQ(Box{}.numel(), 1);  // of a scalar
  EXPECT_EQ((Box{{5}, {7}}).numel(), 7);
  EXPECT_EQ((Box{{0, 1, 2}, {3, 4, 5}}).numel(), 60);
  EXPECT_EQ((Box{{0, 1}, {3, 0}}).numel(), 0);
  constexpr int64_t kLarge = int64_t{1} << 31;
  EXPECT_EQ((Box{{0, 0}, {kLarge, 2}}).numel(), 2 * kLarge);
}

TEST(BoxTest, IsOfItsShape) {
  const auto numel = [](const std::vector<int64_t>& shape, const Box& box) {
    const absl::StatusOr<int64_t> numel = CheckBox(shape, box);
    EXPECT_TRUE(numel.ok()) << numel.status();
    return numel.value_or(-1);
  };
  EXPECT_EQ(numel({}, {}), 1);
  EXPECT_EQ(numel({}, {{0}, {1}}), 1);
  EXPECT_EQ(numel({3, 4}, {{1, 0}, {2, 4}}), 8);
  EXPECT_EQ(numel({3, 4}, {{5}, {7}}), 7);  // flat
  EXPECT_EQ(numel({3, 4}, {{12}, {0}}), 0);
  EXPECT_EQ(numel({3, 0}, {{3, 0}, {0, 0}}), 0);
  const auto problem = [](const std::vector<int64_t>& shape, const Box& box) {
    const absl::Status status = CheckBox(shape, box).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  const std::string sizes =
      "shape or box has a negative size, or does not fit 64 bits";
  EXPECT_EQ(problem({-1}, {{0}, {0}}), sizes);
  EXPECT_EQ(problem({3}, {{0}, {-1}}), sizes);
  EXPECT_EQ(problem({3}, {{0, 0}, {1}}), sizes);
  constexpr int64_t kLarge = int64_t{1} << 32;
  EXPECT_EQ(problem({kLarge, kLarge}, {{0}, {1}}), sizes);
  EXPECT_EQ(problem({3, 4, 5}, {{0, 0}, {1, 1}}),
            "box has 2 dimensions, expected 1 or the 3 of its shape");
  EXPECT_EQ(problem({3, 4}, {{1, 2}, {1, 3}}),
            "box has [2, 2 + 3) in dimension 1 of 4");
  EXPECT_EQ(problem({3, 4}, {{7}, {6}}),
            "box has [7, 7 + 6) in dimension 0 of 12");
  EXPECT_EQ(problem({3}, {{-1}, {1}}),
            "box has [-1, -1 + 1) in dimension 0 of 3");
}

TEST(BoxTest, HasLeavesOfItsTensor) {
  EXPECT_TRUE(HasLeavesOfTensor({}, {}));
  EXPECT_TRUE(HasLeavesOfTensor({100, 100}, {{0, 0}, {100, 100}}));
  EXPECT_TRUE(HasLeavesOfTensor({100, 100}, {{2 * kLeafNumel}, {1808}}));
  EXPECT_TRUE(HasLeavesOfTensor({100, 100}, {{0}, {2 * kLeafNumel}}));
  EXPECT_TRUE(HasLeavesOfTensor({10000}, {{kLeafNumel}, {5904}}));
  EXPECT_TRUE(HasLeavesOfTensor({100, 100}, {{50, 50}, {50, 0}}));
  EXPECT_FALSE(HasLeavesOfTensor({100, 100}, {{0, 0}, {99, 100}}));
  EXPECT_FALSE(HasLeavesOfTensor({100, 100}, {{1}, {kLeafNumel}}));
  EXPECT_FALSE(HasLeavesOfTensor({10000}, {{100}, {1}}));
  EXPECT_FALSE(HasLeavesOfTensor({10000}, {{kLeafNumel}, {17}}));
}

class StateLeaseTest : public testing::Test {
 protected:
  StateLease Lease() {
    StateView view = {"state.w.exp_avg",
                      StateType::kFloat32,
                      {1},
                      {{0}, {1}},
                      0,
                      1,
                      false,
                      &value_};
    return StateLease({view}, [this] { ++released_; });
  }

  const float value_ = 1;
  int released_ = 0;
};

TEST_F(StateLeaseTest, IsReleasedOnceItGoes) {
  {
    const StateLease lease = Lease();
    ASSERT_EQ(lease.views().size(), 1u);
    EXPECT_EQ(lease.views()[0].name, "state.w.exp_avg");
    EXPECT_EQ(lease.views()[0].data, &value_);
    EXPECT_EQ(released_, 0);
  }
  EXPECT_EQ(released_, 1);
}

TEST_F(StateLeaseTest, IsReleasedByWhoeverHasItLast) {
  static_assert(!std::is_copy_constructible_v<StateLease>);
  {
    StateLease outer = [this] {
      StateLease inner = Lease();
      return StateLease(std::move(inner));
    }();
    EXPECT_EQ(released_, 0);
    EXPECT_EQ(outer.views().size(), 1u);
  }
  EXPECT_EQ(released_, 1);
}

TEST_F(StateLeaseTest, AssignmentReleasesTheOneBefore) {
  {
    StateLease lease = Lease();
    lease = Lease();
    EXPECT_EQ(released_, 1);
    StateLease& itself = lease;
    lease = std::move(itself);
    EXPECT_EQ(released_, 1);
    EXPECT_EQ(lease.views().size(), 1u);
  }
  EXPECT_EQ(released_, 2);
}

TEST_F(StateLeaseTest, MayHaveNothingToRelease) {
  const StateLease lease({}, nullptr);
  EXPECT_TRUE(lease.views().empty());
}

// What the owner of a restore is told, a letter each.
class StateRestoreTest : public testing::Test {
 protected:
  StateRestore Restore() {
    StateRestore::Owner owner;
    owner.commit = [this] {
      told_ += 'c';
      return commits_;
    };
    owner.end = [this](bool written, bool committed) {
      told_ += written ? 'W' : 'w';
      told_ += committed ? 'C' : '-';
    };
    return StateRestore({StateTarget()}, std::move(owner));
  }

  absl::Status commits_;
  std::string told_;
};

TEST_F(StateRestoreTest, TellsItsOwnerHowItEnds) {
  { const StateRestore restore = Restore(); }
  EXPECT_EQ(told_, "w-");
  {
    StateRestore restore = Restore();
    restore.BeginWriting();
  }
  EXPECT_EQ(told_, "w-W-");
  {
    StateRestore restore = Restore();
    restore.BeginWriting();
    EXPECT_TRUE(restore.Commit().ok());
    EXPECT_EQ(told_, "w-W-c");
  }
  EXPECT_EQ(told_, "w-W-cWC");
  commits_ = absl::InternalError("no");
  {
    StateRestore restore = Restore();
    restore.BeginWriting();
    EXPECT_EQ(restore.Commit(), commits_);
  }
  EXPECT_EQ(told_, "w-W-cWCcW-");
}

TEST_F(StateRestoreTest, MayBeAbandonedAfterAll) {
  {
    StateRestore restore = Restore();
    restore.BeginWriting();
    EXPECT_TRUE(restore.Commit().ok());
    restore.Abandon();
  }
  EXPECT_EQ(told_, "cW-");
}

TEST_F(StateRestoreTest, EndsOnceWhereverItWent) {
  {
    StateRestore outer = [this] {
      StateRestore inner = Restore();
      inner.BeginWriting();
      return StateRestore(std::move(inner));
    }();
    EXPECT_EQ(told_, "");
    EXPECT_EQ(outer.targets().size(), 1u);
    EXPECT_TRUE(outer.Commit().ok());
    StateRestore& itself = outer;
    outer = std::move(itself);
    EXPECT_EQ(told_, "c");
    outer = Restore();
    EXPECT_EQ(told_, "cWC");
  }
  EXPECT_EQ(told_, "cWCw-");
}

}  // namespace
}  // namespace onepass

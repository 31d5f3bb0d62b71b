#include "dispatch/state.h"

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch/dtype.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

TEST(StateKindTest, NamesAreThoseOfPyTorch) {
  EXPECT_STREQ(Name(StateKind::kMaster), "master_param");
  EXPECT_STREQ(Name(StateKind::kExpAvg), "exp_avg");
  EXPECT_STREQ(Name(StateKind::kExpAvgSq), "exp_avg_sq");
}

TEST(BoxTest, CountsItsElements) {
  EXPECT_EQ(Box{}.numel(), 1);  // of a scalar
  EXPECT_EQ((Box{{5}, {7}}).numel(), 7);
  EXPECT_EQ((Box{{0, 1, 2}, {3, 4, 5}}).numel(), 60);
  EXPECT_EQ((Box{{0, 1}, {3, 0}}).numel(), 0);
  constexpr int64_t kLarge = int64_t{1} << 31;
  EXPECT_EQ((Box{{0, 0}, {kLarge, 2}}).numel(), 2 * kLarge);
}

class StateLeaseTest : public testing::Test {
 protected:
  StateLease Lease() {
    StateView view = {"state.w.exp_avg",
                      DType::kFloat32,
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

}  // namespace
}  // namespace onepass

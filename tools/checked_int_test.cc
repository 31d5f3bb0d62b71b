#include "tools/checked_int.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(CheckedIntTest, CountsUpToTheMost) {
  EXPECT_EQ((CheckedInt(3) * 4 + 5).Get("x").value(), 17);
  EXPECT_EQ((CheckedInt(kMost - 1) + 1).Get("x").value(), kMost);
  EXPECT_EQ((CheckedInt(kMost / 2) * 2).Get("x").value(), kMost - 1);
  EXPECT_EQ(Max(CheckedInt(3), 4).Get("x").value(), 4);
  EXPECT_EQ(Min(CheckedInt(3), 4).Get("x").value(), 3);
  EXPECT_EQ(Min(CheckedInt(kMost) + 1, 4).Get("x").value(), 4);
  EXPECT_EQ(Min(4, CheckedInt(kMost) + 1).Get("x").value(), 4);
}

TEST(CheckedIntTest, RemembersWhatDidNotFit) {
  const CheckedInt sum = CheckedInt(kMost) + 1;
  const CheckedInt product = CheckedInt(kMost) * 2;
  for (const CheckedInt& value :
       {sum, product, sum + 1, product * 0, 1 + sum, 0 * product, Max(sum, 5),
        Min(sum, sum), Max(5, product)}) {
    EXPECT_EQ(
        value.Get("apples").status(),
        absl::OutOfRangeError("the number of apples does not fit 64 bits"));
  }
}

}  // namespace
}  // namespace onepass

#include "offload/gradient_clip.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/norm_sum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/hostile_fp_environment.h"

namespace onepass {
namespace {

using ::testing::StartsWith;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  double norm;
  double max_norm;
  double loss_scale;
  float factor;
};

// Bits from a Python program.
constexpr Case kCases[] = {
    {10, 1, 1, 0x1.999996p-4f},
    {3, 0.25, 1, 0x1.55554ep-4f},
    {1, 1, 1, 0x1.ffffdep-1f},  // the norm itself is a little above the limit
    {65536 * 7.5, 2.5, 65536, 0x1.555552p-18f},
    {1e40, 1, 1, 0x1.16c2p-133f},  // subnormal
    {0.7, 0.1, 1024, 0x1p-10f},    // below the limit once unscaled
    {1e-3, 1, 3, 0x1.555556p-2f},
};

TEST(ClipFactorTest, IsTheFormula) {
  for (const Case& c : kCases) {
    const absl::StatusOr<float> factor =
        ClipFactor(c.norm, c.max_norm, c.loss_scale);
    ASSERT_TRUE(factor.ok()) << factor.status();
    EXPECT_EQ(*factor, c.factor) << c.norm;
  }
}

TEST(ClipFactorTest, IsExactly1BelowTheLimit) {
  for (double norm : {0.0, 1e-300, 0.3, 0.999998}) {
    EXPECT_EQ(ClipFactor(norm, 1).value(), 1.0f) << norm;
    EXPECT_EQ(ClipFactor(norm * 4096, 1, 4096).value(), 0x1p-12f) << norm;
  }
}

TEST(ClipFactorTest, DoesNotClipAtZero) {
  for (double norm : {0.0, 1.0, 1e60}) {
    EXPECT_EQ(ClipFactor(norm, 0).value(), 1.0f);
    EXPECT_EQ(ClipFactor(norm, 0, 3).value(), static_cast<float>(1.0 / 3));
  }
}

TEST(ClipFactorTest, NamesWhatItRefuses) {
  auto refused = [](double norm, double max_norm, double loss_scale,
                    const std::string& name) {
    const absl::Status status = ClipFactor(norm, max_norm, loss_scale).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(name + " is "));
  };
  for (double bad : {kNaN, kInfinity, -kInfinity, -1.0}) {
    refused(bad, 1, 1, "gradient norm");
    refused(bad, 0, 1, "gradient norm");
    refused(1, bad, 1, "max_norm");
    refused(1, 1, bad, "loss_scale");
  }
  refused(1, 1, 0, "loss_scale");
  // Factors that fp32 cannot hold: training would go on with no gradient, or
  // with infinite ones.
  refused(1, 0, 1e-40, "the clip factor");
  refused(1, 1e-320, 1, "the clip factor");
  refused(1e300, 1, 1e-300, "the clip factor");
  refused(1e-30, 1, 1e300, "the clip factor");
}

TEST(GradientNormTest, IsTheRootOfTheSum) {
  NormSum sum;
  EXPECT_EQ(GradientNorm(sum), 0.0);
  sum.Add(9);
  sum.Add(16);
  EXPECT_EQ(GradientNorm(sum), 5.0);
  NormSum infinite = sum;
  infinite.Add(kInfinity);
  EXPECT_EQ(GradientNorm(infinite), kInfinity);
  infinite.Add(kNaN);
  EXPECT_TRUE(std::isnan(GradientNorm(infinite)));
}

TEST(GradientClipTest, TheCallersEnvironmentChangesNothing) {
  for (const Case& c : kCases) {
    absl::StatusOr<float> factor;
    {
      const HostileFpEnvironment hostile;
      factor = ClipFactor(c.norm, c.max_norm, c.loss_scale);
      EXPECT_TRUE(hostile.Intact());
    }
    EXPECT_EQ(factor.value(), c.factor) << c.norm;
  }
  for (double square : {2.0, 3.0, 5.0, 6.0, 7.0, 8.0}) {
    NormSum sum;
    sum.Add(square);
    sum.Add(0x1p-60);
    const double expected = GradientNorm(sum);
    double actual;
    {
      const HostileFpEnvironment hostile;
      actual = GradientNorm(sum);
      EXPECT_TRUE(hostile.Intact());
    }
    EXPECT_EQ(actual, expected) << square;
  }
}

}  // namespace
}  // namespace onepass

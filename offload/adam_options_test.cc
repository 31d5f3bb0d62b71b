#include "offload/adam_options.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/hostile_fp_environment.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Mode = AdamOptions::Mode;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

AdamConstants Constants(const AdamOptions& options, int64_t t) {
  const absl::StatusOr<AdamConstants> constants =
      ComputeAdamConstants(options, t);
  EXPECT_TRUE(constants.ok()) << constants.status();
  return constants.value_or(AdamConstants{});
}

std::vector<uint32_t> Bits(const AdamConstants& c) {
  std::vector<uint32_t> all;
  for (float x : {c.beta1, c.beta2, c.one_minus_beta1, c.one_minus_beta2, c.eps,
                  c.weight_decay, c.step_size, c.bias_correction2, c.decay}) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    all.push_back(bits);
  }
  all.push_back(static_cast<uint32_t>(c.decay_mode));
  return all;
}

AdamOptions WithBetas(double beta1, double beta2) {
  AdamOptions options;
  options.beta1 = beta1;
  options.beta2 = beta2;
  return options;
}

TEST(AdamOptionsTest, RefusesEachBadOptionByName) {
  const std::tuple<std::string, double AdamOptions::*, std::vector<double>>
      cases[] = {
          {"lr", &AdamOptions::lr, {-1e-3, -1e-45, kNaN, kInfinity, 1e39}},
          {"beta1",
           &AdamOptions::beta1,
           {-0.1, 1, 0.99999999, 1.5, kNaN, kInfinity, -kInfinity}},
          {"beta2",
           &AdamOptions::beta2,
           {-0.1, 1, 0.99999999, 1.5, kNaN, kInfinity, -kInfinity}},
          {"eps", &AdamOptions::eps, {-1e-8, kNaN, kInfinity, 1e39}},
          {"weight_decay",
           &AdamOptions::weight_decay,
           {-0.01, kNaN, kInfinity, 1e39}},
      };
  for (const auto& [name, option, values] : cases) {
    for (double value : values) {
      AdamOptions options;
      options.*option = value;
      for (const absl::Status& status :
           {ValidateAdamOptions(options),
            ComputeAdamConstants(options, 1).status()}) {
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << name << value << status;
        EXPECT_THAT(std::string(status.message()),
                    AllOf(StartsWith(name + " is "), HasSubstr("expected")));
      }
    }
  }
}

TEST(AdamOptionsTest, AcceptsTheEdges) {
  EXPECT_TRUE(ValidateAdamOptions({}).ok());
  AdamOptions options = WithBetas(0, 0);
  options.lr = 0;
  options.eps = 0;
  EXPECT_TRUE(ValidateAdamOptions(options).ok());
  EXPECT_TRUE(ComputeAdamConstants(options, 1).ok());
  options = WithBetas(0.9999999, 0.9999999);  // below 1 as fp32
  EXPECT_TRUE(ComputeAdamConstants(options, 1).ok());
}

TEST(AdamOptionsTest, RefusesAStepBelow1) {
  for (int64_t t :
       {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    const absl::Status status = ComputeAdamConstants({}, t).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(),
              "step t is " + std::to_string(t) + ", expected at least 1");
  }
}

TEST(AdamOptionsTest, RefusesWhatOverflows) {
  AdamOptions options;
  options.lr = 3e38;
  EXPECT_FALSE(ComputeAdamConstants(options, 1).ok());  // lr / (1 - 0.9)
  options.bias_correction = false;
  EXPECT_TRUE(ComputeAdamConstants(options, 1).ok());
  options.weight_decay = 10;
  const absl::Status status = ComputeAdamConstants(options, 7).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(),
            "lr 3e+38 with weight_decay 10 at step 7 overflows fp32");
}

TEST(AdamConstantsTest, KnownCases) {
  AdamOptions options = WithBetas(0.5, 0.75);
  options.lr = 0.5;
  options.weight_decay = 0.25;
  options.eps = 1e-6;
  AdamConstants c = Constants(options, 1);
  EXPECT_EQ(c.beta1, 0.5f);
  EXPECT_EQ(c.beta2, 0.75f);
  EXPECT_EQ(c.one_minus_beta1, 0.5f);
  EXPECT_EQ(c.one_minus_beta2, 0.25f);
  EXPECT_EQ(c.eps, 1e-6f);
  EXPECT_EQ(c.weight_decay, 0.25f);
  EXPECT_EQ(c.step_size, -1.0f);        // 0.5 / (1 - 0.5)
  EXPECT_EQ(c.bias_correction2, 2.0f);  // 1 / sqrt(1 - 0.75)
  EXPECT_EQ(c.decay, -0.125f);
  c = Constants(options, 2);
  EXPECT_EQ(c.step_size, -2.0f / 3);
  EXPECT_EQ(c.bias_correction2, static_cast<float>(1 / std::sqrt(0.4375)));
  options.bias_correction = false;
  c = Constants(options, 1);
  EXPECT_EQ(c.step_size, -0.5f);
  EXPECT_EQ(c.bias_correction2, 1.0f);

  // Subtracted in fp32, from the betas of fp32.
  c = Constants({}, 1);
  EXPECT_EQ(c.one_minus_beta1, 1 - 0.9f);
  EXPECT_NE(c.one_minus_beta1, static_cast<float>(1 - 0.9));
  EXPECT_EQ(c.one_minus_beta2, 1 - 0.999f);
}

// From a Python program that multiplies in the order of the contract. The last
// three are steps where the power by libm's pow rounds to another float.
TEST(AdamConstantsTest, BitsOfAnotherProgram) {
  struct Case {
    AdamOptions options;
    int64_t t;
    float step_size;
    float bias_correction2;
  };
  AdamOptions slow = WithBetas(0.999999, 0.999999);
  slow.lr = 1;
  AdamOptions fine;
  fine.lr = 3e-4;  // another step size where it is not rounded to fp32 first
  const Case cases[] = {
      {fine, 5, -0x1.801598p-11f, 0x1.c50108p+3f},
      {{}, 1, -0x1.47ae1p-7f, 0x1.f9f7bap+4f},
      {{}, 2, -0x1.58ed1ep-8f, 0x1.65dcd6p+4f},
      {{}, 1000, -0x1.0624dep-10f, 0x1.41f14ep+0f},
      {{}, 1000000000, -0x1.0624dep-10f, 1.0f},
      {slow, 149736, -0x1.c6a056p+2f, 0x1.5526c8p+1f},
      {slow, 226134, -0x1.3887acp+2f, 0x1.1adb34p+1f},
      {slow, 236368, -0x1.2c7deep+2f, 0x1.155afp+1f},
  };
  for (const Case& expected : cases) {
    const AdamConstants c = Constants(expected.options, expected.t);
    EXPECT_EQ(c.step_size, expected.step_size) << expected.t;
    EXPECT_EQ(c.bias_correction2, expected.bias_correction2) << expected.t;
  }
}

// At most the next float: the reference is rounded to it once.
void ExpectWithinOneUlp(float actual, long double expected) {
  const float rounded = static_cast<float>(expected);
  EXPECT_GE(actual, std::nextafter(rounded, -INFINITY));
  EXPECT_LE(actual, std::nextafter(rounded, INFINITY));
}

TEST(AdamConstantsTest, WithinOneUlpOfTheTextbook) {
  AdamOptions options;
  options.lr = 0.3;
  options.weight_decay = 0.7;
  for (double beta1 : {0.0, 0.5, 0.9, 0.95, 0.9999999}) {
    for (double beta2 : {0.0, 0.9, 0.98, 0.999, 0.9999999}) {
      options.beta1 = beta1;
      options.beta2 = beta2;
      for (int64_t t : {1, 2, 3, 10, 999, 1000, 123456, 1000000000}) {
        SCOPED_TRACE(testing::Message() << beta1 << " " << beta2 << " " << t);
        const AdamConstants c = Constants(options, t);
        auto power = [t](double beta) {
          return std::pow(static_cast<long double>(static_cast<float>(beta)),
                          static_cast<long double>(t));
        };
        ExpectWithinOneUlp(c.step_size, -0.3f / (1 - power(beta1)));
        ExpectWithinOneUlp(c.bias_correction2, 1 / std::sqrt(1 - power(beta2)));
        ExpectWithinOneUlp(c.decay, -1.0L * 0.3f * 0.7f);
      }
    }
  }
}

TEST(AdamConstantsTest, AreAFunctionOfTheStepAlone) {
  std::vector<std::vector<uint32_t>> forward;
  for (int64_t t = 1; t <= 300; ++t) forward.push_back(Bits(Constants({}, t)));
  for (int64_t t = 300; t >= 1; --t) {
    ASSERT_EQ(Bits(Constants({}, t)), forward[t - 1]) << t;
    if (t > 1) {
      ASSERT_NE(forward[t - 1], forward[t - 2]) << t;
    }
  }
}

TEST(AdamConstantsTest, DecayMode) {
  AdamOptions options;
  for (Mode mode : {Mode::kAdamW, Mode::kL2}) {
    options.mode = mode;
    options.weight_decay = 0;
    EXPECT_EQ(Constants(options, 1).decay_mode, WeightDecay::kNone);
    options.weight_decay = 1e-60;  // zero as fp32
    EXPECT_EQ(Constants(options, 1).decay_mode, WeightDecay::kNone);
    options.weight_decay = 0.1;
    EXPECT_EQ(Constants(options, 1).decay_mode,
              mode == Mode::kL2 ? WeightDecay::kL2 : WeightDecay::kAdamW);
  }
}

TEST(AdamConstantsTest, TheCallersEnvironmentChangesNothing) {
  AdamOptions tiny;  // results and options that would be flushed to zero
  tiny.lr = 1e-40;
  tiny.eps = 3e-42;
  tiny.weight_decay = 0.3;
  AdamOptions betas = WithBetas(0.95, 0.98);
  betas.lr = 0.7;
  betas.weight_decay = 0.1;
  for (const AdamOptions& options : {AdamOptions(), tiny, betas}) {
    for (int64_t t : {1, 2, 3, 10, 1000}) {
      const std::vector<uint32_t> expected = Bits(Constants(options, t));
      absl::StatusOr<AdamConstants> actual;
      {
        const HostileFpEnvironment hostile;
        actual = ComputeAdamConstants(options, t);
        EXPECT_TRUE(hostile.Intact());
      }
      ASSERT_TRUE(actual.ok()) << actual.status();
      EXPECT_EQ(Bits(*actual), expected) << options.lr << " " << t;
    }
  }
}

TEST(AdamOptionsTest, TheCallersEnvironmentLetsNothingPass) {
  absl::Status status;
  {
    const HostileFpEnvironment hostile;
    // Toward zero this is below 1.
    status = ValidateAdamOptions(WithBetas(0.99999999, 0.999));
    EXPECT_TRUE(hostile.Intact());
  }
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST(AdamOptionsTest, AreTheSameOutOfACheckpoint) {
  AdamOptions options = WithBetas(0.95, 0.98);
  options.lr = 0.7;
  options.eps = 3e-42;
  options.weight_decay = 0.1;
  options.mode = Mode::kL2;
  options.bias_correction = false;
  StateGroup group;
  {
    const HostileFpEnvironment hostile;
    group = ToStateGroup(options, 12);
    EXPECT_TRUE(hostile.Intact());
  }
  EXPECT_EQ(group.step, 12);
  EXPECT_EQ(group.eps, 3e-42f);
  EXPECT_EQ(group.mode, WeightDecay::kL2);
  EXPECT_FALSE(group.bias_correction);
  EXPECT_EQ(Bits(Constants(ToAdamOptions(group), 12)),
            Bits(Constants(options, 12)));
  options.mode = Mode::kAdamW;
  options.bias_correction = true;
  group = ToStateGroup(options, 13);
  EXPECT_EQ(group.mode, WeightDecay::kAdamW);
  EXPECT_EQ(Bits(Constants(ToAdamOptions(group), 13)),
            Bits(Constants(options, 13)));
}

}  // namespace
}  // namespace onepass

// The peers do what they are said to do: what is measured against is a step.

#include "tools/bench/peers.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr int64_t kNumel = 1003;

struct State {
  State()
      : param(kNumel),
        grad(kNumel),
        exp_avg(kNumel),
        exp_avg_sq(kNumel),
        copy(kNumel) {
    for (int64_t i = 0; i < kNumel; ++i) {
      const float x = static_cast<float>(i % 89) / 89 - 0.5f;
      param[i] = x;
      grad[i] = 0.75f - x;
      exp_avg[i] = 0.1f + x * x;
      exp_avg_sq[i] = 0.01f + x * x;
    }
  }

  AdamStepArgs Args() {
    AdamStepArgs args;
    args.numel = kNumel;
    args.param = param.data();
    args.grad = grad.data();
    args.exp_avg = exp_avg.data();
    args.exp_avg_sq = exp_avg_sq.data();
    args.copy = copy.data();
    args.copy_type = DType::kBFloat16;
    args.grad_scale = 0.5f;
    args.constants.beta1 = 0.9f;
    args.constants.beta2 = 0.99f;
    args.constants.one_minus_beta1 = 0.1f;
    args.constants.one_minus_beta2 = 0.01f;
    args.constants.eps = 1e-3f;
    args.constants.step_size = -0.01f;
    args.constants.bias_correction2 = 1.25f;
    args.constants.decay = -0.001f;
    args.constants.decay_mode = WeightDecay::kAdamW;
    return args;
  }

  std::vector<float> param, grad, exp_avg, exp_avg_sq;
  std::vector<uint16_t> copy;
};

uint16_t UpperHalf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float FromUpperHalf(uint16_t code) {
  const uint32_t bits = uint32_t{code} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

class PeersTest : public testing::TestWithParam<const Kernel*> {
 protected:
  const Peers& peers() const { return *FindPeers(*GetParam()); }

  // What a step with gradients `g` makes of the state before it, in double;
  // `divisor` of the root.
  void ExpectStep(const State& before, const State& after, double factor,
                  double divisor) {
    for (int64_t i = 0; i < kNumel; ++i) {
      const double g = before.grad[i] * factor;
      const double m = before.exp_avg[i] * 0.9 + g * 0.1;
      const double v = before.exp_avg_sq[i] * 0.99 + g * g * 0.01;
      double p = before.param[i] * (1 - 0.001);
      p -= 0.01 * m / (std::sqrt(v) / divisor + 1e-3);
      ASSERT_NEAR(after.exp_avg[i], m, 1e-6) << i;
      ASSERT_NEAR(after.exp_avg_sq[i], v, 1e-6) << i;
      ASSERT_NEAR(after.param[i], p, 1e-6) << i;
    }
  }
};

TEST_P(PeersTest, TwinMovesAndComputesNothing) {
  for (const bool streams : {false, true}) {
    const State before;
    State after;
    AdamStepArgs args = after.Args();
    args.stream_copy = streams;
    peers().twin(args);
    EXPECT_EQ(after.param, before.param);
    EXPECT_EQ(after.grad, before.grad);
    EXPECT_EQ(after.exp_avg, before.exp_avg);
    EXPECT_EQ(after.exp_avg_sq, before.exp_avg_sq);
    for (int64_t i = 0; i < kNumel; ++i) {
      // Rounded.
      ASSERT_NEAR(after.copy[i], UpperHalf(before.grad[i]), 1) << i;
    }
  }
}

TEST_P(PeersTest, ScalingStepWritesScaledGradientsBackAndSteps) {
  const State before;
  State after;
  peers().scaling_step(after.Args(), after.grad.data(), 4);
  for (int64_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(after.grad[i], before.grad[i] / 4) << i;
  }
  EXPECT_EQ(after.copy, before.copy);
  ExpectStep(before, after, 0.25, 1.25);
}

TEST_P(PeersTest, OnePassTwoDivStepsAndCopies) {
  const State before;
  State after;
  peers().one_pass_two_div(after.Args());
  EXPECT_EQ(after.grad, before.grad);
  ExpectStep(before, after, 0.5, 1.25);
  for (int64_t i = 0; i < kNumel; ++i) {
    ASSERT_NEAR(FromUpperHalf(after.copy[i]), after.param[i],
                std::fabs(after.param[i]) * 0x1p-8f)
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PeersTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

TEST(FindPeersTest, OfNoOtherKernel) {
  Kernel other = ScalarKernel();
  other.name = "other";
  EXPECT_EQ(FindPeers(other), nullptr);
}

}  // namespace
}  // namespace onepass

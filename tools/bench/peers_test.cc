// The peers do what they are said to do: what is measured against is a step.

#include "tools/bench/peers.h"

#include <sys/mman.h>
#include <unistd.h>

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
    // sqrt(1 - beta2^t), which peers divide by.
    args.constants.bias_correction2 = 0.8f;
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

  // What AdamStep with gradients times `factor` makes of the state before it,
  // nearly.
  void ExpectStep(State expected, const State& after, float factor) {
    AdamStepArgs args = expected.Args();
    args.grad_scale = factor;
    args.constants.bias_correction2 = 1 / args.constants.bias_correction2;
    ScalarKernel().operations->adam_step(args);
    for (int64_t i = 0; i < kNumel; ++i) {
      ASSERT_NEAR(after.exp_avg[i], expected.exp_avg[i], 1e-6) << i;
      ASSERT_NEAR(after.exp_avg_sq[i], expected.exp_avg_sq[i], 1e-6) << i;
      ASSERT_NEAR(after.param[i], expected.param[i], 1e-6) << i;
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

// A compiler that knows what memory holds may leave out stores of the same.
TEST_P(PeersTest, TwinStoresWhatItLoads) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t numel = page / static_cast<int64_t>(sizeof(float));
  void* const memory = mmap(nullptr, page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  std::vector<float> others(3 * numel);
  std::vector<uint16_t> copy(numel);
  for (int i = 0; i < 3; ++i) {
    float* spans[] = {&others[0], &others[numel], &others[2 * numel]};
    spans[i] = static_cast<float*>(memory);
    State state;
    AdamStepArgs args = state.Args();
    std::vector<float> grad(numel);
    args.numel = numel;
    args.param = spans[0];
    args.exp_avg = spans[1];
    args.exp_avg_sq = spans[2];
    args.grad = grad.data();
    args.copy = copy.data();
    peers().twin(args);
    // A page is whole turns of every kernel: there is no tail.
    ASSERT_EQ(mprotect(memory, page, PROT_READ), 0);
    EXPECT_DEATH(peers().twin(args), "") << "span " << i;
    ASSERT_EQ(mprotect(memory, page, PROT_READ | PROT_WRITE), 0);
  }
  munmap(memory, page);
}

TEST_P(PeersTest, ScalingStepWritesScaledGradientsBackAndSteps) {
  const State before;
  State after;
  peers().scaling_step(after.Args(), after.grad.data(), 4);
  for (int64_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(after.grad[i], before.grad[i] / 4) << i;
  }
  EXPECT_EQ(after.copy, before.copy);
  ExpectStep(before, after, 0.25);
}

TEST_P(PeersTest, OnePassTwoDivStepsAndCopies) {
  const State before;
  State after;
  peers().one_pass_two_div(after.Args());
  EXPECT_EQ(after.grad, before.grad);
  ExpectStep(before, after, 0.5);
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

// A caller's floating-point environment (flush-to-zero, rounding toward zero,
// alternative half precision)
// changes no bit of any operation, and is still set afterwards.

#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/hostile_fp_environment.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

// What the operations give for values of which many are subnormal or become so.
std::vector<unsigned char> RunAll(const KernelOperations& kernel) {
  constexpr int64_t kNumel = kLeafNumel + 37;
  std::vector<float> x(kNumel);
  std::vector<float> y(kNumel);
  std::vector<float> magnitudes(kNumel);  // of x
  for (int64_t i = 0; i < kNumel; ++i) {
    // Magnitudes from the least subnormal float up.
    const uint32_t bits = static_cast<uint32_t>(i * 2654435761u) >> (i % 9);
    const uint32_t small = bits & 0x80ffffff;
    const uint32_t moderate = 0x38000000 + (bits & 0x07ffffff);
    std::memcpy(&x[i], &small, sizeof(small));
    std::memcpy(&y[i], &moderate, sizeof(moderate));
    // By bits: arithmetic here would depend on the environment, too.
    const uint32_t magnitude = small & 0x7fffffff;
    std::memcpy(&magnitudes[i], &magnitude, sizeof(magnitude));
  }
  // Beyond fp16, at its end, not finite: an alternative half precision that a
  // processor may have set takes these codes for numbers.
  constexpr uint32_t kBeyondHalf[] = {0x477fe000, 0x477ff000, 0x49742400,
                                      0x7f800000, 0xff800000, 0x7fc00000};
  constexpr uint16_t kHalfCodes[] = {0x7bff, 0x7c00, 0xfc00, 0x7e00, 0xfe00};
  std::vector<float> beyond(kNumel);
  std::vector<uint16_t> half_codes(kNumel);
  for (int64_t i = 0; i < kNumel; ++i) {
    std::memcpy(&beyond[i], &kBeyondHalf[i % std::size(kBeyondHalf)], 4);
    half_codes[i] = kHalfCodes[i % std::size(kHalfCodes)];
  }
  std::vector<unsigned char> results;
  auto keep = [&results](const auto& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    results.insert(results.end(), bytes,
                   bytes + values.size() * sizeof(values[0]));
  };

  for (WeightDecay mode :
       {WeightDecay::kNone, WeightDecay::kL2, WeightDecay::kAdamW}) {
    std::vector<float> param = y;
    for (int64_t i = 0; i < kNumel; i += 5) param[i] = beyond[i];
    std::vector<float> exp_avg = x;
    std::vector<float> exp_avg_sq = magnitudes;
    std::vector<uint16_t> copy(kNumel);
    AdamStepArgs args = {};
    args.numel = kNumel;
    args.param = param.data();
    args.grad = x.data();
    args.exp_avg = exp_avg.data();
    args.exp_avg_sq = exp_avg_sq.data();
    args.copy = copy.data();
    args.copy_type = DType::kFloat16;
    args.grad_scale = 0.7f;
    args.constants = {0.9f,  0.999f, 1 - 0.9f, 1 - 0.999f, 1e-20f,
                      0.01f, -1e-3f, 1.5f,     -1e-5f,     mode};
    kernel.adam_step(args);
    keep(param);
    keep(exp_avg);
    keep(exp_avg_sq);
    keep(copy);
  }
  std::vector<float> out(kNumel);
  std::vector<double> sums(LeafCount(kNumel));
  kernel.accumulate({kNumel, x.data(), x.data(), out.data(), sums.data(),
                     DType::kFloat32, DType::kFloat32, 3.0f});
  keep(out);
  keep(sums);
  kernel.scale({kNumel, y.data(), out.data(), 1e-36f});
  keep(out);
  kernel.cast({kNumel, half_codes.data(), out.data(), DType::kFloat16,
               DType::kFloat32});
  keep(out);
  for (DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    std::vector<uint16_t> codes(kNumel);
    kernel.cast({kNumel, beyond.data(), codes.data(), DType::kFloat32, type});
    keep(codes);
    kernel.cast({kNumel, y.data(), codes.data(), DType::kFloat32, type});
    keep(codes);
    kernel.cast({kNumel, x.data(), codes.data(), DType::kFloat32, type});
    keep(codes);
    // Codes of subnormals, in all types.
    std::vector<uint16_t> small(kNumel);
    for (int64_t i = 0; i < kNumel; ++i) {
      small[i] = static_cast<uint16_t>(type == DType::kFloat8E4M3
                                           ? (i & 0xff) | (i & 0xff) << 8
                                           : (i & 0x7f) | (i & 1) << 15);
    }
    kernel.cast({kNumel, small.data(), out.data(), type, DType::kFloat32});
    keep(out);
  }
  std::vector<float> largest(LeafCount(kNumel));
  kernel.squared_norm({kNumel, x.data(), sums.data(), DType::kFloat32});
  keep(sums);
  kernel.absmax({kNumel, x.data(), largest.data(), DType::kFloat32});
  keep(largest);
  for (DType type : {DType::kFloat16, DType::kFloat8E4M3}) {
    std::vector<float> scales(LeafCount(kNumel));
    std::vector<uint16_t> codes(kNumel);
    // By a scale that is normal, then by one that is not; read by one that no
    // leaf gets, which an environment may take for zero.
    constexpr uint32_t kSubnormal = 0x00400000;
    for (const auto* values : {&y, &x}) {
      kernel.quantize(
          {kNumel, values->data(), codes.data(), scales.data(), type});
      keep(codes);
      keep(scales);
      for (float& scale : scales) std::memcpy(&scale, &kSubnormal, 4);
      kernel.dequantize(
          {kNumel, codes.data(), scales.data(), out.data(), type});
      keep(out);
    }
  }
  return results;
}

class EnvironmentTest : public testing::TestWithParam<const Kernel*> {};

TEST_P(EnvironmentTest, CallersEnvironmentChangesNothingAndStays) {
  const KernelOperations& kernel = *GetParam()->operations;
  const std::vector<unsigned char> expected = RunAll(kernel);
  HostileFpEnvironment hostile;
  EXPECT_EQ(expected, RunAll(kernel));
  EXPECT_TRUE(hostile.Intact());
}

INSTANTIATE_TEST_SUITE_P(Kernels, EnvironmentTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

}  // namespace
}  // namespace onepass

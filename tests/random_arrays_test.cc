#include "tests/random_arrays.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"
#include "tools/bench/random_at.h"

namespace onepass {
namespace {

// Some leaves, and a last one that is short.
constexpr int64_t kNumel = 3 * kLeafNumel + 77;

// The array in fp32.
std::vector<float> Widened(DType type, const void* array) {
  std::vector<float> out(kNumel);
  if (type == DType::kFloat32) {
    const float* const in = static_cast<const float*>(array);
    return std::vector<float>(in, in + kNumel);
  }
  CastArgs args;
  args.numel = kNumel;
  args.in = array;
  args.in_type = type;
  args.out = out.data();
  ScalarKernel().operations->cast(args);
  return out;
}

// `value` with `bits` of mantissa, the others cut off.
float Cut(float value, int bits) {
  int exponent;
  const float fraction = std::frexp(value, &exponent);
  return std::ldexp(std::trunc(std::ldexp(fraction, bits + 1)),
                    exponent - bits - 1);
}

TEST(RandomArraysTest, HoldsOneSequenceCutToTheBitsOfEachType) {
  const struct {
    DType type;
    int mantissa;
  } kCases[] = {{DType::kFloat32, 23},
                {DType::kBFloat16, 7},
                {DType::kFloat16, 10},
                {DType::kFloat8E4M3, 3}};
  for (int threads : {1, 3}) {
    const std::unique_ptr<ThreadPool> pool = MakePool(threads);
    RandomArrays arrays(*pool);
    int64_t first = 0;
    for (const auto& c : kCases) {
      for (bool positive : {false, true}) {
        SCOPED_TRACE(testing::Message() << Name(c.type) << " positive "
                                        << positive << " threads " << threads);
        const void* const array = positive ? arrays.AddPositive(c.type, kNumel)
                                           : arrays.Add(c.type, kNumel);
        ASSERT_EQ(arrays.status(), absl::OkStatus());
        const std::vector<float> values = Widened(c.type, array);
        for (int64_t i = 0; i < kNumel; ++i) {
          const float number = Cut(RandomAt(first + i), c.mantissa);
          ASSERT_EQ(values[i], positive ? std::fabs(number) : number) << i;
        }
        first += kNumel;
      }
    }
  }
}

TEST(RandomArraysTest, BeginsArraysAtDifferentOffsetsOfAPage) {
  const std::unique_ptr<ThreadPool> pool = MakePool(1);
  RandomArrays arrays(*pool);
  std::vector<uintptr_t> offsets;
  // As many as an Adam step has.
  for (int i = 0; i < 5; ++i) {
    const uintptr_t offset =
        reinterpret_cast<uintptr_t>(arrays.Add(DType::kFloat32, kNumel)) % 4096;
    EXPECT_EQ(offset % 64, 0u);
    for (uintptr_t other : offsets) EXPECT_NE(offset, other);
    offsets.push_back(offset);
  }
}

TEST(RandomArraysTest, SaysWhatMemoryTheSystemRefused) {
  const std::unique_ptr<ThreadPool> pool = MakePool(1);
  RandomArrays arrays(*pool);
  // More than addresses there are.
  EXPECT_EQ(arrays.Add(DType::kBFloat16, int64_t{1} << 61), nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(arrays.status())) << arrays.status();
  EXPECT_NE(arrays.Add(DType::kBFloat16, kNumel), nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(arrays.status())) << arrays.status();
}

}  // namespace
}  // namespace onepass

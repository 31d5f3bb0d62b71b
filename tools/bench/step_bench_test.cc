#include "tools/bench/step_bench.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "dispatch/dispatcher.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/counting_kernel.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"
#include "tools/bench/measure.h"

namespace onepass {
namespace {

// The two ways of each ratio, and the bytes of an element of each way.
using Ratios = std::map<std::string, std::pair<std::string, std::string>>;
using Bytes = std::map<std::string, int64_t>;

template <typename Map>
std::set<std::string> Keys(const Map& map) {
  std::set<std::string> keys;
  for (const auto& item : map) keys.insert(item.first);
  return keys;
}

class StepBenchTest : public testing::TestWithParam<const Kernel*> {};

TEST_P(StepBenchTest, HasEveryRowThatTheKernelCanMeasure) {
  Ratios ratios = {{"three_pass/fused", {"three_pass", "fused"}},
                   {"three_pass_fresh/fused", {"three_pass_fresh", "fused"}},
                   {"scale_fused/fused", {"scale_fused", "fused"}},
                   {"fused/adam_only", {"fused", "adam_only"}},
                   {"twin/fused", {"twin", "fused"}},
                   {"torch_shape/fused", {"torch_shape", "fused"}},
                   {"one_pass_two_div/fused", {"one_pass_two_div", "fused"}},
                   {"bf16_grad/fp32_grad", {"bf16_grad", "fused"}},
                   {"bf16_grad_moments/fp32", {"bf16_grad_moments", "fused"}},
                   {"pieces/one_call", {"pieces", "fused"}},
                   {"equal_bases/bases_apart", {"equal_bases", "fused"}},
                   {"subnormal/normal", {"subnormal", "fused"}}};
  Bytes bytes = {{"fused", 30},
                 {"adam_only", 28},
                 {"three_pass", 42},
                 {"three_pass_fresh", 42},
                 {"scale_fused", 34},
                 {"bf16_grad", 28},
                 {"bf16_grad_moments", 20},
                 {"pieces", 30},
                 {"equal_bases", 30},
                 {"subnormal", 30},
                 {"twin", 30},
                 {"torch_shape", 38},
                 {"one_pass_two_div", 30}};
  const Kernel& kernel = *GetParam();
  if (kernel.operations->streams_copies) {
    ratios["streaming/ordinary"] = {"streaming", "ordinary"};
    bytes["streaming"] = 30;
    bytes["ordinary"] = 30;
  }
  const bool is_avx512 = absl::string_view(kernel.name) == "avx512";
  if (is_avx512) {
    ratios["avx2/avx512"] = {"avx2", "fused"};
    bytes["avx2"] = 30;
  }
  // What avx512 is measured against, and no other kernel.
  const Kernel avx2 = MakeCountingKernel<0>(ScalarKernel(), "avx2");
  Dispatcher dispatcher;
  ASSERT_TRUE(dispatcher.Register(avx2).ok());
  // On two workers, of whom one has the short last leaf.
  const auto pool = MakePool(2);
  StepBenchOptions options;
  options.numel = 3 * kLeafNumel + 77;
  options.rounds = 1;
  const int64_t avx2_steps = OperationCounts<0>().adam_step_with_copy;
  const double begin = MonotonicSeconds();
  const absl::StatusOr<StepBenchReport> report =
      RunStepBench(dispatcher, kernel, *pool, options);
  const double taken = MonotonicSeconds() - begin;
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->store, "ordinary");
  // Of both workers, to warm up and in the round.
  EXPECT_EQ(OperationCounts<0>().adam_step_with_copy - avx2_steps,
            is_avx512 ? 4 : 0);

  std::map<std::string, double> seconds;
  double sum = 0;
  for (const StepRate& rate : report->rates) {
    EXPECT_TRUE(std::isfinite(rate.gb_per_s)) << rate.variant;
    const double bytes_moved =
        static_cast<double>(bytes[rate.variant] * options.numel);
    const double s = bytes_moved / (rate.gb_per_s * 1e9);
    EXPECT_GT(s, 0) << rate.variant;
    EXPECT_TRUE(seconds.emplace(rate.variant, s).second) << rate.variant;
    sum += s;
  }
  // Too small for huge pages.
  EXPECT_EQ(Keys(seconds), Keys(bytes));
  EXPECT_LT(sum, taken);

  std::set<std::string> found;
  for (const StepRatio& ratio : report->ratios) {
    EXPECT_TRUE(found.insert(ratio.name).second) << ratio.name;
    // Of one round.
    const double median = ratio.spread.median;
    const auto& [over, under] = ratios[ratio.name];
    EXPECT_NEAR(median, seconds[over] / seconds[under], 1e-12 * median)
        << ratio.name;
    EXPECT_EQ(ratio.spread.p10, median) << ratio.name;
    EXPECT_EQ(ratio.spread.p90, median) << ratio.name;
    EXPECT_FALSE(ratio.meaning.empty()) << ratio.name;
    if (ratio.target.empty()) {
      EXPECT_FALSE(ratio.reached) << ratio.name;
    } else {
      const double bound = std::stod(ratio.target.substr(3));
      EXPECT_EQ(ratio.reached, absl::StartsWith(ratio.target, ">= ")
                                   ? median >= bound
                                   : median <= bound)
          << ratio.name;
    }
  }
  EXPECT_EQ(found, Keys(ratios));
}

INSTANTIATE_TEST_SUITE_P(Kernels, StepBenchTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

TEST(StepBenchWaysTest, RunTheOperationsThatTheyAreNamedFor) {
  Kernel kernel = MakeCountingKernel<1>(ScalarKernel(), "counting");
  KernelOperations operations = *kernel.operations;
  operations.streams_copies = true;
  kernel.operations = &operations;
  // One call an operation.
  const auto pool = MakePool(1);
  const absl::Status status =
      RunStepBench(Dispatcher(), kernel, *pool, {kLeafNumel, 1}).status();
  ASSERT_TRUE(status.ok()) << status;
  // Each way runs twice, first to warm up. Of twelve steps these write no
  // copy: adam_only, scale_fused, and both of three passes.
  const OperationCounter& counts = OperationCounts<1>();
  EXPECT_EQ(counts.adam_step, 2 * 12);
  EXPECT_EQ(counts.adam_step_with_copy, 2 * 8);
  EXPECT_EQ(counts.adam_step_streaming, 2 * 1);
  EXPECT_EQ(counts.scale, 2 * 2);
  // And three arrays of 16 bits are made of those of fp32.
  EXPECT_EQ(counts.cast, 2 * 3 + 3);
  EXPECT_EQ(counts.Total(), 24 + 4 + 9);
}

TEST(StepBenchBytesTest, CountsEveryArray) {
  // Four states of 18 bytes an element, three arrays of bf16 and a fresh one,
  // and two buffers of 512Ki. Each array may begin and end within a page.
  constexpr int64_t kNumel = 3 << 20;
  EXPECT_EQ(*StepBenchBytes({kNumel, 1}),
            kNumel * (4 * 18 + 3 * 2 + 2) + 2 * (512 << 10) * 2 +
                (4 * 5 + 3 + 2) * HostBuffer::kHugePageBytes);
}

TEST(StepBenchBytesTest, NamesTheFlag) {
  const auto pool = MakePool(1);
  const auto problem = [&pool](int64_t numel, int64_t rounds) {
    const StepBenchOptions options = {numel, rounds};
    const absl::Status status = StepBenchBytes(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(
        RunStepBench(Dispatcher(), ScalarKernel(), *pool, options).status(),
        status);
    return std::string(status.message());
  };
  EXPECT_TRUE(absl::StartsWith(problem(0, 1), "--numel is 0, expected 1 to"));
  EXPECT_TRUE(absl::StartsWith(problem(-1, 1), "--numel is -1,"));
  EXPECT_TRUE(absl::StartsWith(problem(std::numeric_limits<int64_t>::max(), 1),
                               "--numel is 9223"));
  EXPECT_EQ(problem(1, 0), "--rounds is 0, expected at least 1");
}

}  // namespace
}  // namespace onepass

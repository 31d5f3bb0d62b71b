#include "tools/bench/step_bench.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "dispatch/dispatcher.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"
#include "tools/bench/measure.h"

namespace onepass {
namespace {

using Names = std::set<std::string>;

bool IsSupported(const Dispatcher& dispatcher, absl::string_view name) {
  for (const KernelReport& report : dispatcher.Report()) {
    if (report.kernel->name == name) return report.supported;
  }
  return false;
}

class StepBenchTest : public testing::TestWithParam<const Kernel*> {};

TEST_P(StepBenchTest, HasEveryRowThatTheKernelCanMeasure) {
  const absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  ASSERT_TRUE(dispatcher.ok());
  Names ratios = {"three_pass/fused",
                  "three_pass_fresh/fused",
                  "scale_fused/fused",
                  "fused/adam_only",
                  "twin/fused",
                  "torch_shape/fused",
                  "one_pass_two_div/fused",
                  "bf16_grad/fp32_grad",
                  "bf16_grad_moments/fp32",
                  "pieces/one_call",
                  "equal_bases/bases_apart",
                  "subnormal/normal"};
  Names rates = {"fused",
                 "adam_only",
                 "three_pass",
                 "three_pass_fresh",
                 "scale_fused",
                 "bf16_grad",
                 "bf16_grad_moments",
                 "pieces",
                 "equal_bases",
                 "subnormal",
                 "twin",
                 "torch_shape",
                 "one_pass_two_div"};
  const Kernel& kernel = *GetParam();
  if (kernel.operations->streams_copies) {
    ratios.insert("streaming/ordinary");
    rates.insert({"streaming", "ordinary"});
  }
  if (absl::string_view(kernel.name) == "avx512" &&
      IsSupported(*dispatcher, "avx2")) {
    ratios.insert("avx2/avx512");
    rates.insert("avx2");
  }
  // On two workers, of whom one has the short last leaf.
  const auto pool = MakePool(2);
  StepBenchOptions options;
  options.numel = 3 * kLeafNumel + 77;
  options.rounds = 3;
  const absl::StatusOr<StepBenchReport> report =
      RunStepBench(*dispatcher, kernel, *pool, options);
  ASSERT_TRUE(report.ok()) << report.status();
  Names found;
  for (const StepRatio& ratio : report->ratios) {
    EXPECT_TRUE(found.insert(ratio.name).second) << ratio.name;
    EXPECT_GT(ratio.spread.p10, 0) << ratio.name;
    EXPECT_LE(ratio.spread.p10, ratio.spread.median) << ratio.name;
    EXPECT_LE(ratio.spread.median, ratio.spread.p90) << ratio.name;
    EXPECT_FALSE(ratio.meaning.empty()) << ratio.name;
    if (ratio.target.empty()) {
      EXPECT_FALSE(ratio.reached) << ratio.name;
    } else {
      const double bound = std::stod(ratio.target.substr(3));
      EXPECT_EQ(ratio.reached, absl::StartsWith(ratio.target, ">= ")
                                   ? ratio.spread.median >= bound
                                   : ratio.spread.median <= bound)
          << ratio.name;
    }
  }
  // Too small for huge pages.
  EXPECT_EQ(found, ratios);
  found.clear();
  for (const StepRate& rate : report->rates) {
    EXPECT_TRUE(found.insert(rate.variant).second) << rate.variant;
    EXPECT_GT(rate.gb_per_s, 0) << rate.variant;
    EXPECT_TRUE(std::isfinite(rate.gb_per_s)) << rate.variant;
  }
  EXPECT_EQ(found, rates);
  EXPECT_EQ(report->store, "ordinary");
}

INSTANTIATE_TEST_SUITE_P(Kernels, StepBenchTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

TEST(StepBenchBytesTest, CountsEveryArray) {
  StepBenchOptions options;
  options.numel = 1 << 20;
  const int64_t bytes = *StepBenchBytes(options);
  options.numel = 3 << 20;
  // Four states of 18 bytes an element, three arrays of bf16 and a fresh one.
  EXPECT_EQ(*StepBenchBytes(options) - bytes, (2 << 20) * (4 * 18 + 3 * 2 + 2));
}

TEST(StepBenchBytesTest, NamesTheFlag) {
  const auto problem = [](int64_t numel, int64_t rounds) {
    const absl::Status status = StepBenchBytes({numel, rounds}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
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

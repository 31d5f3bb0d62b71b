// The exact sum: a leaf added, two sums merged, and the rounding at the end.
// Add comes once for each 4096 elements, beside the kernel's squared_norm.

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "dispatch/norm_sum.h"
#include "tests/benchmark.h"

namespace onepass {
namespace {

constexpr int kLeaves = 4096;

// Sums of squares as leaves of gradients have them, of many magnitudes.
std::vector<double> RandomLeafSums() {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> magnitude(-40, 20);
  std::vector<double> leaf_sums(kLeaves);
  for (double& leaf_sum : leaf_sums) {
    // A product of two floats has at most 48 bits: no bit below 2^-298.
    const double root = static_cast<float>(std::exp2(magnitude(random)));
    leaf_sum = root * root;
  }
  return leaf_sums;
}

NormSum RandomSum() {
  NormSum sum;
  for (double leaf_sum : RandomLeafSums()) sum.Add(leaf_sum);
  return sum;
}

void Add(benchmark::State& state) {
  const std::vector<double> leaf_sums = RandomLeafSums();
  NormSum sum;
  for (auto _ : state) {
    for (double leaf_sum : leaf_sums) sum.Add(leaf_sum);
    benchmark::DoNotOptimize(sum);
  }
  if (!sum.finite()) return state.SkipWithError("the sum is not finite");
  state.SetItemsProcessed(state.iterations() * kLeaves);
  state.SetBytesProcessed(state.iterations() * kLeaves *
                          static_cast<int64_t>(sizeof(double)));
}

void Merge(benchmark::State& state) {
  const NormSum other = RandomSum();
  NormSum sum;
  for (auto _ : state) {
    sum.Merge(other);
    benchmark::DoNotOptimize(sum);
  }
  if (!sum.finite()) return state.SkipWithError("the sum is not finite");
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(3 * sizeof(NormSum)));
}

void Total(benchmark::State& state) {
  NormSum sum = RandomSum();
  for (auto _ : state) {
    benchmark::DoNotOptimize(sum);
    benchmark::DoNotOptimize(sum.Total());
  }
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(sizeof(NormSum)));
}

}  // namespace

void RegisterBenchmarks(const BenchmarkPlan&) {
  benchmark::RegisterBenchmark("NormSum/Add", &Add);
  benchmark::RegisterBenchmark("NormSum/Merge", &Merge);
  benchmark::RegisterBenchmark("NormSum/Total", &Total);
}

}  // namespace onepass

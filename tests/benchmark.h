// What a benchmark defines, for the main that all of them share:
//
//   void AddLeaf(benchmark::State& state) { ... }
//
//   namespace onepass {
//   void RegisterBenchmarks(const BenchmarkPlan& plan) {
//     benchmark::RegisterBenchmark("AddLeaf", &AddLeaf);
//   }
//   }  // namespace onepass
//
// Its target is a cc_benchmark (tests/benchmark.bzl). The program takes the
// flags of Google Benchmark, and
//
//   --once  over small sizes, each benchmark for one iteration: its test.
//
// It fails where a benchmark reports an error or none runs. Where the
// environment pins a kernel or a length of vectors that this processor has not
// (tests/runnable_kernels.h), that is an error, and with --once a line
// "SKIPPED: reason".

#ifndef ONEPASS_TESTS_BENCHMARK_H_
#define ONEPASS_TESTS_BENCHMARK_H_

#include <cstdint>
#include <vector>

#include "dispatch/kernel.h"

namespace onepass {

// What benchmarks run over.
struct BenchmarkPlan {
  bool once = false;
  // All that run here, the best first; the pinned one where one is pinned.
  std::vector<const Kernel*> kernels;
  // Elements of an array, the most last: some that a processor's own cache
  // holds, and 64Mi, of which arrays of an Adam step are in none.
  std::vector<int64_t> numels;
  // 1, 2, 4, ..., and one for each processor.
  std::vector<int> threads;
};

// Defined by each benchmark; called once, before any of them runs.
void RegisterBenchmarks(const BenchmarkPlan& plan);

}  // namespace onepass

#endif  // ONEPASS_TESTS_BENCHMARK_H_

// Two benchmarks, of which one fails: what benchmark_test.sh runs.

#include "benchmark/benchmark.h"
#include "tests/benchmark.h"

namespace onepass {
namespace {

void Works(benchmark::State& state) {
  for (auto _ : state) benchmark::ClobberMemory();
}

void Fails(benchmark::State& state) { state.SkipWithError("as asked"); }

}  // namespace

void RegisterBenchmarks(const BenchmarkPlan&) {
  benchmark::RegisterBenchmark("Works", &Works);
  benchmark::RegisterBenchmark("Fails", &Fails);
}

}  // namespace onepass

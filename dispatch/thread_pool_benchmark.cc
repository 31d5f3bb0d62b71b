// What a Run() costs beside its work: none is done. With workers that still
// spin from the run before, and with workers that have gone to sleep.

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "benchmark/benchmark.h"
#include "dispatch/thread_pool.h"
#include "tests/benchmark.h"

namespace onepass {
namespace {

using Clock = std::chrono::steady_clock;

// Much longer than workers spin.
constexpr std::chrono::microseconds kPause(1000);

// Pauses of a benchmark take this long together, about.
constexpr std::chrono::seconds kPauses(1);

// A pool of as many threads as the benchmark's argument says; null, and the
// benchmark skipped, where it cannot be had.
std::unique_ptr<ThreadPool> MakePool(benchmark::State& state) {
  absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
      ThreadPool::Create({static_cast<int>(state.range(0))});
  if (pool.ok()) return *std::move(pool);
  state.SkipWithError(pool.status().ToString().c_str());
  return nullptr;
}

void RunWhileSpinning(benchmark::State& state) {
  const std::unique_ptr<ThreadPool> pool = MakePool(state);
  if (pool == nullptr) return;
  for (auto _ : state) pool->Run([](int) {});
  state.SetItemsProcessed(state.iterations());
}

// The caller is busy in between, as it is with other work: what is measured
// beyond the other benchmark is the waking of the workers alone, from a
// processor that never rested. That is not the wake-up of `onepass bench
// scaling`, whose caller sleeps before each run, as one that waits for a device
// does: its own processor has rested, too.
void RunAfterSleep(benchmark::State& state) {
  const std::unique_ptr<ThreadPool> pool = MakePool(state);
  if (pool == nullptr) return;
  for (auto _ : state) {
    Clock::time_point begin = Clock::now();
    for (const Clock::time_point end = begin + kPause; begin < end;) {
      begin = Clock::now();
    }
    pool->Run([](int) {});
    const std::chrono::duration<double> taken = Clock::now() - begin;
    state.SetIterationTime(taken.count());
  }
  state.SetItemsProcessed(state.iterations());
}

}  // namespace

void RegisterBenchmarks(const BenchmarkPlan& plan) {
  auto* const spinning =
      benchmark::RegisterBenchmark("Run/workers_spin", &RunWhileSpinning);
  spinning->ArgName("threads")->UseRealTime();
  auto* const asleep =
      benchmark::RegisterBenchmark("Run/workers_sleep", &RunAfterSleep);
  // Without a number it would take as many pauses as runs fill a time.
  asleep->ArgName("threads")->UseManualTime()->Iterations(
      plan.once ? 1 : kPauses / kPause);
  for (int threads : plan.threads) {
    spinning->Arg(threads);
    asleep->Arg(threads);
  }
}

}  // namespace onepass

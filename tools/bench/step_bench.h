// What the fused step gains over other ways to do the same, as ratios of time
// in one run: each row of the design's table of targets that is about a step.
//
//   ASSIGN_OR_RETURN(int64_t bytes, StepBenchBytes(options));   // ask first
//   ASSIGN_OR_RETURN(StepBenchReport report,
//                    RunStepBench(dispatcher, kernel, *pool, options));
//   report.ratios[0].spread.median;
//
// Data are random and normal, of a fixed seed, and touched before, each page by
// the worker that updates it; arrays begin at different offsets of a page. To
// measure another way: its line in Ways() and that of its ratio in kRatios.

#ifndef ONEPASS_TOOLS_BENCH_STEP_BENCH_H_
#define ONEPASS_TOOLS_BENCH_STEP_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dispatch/dispatcher.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "tools/bench/measure.h"

namespace onepass {

struct StepBenchOptions {
  // Elements of the state. What is below the reach of the caches measures
  // these.
  int64_t numel = 64 << 20;
  int64_t rounds = 20;
};

struct StepRatio {
  std::string name;     // of times: "three_pass/fused"
  std::string meaning;  // one short line
  Spread spread;
  std::string target;  // ">= 1.55", of the median; empty: it is only reported
  bool reached = false;
};

struct StepRate {
  std::string variant;
  // Bytes that it has to read and write, by its median time.
  double gb_per_s = 0;
};

struct StepBenchReport {
  // Without those that this machine or kernel cannot measure.
  std::vector<StepRatio> ratios;
  std::vector<StepRate> rates;
  std::string store;  // of "fused": "ordinary" or "streaming"
};

// Bytes that a run takes. InvalidArgument: bad options, by their flags.
absl::StatusOr<int64_t> StepBenchBytes(const StepBenchOptions& options);

// Errors: those of StepBenchBytes(); ResourceExhausted: the system refuses the
// memory.
absl::StatusOr<StepBenchReport> RunStepBench(const Dispatcher& dispatcher,
                                             const Kernel& kernel,
                                             ThreadPool& pool,
                                             const StepBenchOptions& options);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_STEP_BENCH_H_

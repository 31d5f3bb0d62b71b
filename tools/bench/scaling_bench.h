// How the time of CpuAdam's step (fp32 gradients and moments, bf16 copy) goes
// with the number of elements, of threads and of processes, and what it
// costs to wake the threads of a pool.
//
//   ScalingOptions options;
//   ASSIGN_OR_RETURN(ScalingReport report, MeasureScaling(*kernel, options));
//
// Variants of a section are interleaved round by round in rotated order, after
// one round that is not counted; spreads are over rounds, ratios those within a
// round. The threads' rows share one state, touched first by the largest pool:
// on a machine of several memory nodes one thread alone reads from all of them,
// which slows it and flatters the speed-ups. To add a section: its points in
// the report, and a function beside those of scaling_bench.cc; what forks comes
// before what has threads.

#ifndef ONEPASS_TOOLS_BENCH_SCALING_BENCH_H_
#define ONEPASS_TOOLS_BENCH_SCALING_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "tools/bench/measure.h"

namespace onepass {

// Defaults are those of `onepass bench scaling`; errors name the flags.
struct ScalingOptions {
  static constexpr int64_t kLeastNumel = 4096;

  // Elements of the largest state; each number of threads is measured on as
  // many, and so is each of processes, all together.
  int64_t max_numel = int64_t{64} << 20;
  int threads = 0;  // the most; 0: one for each processor allowed
  int64_t rounds = 20;
  // Seconds that processes run for in a round.
  double slice_s = 0.1;
};

// One thread over a state of `numel` elements, again and again.
struct ElementsPoint {
  int64_t numel;
  Spread ns_per_element;
  double gb_per_s;  // of the median; bytes that are read and written, in 10^9
};

struct ThreadsPoint {
  int threads;
  double gb_per_s;
  Spread speedup;  // time of one thread / time of these
};

// Processes that step at the same time, each over a state of its own: one
// process over ScalingOptions::max_numel elements, several over their share.
struct ProcessesPoint {
  int processes;
  int threads;      // of each
  double gb_per_s;  // of all together
  // Elements a second of all together / those of one process with one thread
  // for each processor, which is the first point.
  Spread ratio;
  // ">= 0.90", of the median, where these are as many processes of one thread
  // as the first point has threads; empty: it is only reported.
  std::string target;
  bool reached = false;
};

// A run of a pool with nothing to do, from call to return.
struct PoolPoint {
  int threads;
  Spread awake_us;   // right after another
  Spread asleep_us;  // after a pause in which the workers fall asleep
};

struct ScalingReport {
  std::vector<ElementsPoint> elements;  // 4096, and 4 times as many each
  std::vector<ThreadsPoint> threads;    // 1, 2, 4, ... and the most
  std::vector<ProcessesPoint> processes;
  PoolPoint pool;
  // How the step over the largest state stores its copy: "ordinary" or
  // "streaming". That over a smaller one chooses by its own size.
  std::string store;
};

// The most that MeasureScaling() takes beside the program, in bytes.
// InvalidArgument: an option that makes no sense. OutOfRange: does not fit 64
// bits.
absl::StatusOr<int64_t> ScalingBytes(const ScalingOptions& options);

// No other thread may be running: it forks. FailedPrecondition: the kernel
// writes no bf16 copies. Else the errors of ScalingBytes(), and what goes wrong
// on the way, named.
absl::StatusOr<ScalingReport> MeasureScaling(const Kernel& kernel,
                                             const ScalingOptions& options);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_SCALING_BENCH_H_

// Times several ways to do the same so that their ratios can be trusted: all of
// them in every round, in an order that moves on by one each round and runs
// backwards every other one. What slows the machine for a while then slows all
// of them, and none is always first, or has always the same one, with its
// caches, before it.
//
//   const std::vector<Variant> variants = {{"fused", RunFused},
//                                          {"apart", RunApart}};
//   Timings seconds;
//   ASSIGN_OR_RETURN(seconds, MeasureInterleaved(variants, /*rounds=*/20));
//   Spread gain = RatioOf(seconds[1], seconds[0]);   // gain.median, ...
//
// To measure another way, add a Variant.

#ifndef ONEPASS_TOOLS_BENCH_MEASURE_H_
#define ONEPASS_TOOLS_BENCH_MEASURE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace onepass {

// Since some moment, by the clock that all processes of the machine share.
double MonotonicSeconds();

// One way to do what is measured.
struct Variant {
  std::string name;
  std::function<absl::Status()> run;
  // Before each run, and not timed; may be null.
  std::function<void()> prepare = nullptr;
};

// Seconds, [variant][round].
using Timings = std::vector<std::vector<double>>;

// Runs every variant once as a warm-up, which is not in the result, then in
// each of `rounds` rounds, by the monotonic clock. Round r starts with variant
// r modulo their number and goes on to the next, or where r is odd to the one
// before, and wraps around.
// InvalidArgument: no variants, one without `run` (named), rounds below 1. An
// error of a variant ends the measurement; its message begins with the name.
absl::StatusOr<Timings> MeasureInterleaved(const std::vector<Variant>& variants,
                                           int64_t rounds);
// By another clock, which gives seconds since some moment.
absl::StatusOr<Timings> MeasureInterleaved(const std::vector<Variant>& variants,
                                           int64_t rounds,
                                           absl::FunctionRef<double()> now);

// Of a sample: the value that half of it, a tenth, nine tenths lie below.
struct Spread {
  double median = 0;
  double p10 = 0;
  double p90 = 0;
};

// Quantile q of n values in rising order, counted from 0, is the value at place
// q * (n - 1), on the line between its neighbours where that is not whole: of
// 1, 2, 4 the median is 2 and p10 is 1.2. NaN counts as larger than all others;
// of no values all three are NaN.
Spread SpreadOf(std::vector<double> values);

// Of the ratios a[i] / b[i] of each round that both have.
Spread RatioOf(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_MEASURE_H_

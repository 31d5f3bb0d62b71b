// How much of the time of copies a step hides behind the update: the step of
// ShardOptimizer over links slower and faster than the CPU; and the time of
// ZeroOptimizer's step against ranks and elements.
//
//   ASSIGN_OR_RETURN(int64_t bytes, PipelineBenchBytes(options));  // ask first
//   ASSIGN_OR_RETURN(PipelineReport report,
//                    RunPipelineBench(kernel, options));
//   report.points[0].bound_over_measured.median;
//
// Times are those that ShardOptimizer::Step() reports, of steps whose gradients
// (bf16, normal random numbers) have arrived before, on a HostDevice. In turns,
// interleaved as tools/bench/measure.h says, for each link anew:
//
//   Tc         a step on a device whose copies of weights take no time and move
//              nothing, in the same pieces through two buffers
//   measured   a step over the link, in pieces
//   serial     a step over the link in one piece: all is updated, then copied
//
// Links have link_over_cpu times the bandwidth of 2 * numel bytes in Tc: the
// median over the link before, or before the first one over a link that is
// measured for that only. Tl, the time of copies alone, is 2 * numel bytes by
// the bandwidth that the link then has.
//
// Copies are real, moved by a thread of their own, where a processor is left
// for it; otherwise, or where asked for, they take their time and move nothing
// (weights only: gradients always arrive). Real ones share the memory with the
// update, which Tc does not: the difference between both ways is what that
// costs.
//
// Below 16Mi elements pieces are short enough for ordinary stores where the one
// piece of `serial` is streamed (kStreamedCopyBytes): its ratio says less then.
//
// To add a row: its line in kRows of pipeline_bench.cc.

#ifndef ONEPASS_TOOLS_BENCH_PIPELINE_BENCH_H_
#define ONEPASS_TOOLS_BENCH_PIPELINE_BENCH_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "tools/bench/measure.h"

namespace onepass {

// Errors name the flags of `onepass bench pipeline`.
struct PipelineBenchOptions {
  static constexpr int64_t kLeastNumel = int64_t{1} << 17;
  static constexpr int64_t kMostPieces = 1024;

  int64_t numel = int64_t{64} << 20;
  // Of a step; fewer where pieces of whole leaves do not come out even.
  int64_t pieces = 32;
  int threads = 1;  // that update; 0: one for each processor allowed
  int64_t rounds = 20;
  bool timestamps = false;  // rather than real copies, also where these can be
  // HostDeviceOptions::observer of the devices with a link.
  std::function<void(const HostDeviceCopy& copy, bool begins)> observer;
};

// What is to be reached by a median.
struct PipelineTarget {
  double at_least = 0;  // 0: none
  bool reached = false;
};

struct PipelinePoint {
  double link_over_cpu = 0;
  int64_t pieces = 0;
  int buffers = 0;
  Spread ms;  // measured
  // PipelineBound(Tc, Tl, pieces) / measured, of each round.
  Spread bound_over_measured;
  PipelineTarget bound_target;
  // serial / measured, of each round.
  Spread serial_over_pipelined;
  PipelineTarget serial_target;
};

// ZeroOptimizer's step of ranks that are threads, each with a device of its own
// (whose copies take the time that moving the bytes takes) and one thread for
// its update: from when the last rank had its gradients reduced to when the
// last returned.
struct RanksPoint {
  int64_t numel = 0;  // of all ranks together
  int ranks = 0;
  Spread ms;
  double ns_per_element = 0;  // of the median
  Spread speedup;             // time of one rank / time of these
};

struct PipelineReport {
  int threads = 0;  // that updated; of the ranks each has one
  bool real_copies = false;
  // Bytes of copies that steps produce without a link, in 10^9 a second: the
  // median of all links.
  double cpu_gb_per_s = 0;
  std::vector<PipelinePoint> points;
  // A 64th, a 16th, a quarter of the elements, each on 1, 2 and 4 ranks.
  std::vector<RanksPoint> ranks;
};

// The least time of a step in `pieces` pieces: the longer of update and copies,
// and the first or last piece of the other, which has nothing beside it.
double PipelineBound(double cpu_s, double link_s, int64_t pieces);

// Whether `threads` threads that update leave a processor for one that copies,
// of as many as are allowed.
bool CopiesAreReal(int threads, int processors);

// The most that a run takes beside the program, in bytes. InvalidArgument:
// options that make no sense, by their flags.
absl::StatusOr<int64_t> PipelineBenchBytes(const PipelineBenchOptions& options);

// FailedPrecondition: the kernel writes no bf16 copies or reads no bf16
// gradients. Else the errors of PipelineBenchBytes(), and what goes wrong on
// the way, named.
absl::StatusOr<PipelineReport> RunPipelineBench(
    const Kernel& kernel, const PipelineBenchOptions& options);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_PIPELINE_BENCH_H_

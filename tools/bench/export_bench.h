// How fast an optimizer's state goes to files, and what memory that takes:
// StateFiles, as checkpoints use it, against a loop that only writes.
//
//   ASSIGN_OR_RETURN(ExportReport report, RunExportBench(kernel, options));
//   report.direct_over_export.median;
//
// In turns, interleaved as tools/bench/measure.h says, each time into files
// that were not there, up to when they are on the disk:
//
//   export       one fp32 tensor, with checksums
//   unchecked    the same without checksums
//   direct       the same bytes out of the same memory, in writes of a chunk,
//                around the page cache where the filesystem has that
//   small        as many bytes in tensors of 4 KiB
//
// Then once more an export of each, for the most memory that it takes.

#ifndef ONEPASS_TOOLS_BENCH_EXPORT_BENCH_H_
#define ONEPASS_TOOLS_BENCH_EXPORT_BENCH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "tools/bench/measure.h"

namespace onepass {

// Errors name the flags of `onepass bench export`.
struct ExportBenchOptions {
  static constexpr int64_t kSmallNumel = 1024;  // elements of a small tensor

  // Of the tensor; rounded down to a multiple of kSmallNumel.
  int64_t numel = 100'000 * kSmallNumel;
  int64_t chunk_bytes = int64_t{8} << 20;
  int64_t rounds = 20;
  std::string directory = ".";  // files are written into a new one in it
};

struct ExportReport {
  Spread direct_over_export;
  Spread checksum_over_none;
  Spread small_over_one;
  double gb_per_s = 0;  // of the median export
  bool direct = false;  // whether writes went around the page cache
  // Resident memory above that before, at most: of the one tensor, of the small
  // ones, which have names and places besides; and what buffers take.
  int64_t extra_rss_bytes = 0;
  int64_t small_extra_rss_bytes = 0;
  int64_t budget_bytes = 0;
};

// The most that a run takes beside the program, in bytes of memory; on the disk
// it takes as much. InvalidArgument: options that make no sense, by their
// flags.
absl::StatusOr<int64_t> ExportBenchBytes(const ExportBenchOptions& options);

// Errors: those of ExportBenchBytes(), of files, named, and what goes wrong on
// the way. The directory is removed in any case.
absl::StatusOr<ExportReport> RunExportBench(const Kernel& kernel,
                                            const ExportBenchOptions& options);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_EXPORT_BENCH_H_

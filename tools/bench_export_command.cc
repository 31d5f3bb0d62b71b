// onepass bench export: how fast state goes to files, beside a loop that only
// writes, and what memory that takes.

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "dispatch/kernel.h"
#include "nlohmann/json.hpp"
#include "tools/bench/export_bench.h"
#include "tools/bench/measure.h"
#include "tools/bench_report.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/common_flags.h"
#include "tools/memory.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

using Json = nlohmann::ordered_json;

// A ratio, and what is to be reached by its median.
struct Row {
  const char* name;
  Spread ExportReport::*spread;
  bool at_least;  // else at most
  double target;
  const char* meaning;
};

constexpr Row kRows[] = {
    {"direct_reference/export", &ExportReport::direct_over_export, true, 0.90,
     "a loop that only writes the same bytes"},
    {"checksum/none", &ExportReport::checksum_over_none, false, 1.03,
     "exports with checksums, and without"},
    {"small_tensors/one", &ExportReport::small_over_one, false, 1.25,
     "tensors of 4 KiB, and one of as many bytes"}};

// Beside what its buffers take.
constexpr double kMostOverBudget = 1.1;
constexpr int64_t kMoreBytes = int64_t{8} << 20;

class BenchExportCommand : public Command {
 public:
  const char* name() const override { return "bench export"; }
  const char* summary() const override {
    return "Measures how fast state goes to files, and the memory of that.";
  }

  void AddFlags(Flags& flags) override {
    flags.Add("json", &json_, "Print one JSON object instead of a table.");
    flags.Add("numel", &options_.numel, "elements",
              "Elements of the state, fp32; as many bytes go to the disk.");
    flags.Add("chunk_bytes", &options_.chunk_bytes, "bytes",
              "Bytes of a buffer, a multiple of 4096; there are three.");
    flags.Add("rounds", &options_.rounds, "rounds",
              "Exports of each kind, after one more to warm up.");
    flags.Add("dir", &options_.directory, "directory",
              "Where to write; what is written is removed.");
    AddKernelFlag(flags, &kernel_);
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    const absl::StatusOr<int64_t> needed = ExportBenchBytes(options_);
    if (!needed.ok()) return needed.status();
    const absl::StatusOr<KernelChoice> choice = ChooseKernel(kernel_);
    if (!choice.ok()) return choice.status();
    if (!choice->selected.ok()) return choice->selected.status();
    const absl::Status enough =
        CheckMemory("the benchmark", *needed, "lower --numel");
    if (!enough.ok()) return enough;
    err << absl::StreamFormat(
        "needs %s of memory, and writes %s in each of %d rounds\n",
        FormatBytes(*needed), FormatBytes(4 * 4 * options_.numel),
        options_.rounds);
    err.flush();
    const absl::StatusOr<ExportReport> report =
        RunExportBench(**choice->selected, options_);
    if (!report.ok()) return report.status();
    json_ ? PrintJson(*report, out) : PrintTable(*report, out);
    return absl::OkStatus();
  }

 private:
  void PrintJson(const ExportReport& report, std::ostream& out) const {
    Json ratios = Json::object();
    Json spreads = Json::object();
    for (const Row& row : kRows) {
      ratios[row.name] = (report.*row.spread).median;
      spreads[row.name] = SpreadJson(report.*row.spread);
    }
    out << Json{{"numel", options_.numel},
                {"chunk_bytes", options_.chunk_bytes},
                {"rounds", options_.rounds},
                {"direct", report.direct},
                {"ratios", ratios},
                {"spreads", spreads},
                {"extra_rss_bytes", report.extra_rss_bytes},
                {"small_extra_rss_bytes", report.small_extra_rss_bytes},
                {"budget_bytes", report.budget_bytes},
                {"gb_per_s", report.gb_per_s}}
               .dump()
        << "\n";
  }

  void PrintTable(const ExportReport& report, std::ostream& out) const {
    out << absl::StreamFormat(
        "%s in chunks of %s, %d rounds: median (p10 to p90)\n"
        "%.2f GB a second to the disk, %s\n\n%-24s  %-24s  %s\n",
        FormatBytes(4 * options_.numel), FormatBytes(options_.chunk_bytes),
        options_.rounds, report.gb_per_s,
        report.direct ? "around the page cache"
                      : "through the page cache: this filesystem has no direct "
                        "writes",
        "ratio of times", "", "target");
    for (const Row& row : kRows) {
      const Spread& spread = report.*row.spread;
      const bool reached = row.at_least ? spread.median >= row.target
                                        : spread.median <= row.target;
      out << absl::StreamFormat(
          "%-24s  %-24s  %s %.2f %-7s  %s\n", row.name,
          absl::StrFormat("%.3f (%.3f to %.3f)", spread.median, spread.p10,
                          spread.p90),
          row.at_least ? ">=" : "<=", row.target,
          reached ? "reached" : "MISSED", row.meaning);
    }
    const double most =
        kMostOverBudget * static_cast<double>(report.budget_bytes) +
        static_cast<double>(kMoreBytes);
    const auto reached = [most](int64_t bytes) {
      return static_cast<double>(bytes) <= most ? "reached" : "MISSED";
    };
    out << absl::StreamFormat(
        "\nextra resident memory, of buffers of %s, <= %s: one tensor %s %s, "
        "small tensors %s %s\n",
        FormatBytes(report.budget_bytes),
        FormatBytes(static_cast<int64_t>(most)),
        FormatBytes(report.extra_rss_bytes), reached(report.extra_rss_bytes),
        FormatBytes(report.small_extra_rss_bytes),
        reached(report.small_extra_rss_bytes));
  }

  ExportBenchOptions options_;
  std::string kernel_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewBenchExportCommand() {
  return std::make_unique<BenchExportCommand>();
}

}  // namespace onepass

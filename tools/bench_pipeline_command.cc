// onepass bench pipeline: how much of the time of copies to the device a step
// hides behind the update, over links slower and faster than the CPU; and the
// step of several ranks.

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "dispatch/kernel.h"
#include "nlohmann/json.hpp"
#include "tools/bench/measure.h"
#include "tools/bench/pipeline_bench.h"
#include "tools/bench_report.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/common_flags.h"
#include "tools/memory.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

using Json = nlohmann::ordered_json;

// What was measured, and on what.
struct Setting {
  PipelineBenchOptions options;
  int threads;
  const char* kernel;
};

void PrintJson(const Setting& setting, const PipelineReport& report,
               std::ostream& out) {
  Json results = Json::array();
  for (const PipelinePoint& point : report.points) {
    results.push_back(
        {{"link_over_cpu", point.link_over_cpu},
         {"pieces", point.pieces},
         {"buffers", point.buffers},
         {"bound_over_measured", point.bound_over_measured.median},
         {"serial_over_pipelined", point.serial_over_pipelined.median},
         {"ms", SpreadJson(point.ms)},
         {"spreads",
          {{"bound_over_measured", SpreadJson(point.bound_over_measured)},
           {"serial_over_pipelined",
            SpreadJson(point.serial_over_pipelined)}}}});
  }
  Json ranks = Json::array();
  for (const RanksPoint& point : report.ranks) {
    ranks.push_back({{"numel", point.numel},
                     {"ranks", point.ranks},
                     {"ms", SpreadJson(point.ms)},
                     {"ns_per_element", point.ns_per_element},
                     {"speedup", SpreadJson(point.speedup)}});
  }
  out << Json{{"numel", setting.options.numel},
              {"threads", setting.threads},
              {"rounds", setting.options.rounds},
              {"kernel", setting.kernel},
              {"copies", report.real_copies ? "real" : "timestamps"},
              {"cpu_gb_per_s", report.cpu_gb_per_s},
              {"results", results},
              {"ranks", ranks}}
             .dump()
      << "\n";
}

// "0.970 (0.958 to 0.981)"
std::string Text(const Spread& spread) {
  return absl::StrFormat("%.3f (%.3f to %.3f)", spread.median, spread.p10,
                         spread.p90);
}

// ">= 0.95 reached"
std::string Text(const PipelineTarget& target) {
  if (target.at_least == 0) return "";
  return absl::StrFormat(">= %.2f %s", target.at_least,
                         target.reached ? "reached" : "MISSED");
}

void PrintRatios(const PipelineReport& report, const char* name,
                 Spread PipelinePoint::*spread,
                 PipelineTarget PipelinePoint::*target, std::ostream& out) {
  out << absl::StreamFormat("\n%8s  %6s  %7s  %-24s  %s\n", "link/CPU",
                            "pieces", "buffers", name, "target");
  BarChart chart;
  for (const PipelinePoint& point : report.points) {
    chart.Add(absl::StrFormat("%8.2f  %6d  %7d  %-24s  %-15s",
                              point.link_over_cpu, point.pieces, point.buffers,
                              Text(point.*spread), Text(point.*target)),
              (point.*spread).median);
  }
  chart.Print(out);
}

void PrintTable(const Setting& setting, const PipelineReport& report,
                std::ostream& out) {
  out << absl::StreamFormat(
      "%d elements, %d rounds, %d %s, kernel %s: median (p10 to p90)\n"
      "without a link %.2f GB of copies a second; over a link copies are %s\n",
      setting.options.numel, setting.options.rounds, setting.threads,
      setting.threads == 1 ? "thread" : "threads", setting.kernel,
      report.cpu_gb_per_s,
      report.real_copies
          ? "real"
          : "timestamps: they\ntake their time and move nothing");
  PrintRatios(report, "bound/measured", &PipelinePoint::bound_over_measured,
              &PipelinePoint::bound_target, out);
  PrintRatios(report, "serial/pipelined", &PipelinePoint::serial_over_pipelined,
              &PipelinePoint::serial_target, out);
  out << absl::StreamFormat("\n%10s  %5s  %-27s  %7s  %s\n", "elements",
                            "ranks", "ms of ZeroOptimizer's step", "ns/elem.",
                            "over one rank");
  BarChart ranks;
  for (const RanksPoint& point : report.ranks) {
    ranks.Add(absl::StrFormat("%10d  %5d  %-27s  %8.3f  %.2f (%.2f to %.2f)",
                              point.numel, point.ranks, Text(point.ms),
                              point.ns_per_element, point.speedup.median,
                              point.speedup.p10, point.speedup.p90),
              point.ns_per_element);
  }
  ranks.Print(out);
}

class BenchPipelineCommand : public Command {
 public:
  const char* name() const override { return "bench pipeline"; }
  const char* summary() const override {
    return "Measures how copies hide behind the update, and steps of ranks.";
  }

  void AddFlags(Flags& flags) override {
    flags.Add("json", &json_, "Print one JSON object instead of tables.");
    flags.Add("numel", &options_.numel, "elements",
              "Elements of the state; of all ranks together up to a quarter.");
    flags.Add("pieces", &options_.pieces, "pieces",
              "Pieces of a step; targets are those of 32.");
    flags.Add("rounds", &options_.rounds, "rounds",
              "Steps of each, after one more to warm up.");
    flags.Add("timestamps", &options_.timestamps,
              "Let copies take their time but move nothing.");
    AddThreadsFlag(flags, &threads_);
    AddKernelFlag(flags, &kernel_);
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    const absl::Status threads = CheckThreads(threads_);
    if (!threads.ok()) return threads;
    options_.threads = static_cast<int>(threads_);
    const absl::StatusOr<int64_t> needed = PipelineBenchBytes(options_);
    if (!needed.ok()) return needed.status();
    const absl::StatusOr<KernelChoice> choice = ChooseKernel(kernel_);
    if (!choice.ok()) return choice.status();
    if (!choice->selected.ok()) return choice->selected.status();
    const Kernel& kernel = **choice->selected;
    const absl::Status enough =
        CheckMemory("the benchmark", *needed, "lower --numel");
    if (!enough.ok()) return enough;

    err << absl::StreamFormat(
        "needs %s of memory, to time steps over each link and on ranks in %d "
        "rounds\n",
        FormatBytes(*needed), options_.rounds);
    err.flush();
    const absl::StatusOr<PipelineReport> report =
        RunPipelineBench(kernel, options_);
    if (!report.ok()) return report.status();
    const Setting setting = {options_, report->threads, kernel.name};
    json_ ? PrintJson(setting, *report, out)
          : PrintTable(setting, *report, out);
    return absl::OkStatus();
  }

 private:
  PipelineBenchOptions options_;
  std::string kernel_;
  // As for bench step: several drift apart. The copies take one more.
  int64_t threads_ = 1;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewBenchPipelineCommand() {
  return std::make_unique<BenchPipelineCommand>();
}

}  // namespace onepass

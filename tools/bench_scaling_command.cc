// onepass bench scaling: the fused step over elements, threads and processes.

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dispatch/kernel.h"
#include "nlohmann/json.hpp"
#include "tools/bench/measure.h"
#include "tools/bench/scaling_bench.h"
#include "tools/bench_report.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/common_flags.h"
#include "tools/memory.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

using Json = nlohmann::ordered_json;

void PrintJson(const ScalingReport& report, const std::string& kernel,
               int64_t rounds, std::ostream& out) {
  Json elements = Json::array();
  for (const ElementsPoint& point : report.elements) {
    elements.push_back({{"numel", point.numel},
                        {"ns_per_element", SpreadJson(point.ns_per_element)},
                        {"gb_per_s", point.gb_per_s}});
  }
  Json threads = Json::array();
  for (const ThreadsPoint& point : report.threads) {
    threads.push_back({{"threads", point.threads},
                       {"speedup", SpreadJson(point.speedup)},
                       {"gb_per_s", point.gb_per_s}});
  }
  Json processes = Json::array();
  for (const ProcessesPoint& point : report.processes) {
    processes.push_back({{"processes", point.processes},
                         {"threads", point.threads},
                         {"ratio", SpreadJson(point.ratio)},
                         {"gb_per_s", point.gb_per_s}});
  }
  out << Json{{"kernel", kernel},
              {"store", report.store},
              {"rounds", rounds},
              {"elements", elements},
              {"threads", threads},
              {"processes", processes},
              {"pool",
               {{"threads", report.pool.threads},
                {"awake_us", SpreadJson(report.pool.awake_us)},
                {"asleep_us", SpreadJson(report.pool.asleep_us)}}}}
             .dump()
      << "\n";
}

void PrintTable(const ScalingReport& report, const std::string& kernel,
                int64_t rounds, std::ostream& out) {
  out << absl::StreamFormat(
      "fused Adam step, kernel %s, %d rounds: median (p10 to p90)\n"
      "%s stores over the most elements\n\n",
      kernel, rounds, report.store);
  out << absl::StreamFormat("%10s  %-24s %8s\n", "elements",
                            "ns/element, one thread", "GB/s");
  BarChart elements;
  for (const ElementsPoint& point : report.elements) {
    const Spread& ns = point.ns_per_element;
    elements.Add(absl::StrFormat("%10d  %-24s %8.1f", point.numel,
                                 absl::StrFormat("%.3f (%.3f to %.3f)",
                                                 ns.median, ns.p10, ns.p90),
                                 point.gb_per_s),
                 point.gb_per_s);
  }
  elements.Print(out);
  const auto ratio = [](const Spread& spread) {
    return absl::StrFormat("%.2f (%.2f to %.2f)", spread.median, spread.p10,
                           spread.p90);
  };
  out << absl::StreamFormat("\n%10s  %-24s %8s\n", "threads", "over one thread",
                            "GB/s");
  BarChart threads;
  for (const ThreadsPoint& point : report.threads) {
    threads.Add(absl::StrFormat("%10d  %-24s %8.1f", point.threads,
                                ratio(point.speedup), point.gb_per_s),
                point.gb_per_s);
  }
  threads.Print(out);
  out << absl::StreamFormat("\n%10s  %-24s %8s  %s\n", "processes",
                            "over the first row", "GB/s", "target");
  BarChart processes;
  for (const ProcessesPoint& point : report.processes) {
    const char* reached = point.reached ? "reached" : "MISSED";
    processes.Add(
        absl::StrFormat("%10s  %-24s %8.1f  %-7s %-7s",
                        absl::StrCat(point.processes, " x ", point.threads),
                        ratio(point.ratio), point.gb_per_s, point.target,
                        point.target.empty() ? "" : reached),
        point.gb_per_s);
  }
  processes.Print(out);
  const auto microseconds = [](const Spread& spread) {
    return absl::StrFormat("%.1f us (%.1f to %.1f)", spread.median, spread.p10,
                           spread.p90);
  };
  out << absl::StreamFormat(
      "processes: N x T of T threads each, all together\n\n"
      "an empty run of a pool of %d threads: %s right after another,\n"
      "%s after a pause in which its workers fall asleep\n",
      report.pool.threads, microseconds(report.pool.awake_us),
      microseconds(report.pool.asleep_us));
}

class BenchScalingCommand : public Command {
 public:
  const char* name() const override { return "bench scaling"; }
  const char* summary() const override {
    return "Measures the step over elements, threads and processes.";
  }

  void AddFlags(Flags& flags) override {
    flags.Add("rounds", &options_.rounds, "rounds",
              "How often each is measured.");
    flags.Add("max_numel", &options_.max_numel, "elements",
              "Elements of the largest state.");
    AddThreadsFlag(flags, &threads_);
    AddKernelFlag(flags, &kernel_);
    flags.Add("json", &json_, "Print one JSON object instead of a table.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    const absl::Status threads = CheckThreads(threads_);
    if (!threads.ok()) return threads;
    options_.threads = static_cast<int>(threads_);
    const absl::StatusOr<KernelChoice> choice = ChooseKernel(kernel_);
    if (!choice.ok()) return choice.status();
    if (!choice->selected.ok()) return choice->selected.status();
    const Kernel& kernel = **choice->selected;
    const absl::StatusOr<int64_t> bytes = ScalingBytes(options_);
    if (!bytes.ok()) return bytes.status();
    const absl::Status fits =
        CheckMemory("bench scaling", *bytes, "lower --max_numel");
    if (!fits.ok()) return fits;
    err << absl::StreamFormat(
        "needs %s of memory, to time each state, number of threads and of "
        "processes in %d rounds\n",
        FormatBytes(*bytes), options_.rounds);
    err.flush();
    const absl::StatusOr<ScalingReport> report =
        MeasureScaling(kernel, options_);
    if (!report.ok()) return report.status();
    json_ ? PrintJson(*report, kernel.name, options_.rounds, out)
          : PrintTable(*report, kernel.name, options_.rounds, out);
    return absl::OkStatus();
  }

 private:
  ScalingOptions options_;
  std::string kernel_;
  int64_t threads_ = 0;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewBenchScalingCommand() {
  return std::make_unique<BenchScalingCommand>();
}

}  // namespace onepass

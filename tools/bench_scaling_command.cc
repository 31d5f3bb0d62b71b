// onepass bench scaling: the fused step over elements, threads and processes.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tools/bench/measure.h"
#include "tools/bench/scaling_bench.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/memory.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

using Json = nlohmann::ordered_json;

Json Of(const Spread& spread) {
  return {{"median", spread.median}, {"p10", spread.p10}, {"p90", spread.p90}};
}

void PrintJson(const ScalingReport& report, const std::string& kernel,
               int64_t rounds, std::ostream& out) {
  Json elements = Json::array();
  for (const ElementsPoint& point : report.elements) {
    elements.push_back({{"numel", point.numel},
                        {"ns_per_element", point.ns_per_element.median},
                        {"p10", point.ns_per_element.p10},
                        {"p90", point.ns_per_element.p90},
                        {"gb_per_s", point.gb_per_s}});
  }
  Json threads = Json::array();
  for (const ThreadsPoint& point : report.threads) {
    threads.push_back({{"threads", point.threads},
                       {"speedup", point.speedup.median},
                       {"p10", point.speedup.p10},
                       {"p90", point.speedup.p90},
                       {"gb_per_s", point.gb_per_s}});
  }
  Json processes = Json::array();
  for (const ProcessesPoint& point : report.processes) {
    processes.push_back({{"processes", point.processes},
                         {"threads", point.threads},
                         {"ratio", point.ratio.median},
                         {"p10", point.ratio.p10},
                         {"p90", point.ratio.p90},
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
                {"awake_us", Of(report.pool.awake_us)},
                {"asleep_us", Of(report.pool.asleep_us)}}}}
             .dump()
      << "\n";
}

// `value` of `most` as a bar.
std::string Bar(double value, double most) {
  constexpr int kWidth = 40;
  return std::string(
      static_cast<size_t>(most > 0 ? kWidth * value / most + 0.5 : 0), '#');
}

template <typename Point>
double Fastest(const std::vector<Point>& points) {
  double most = 0;
  for (const Point& point : points) most = std::max(most, point.gb_per_s);
  return most;
}

void PrintTable(const ScalingReport& report, const std::string& kernel,
                int64_t rounds, std::ostream& out) {
  out << absl::StreamFormat(
      "fused Adam step, kernel %s, %s stores over the most elements, %d "
      "rounds: "
      "median (p10 to p90)\n\n",
      kernel, report.store, rounds);
  out << absl::StreamFormat("%10s  %-24s %8s\n", "elements",
                            "ns/element, one thread", "GB/s");
  for (const ElementsPoint& point : report.elements) {
    const Spread& ns = point.ns_per_element;
    out << absl::StreamFormat(
        "%10d  %-24s %8.1f  %s\n", point.numel,
        absl::StrFormat("%.3f (%.3f to %.3f)", ns.median, ns.p10, ns.p90),
        point.gb_per_s, Bar(point.gb_per_s, Fastest(report.elements)));
  }
  const auto ratio = [](const Spread& spread) {
    return absl::StrFormat("%.2f (%.2f to %.2f)", spread.median, spread.p10,
                           spread.p90);
  };
  out << absl::StreamFormat("\n%10s  %-24s %8s\n", "threads", "over one thread",
                            "GB/s");
  for (const ThreadsPoint& point : report.threads) {
    out << absl::StreamFormat("%10d  %-24s %8.1f  %s\n", point.threads,
                              ratio(point.speedup), point.gb_per_s,
                              Bar(point.gb_per_s, Fastest(report.threads)));
  }
  out << absl::StreamFormat("\n%10s  %-24s %8s  %s\n", "processes",
                            "over the first row", "GB/s", "target");
  for (const ProcessesPoint& point : report.processes) {
    out << absl::StreamFormat(
        "%10s  %-24s %8.1f  %-7s %-7s  %s\n",
        absl::StrCat(point.processes, " x ", point.threads), ratio(point.ratio),
        point.gb_per_s, point.target,
        point.target.empty() ? ""
        : point.reached      ? "reached"
                             : "MISSED",
        Bar(point.gb_per_s, Fastest(report.processes)));
  }
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
    flags.Add("threads", &threads_, "threads",
              "The most; 0: one for each processor allowed.");
    flags.Add("kernel", &kernel_, "name",
              "See 'onepass kernels'. [$ONEPASS_KERNEL, else the best here]");
    flags.Add("json", &json_, "Print one JSON object instead of a table.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    // Before it is made an int.
    if (threads_ < 0 || threads_ > ThreadPool::kMaxThreads) {
      return absl::InvalidArgumentError(absl::StrCat("--threads is ", threads_,
                                                     ", expected 0 to ",
                                                     ThreadPool::kMaxThreads));
    }
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
    err << absl::StreamFormat("takes up to %.0f MiB of memory\n",
                              static_cast<double>(*bytes) / (1 << 20));
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

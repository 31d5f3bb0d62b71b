// onepass bench step: what one pass gains over other ways to do a step, as
// ratios of time.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tools/bench/step_bench.h"
#include "tools/bench_report.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/common_flags.h"
#include "tools/memory.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

// What was measured, and on what.
struct Setting {
  StepBenchOptions options;
  int threads;
  const char* kernel;
};

void PrintJson(const Setting& setting, const StepBenchReport& report,
               std::ostream& out) {
  auto ratios = nlohmann::ordered_json::object();
  for (const StepRatio& ratio : report.ratios) {
    ratios[ratio.name] = SpreadJson(ratio.spread);
  }
  auto rates = nlohmann::ordered_json::object();
  for (const StepRate& rate : report.rates) rates[rate.variant] = rate.gb_per_s;
  out << nlohmann::ordered_json{{"numel", setting.options.numel},
                                {"threads", setting.threads},
                                {"rounds", setting.options.rounds},
                                {"ratios", ratios},
                                {"gb_per_s", rates},
                                {"kernel", setting.kernel},
                                {"store", report.store}}
             .dump()
      << "\n";
}

void PrintTable(const Setting& setting, const StepBenchReport& report,
                std::ostream& out) {
  out << absl::StreamFormat(
      "%d elements, %d rounds, %d %s, kernel %s, %s stores\n\n",
      setting.options.numel, setting.options.rounds, setting.threads,
      setting.threads == 1 ? "thread" : "threads", setting.kernel,
      report.store);

  constexpr absl::string_view kRatio = "ratio of times";
  size_t name_width = kRatio.size();
  for (const StepRatio& ratio : report.ratios) {
    name_width = std::max(name_width, ratio.name.size());
  }
  const int width = static_cast<int>(name_width);
  out << absl::StreamFormat("%-*s  %7s  %7s  %7s  %s\n", width, kRatio,
                            "median", "p10", "p90", "target");
  BarChart ratios;
  for (const StepRatio& ratio : report.ratios) {
    const char* reached = ratio.reached ? "reached" : "MISSED";
    ratios.Add(absl::StrFormat("%-*s  %7.3f  %7.3f  %7.3f  %-7s %-7s", width,
                               ratio.name, ratio.spread.median,
                               ratio.spread.p10, ratio.spread.p90, ratio.target,
                               ratio.target.empty() ? "" : reached),
               ratio.spread.median, ratio.meaning);
  }
  ratios.Print(out);

  name_width = 0;
  for (const StepRate& rate : report.rates) {
    name_width = std::max(name_width, rate.variant.size());
  }
  out << "\nbytes read and written in a second\n";
  BarChart rates;
  for (const StepRate& rate : report.rates) {
    rates.Add(absl::StrFormat("%-*s  %7.2f GB/s", static_cast<int>(name_width),
                              rate.variant, rate.gb_per_s),
              rate.gb_per_s);
  }
  rates.Print(out);
}

class BenchStepCommand : public Command {
 public:
  const char* name() const override { return "bench step"; }
  const char* summary() const override {
    return "Times the fused step against other ways to do the same.";
  }

  void AddFlags(Flags& flags) override {
    flags.Add("json", &json_, "Print one JSON object instead of tables.");
    flags.Add("numel", &options_.numel, "elements",
              "Elements in a step; caches hide what those that fit cost.");
    flags.Add("rounds", &options_.rounds, "rounds",
              "Runs of each way, after one more to warm up.");
    AddThreadsFlag(flags, &threads_);
    AddKernelFlag(flags, &kernel_);
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    const absl::Status threads = CheckThreads(threads_);
    if (!threads.ok()) return threads;
    const absl::StatusOr<int64_t> needed = StepBenchBytes(options_);
    if (!needed.ok()) return needed.status();
    const absl::StatusOr<KernelChoice> choice = ChooseKernel(kernel_);
    if (!choice.ok()) return choice.status();
    if (!choice->selected.ok()) return choice->selected.status();
    const Kernel& kernel = **choice->selected;
    const absl::Status enough =
        CheckMemory("the benchmark", *needed, "lower --numel");
    if (!enough.ok()) return enough;
    const absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
        ThreadPool::Create({static_cast<int>(threads_)});
    if (!pool.ok()) return pool.status();

    err << absl::StreamFormat(
        "needs %s of memory, to time each way to do a step in %d rounds\n",
        FormatBytes(*needed), options_.rounds);
    err.flush();
    const absl::StatusOr<StepBenchReport> report =
        RunStepBench(choice->dispatcher, kernel, **pool, options_);
    if (!report.ok()) return report.status();
    const Setting setting = {options_, (*pool)->threads(), kernel.name};
    json_ ? PrintJson(setting, *report, out)
          : PrintTable(setting, *report, out);
    return absl::OkStatus();
  }

 private:
  StepBenchOptions options_;
  std::string kernel_;
  // Several drift apart, by up to twice the time, within seconds.
  int64_t threads_ = 1;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewBenchStepCommand() {
  return std::make_unique<BenchStepCommand>();
}

}  // namespace onepass

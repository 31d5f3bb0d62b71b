// onepass kernels: what kernels are linked, and which of them would run here.

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

std::vector<std::string> Names(DTypeSet types) {
  std::vector<std::string> names;
  for (const DType type : kAllDTypes) {
    if (types.Contains(type)) names.push_back(Name(type));
  }
  return names;
}

void PrintJson(const std::vector<KernelReport>& reports, std::ostream& out) {
  auto kernels = nlohmann::ordered_json::array();
  for (const KernelReport& report : reports) {
    kernels.push_back({
        {"name", report.kernel->name},
        {"rank", report.kernel->rank()},
        {"supported", report.supported},
        {"selected", report.selected},
        {"block_numel", report.block_numel},
        {"copy_types", Names(report.kernel->copy_types)},
        {"gradient_types", Names(report.kernel->gradient_types)},
        {"moment_types", Names(report.kernel->moment_types)},
    });
  }
  out << nlohmann::ordered_json{{"kernels", kernels}}.dump() << "\n";
}

void PrintTable(const std::vector<KernelReport>& reports, std::ostream& out) {
  constexpr char kRow[] = "%-2s%-10s %5s  %-10s %6s  %-16s %-16s %s\n";
  const auto list = [](DTypeSet types) {
    return types.empty() ? "-" : absl::StrJoin(Names(types), ",");
  };
  out << absl::StreamFormat(kRow, "", "kernel", "rank", "runs here", "block",
                            "gradients", "moments", "copies");
  for (const KernelReport& report : reports) {
    const Kernel& kernel = *report.kernel;
    out << absl::StreamFormat(
        kRow, report.selected ? "*" : "", kernel.name,
        std::to_string(kernel.rank()), report.supported ? "yes" : "no",
        std::to_string(report.block_numel), list(kernel.gradient_types),
        list(kernel.moment_types), list(kernel.copy_types));
  }
  out << "* selected; block: elements that are updated at a time\n";
}

class KernelsCommand : public Command {
 public:
  const char* name() const override { return "kernels"; }
  const char* summary() const override {
    return "Lists the kernels, what they can do, and which one is selected.";
  }

  void AddFlags(Flags& flags) override {
    flags.Add("json", &json_, "Print one JSON object instead of a table.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    const absl::StatusOr<KernelChoice> choice = ChooseKernel("");
    if (!choice.ok()) return choice.status();
    // A forced kernel that cannot run here: the list is what the user needs.
    if (!choice->selected.ok()) {
      err << choice->selected.status().message() << "\n";
    }
    const std::vector<KernelReport> reports = choice->dispatcher.Report();
    json_ ? PrintJson(reports, out) : PrintTable(reports, out);
    return absl::OkStatus();
  }

 private:
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewKernelsCommand() {
  return std::make_unique<KernelsCommand>();
}

}  // namespace onepass

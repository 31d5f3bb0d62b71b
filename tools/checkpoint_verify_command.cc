// onepass checkpoint verify: reads all of a checkpoint, and says what is
// damaged.

#include <algorithm>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/verify.h"
#include "dispatch/return_if_error.h"
#include "nlohmann/json.hpp"
#include "tools/checkpoint_text.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/progress_bar.h"

namespace onepass {
namespace {

class CheckpointVerifyCommand : public Command {
 public:
  const char* name() const override { return "checkpoint verify"; }
  const char* summary() const override {
    return "Reads all of a checkpoint, and prints what is damaged. Exit "
           "status: 0 whole, 1 damaged, 2 another error.";
  }

  void AddFlags(Flags& flags) override {
    flags.AddArgument("PATH", &path_, "The checkpoint.");
    flags.Add("json", &json_, "Print one JSON object instead of lines.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    VerifyReport report;
    {
      ProgressBar bar(err);
      VerifyOptions options;
      options.progress = [&](int64_t done, int64_t all) {
        bar.Update(done, all);
      };
      ONEPASS_ASSIGN_OR_RETURN(report, VerifyCheckpoint(path_, options));
    }
    auto problems = nlohmann::ordered_json::array();
    for (const absl::Status& problem : report.problems) {
      problems.push_back(std::string(problem.message()));
      if (!json_) out << Printable(problem.message()) << "\n";
    }
    const int64_t count = static_cast<int64_t>(report.problems.size());
    if (json_) {
      out << JsonText({{"path", path_},
                       {"bytes", report.bytes},
                       {"problems", problems}})
          << "\n";
    } else if (count == 0) {
      out << Printable(path_) << ": " << report.bytes
          << " bytes read, nothing is damaged\n";
    }
    if (count == 0) return absl::OkStatus();
    damaged_ = std::any_of(
        report.problems.begin(), report.problems.end(),
        [](const absl::Status& problem) { return absl::IsDataLoss(problem); });
    return absl::DataLossError(absl::StrCat(
        "\"", path_, "\" ", damaged_ ? "is damaged: " : "cannot be read: ",
        Count(count, "problem")));
  }

  int failure_status() const override {
    return damaged_ ? kExitFailure : kExitUsage;
  }

 private:
  std::string path_;
  bool json_ = false;
  bool damaged_ = false;
};

}  // namespace

std::unique_ptr<Command> NewCheckpointVerifyCommand() {
  return std::make_unique<CheckpointVerifyCommand>();
}

}  // namespace onepass

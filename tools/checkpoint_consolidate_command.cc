// onepass checkpoint consolidate: one safetensors file out of a checkpoint.

#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/consolidate.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"
#include "dispatch/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tools/checkpoint_text.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/progress_bar.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

class CheckpointConsolidateCommand : public Command {
 public:
  const char* name() const override { return "checkpoint consolidate"; }
  const char* summary() const override {
    return "Writes a checkpoint's tensors, whole, to one safetensors file.";
  }

  void AddFlags(Flags& flags) override {
    flags.AddArgument("PATH", &path_, "The checkpoint.");
    flags.AddArgument("OUT", &out_path_,
                      "The new file, as model.safetensors; where there is one, "
                      "it stays.");
    flags.Add("as", &as_, "type",
              "stored: types stay, with codes of e4m3 as U8 and scales beside. "
              "fp32: values, with masters rebuilt from remainders.");
    flags.Add("json", &json_, "Print one JSON object instead of a line.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    ConsolidateOptions options;
    if (as_ == "fp32") {
      options.form = ConsolidatedForm::kFloat32;
    } else if (as_ != "stored") {
      return absl::InvalidArgumentError(
          absl::StrCat("--as is ", as_, ", expected fp32 or stored"));
    }
    const absl::StatusOr<KernelChoice> choice = ChooseKernel("");
    ONEPASS_RETURN_IF_ERROR(choice.status());
    ONEPASS_RETURN_IF_ERROR(choice->selected.status());
    const absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
        ThreadPool::Create({});
    ONEPASS_RETURN_IF_ERROR(pool.status());
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path_);
    ONEPASS_RETURN_IF_ERROR(checkpoint.status());
    ConsolidateReport report;
    {
      ProgressBar bar(err);
      options.progress = [&](int64_t done, int64_t all) {
        bar.Update(done, all);
      };
      ONEPASS_ASSIGN_OR_RETURN(
          report, ConsolidateCheckpoint(**choice->selected, **pool, *checkpoint,
                                        out_path_, options));
    }
    if (json_) {
      out << JsonText({{"path", path_},
                       {"out", out_path_},
                       {"as", as_},
                       {"tensors", report.tensors},
                       {"bytes", report.bytes}})
          << "\n";
    } else {
      out << Printable(out_path_) << ": " << Count(report.tensors, "tensor")
          << ", " << report.bytes << " bytes\n";
    }
    return absl::OkStatus();
  }

 private:
  std::string path_;
  std::string out_path_;
  std::string as_ = "stored";
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewCheckpointConsolidateCommand() {
  return std::make_unique<CheckpointConsolidateCommand>();
}

}  // namespace onepass

// onepass checkpoint diff: what differs between two checkpoints.

#include <cmath>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/compare.h"
#include "dispatch/return_if_error.h"
#include "nlohmann/json.hpp"
#include "tools/checkpoint_text.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/progress_bar.h"

namespace onepass {
namespace {

using nlohmann::ordered_json;
using Kind = TensorDifference::Kind;

std::string Describe(const TensorDifference& found) {
  switch (found.kind) {
    case Kind::kOnlyInA:
      return "only in A";
    case Kind::kOnlyInB:
      return "only in B";
    case Kind::kType:
      return absl::StrCat("type: ", found.what);
    case Kind::kShape:
      return absl::StrCat("shape: ", found.what);
    case Kind::kElements:
      break;
  }
  std::string text = absl::StrFormat(
      "%d of %s differ, from element %d on, by at most %.9g%s", found.differing,
      Count(found.numel, "element"), found.first, found.largest,
      found.codes ? " (of codes)" : "");
  if (found.nans > 0) {
    absl::StrAppend(&text, "; ", found.nans, " are NaN on a side");
  }
  return text;
}

ordered_json ToJson(const TensorDifference& found) {
  ordered_json json = {{"name", found.name}, {"kind", Name(found.kind)}};
  if (found.kind == Kind::kType || found.kind == Kind::kShape) {
    json["what"] = found.what;
  }
  if (found.kind != Kind::kElements) return json;
  json["numel"] = found.numel;
  json["differing"] = found.differing;
  json["first"] = found.first;
  // JSON has no infinity.
  json["largest_difference"] = std::isinf(found.largest)
                                   ? ordered_json("infinity")
                                   : ordered_json(found.largest);
  json["of"] = found.codes ? "codes" : "values";
  json["nans"] = found.nans;
  return json;
}

class CheckpointDiffCommand : public Command {
 public:
  const char* name() const override { return "checkpoint diff"; }
  const char* summary() const override {
    return "Compares two checkpoints by name, whatever their ranks. Exit "
           "status: 0 equal, 1 different or damaged, 2 another error.";
  }

  void AddFlags(Flags& flags) override {
    flags.AddArgument("A", &a_, "A checkpoint.");
    flags.AddArgument("B", &b_, "Another one.");
    flags.Add("json", &json_, "Print one JSON object instead of lines.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    const absl::Status status = Compare(out, err);
    found_ |= absl::IsDataLoss(status);
    return status;
  }

  int failure_status() const override {
    return found_ ? kExitFailure : kExitUsage;
  }

 private:
  absl::Status Compare(std::ostream& out, std::ostream& err) {
    absl::StatusOr<Checkpoint> a = Checkpoint::Open(a_);
    ONEPASS_RETURN_IF_ERROR(a.status());
    absl::StatusOr<Checkpoint> b = Checkpoint::Open(b_);
    ONEPASS_RETURN_IF_ERROR(b.status());
    CompareReport report;
    {
      ProgressBar bar(err);
      CompareOptions options;
      options.progress = [&](int64_t done, int64_t all) {
        bar.Update(done, all);
      };
      ONEPASS_ASSIGN_OR_RETURN(report, CompareCheckpoints(*a, *b, options));
    }
    json_ ? PrintJson(report, out) : PrintLines(report, out);
    if (report.equal()) return absl::OkStatus();
    found_ = true;
    return absl::FailedPreconditionError(
        absl::StrCat("\"", a_, "\" and \"", b_, "\" differ"));
  }

  void PrintJson(const CompareReport& report, std::ostream& out) const {
    auto tensors = ordered_json::array();
    // Of elements; as what differs first is asked for most.
    ordered_json first = nullptr;
    int64_t differing = 0;
    for (const TensorDifference& found : report.tensors) {
      tensors.push_back(ToJson(found));
      if (first.is_null()) first = found.name;
      differing += found.differing;
    }
    out << JsonText({{"a", a_},
                     {"b", b_},
                     {"equal", report.equal()},
                     {"tensors_compared", report.tensors_compared},
                     {"first_tensor", first},
                     {"differing", differing},
                     {"tensors", tensors},
                     {"others", report.others}})
        << "\n";
  }

  static void PrintLines(const CompareReport& report, std::ostream& out) {
    for (const std::string& other : report.others) {
      out << Printable(other) << "\n";
    }
    for (const TensorDifference& found : report.tensors) {
      out << Printable(found.name) << ": " << Describe(found) << "\n";
    }
    if (!report.equal()) return;
    out << Count(report.tensors_compared, "tensor")
        << " compared, nothing differs\n";
  }

  std::string a_;
  std::string b_;
  bool json_ = false;
  bool found_ = false;  // a difference, or damage
};

}  // namespace

std::unique_ptr<Command> NewCheckpointDiffCommand() {
  return std::make_unique<CheckpointDiffCommand>();
}

}  // namespace onepass

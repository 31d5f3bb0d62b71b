// onepass verify: whether every kernel computes the committed bits here.

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dispatch/dispatcher.h"
#include "dispatch/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/golden.h"
#include "tools/select_kernel.h"

namespace onepass {
namespace {

// One thread and several, as many as divide the work evenly and as do not; one
// call, pieces of a block or so, of whole leaves, for several threads each, and
// pieces that cut leaves.
constexpr struct {
  int threads;
  int64_t piece_numel;
} kRuns[] = {{1, 0}, {2, 64}, {3, 0}, {2, 8192}, {5, 1000}};

class VerifyCommand : public Command {
 public:
  explicit VerifyCommand(std::string golden) : golden_(std::move(golden)) {}

  const char* name() const override { return "verify"; }
  const char* summary() const override {
    return "Checks that every kernel that runs here computes the same bits as "
           "everywhere.";
  }

  void AddFlags(Flags& flags) override {
    flags.Add("json", &json_, "Print one JSON object instead of lines.");
  }

  absl::Status Run(std::ostream& out, std::ostream&) override {
    const absl::StatusOr<KernelChoice> choice = ChooseKernel("");
    if (!choice.ok()) return choice.status();
    auto results = nlohmann::ordered_json::array();
    int runs = 0;
    int different = 0;
    for (const KernelReport& report : choice->dispatcher.Report()) {
      if (!report.supported) continue;
      for (const auto [threads, piece_numel] : kRuns) {
        const absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
            ThreadPool::Create({threads});
        if (!pool.ok()) return pool.status();
        const char* kernel = report.kernel->name;
        const absl::StatusOr<std::string> digest =
            RunGoldenWorkload(*report.kernel, **pool, piece_numel);
        if (!digest.ok()) {
          return absl::Status(
              digest.status().code(),
              absl::StrCat("kernel ", kernel, ": ", digest.status().message()));
        }
        ++runs;
        const bool identical = *digest == golden_;
        if (!identical) ++different;
        results.push_back({{"kernel", kernel},
                           {"threads", threads},
                           {"piece_numel", piece_numel},
                           {"digest", *digest}});
        if (!json_) {
          out << absl::StreamFormat(
              "%s  %-10s threads %d  piece_numel %4d  %s\n", *digest, kernel,
              threads, piece_numel, identical ? "same" : "DIFFERENT");
        }
      }
    }
    if (json_) {
      out << nlohmann::ordered_json{{"golden", golden_},
                                    {"identical", different == 0},
                                    {"results", results}}
                 .dump()
          << "\n";
    }
    if (different == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(different, " of ", runs,
                                            " digests differ from ", golden_,
                                            ", which every kernel must give"));
  }

 private:
  const std::string golden_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewVerifyCommand() {
  return NewVerifyCommand(kGoldenDigest);
}

std::unique_ptr<Command> NewVerifyCommand(std::string golden) {
  return std::make_unique<VerifyCommand>(std::move(golden));
}

}  // namespace onepass

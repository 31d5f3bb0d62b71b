#include "tools/train_checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "checkpoint/agreement.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "checkpoint/publish.h"
#include "checkpoint/verify.h"
#include "dispatch/return_if_error.h"
#include "dispatch/runtime.h"
#include "tools/step_checkpoints.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

absl::Status Annotate(const absl::Status& status, absl::string_view before,
                      absl::string_view after = "") {
  return absl::Status(status.code(),
                      absl::StrCat(before, status.message(), after));
}

// Where the manifest does not say it, the name does. What says nothing is taken
// for the newest: nobody resumes from an older one unasked.
int64_t StepOf(const FoundCheckpoint& checkpoint) {
  if (checkpoint.step >= 0) return checkpoint.step;
  absl::string_view digits = checkpoint.name;
  int64_t step;
  if (absl::ConsumePrefix(&digits, kStepPrefix) &&
      absl::SimpleAtoi(digits.substr(0, digits.find('-')), &step)) {
    return step;
  }
  return std::numeric_limits<int64_t>::max();
}

// The newest first, also those whose manifest is damaged.
absl::StatusOr<std::vector<FoundCheckpoint>> NewestFirst(
    const std::string& directory) {
  std::vector<FoundCheckpoint> found;
  ONEPASS_ASSIGN_OR_RETURN(found, FindStepCheckpoints(directory));
  std::sort(found.begin(), found.end(),
            [](const FoundCheckpoint& a, const FoundCheckpoint& b) {
              return std::make_tuple(StepOf(a), a.name) >
                     std::make_tuple(StepOf(b), b.name);
            });
  return found;
}

absl::Status MakeDirectory(const std::string& path) {
  std::error_code code;
  const bool made = fs::create_directory(path, code);
  if (code) {
    return absl::InvalidArgumentError(
        absl::StrCat("--save_dir ", path, ": ", code.message()));
  }
  if (!made) return absl::OkStatus();
  // Its name is on the disk before that of a checkpoint is. (A path may end in
  // a slash.)
  return Annotate(SyncDirectory(JoinPath(path, "..")), "--save_dir: ");
}

constexpr char kPreviousHelps[] =
    "; --resume_from_previous takes the newest one that is whole";

}  // namespace

absl::StatusOr<std::unique_ptr<TrainCheckpoints>> TrainCheckpoints::Create(
    const TrainCheckpointOptions& options, const Kernel& kernel, Device& device,
    Communicator& communicator) {
  std::unique_ptr<Communicator> own;
  ONEPASS_ASSIGN_OR_RETURN(own, communicator.Duplicate());
  auto checkpoints =
      absl::WrapUnique(new TrainCheckpoints(options, std::move(own)));
  ONEPASS_ASSIGN_OR_RETURN(
      checkpoints->budget_,
      MemoryBudget::Create({options.budget_bytes, options.budget_bytes}));
  if (options.async && checkpoints->saves()) {
    ONEPASS_ASSIGN_OR_RETURN(checkpoints->pool_, ThreadPool::Create({1}));
    ONEPASS_ASSIGN_OR_RETURN(own, communicator.Duplicate());
    checkpoints->saver_ = std::make_unique<AsyncSaver>(
        Runtime{kernel, device, *checkpoints->pool_}, std::move(own));
  }
  // What rank 0 sees of directories is what is so, for all.
  absl::StatusOr<std::string> mine = std::string();
  if (checkpoints->root()) {
    mine = checkpoints->Find();
    if (mine.ok()) {
      mine->insert(0, 1, checkpoints->SavesWhereItLoads() ? '1' : '0');
    }
  }
  std::vector<std::string> all;
  ONEPASS_ASSIGN_OR_RETURN(all,
                           ExchangeOrFail(*checkpoints->communicator_, mine));
  checkpoints->same_directory_ = all[0][0] == '1';
  checkpoints->found_ = all[0].substr(1);
  return checkpoints;
}

bool TrainCheckpoints::SavesWhereItLoads() const {
  std::error_code none;
  return saves() && fs::equivalent(options_.save_dir, load_dir(), none);
}

absl::StatusOr<std::string> TrainCheckpoints::Find() {
  if (saves()) {
    ONEPASS_RETURN_IF_ERROR(MakeDirectory(options_.save_dir));
    if (!options_.resume || !SavesWhereItLoads()) {
      std::vector<FoundCheckpoint> there;
      ONEPASS_ASSIGN_OR_RETURN(there, NewestFirst(options_.save_dir));
      if (!there.empty()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "--save_dir ", options_.save_dir, " has checkpoints, up to ",
            there.front().name, ": expected --resume",
            options_.resume ? " without --load_dir" : "",
            ", or another directory"));
      }
    }
  }
  if (!options_.resume) return std::string();
  absl::StatusOr<std::vector<FoundCheckpoint>> found = NewestFirst(load_dir());
  if (!found.ok()) return Annotate(found.status(), "--resume: ");
  if (found->empty()) {
    // Who names a directory of its own does not mean to begin.
    if (!options_.load_dir.empty()) {
      return absl::NotFoundError(absl::StrCat(
          "--resume: no checkpoint in --load_dir ", options_.load_dir));
    }
    remarks_.push_back(absl::StrCat("no checkpoint in ", load_dir(),
                                    ": training starts anew"));
    return std::string();
  }
  return Choose(*found);
}

absl::StatusOr<std::string> TrainCheckpoints::Choose(
    const std::vector<FoundCheckpoint>& checkpoints) {
  if (!options_.resume_from_previous) {
    const FoundCheckpoint& newest = checkpoints.front();
    if (newest.status.ok()) return newest.path;
    return Annotate(newest.status, "--resume: ",
                    absl::IsDataLoss(newest.status) ? kPreviousHelps : "");
  }
  VerifyOptions options;
  options.buffer_bytes = std::min(options.buffer_bytes, options_.budget_bytes);
  for (const FoundCheckpoint& checkpoint : checkpoints) {
    absl::Status problem = checkpoint.status;
    if (problem.ok()) {
      absl::StatusOr<VerifyReport> report =
          VerifyCheckpoint(checkpoint.path, options);
      if (!report.ok()) return Annotate(report.status(), "--resume: ");
      if (!report->problems.empty()) problem = report->problems.front();
    }
    if (problem.ok()) {
      if (&checkpoint != &checkpoints.front()) {
        remarks_.push_back(
            absl::StrCat("using the previous checkpoint ", checkpoint.path));
      }
      return checkpoint.path;
    }
    // It may be whole: nobody goes back for that.
    if (!absl::IsDataLoss(problem)) return Annotate(problem, "--resume: ");
    damaged_.insert(checkpoint.name);
    remarks_.push_back(absl::StrCat("the checkpoint ", checkpoint.path,
                                    " is damaged: ", problem.message()));
  }
  return absl::DataLossError(
      absl::StrCat("--resume: all checkpoints of ", load_dir(),
                   " are damaged, the newest ", "so: ", remarks_.front()));
}

absl::Status TrainCheckpoints::Resume(Trainer& trainer) {
  if (found_.empty()) return absl::OkStatus();
  absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(found_);
  absl::Status status = Agree(*communicator_, checkpoint.status());
  if (status.ok()) {
    status = trainer.Restore(*communicator_, *checkpoint, *budget_);
  }
  if (!status.ok()) {
    return Annotate(status, absl::StrCat("--resume from ", found_, ": "),
                    absl::IsDataLoss(status) && !options_.resume_from_previous
                        ? kPreviousHelps
                        : "");
  }
  if (same_directory_) saved_step_ = trainer.steps();
  return absl::OkStatus();
}

absl::StatusOr<std::string> TrainCheckpoints::FreeName(int64_t step) {
  const std::string name = absl::StrFormat("%s%08d", kStepPrefix, step);
  std::string free = name;
  // A damaged one of that step may be there, which stays.
  std::error_code none;
  for (int64_t i = 2; root() && fs::exists(fs::symlink_status(
                                    JoinPath(options_.save_dir, free), none));
       ++i) {
    free = absl::StrCat(name, "-", i);
  }
  std::vector<std::string> all;
  ONEPASS_ASSIGN_OR_RETURN(all, Exchange(*communicator_, free));
  return all[0];
}

absl::StatusOr<std::vector<SavedStep>> TrainCheckpoints::Save(
    Trainer& trainer) {
  std::vector<SavedStep> saved;
  ONEPASS_ASSIGN_OR_RETURN(saved, Finish());
  std::string name;
  ONEPASS_ASSIGN_OR_RETURN(name, FreeName(trainer.steps()));
  if (saver_ == nullptr) {
    SaveReport report;
    ONEPASS_ASSIGN_OR_RETURN(
        report,
        trainer.Save(*communicator_, options_.save_dir, name, *budget_));
    return Saved(trainer.steps(), name, std::move(report));
  }
  ONEPASS_RETURN_IF_ERROR(
      Agree(*communicator_,
            trainer.StartSave(*saver_, options_.save_dir, name, *budget_)));
  saving_ = name;
  saved_step_ = trainer.steps();
  return saved;
}

absl::StatusOr<std::vector<SavedStep>> TrainCheckpoints::Finish() {
  if (saving_.empty()) return std::vector<SavedStep>();
  const std::string name = std::exchange(saving_, "");
  SaveReport report;
  ONEPASS_ASSIGN_OR_RETURN(report, saver_->Wait());
  return Saved(saved_step_, name, std::move(report));
}

absl::StatusOr<std::vector<SavedStep>> TrainCheckpoints::Saved(
    int64_t step, const std::string& name, SaveReport report) {
  absl::Status removal = root() ? RemoveOld(name) : absl::OkStatus();
  std::vector<int64_t> bytes(communicator_->size());
  ONEPASS_RETURN_IF_ERROR(communicator_->AllGather(&report.bytes, bytes.data(),
                                                   sizeof(report.bytes)));
  report.bytes = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  saved_step_ = step;
  return std::vector<SavedStep>{{step, std::move(report), std::move(removal)}};
}

absl::Status TrainCheckpoints::RemoveOld(const std::string& saved) const {
  std::vector<FoundCheckpoint> found;
  ONEPASS_ASSIGN_OR_RETURN(found, NewestFirst(options_.save_dir));
  // A copy that somebody keeps under a name of its own is no matter of the run.
  found.erase(std::remove_if(found.begin(), found.end(),
                             [](const FoundCheckpoint& checkpoint) {
                               return !IsStepName(checkpoint.name);
                             }),
              found.end());
  // What is newer would count, and this one would go.
  if (found.empty() || found.front().name != saved) return absl::OkStatus();
  // What is damaged counts for nothing, and stays.
  std::vector<std::string> old;
  int64_t whole = 0;
  for (const FoundCheckpoint& checkpoint : found) {
    if (!checkpoint.status.ok() || damaged_.count(checkpoint.name) > 0 ||
        ++whole <= options_.keep_last) {
      continue;
    }
    old.push_back(checkpoint.name);
  }
  // The oldest first. One that stays keeps no other.
  absl::Status status;
  for (auto name = old.rbegin(); name != old.rend(); ++name) {
    status.Update(RemovePublished(options_.save_dir, *name));
  }
  return status;
}

absl::StatusOr<int> TrainCheckpoints::AgreeOnSignal(int mine) {
  std::vector<int> all(communicator_->size());
  ONEPASS_RETURN_IF_ERROR(
      communicator_->AllGather(&mine, all.data(), sizeof(mine)));
  return *std::max_element(all.begin(), all.end());
}

}  // namespace onepass

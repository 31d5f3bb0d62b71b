// The checkpoints of a run of `onepass train`: directories "step-<8 digits>" of
// one directory.
//
//   ASSIGN_OR_RETURN(auto checkpoints,
//                    TrainCheckpoints::Create(options, communicator));
//   ASSIGN_OR_RETURN(auto trainer, Trainer::Create(...));
//   RETURN_IF_ERROR(checkpoints->Resume(*trainer));
//   ...                                              // steps
//   std::vector<SavedStep> saved;
//   ASSIGN_OR_RETURN(saved, checkpoints->Save(*trainer));
//   ...                                              // at the end
//   ASSIGN_OR_RETURN(saved, checkpoints->Finish());
//
// All functions but accessors are collective.

#ifndef ONEPASS_TOOLS_TRAIN_CHECKPOINTS_H_
#define ONEPASS_TOOLS_TRAIN_CHECKPOINTS_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/async_save.h"
#include "checkpoint/find.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/save.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "tools/trainer.h"

namespace onepass {

// The same on all ranks; errors name the flags.
struct TrainCheckpointOptions {
  std::string save_dir;  // empty: nothing is saved
  std::string load_dir;  // of what to resume from; empty: save_dir
  int64_t keep_last = 3;
  bool resume = false;
  // Where the newest one is damaged, the newest that is not.
  bool resume_from_previous = false;
  // Of each rank, of the host and of the device apart.
  int64_t budget_bytes = kDefaultBudget.host;
  // Whether training goes on while a checkpoint is written.
  bool async = false;
};

// A checkpoint that is there.
struct SavedStep {
  int64_t step;
  // The bytes are those of all ranks; the path is that of rank 0.
  SaveReport report;
  // Why older ones stay that were to be removed, on rank 0. The run goes on.
  absl::Status removal;
};

class TrainCheckpoints {
 public:
  // Makes save_dir where it is missing, and finds what Resume() is to take.
  // FailedPrecondition: save_dir has checkpoints, of another run than that
  // which is resumed. NotFound: load_dir has none. DataLoss, with the file: the
  // newest one is damaged, and resume_from_previous not set, or all are.
  // (Without it, damage of tensors is seen by Resume().) Others: of the
  // directories. Kernel and device outlive the result; the trainer, which they
  // are of, does not have to.
  static absl::StatusOr<std::unique_ptr<TrainCheckpoints>> Create(
      const TrainCheckpointOptions& options, const Kernel& kernel,
      Device& device, Communicator& communicator);

  // What a user wants to know of what was found, on rank 0.
  const std::vector<std::string>& remarks() const { return remarks_; }
  // What Resume() takes; empty where there is nothing.
  const std::string& found() const { return found_; }

  // Nothing, where there is nothing to resume from. Errors: those of
  // Trainer::Restore().
  absl::Status Resume(Trainer& trainer);

  bool saves() const { return !options_.save_dir.empty(); }
  // Saves, or with `async` waits for the save before and starts one. After each
  // that is complete all but the newest `keep_last` are removed, of those that
  // IsStepName() (tools/step_checkpoints.h), unless there are newer ones, which
  // are damaged then. What is complete now and was not before.
  absl::StatusOr<std::vector<SavedStep>> Save(Trainer& trainer);
  // Waits for the save under way, if there is one.
  absl::StatusOr<std::vector<SavedStep>> Finish();
  // The last step that save_dir has, or will have, of this trainer; -1: none.
  int64_t saved_step() const { return saved_step_; }

  // A signal that a rank has received (tools/stop_signals.h), the same on all;
  // 0 where none has.
  absl::StatusOr<int> AgreeOnSignal(int mine);

 private:
  TrainCheckpoints(const TrainCheckpointOptions& options,
                   std::unique_ptr<Communicator> communicator)
      : options_(options), communicator_(std::move(communicator)) {}

  bool SavesWhereItLoads() const;
  // On rank 0: the path to resume from, or nothing.
  absl::StatusOr<std::string> Find();
  absl::StatusOr<std::string> Choose(
      const std::vector<FoundCheckpoint>& checkpoints);
  // One that save_dir has not, the same on all ranks.
  absl::StatusOr<std::string> FreeName(int64_t step);
  // After a checkpoint was published.
  absl::StatusOr<std::vector<SavedStep>> Saved(int64_t step,
                                               const std::string& name,
                                               SaveReport report);
  // On rank 0.
  absl::Status RemoveOld(const std::string& saved) const;

  bool root() const { return communicator_->rank() == 0; }
  const std::string& load_dir() const {
    return options_.load_dir.empty() ? options_.save_dir : options_.load_dir;
  }

  const TrainCheckpointOptions options_;
  const std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<MemoryBudget> budget_;
  // Of the saves under way: with a pool and a communicator of their own.
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<AsyncSaver> saver_;
  std::string saving_;  // the name of that under way, or empty
  std::vector<std::string> remarks_;
  std::string found_;
  bool same_directory_ = false;  // that is loaded from and saved to
  // Names of those whose damage was found when the one to resume from was.
  std::set<std::string> damaged_;
  int64_t saved_step_ = -1;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_TRAIN_CHECKPOINTS_H_

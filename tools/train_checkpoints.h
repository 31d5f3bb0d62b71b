// The checkpoints of a run of `onepass train`: directories "step-<8 digits>" of
// one directory.
//
//   ASSIGN_OR_RETURN(auto checkpoints,
//                    TrainCheckpoints::Create(options, communicator));
//   ASSIGN_OR_RETURN(auto trainer, Trainer::Create(...));
//   RETURN_IF_ERROR(checkpoints->Resume(*trainer));
//   ...                                              // steps
//   ASSIGN_OR_RETURN(SaveReport report, checkpoints->Save(*trainer));
//
// All functions but accessors are collective.

#ifndef ONEPASS_TOOLS_TRAIN_CHECKPOINTS_H_
#define ONEPASS_TOOLS_TRAIN_CHECKPOINTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/find.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/save.h"
#include "dispatch/communicator.h"
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
};

class TrainCheckpoints {
 public:
  // Makes save_dir where it is missing, and finds what Resume() is to take.
  // FailedPrecondition: save_dir has checkpoints, of another run than that
  // which is resumed. DataLoss, with the file: the newest one is damaged, and
  // resume_from_previous not set, or all are. (Without it, damage of tensors is
  // seen by Resume().) Others: of the directories.
  static absl::StatusOr<std::unique_ptr<TrainCheckpoints>> Create(
      const TrainCheckpointOptions& options, Communicator& communicator);

  // What a user wants to know of what was found, on rank 0.
  const std::vector<std::string>& remarks() const { return remarks_; }
  // What Resume() takes; empty where there is nothing.
  const std::string& found() const { return found_; }

  // Nothing, where there is nothing to resume from. Errors: those of
  // Trainer::Restore().
  absl::Status Resume(Trainer& trainer);

  bool saves() const { return !options_.save_dir.empty(); }
  // Saves, and removes all but the newest `keep_last`, unless there are newer
  // ones, which are damaged then. The bytes of the report are those of all
  // ranks; its path is that of rank 0.
  absl::StatusOr<SaveReport> Save(Trainer& trainer);
  // The last step that save_dir has of this trainer; -1: none.
  int64_t saved_step() const { return saved_step_; }

  // A signal that a rank has received (tools/stop_signals.h), the same on all;
  // 0 where none has.
  absl::StatusOr<int> AgreeOnSignal(int mine);

 private:
  TrainCheckpoints(const TrainCheckpointOptions& options,
                   std::unique_ptr<Communicator> communicator)
      : options_(options), communicator_(std::move(communicator)) {}

  // On rank 0: the path to resume from, or nothing.
  absl::StatusOr<std::string> Find();
  absl::StatusOr<std::string> Choose(
      const std::vector<FoundCheckpoint>& checkpoints);
  // On rank 0: one that save_dir has not.
  std::string FreeName(int64_t step) const;
  absl::Status RemoveOld(const std::string& saved) const;

  bool root() const { return communicator_->rank() == 0; }
  const std::string& load_dir() const {
    return options_.load_dir.empty() ? options_.save_dir : options_.load_dir;
  }

  const TrainCheckpointOptions options_;
  const std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<MemoryBudget> budget_;
  std::vector<std::string> remarks_;
  std::string found_;
  int64_t saved_step_ = -1;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_TRAIN_CHECKPOINTS_H_

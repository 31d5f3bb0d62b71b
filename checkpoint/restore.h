// Brings the state of a checkpoint back, at any number of ranks: each reads
// what its own boxes need.
//
//   ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(path));
//   ASSIGN_OR_RETURN(StateRestore target, optimizer.RestoreState());
//   RestoreOptions options;
//   options.groups = optimizer.StateGroups();
//   ASSIGN_OR_RETURN(CheckpointMeta meta,
//                    RestoreCheckpoint(runtime, communicator, checkpoint,
//                                      std::move(target), options));
//   RETURN_IF_ERROR(optimizer.SetStateGroups(meta.groups));
//
// Matching is by name. All or nothing: until all ranks have found what they
// need, nothing is written; what fails later leaves the targets of all ranks
// unusable (dispatch/state.h).

#ifndef ONEPASS_CHECKPOINT_RESTORE_H_
#define ONEPASS_CHECKPOINT_RESTORE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/meta.h"
#include "dispatch/communicator.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"

namespace onepass {

struct RestoreOptions {
  // All parameters of the trainer, by group. They, and the options but lr, have
  // to be those of the checkpoint, in whatever order parameters are; lr is what
  // schedules change, and belongs to the state.
  std::vector<StateGroup> groups;
  // Lets a tensor be stored in another plain type (fp32, bf16, fp16) than that
  // of the target, and rounds to it.
  bool cast = false;
  // What else the trainer asks of what is beside tensors, as of the loss scale;
  // its error is that of the restore, before anything is written.
  std::function<absl::Status(const CheckpointMeta& meta)> check;
  // Memory that grows with tensors: what is read goes through half of the
  // host's bytes, 64 MiB at most; with `cast` at least 32 KiB of it, else 8.
  // Null: one of its own of kDefaultBudget.
  MemoryBudget* budget = nullptr;
};

// Collective. What the checkpoint holds beside tensors, with the groups in the
// order of the trainer's. The target has been committed then.
// FailedPrecondition, with the name: a tensor, parameter or group that is
// missing, extra, of another shape, type or step, or an option, or the leaf,
// that differs. DataLoss: as Checkpoint::Read(). The error of one rank is that
// of all.
absl::StatusOr<CheckpointMeta> RestoreCheckpoint(const Runtime& runtime,
                                                 Communicator& communicator,
                                                 Checkpoint& checkpoint,
                                                 StateRestore target,
                                                 const RestoreOptions& options);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_RESTORE_H_

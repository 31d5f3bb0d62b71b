// Saves the state of all ranks as a checkpoint: a directory that is there whole
// or not at all.
//
//   ASSIGN_OR_RETURN(StateLease lease, optimizer.LeaseState());
//   CheckpointMeta meta;
//   meta.step = step;
//   meta.groups = optimizer.StateGroups();
//   ASSIGN_OR_RETURN(SaveReport report,
//                    SaveCheckpoint(runtime, communicator, "runs", "step-100",
//                                   lease, meta, {}));
//
// Each rank writes files of its own
// ("rank-<rank>-of-<world>-32bit.safetensors",
// ...) and an index of them, into a directory "<name>.partial-<id>"; then rank
// 0 writes the manifest and gives the directory its name. What was complete
// before still is, at every moment. A rank that fails, or does not answer
// within the communicator's timeout, fails the save of all.

#ifndef ONEPASS_CHECKPOINT_SAVE_H_
#define ONEPASS_CHECKPOINT_SAVE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/meta.h"
#include "checkpoint/output_file.h"
#include "checkpoint/state_tensors.h"
#include "checkpoint/state_transfer.h"
#include "dispatch/communicator.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"

namespace onepass {

struct SaveOptions {
  ExportForm form = ExportForm::kExact;
  CheckpointLayout layout = CheckpointLayout::kFlat;
  // Whole tensors, gathered a chunk at a time and written by rank 0, instead of
  // each rank's own parts.
  bool full = false;
  // What the save may take, on each rank, of the device and of the host, of
  // memory that grows with tensors. Null: one of its own of kDefaultBudget.
  MemoryBudget* budget = nullptr;
  // Bytes that are converted, written and have a checksum at a time; less where
  // the budget is small.
  int64_t chunk_bytes = int64_t{8} << 20;
  // Those but kChunk are there to compare with: what they take of the device is
  // not of the budget.
  ExportGranularity granularity = ExportGranularity::kChunk;
  OutputFileOptions file;
};

struct SaveReport {
  std::string path;          // of the checkpoint
  int64_t bytes = 0;         // of this rank's files of tensors
  bool direct = true;        // whether all of them went around the page cache
  MemoryBudget::Bytes peak;  // of the budget
  double seconds = 0;
};

// Collective. InvalidArgument: a name that is none of a directory, state or a
// budget that makes no sense, ranks that differ about a tensor or do not have
// each of its elements once. AlreadyExists: `parent` has something of that
// name. FailedPrecondition: ranks have different options, or see different
// directories. Others: of the device, files and communicator. The error of one
// rank is that of all, with its number. "unknown" in an error of other ranks
// than 0: rank 0 did not say whether it published; a look at the directory
// decides. "published" in an error: the checkpoint is there, but may be gone
// should the machine crash (checkpoint/publish.h). Where all ranks agree that
// the save failed, what else it wrote is removed; if they could not, it stays,
// as a partial directory.
absl::StatusOr<SaveReport> SaveCheckpoint(
    const Runtime& runtime, Communicator& communicator,
    absl::string_view parent, absl::string_view name, const StateLease& lease,
    const CheckpointMeta& meta, const SaveOptions& options);

// Removes all but the newest `keep` complete checkpoints below `parent`, as
// their steps say. One process does it, after a checkpoint was published.
// InvalidArgument: keep below 1.
absl::Status KeepLast(absl::string_view parent, int keep);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_SAVE_H_

// One safetensors file of whole tensors out of a checkpoint.
//
//   ASSIGN_OR_RETURN(ConsolidateReport report,
//                    ConsolidateCheckpoint(kernel, pool, checkpoint,
//                                          "model.safetensors", {}));
//
// Tensors lie in it by the size of their elements, the largest first, and then
// by name, so that all are aligned.

#ifndef ONEPASS_CHECKPOINT_CONSOLIDATE_H_
#define ONEPASS_CHECKPOINT_CONSOLIDATE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/checkpoint.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"

namespace onepass {

enum class ConsolidatedForm : uint8_t {
  // Types as they are stored: codes, those of e4m3 as U8, with scales beside.
  kStored,
  // Values in fp32; of a remainder and its weight, the master.
  kFloat32,
};

struct ConsolidateOptions {
  ConsolidatedForm form = ConsolidatedForm::kStored;
  // Of memory that grows with tensors; at least 128 KiB.
  int64_t buffer_bytes = int64_t{64} << 20;
  // Called with the bytes of tensors that were written, and those that are to
  // be.
  std::function<void(int64_t done, int64_t all)> progress;
};

struct ConsolidateReport {
  int64_t tensors = 0;
  int64_t bytes = 0;  // of the file
};

// What is written is on the disk then. InvalidArgument: too small a buffer, too
// many tensors for the format. AlreadyExists: there is something at `out`,
// which stays. FailedPrecondition: a remainder without its weight of the same
// step. Others: as Checkpoint::Read() and FileError(). It is written as
// "<out>.partial-<process>", which is removed where it fails, and has its name
// once it is whole.
absl::StatusOr<ConsolidateReport> ConsolidateCheckpoint(
    const Kernel& kernel, ThreadPool& pool, Checkpoint& checkpoint,
    const std::string& out, const ConsolidateOptions& options);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_CONSOLIDATE_H_

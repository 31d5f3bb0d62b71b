// Whole tensors out of the parts that ranks have, a chunk at a time, on one of
// them: what a full checkpoint, or a full state dict, is made of.
//
//   ASSIGN_OR_RETURN(WholeState whole, FindWholeState(communicator, tensors,
//                                                     meta));
//   RETURN_IF_ERROR(GatherState(communicator, tensors, transfer, whole, buffer,
//                               rank == 0 ? &sink : nullptr, exported));

#ifndef ONEPASS_CHECKPOINT_GATHER_STATE_H_
#define ONEPASS_CHECKPOINT_GATHER_STATE_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/meta.h"
#include "checkpoint/state_sink.h"
#include "checkpoint/state_tensors.h"
#include "checkpoint/state_transfer.h"
#include "dispatch/communicator.h"

namespace onepass {

// The arrays of all ranks together: each once, as a whole.
struct WholeState {
  struct Part {
    int rank;
    int array;  // index in the arrays of that rank
    Box box;
  };

  std::vector<StoredArray> arrays;
  std::vector<std::vector<Part>> parts;  // of each array, by rank
  // The arrays as an index has them, without files.
  checkpoint::Index index;
};

// Collective. InvalidArgument: a tensor of a parameter in no group; ranks that
// differ about a tensor, or do not have each of its elements once. Others: of
// the communicator. The error of one rank is that of all.
absl::StatusOr<WholeState> FindWholeState(Communicator& communicator,
                                          const StateTensors& tensors,
                                          const CheckpointMeta& meta);

// Collective: writes `whole` to the sink of rank 0, which is null on all
// others. Each rank reads through `buffer`, of the same size on all, at least
// 4096 bytes. `exported` is as that of ExportState(), on each rank of its own
// tensors. Errors: those of StateTransfer, of the sink and of `exported`, on
// all ranks; after them the sink is not valid.
absl::Status GatherState(Communicator& communicator,
                         const StateTensors& tensors, StateTransfer& transfer,
                         const WholeState& whole, absl::Span<char> buffer,
                         StateSink* sink,
                         absl::FunctionRef<absl::Status(int tensor)> exported);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_GATHER_STATE_H_

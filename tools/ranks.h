// The ranks of a subcommand, where they are threads of this process.
//
//   RETURN_IF_ERROR(RunThreadRanks(4, [&](Communicator& communicator) {
//     return Train(communicator);
//   }));
//
// Ranks that are processes are tools/mpi_rank.h's.

#ifndef ONEPASS_TOOLS_RANKS_H_
#define ONEPASS_TOOLS_RANKS_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/communicator.h"

namespace onepass {

inline constexpr int kMaxThreadRanks = 1024;

// Calls `work` on a thread for each rank, rank 0 on the caller's, and returns
// when all have returned: the first error in time, but one that a rank was told
// of another (Aborted) only where there is no other. A rank that returned is
// gone for the others. What `work` throws goes on to the caller.
// InvalidArgument: ranks outside 1 to kMaxThreadRanks. ResourceExhausted: the
// system refused a thread.
absl::Status RunThreadRanks(
    int ranks, absl::FunctionRef<absl::Status(Communicator&)> work);

// Where the ranks of a communicator run, this one among them.
struct RankNeighbours {
  int on_host;        // ranks of this host
  int on_processors;  // those of them that have the same processors as this
};

// Collective.
absl::StatusOr<RankNeighbours> FindNeighbours(Communicator& communicator);

// InvalidArgument on all ranks where one gives another `value` than rank 0: it
// names the first that does, and `what` that is. Collective.
absl::Status CheckSameOnAllRanks(Communicator& communicator,
                                 absl::string_view what,
                                 absl::string_view value);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_RANKS_H_

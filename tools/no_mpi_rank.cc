// In builds without MPI.

#include "absl/status/status.h"
#include "tools/mpi_rank.h"

namespace onepass {

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiRank() {
  return absl::UnimplementedError(
      "this onepass was built without MPI: build it with --config=mpi");
}

}  // namespace onepass

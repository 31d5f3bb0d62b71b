#include "tools/mpi_rank.h"

#include "dispatch/mpi_communicator.h"

namespace onepass {

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiRank() {
  return CreateMpiCommunicator({});
}

}  // namespace onepass

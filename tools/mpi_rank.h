// The rank that this process is among those that mpirun started.

#ifndef ONEPASS_TOOLS_MPI_RANK_H_
#define ONEPASS_TOOLS_MPI_RANK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "dispatch/communicator.h"

namespace onepass {

// Once a process. Unimplemented: this program was built without MPI. Errors of
// CreateMpiCommunicator().
absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiRank();

}  // namespace onepass

#endif  // ONEPASS_TOOLS_MPI_RANK_H_

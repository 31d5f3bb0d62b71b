// Ranks that are MPI processes. Built with --config=mpi, where Open MPI is
// installed; left out without.
//
//   mpirun -n 4 trainer                                // all of its processes
//
//   ASSIGN_OR_RETURN(auto mpi, CreateMpiCommunicator({}));
//
// Bytes go through buffers of the communicator's own, a chunk at a time: where
// a rank falls silent in the middle of a call, nothing goes on writing into
// memory of the caller's. The deadline is one for all ranks to call, and then
// one from each chunk to the next, so that large transfers may take longer.
//
// A rank that only computes hears nothing: messages travel while their
// receivers are in a call. Waiting ranks give the processor away, as they may
// share it. What a dead communicator still has under way keeps its buffers
// until the process ends: MPI takes no message back.
//
// What the others are told of an error, as the reason of Abort(), is cut after
// 500 bytes.

#ifndef ONEPASS_DISPATCH_MPI_COMMUNICATOR_H_
#define ONEPASS_DISPATCH_MPI_COMMUNICATOR_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "dispatch/communicator.h"

namespace onepass {

struct MpiCommunicatorOptions : CommunicatorOptions {
  static constexpr int64_t kMaxChunkBytes = int64_t{1} << 30;

  // Bytes that travel as one message, 1 to kMaxChunkBytes; where ranks differ,
  // the least. A communicator has four buffers of as many.
  int64_t chunk_bytes = int64_t{1} << 20;
};

// All ranks of MPI_COMM_WORLD call it, from one thread of each. Initialises
// MPI, for use by several threads, where nobody has done so; it is then
// finalised when the process ends by exit() or by returning from main(), which
// waits for the other ranks to end too. Where the trainer finalises MPI itself,
// the communicator is of no use from then on.
//
// Each call takes one of MPI's own communicators until MPI is finalised;
// Duplicate() takes none.
//
// Meanwhile errors of MPI_COMM_WORLD are returned, whatever handler it has;
// that is then as it was. No other thread sets that handler meanwhile, or
// relies on it.
//
// InvalidArgument: a timeout that is not above 0, a chunk_bytes out of range.
// FailedPrecondition: however MPI was initialised before, it does not allow
// several threads; it was finalised. DeadlineExceeded: not all ranks called.
// Internal: an error of MPI, as that it has no communicator left.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator(
    const MpiCommunicatorOptions& options);

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_MPI_COMMUNICATOR_H_

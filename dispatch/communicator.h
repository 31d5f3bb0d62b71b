// How ranks exchange bytes: all-gather, all-to-all, broadcast, barrier. It only
// moves data; sums are formed by whoever receives, in rank order, so that every
// backend gives the same bits.
//
//   ASSIGN_OR_RETURN(auto ranks, CreateThreadCommunicators(4, {}));
//   std::thread([&] { Train(*ranks[0]); }) ...      // one thread a rank
//
// Ranks are threads of one process (dispatch/thread_communicator.h) or MPI
// processes (dispatch/mpi_communicator.h). Another backend derives from
// CollectiveCommunicator (dispatch/collective.h), and its tests link
// :communicator_conformance.
//
// Every rank calls the same functions with the same sizes in the same order, as
// is usual with collectives. Calls return when the caller may use its result
// and reuse its memory; none goes on in the background.
//
// Every wait has a deadline (CommunicatorOptions::timeout). A rank that does
// not answer within it, that called another function or with another size, that
// said it failed (Abort()), or whose communicator is gone, makes the call
// return an error that names the rank: DeadlineExceeded for silence,
// FailedPrecondition for another call, Aborted for the others. From then on
// the communicator is dead: all calls of all ranks return that error, or one
// that names whoever found it, within the deadline. What the call was to
// receive is then undefined.
//
// Arguments that are wrong in themselves (InvalidArgument: bytes below 0, a
// null pointer with bytes, a root that is no rank, memory that overlaps, sizes
// beyond 64 bits) are found before anybody is asked: that call changes nothing,
// and for the others it has not taken place. They wait for the right one, until
// their deadline.
//
// Memory is what threads of this process may read and write: host memory, or
// that of a device with Device::host_accessible(). Where ranks share a process,
// none receives into memory that another gives. Of 0 bytes it may be null;
// ranks wait for one another all the same.

#ifndef ONEPASS_DISPATCH_COMMUNICATOR_H_
#define ONEPASS_DISPATCH_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace onepass {

struct CommunicatorOptions {
  // Above 0; more than a year is a year.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

// One rank's end. Functions of one object are called by one thread at a time.
class Communicator {
 public:
  // Its rank takes part no more: where others go on to call, they get an error
  // that names it. Where none does, as in an orderly end, nobody sees one.
  virtual ~Communicator() = default;

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // `all` gets size() times `bytes`: what each rank gave, in the order of
  // ranks. `mine` may be the caller's own place in `all`, and may not overlap
  // it otherwise.
  virtual absl::Status AllGather(const void* mine, void* all,
                                 int64_t bytes) = 0;
  // `send` holds size() times `bytes`, one for each rank; `received` gets what
  // each rank had for the caller. They do not overlap.
  virtual absl::Status AllToAll(const void* send, void* received,
                                int64_t bytes) = 0;
  // `data` of `root` goes to that of all others.
  virtual absl::Status Broadcast(void* data, int64_t bytes, int root) = 0;
  virtual absl::Status Barrier() = 0;

  // Another communicator of the same ranks, whose calls do not meet those of
  // this one. All ranks call it. It has the timeout of this one; neither's
  // death is the other's.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Duplicate() = 0;

  // Tells the others that this rank goes no further, and why. Their calls, also
  // those under way that wait for it, return an error that names this rank and
  // holds the reason. On a communicator that is dead it does nothing.
  virtual void Abort(absl::string_view reason) = 0;

 protected:
  Communicator() = default;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_COMMUNICATOR_H_

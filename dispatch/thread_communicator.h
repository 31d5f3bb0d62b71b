// Ranks that are threads of this process.
//
//   ASSIGN_OR_RETURN(auto ranks, CreateThreadCommunicators(4, {}));
//   for (auto& rank : ranks) threads.emplace_back([&] { Train(*rank); });
//
// A rank copies out of the memory of the others, once all have called; a call
// returns when all have copied. Only the wait for all to call has a deadline:
// who copies needs no answer from anybody. Calls of ranks that are on time
// allocate nothing.

#ifndef ONEPASS_DISPATCH_THREAD_COMMUNICATOR_H_
#define ONEPASS_DISPATCH_THREAD_COMMUNICATOR_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "dispatch/communicator.h"

namespace onepass {

// Element i is rank i's. InvalidArgument: ranks below 1, a timeout that is not
// above 0.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>>
CreateThreadCommunicators(int ranks, const CommunicatorOptions& options);

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_THREAD_COMMUNICATOR_H_

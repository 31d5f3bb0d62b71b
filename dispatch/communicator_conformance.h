// What every backend of dispatch/communicator.h has to do. The test of a
// backend links :communicator_conformance, whose tests run on the ranks that
// its OnRanks() makes.
//
//   void OnRanks(const CommunicatorOptions& options, RankBody body) {
//     ... body(communicator, control) on each of 4 ranks ...
//   }

#ifndef ONEPASS_DISPATCH_COMMUNICATOR_CONFORMANCE_H_
#define ONEPASS_DISPATCH_COMMUNICATOR_CONFORMANCE_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "dispatch/communicator.h"

namespace onepass {

// What a rank does with its end of the communicator under test, and of another,
// of kLong, on which ranks tell one another how far they are.
using RankBody = absl::FunctionRef<void(std::unique_ptr<Communicator> tested,
                                        Communicator& control)>;

// Defined by the test of a backend: calls `body` once on each rank, at the same
// time, and returns when it has returned on all ranks of this process. It may
// do so for several numbers of ranks. `options` are those of the communicator
// under test.
void OnRanks(const CommunicatorOptions& options, RankBody body);

// A timeout of what must succeed, on a busy machine too.
inline constexpr std::chrono::milliseconds kLong = std::chrono::seconds(40);
// One of what must fail; longer than ranks take to come from a barrier.
std::chrono::milliseconds Short();

// Each fails the test where the call does, or gives wrong bytes. `round` makes
// the bytes of one call unlike those of another. What is given is overwritten
// as soon as the call has returned.
void ExpectAllGather(Communicator& communicator, int64_t bytes, int64_t round,
                     bool in_place = false);
void ExpectAllToAll(Communicator& communicator, int64_t bytes, int64_t round);
void ExpectBroadcast(Communicator& communicator, int64_t bytes, int64_t round,
                     int root);

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_COMMUNICATOR_CONFORMANCE_H_

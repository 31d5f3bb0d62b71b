// How ranks tell each other what came out, so that all go on or none does.
//
//   const absl::Status mine = Write(...);
//   RETURN_IF_ERROR(Agree(communicator, mine));   // of whoever failed

#ifndef ONEPASS_CHECKPOINT_AGREEMENT_H_
#define ONEPASS_CHECKPOINT_AGREEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/communicator.h"

namespace onepass {

// Collective: the texts of all ranks, by rank. They are short: each rank has
// memory of as many times the longest as there are ranks. Errors: those of the
// communicator.
absl::StatusOr<std::vector<std::string>> Exchange(Communicator& communicator,
                                                  absl::string_view mine);

// Collective: OK where all ranks' are; else the error of the first rank that
// has one, which is named, the same on all.
absl::Status Agree(Communicator& communicator, const absl::Status& mine);

// Both at once: the texts, unless a rank has an error.
absl::StatusOr<std::vector<std::string>> ExchangeOrFail(
    Communicator& communicator, const absl::StatusOr<std::string>& mine);

// Whether an error was agreed on by all ranks, which can then go on to talk;
// else it is the communicator's.
bool IsAgreed(const absl::Status& error);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_AGREEMENT_H_

// What two boxes of one tensor have in common, as runs of elements that follow
// each other in both.

#ifndef ONEPASS_CHECKPOINT_BOX_RUNS_H_
#define ONEPASS_CHECKPOINT_BOX_RUNS_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "dispatch/state.h"

namespace onepass {

// Calls visit(i, j, n) for each run: elements [i, i + n) of `a` in C order are
// elements [j, j + n) of `b`. Both boxes are of a tensor of `shape`, and keep
// the rules of Box: of as many dimensions, or ranges of one. In ascending order
// of both i and j. An error of `visit` ends it.
absl::Status ForEachCommonRun(
    absl::Span<const int64_t> shape, const Box& a, const Box& b,
    absl::FunctionRef<absl::Status(int64_t i, int64_t j, int64_t n)> visit);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_BOX_RUNS_H_

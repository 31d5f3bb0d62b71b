// What differs between two checkpoints, whatever the ranks that wrote them.
//
//   ASSIGN_OR_RETURN(CompareReport report, CompareCheckpoints(a, b, {}));
//   if (!report.equal()) ...
//
// Tensors are matched by name. How they are cut into boxes, chunks and files is
// no difference, nor is the order of parameters in a group.

#ifndef ONEPASS_CHECKPOINT_COMPARE_H_
#define ONEPASS_CHECKPOINT_COMPARE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/checkpoint.h"

namespace onepass {

struct CompareOptions {
  // Of memory that grows with tensors; at least 3 * 4096.
  int64_t buffer_bytes = int64_t{48} << 20;
  // Called with the bytes of tensors that were compared, and those that are to
  // be.
  std::function<void(int64_t done, int64_t all)> progress;
};

struct TensorDifference {
  enum class Kind : uint8_t { kOnlyInA, kOnlyInB, kType, kShape, kElements };

  std::string name;
  Kind kind = Kind::kElements;
  // Of types and shapes: "[3, 4] and [4, 3]".
  std::string what;
  // Of elements, which are compared bit by bit:
  int64_t differing = 0;
  int64_t numel = 0;
  int64_t first = 0;  // in C order
  // Between two that differ: of values, where the type is one of floating
  // point; of codes as integers or unscaled numbers, where it is not or there
  // are scales. May be infinity.
  double largest = 0;
  bool codes = false;
  // Differing elements of which a value is NaN; `largest` is of the others.
  int64_t nans = 0;
};

// "only_in_a", "only_in_b", "type", "shape", "elements".
const char* Name(TensorDifference::Kind kind);

struct CompareReport {
  std::vector<TensorDifference> tensors;  // by name
  // A sentence for each: step, loss scale, groups, ...
  std::vector<std::string> others;
  int64_t tensors_compared = 0;  // whose elements were

  bool equal() const { return tensors.empty() && others.empty(); }
};

// InvalidArgument: too small a buffer. Others: as Checkpoint::Read().
absl::StatusOr<CompareReport> CompareCheckpoints(Checkpoint& a, Checkpoint& b,
                                                 const CompareOptions& options);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_COMPARE_H_

// A range of a tensor of a checkpoint, whatever the boxes are that ranks wrote
// of it.
//
//   RETURN_IF_ERROR(ReadRange(checkpoint, tensor, first, numel, buffer, out));

#ifndef ONEPASS_CHECKPOINT_READ_RANGE_H_
#define ONEPASS_CHECKPOINT_READ_RANGE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/checkpoint.h"

namespace onepass {

// Writes elements [first, first + numel) of the tensor, in C order, to `out`;
// they are some of its elements. `buffer` and errors: Checkpoint::Read().
absl::Status ReadRange(Checkpoint& checkpoint, const Checkpoint::Tensor& tensor,
                       int64_t first, int64_t numel, absl::Span<char> buffer,
                       char* out);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_READ_RANGE_H_

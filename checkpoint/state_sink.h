// Where exported state goes: a state dict in memory (checkpoint/state_dict.h),
// safetensors files (checkpoint/state_files.h).
//
//   RETURN_IF_ERROR(sink.Open(tensors.arrays()));
//   // Each array from its first element to its last; arrays in any order.
//   ASSIGN_OR_RETURN(absl::Span<char> room, sink.Next(array, bytes));
//   RETURN_IF_ERROR(sink.Written(array, room.size()));  // after filling it
//   RETURN_IF_ERROR(sink.Close());                      // now it is valid
//
// Another destination derives from StateSink.

#ifndef ONEPASS_CHECKPOINT_STATE_SINK_H_
#define ONEPASS_CHECKPOINT_STATE_SINK_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/state_tensors.h"

namespace onepass {

// Open, closed or failed: after an error each call returns that error. By one
// thread at a time.
class StateSink {
 public:
  virtual ~StateSink() = default;
  StateSink(const StateSink&) = delete;
  StateSink& operator=(const StateSink&) = delete;

  // Once, first: all arrays that come. They outlive the sink.
  virtual absl::Status Open(const std::vector<StoredArray>& arrays) = 0;
  // Room for the next elements of an array, by its index: one at least, and
  // `bytes` at most, which are above 0 and not more than are left of it. It is
  // aligned to elements, and the caller's until Written().
  virtual absl::StatusOr<absl::Span<char>> Next(int array, int64_t bytes) = 0;
  // The first `bytes` of the room are there.
  virtual absl::Status Written(int array, int64_t bytes) = 0;
  // After all of all arrays.
  virtual absl::Status Close() = 0;

 protected:
  StateSink() = default;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_STATE_SINK_H_

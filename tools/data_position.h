// Where in its data a run of `onepass train` is: what a checkpoint holds of it
// beside tensors, as a line of text.
//
//   meta.user = EncodeDataPosition(position);
//   ...
//   ASSIGN_OR_RETURN(DataPosition position, DecodeDataPosition(meta.user));

#ifndef ONEPASS_TOOLS_DATA_POSITION_H_
#define ONEPASS_TOOLS_DATA_POSITION_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/dtype.h"

namespace onepass {

// The ranks draw from one stream of random numbers, each its own part of a
// micro-batch: how many were drawn is the position of all, whatever the number
// of ranks.
struct DataPosition {
  int64_t seed = 0;  // of the stream
  int64_t text_bytes = 0;
  uint64_t text_hash = 0;  // XXH3, 64 bits
  int64_t drawn = 0;       // at most kMostDrawn
  // What else the masters depend on, but the learning rate, which is state, and
  // the number of ranks.
  int64_t batch = 1;
  int64_t micro_batches = 1;
  double clip = 0;
  DType precision = DType::kFloat32;
};

// A run that goes on from there has room to count.
inline constexpr int64_t kMostDrawn = int64_t{1} << 62;

std::string EncodeDataPosition(const DataPosition& position);

// DataLoss: it is no text that EncodeDataPosition() wrote.
absl::StatusOr<DataPosition> DecodeDataPosition(absl::string_view text);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_DATA_POSITION_H_

#include "checkpoint/export_state.h"

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/return_if_error.h"

namespace onepass {

absl::Status ExportState(const StateTensors& tensors, StateTransfer& transfer,
                         StateSink& sink,
                         absl::FunctionRef<absl::Status(int tensor)> exported) {
  const std::vector<StoredArray>& arrays = tensors.arrays();
  ONEPASS_RETURN_IF_ERROR(sink.Open(arrays));
  for (size_t i = 0; i < arrays.size(); ++i) {
    const StoredArray& array = arrays[i];
    const int index = static_cast<int>(i);
    const int64_t element = ByteSize(array.type);
    for (int64_t first = 0; first < array.numel;) {
      absl::Span<char> room;
      ONEPASS_ASSIGN_OR_RETURN(
          room, sink.Next(index, (array.numel - first) * element));
      const int64_t numel = static_cast<int64_t>(room.size()) / element;
      ONEPASS_RETURN_IF_ERROR(transfer.Read(array, first, numel, room.data()));
      ONEPASS_RETURN_IF_ERROR(sink.Written(index, numel * element));
      first += numel;
    }
    const bool last =
        i + 1 == arrays.size() || arrays[i + 1].tensor != array.tensor;
    if (last) ONEPASS_RETURN_IF_ERROR(exported(array.tensor));
  }
  return sink.Close();
}

}  // namespace onepass

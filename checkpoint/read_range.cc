#include "checkpoint/read_range.h"

#include <cstring>

#include "checkpoint/safetensors.h"
#include "dispatch/state.h"

namespace onepass {

absl::Status ReadRange(Checkpoint& checkpoint, const Checkpoint::Tensor& tensor,
                       int64_t first, int64_t numel, absl::Span<char> buffer,
                       char* out) {
  const int64_t element = ByteSize(tensor.type);
  const Box range = {{first}, {numel}};
  return checkpoint.Read(
      tensor, range, buffer, [&](int64_t at, int64_t n, const char* data) {
        std::memcpy(out + at * element, data, static_cast<size_t>(n * element));
        return absl::OkStatus();
      });
}

}  // namespace onepass

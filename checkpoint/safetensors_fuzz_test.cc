// Any bytes as a safetensors file.

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/safetensors.h"
#include "tests/fuzz_require.h"

namespace onepass {
namespace {

void ExpectEqual(const SafetensorsHeader& a, const SafetensorsHeader& b) {
  ONEPASS_FUZZ_REQUIRE(a.metadata == b.metadata);
  ONEPASS_FUZZ_REQUIRE(a.tensors.size() == b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const SafetensorsTensor& x = a.tensors[i];
    const SafetensorsTensor& y = b.tensors[i];
    ONEPASS_FUZZ_REQUIRE(x.name == y.name && x.type == y.type &&
                         x.shape == y.shape && x.begin == y.begin &&
                         x.end == y.end);
  }
}

void Fuzz(absl::string_view file) {
  const int64_t file_bytes = static_cast<int64_t>(file.size());
  const absl::StatusOr<int64_t> length = SafetensorsHeaderLength(
      file.substr(0, kSafetensorsLengthBytes), file_bytes);
  ONEPASS_FUZZ_REQUIRE(length.ok() || absl::IsDataLoss(length.status()));
  if (file_bytes < kSafetensorsLengthBytes) return;
  file.remove_prefix(kSafetensorsLengthBytes);
  // A length that is wrong is to hide nothing: then some other.
  const size_t text_bytes = length.ok() ? static_cast<size_t>(*length)
                            : file.empty()
                                ? 0
                                : file.size() - file[0] % file.size();
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(file.substr(0, text_bytes), file_bytes);
  if (!header.ok()) {
    ONEPASS_FUZZ_REQUIRE(absl::IsDataLoss(header.status()));
    return;
  }
  // What is taken can be written, and is then the same.
  const absl::StatusOr<std::string> bytes = SerializeSafetensorsHeader(*header);
  ONEPASS_FUZZ_REQUIRE(bytes.ok());
  const absl::StatusOr<SafetensorsHeader> again = ParseSafetensorsHeader(
      absl::string_view(*bytes).substr(kSafetensorsLengthBytes),
      static_cast<int64_t>(bytes->size()) + header->data_bytes());
  ONEPASS_FUZZ_REQUIRE(again.ok());
  ExpectEqual(*header, *again);
}

}  // namespace
}  // namespace onepass

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  onepass::Fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}

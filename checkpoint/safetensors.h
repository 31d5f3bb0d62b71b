// The header of a safetensors file, read and written.
//
//   SafetensorsHeader header;
//   header.tensors.push_back(
//       {"weight", SafetensorsType::kF32, {numel}, 0, 4 * numel});
//   std::string bytes;
//   ASSIGN_OR_RETURN(bytes, SerializeSafetensorsHeader(header));
//   // write `bytes`, then the data of the tensors
//
//   int64_t length;
//   ASSIGN_OR_RETURN(length,
//                    SafetensorsHeaderLength(first_8_bytes, file_bytes));
//   ASSIGN_OR_RETURN(header,
//                    ParseSafetensorsHeader(length_bytes_of_text, file_bytes));
//
// The format (github.com/huggingface/safetensors): 8 bytes, little endian, the
// length of a JSON text; the text, an object, which may end in spaces; the
// data. The object has for each tensor its "dtype", "shape" and "data_offsets",
// its beginning and end in the data, and may have "__metadata__", texts by
// texts. Files come from outside: every rule is checked, and nothing is
// allocated that the text does not hold.

#ifndef ONEPASS_CHECKPOINT_SAFETENSORS_H_
#define ONEPASS_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace onepass {

enum class SafetensorsType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64,
};

// "F32", ...
const char* Name(SafetensorsType type);
int64_t ByteSize(SafetensorsType type);

struct SafetensorsTensor {
  std::string name;
  SafetensorsType type;
  std::vector<int64_t> shape;
  // In the data section, in bytes.
  int64_t begin;
  int64_t end;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  // In the order of their data.
  std::vector<SafetensorsTensor> tensors;

  int64_t data_bytes() const {
    return tensors.empty() ? 0 : tensors.back().end;
  }
};

// Of the text.
inline constexpr int64_t kMostSafetensorsHeaderBytes = 100'000'000;
// Where the data section of our files begins at a multiple of.
inline constexpr int64_t kSafetensorsAlignment = 4096;
inline constexpr int64_t kSafetensorsLengthBytes = 8;

// The length of the text, from the first 8 bytes of a file of `file_bytes`.
// DataLoss: it is too large for the format or the file, or there are fewer
// bytes.
absl::StatusOr<int64_t> SafetensorsHeaderLength(absl::string_view first_bytes,
                                                int64_t file_bytes);

// DataLoss, which says what is wrong and of which tensor: the text breaks a
// rule of the format, or the tensors do not take all of the data section of a
// file of `file_bytes`, one after the other from its beginning.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view text,
                                                         int64_t file_bytes);

// The length and the text, which ends in spaces up to kSafetensorsAlignment.
// InvalidArgument: tensors whose names are empty, hold a NUL, are no UTF-8 or
// are there twice, or whose data is not their shape's or does not follow that
// of the one before; a text that is too long.
absl::StatusOr<std::string> SerializeSafetensorsHeader(
    const SafetensorsHeader& header);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_SAFETENSORS_H_

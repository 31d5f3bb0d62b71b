// Prints what checkpoint/safetensors.h reads of a file: a line
// "<name> <type> <shape> <sum of its bytes>" for each tensor, the sum being
// that of 31 to the power of how many follow, modulo 2^64.
//
//   print_safetensors FILE

#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "checkpoint/safetensors.h"

namespace onepass {
namespace {

absl::Status Print(const std::string& bytes) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  const absl::string_view all = bytes;
  const absl::StatusOr<int64_t> length =
      SafetensorsHeaderLength(all.substr(0, kSafetensorsLengthBytes), size);
  if (!length.ok()) return length.status();
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(
      all.substr(kSafetensorsLengthBytes, static_cast<size_t>(*length)), size);
  if (!header.ok()) return header.status();
  const absl::string_view data =
      all.substr(static_cast<size_t>(kSafetensorsLengthBytes + *length));
  for (const SafetensorsTensor& tensor : header->tensors) {
    uint64_t sum = 0;
    for (int64_t i = tensor.begin; i < tensor.end; ++i) {
      sum = sum * 31 + static_cast<unsigned char>(data[i]);
    }
    std::cout << tensor.name << " " << Name(tensor.type) << " ["
              << absl::StrJoin(tensor.shape, ",") << "] " << sum << "\n";
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: print_safetensors FILE\n";
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const absl::Status status =
      onepass::Print({std::istreambuf_iterator<char>(file), {}});
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}

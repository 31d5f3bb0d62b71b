#include "dispatch/dtype.h"

namespace onepass {

int64_t ByteSize(DType type) {
  switch (type) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

const char* Name(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kFloat8E4M3:
      return "e4m3";
  }
  return "unknown type";
}

}  // namespace onepass

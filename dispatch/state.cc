#include "dispatch/state.h"

namespace onepass {

const char* Name(StateKind kind) {
  switch (kind) {
    case StateKind::kMaster:
      return "master_param";
    case StateKind::kExpAvg:
      return "exp_avg";
    case StateKind::kExpAvgSq:
      return "exp_avg_sq";
    case StateKind::kParam:
      return "param";
  }
  return "unknown";
}

int64_t ByteSize(StateType type) {
  switch (type) {
    case StateType::kFloat32:
      return 4;
    case StateType::kBFloat16:
    case StateType::kFloat16:
    case StateType::kScaledFloat16:
    case StateType::kInt16Remainder:
      return 2;
    case StateType::kScaledFloat8E4M3:
      return 1;
  }
  return 0;
}

const char* Name(StateType type) {
  switch (type) {
    case StateType::kFloat32:
      return "fp32";
    case StateType::kBFloat16:
      return "bf16";
    case StateType::kFloat16:
      return "fp16";
    case StateType::kScaledFloat16:
      return "scaled fp16";
    case StateType::kScaledFloat8E4M3:
      return "scaled e4m3";
    case StateType::kInt16Remainder:
      return "int16 remainder";
  }
  return "unknown";
}

}  // namespace onepass

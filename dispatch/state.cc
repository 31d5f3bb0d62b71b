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
  }
  return "unknown";
}

}  // namespace onepass

// What a checkpoint holds beside tensors.

#ifndef ONEPASS_CHECKPOINT_META_H_
#define ONEPASS_CHECKPOINT_META_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dispatch/state.h"

namespace onepass {

// The same on all ranks, but for names
// of parameters in groups, of which each rank may have its own, and `user`,
// which is that of rank 0.
struct CheckpointMeta {
  int64_t step = 0;
  std::vector<StateGroup> groups;
  std::optional<LossScaleState> loss_scale;
  std::string user;  // any bytes: where in the data the trainer is, ...
};

// How the keys of tensors and groups are presented: checkpoint/layout.h.
enum class CheckpointLayout : uint8_t { kFlat, kNested };

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_META_H_

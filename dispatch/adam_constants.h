// The constants of one step of Adam: one arithmetic for those that the host
// computes and for those that a device computes where lr and the number of the
// step live there (AdvanceStepArgs of dispatch/operations.h).
//
//   const AdamRule rule = {0.9f, 0.999f, 1e-8f, 0.01f, WeightDecay::kAdamW};
//   const AdamConstants constants = ComputeConstants(rule, /*lr=*/1e-3f, t);
//
// offload/adam_options.h makes a rule of options, and checks them.

#ifndef ONEPASS_DISPATCH_ADAM_CONSTANTS_H_
#define ONEPASS_DISPATCH_ADAM_CONSTANTS_H_

#include <cstdint>

#include "dispatch/kernel.h"

namespace onepass {

// What does not change with the step.
struct AdamRule {
  float beta1 = 0.9f;         // in [0, 1)
  float beta2 = 0.999f;       // in [0, 1)
  float eps = 1e-8f;          // >= 0
  float weight_decay = 0.0f;  // >= 0
  WeightDecay decay_mode = WeightDecay::kNone;
  bool bias_correction = true;
};

// Those of step t, counted from 1: a pure function of its arguments, with the
// same bits on every platform (no libm), whatever the caller's floating-point
// environment. Checks nothing: where lr is too large for fp32, or t below 1,
// the step size is not finite.
AdamConstants ComputeConstants(const AdamRule& rule, float lr, int64_t t);

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_ADAM_CONSTANTS_H_

#include "dispatch/adam_constants.h"

#include <cmath>

#include "dispatch/fp_environment.h"

namespace onepass {
namespace {

// base^t by binary exponentiation from the lowest bit of t up: a fixed sequence
// of double multiplications, where pow() differs between platforms in the last
// bit.
double Power(double base, int64_t t) {
  double result = 1;
  for (; t > 0; t >>= 1) {
    if ((t & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

// Not inlined: its arithmetic may not leave the environment its caller sets.
[[gnu::noinline]] void Compute(const AdamRule& rule, float lr, int64_t t,
                               AdamConstants& c) {
  c.beta1 = rule.beta1;
  c.beta2 = rule.beta2;
  c.one_minus_beta1 = 1.0f - c.beta1;
  c.one_minus_beta2 = 1.0f - c.beta2;
  c.eps = rule.eps;
  c.weight_decay = rule.weight_decay;
  double correction1 = 1;
  double correction2 = 1;
  if (rule.bias_correction) {
    correction1 = 1 - Power(c.beta1, t);
    correction2 = 1 / std::sqrt(1 - Power(c.beta2, t));
  }
  c.step_size = static_cast<float>(-static_cast<double>(lr) / correction1);
  c.bias_correction2 = static_cast<float>(correction2);
  c.decay_mode = rule.decay_mode;
  c.decay = 0;
  if (rule.decay_mode == WeightDecay::kAdamW) {
    c.decay = static_cast<float>(-static_cast<double>(lr) *
                                 static_cast<double>(c.weight_decay));
  }
}

}  // namespace

AdamConstants ComputeConstants(const AdamRule& rule, float lr, int64_t t) {
  AdamConstants constants;
  {
    const ScopedFpEnvironment fp;
    Compute(rule, lr, t, constants);
  }
  return constants;
}

}  // namespace onepass

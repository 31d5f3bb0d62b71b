#include "offload/adam_options.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/adam_constants.h"
#include "dispatch/fp_environment.h"

namespace onepass {
namespace {

absl::Status CheckOption(absl::string_view name, double value, bool valid,
                         absl::string_view expected) {
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", value, ", expected ", expected));
}

absl::Status CheckNotNegative(absl::string_view name, double value) {
  const float rounded = static_cast<float>(value);
  return CheckOption(name, value, std::isfinite(rounded) && rounded >= 0,
                     "a finite fp32 number of at least 0");
}

absl::Status CheckBeta(absl::string_view name, double value) {
  const float rounded = static_cast<float>(value);
  return CheckOption(name, value, rounded >= 0 && rounded < 1,
                     "at least 0 and, rounded to fp32, below 1");
}

// Not inlined: its arithmetic may not leave the environment its caller sets.
[[gnu::noinline]] void Round(const AdamOptions& options, AdamRule& rule) {
  rule.beta1 = static_cast<float>(options.beta1);
  rule.beta2 = static_cast<float>(options.beta2);
  rule.eps = static_cast<float>(options.eps);
  rule.weight_decay = static_cast<float>(options.weight_decay);
  rule.decay_mode = rule.weight_decay == 0 ? WeightDecay::kNone
                    : options.mode == AdamOptions::Mode::kL2
                        ? WeightDecay::kL2
                        : WeightDecay::kAdamW;
  rule.bias_correction = options.bias_correction;
}

// Not inlined: it rounds to fp32, so neither may it.
[[gnu::noinline]] absl::Status Validate(const AdamOptions& options) {
  absl::Status status = CheckNotNegative("lr", options.lr);
  if (status.ok()) status = CheckBeta("beta1", options.beta1);
  if (status.ok()) status = CheckBeta("beta2", options.beta2);
  if (status.ok()) status = CheckNotNegative("eps", options.eps);
  if (status.ok()) {
    status = CheckNotNegative("weight_decay", options.weight_decay);
  }
  return status;
}

// Nor this.
[[gnu::noinline]] void Round(const AdamOptions& options, StateGroup& group) {
  group.lr = static_cast<float>(options.lr);
  group.beta1 = static_cast<float>(options.beta1);
  group.beta2 = static_cast<float>(options.beta2);
  group.eps = static_cast<float>(options.eps);
  group.weight_decay = static_cast<float>(options.weight_decay);
}

}  // namespace

absl::Status ValidateAdamOptions(const AdamOptions& options) {
  const ScopedFpEnvironment fp;
  return Validate(options);
}

absl::StatusOr<AdamConstants> ComputeAdamConstants(const AdamOptions& options,
                                                   int64_t t) {
  AdamConstants constants;
  {
    const ScopedFpEnvironment fp;
    if (absl::Status status = Validate(options); !status.ok()) {
      return status;
    }
    if (t < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("step t is ", t, ", expected at least 1"));
    }
    AdamRule rule;
    Round(options, rule);
    constants = ComputeConstants(rule, static_cast<float>(options.lr), t);
  }
  if (!std::isfinite(constants.step_size) || !std::isfinite(constants.decay)) {
    return absl::InvalidArgumentError(
        absl::StrCat("lr ", options.lr, " with weight_decay ",
                     options.weight_decay, " at step ", t, " overflows fp32"));
  }
  return constants;
}

AdamRule ToAdamRule(const AdamOptions& options) {
  AdamRule rule;
  {
    const ScopedFpEnvironment fp;
    Round(options, rule);
  }
  return rule;
}

StateGroup ToStateGroup(const AdamOptions& options, int64_t step) {
  StateGroup group;
  {
    const ScopedFpEnvironment fp;
    Round(options, group);
  }
  group.step = step;
  group.mode = options.mode == AdamOptions::Mode::kL2 ? WeightDecay::kL2
                                                      : WeightDecay::kAdamW;
  group.bias_correction = options.bias_correction;
  return group;
}

AdamOptions ToAdamOptions(const StateGroup& group) {
  AdamOptions options;
  options.lr = group.lr;
  options.beta1 = group.beta1;
  options.beta2 = group.beta2;
  options.eps = group.eps;
  options.weight_decay = group.weight_decay;
  options.mode = group.mode == WeightDecay::kL2 ? AdamOptions::Mode::kL2
                                                : AdamOptions::Mode::kAdamW;
  options.bias_correction = group.bias_correction;
  return options;
}

}  // namespace onepass

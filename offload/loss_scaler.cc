#include "offload/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace onepass {
namespace {

using Mode = LossScaleOptions::Mode;

// A scale that stays is a dynamic one without room to move.
LossScaleOptions AsDynamic(LossScaleOptions options) {
  if (options.mode == Mode::kDynamic) return options;
  if (options.mode == Mode::kNone) options.initial_scale = 1;
  options.min_scale = options.initial_scale;
  options.max_scale = options.initial_scale;
  options.hysteresis = 1;
  options.growth_interval = 1;
  return options;
}

absl::Status Check(absl::string_view name, const absl::AlphaNum& value,
                   bool valid, const absl::AlphaNum& expected) {
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "loss scaler: ", name, " is ", value, ", expected ", expected));
}

bool IsPowerOfTwo(double x) {
  int exponent;
  return std::frexp(x, &exponent) == 0.5;
}

absl::Status CheckScale(absl::string_view name, double value) {
  return Check(name, value,
               IsPowerOfTwo(value) && value >= 0x1p-126 && value <= 0x1p126,
               "a power of two from 2^-126 to 2^126");
}

absl::Status CheckCount(absl::string_view name, int64_t value) {
  return Check(name, value, value >= 1, "at least 1");
}

// Whether these options lead to this scale.
absl::Status CheckScaleWithin(absl::string_view name, double value,
                              const LossScaleOptions& options) {
  return Check(
      name, value,
      IsPowerOfTwo(value) && value >= options.min_scale &&
          value <= options.max_scale,
      absl::StrCat("a power of two from min_scale, ", options.min_scale,
                   ", to max_scale, ", options.max_scale));
}

absl::Status CheckOptions(const LossScaleOptions& options) {
  absl::Status status = CheckScale("initial_scale", options.initial_scale);
  if (status.ok()) status = CheckScale("min_scale", options.min_scale);
  if (status.ok()) status = CheckScale("max_scale", options.max_scale);
  if (status.ok()) {
    status = CheckScaleWithin("initial_scale", options.initial_scale, options);
  }
  if (status.ok()) status = CheckCount("hysteresis", options.hysteresis);
  if (status.ok()) {
    status = CheckCount("growth_interval", options.growth_interval);
  }
  return status;
}

absl::Status CheckState(const LossScaleState& state,
                        const LossScaleOptions& options) {
  absl::Status status = CheckScaleWithin("scale", state.scale, options);
  if (status.ok()) {
    status = Check("hysteresis_left", state.hysteresis_left,
                   state.hysteresis_left >= 1 &&
                       state.hysteresis_left <= options.hysteresis,
                   absl::StrCat("1 to ", options.hysteresis));
  }
  if (status.ok()) {
    status = Check(
        "clean_steps", state.clean_steps,
        state.clean_steps >= 0 && state.clean_steps < options.growth_interval,
        absl::StrCat("0 to ", options.growth_interval - 1));
  }
  return status;
}

}  // namespace

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options), state_{options.initial_scale, options.hysteresis, 0} {}

absl::StatusOr<LossScaler> LossScaler::Create(const LossScaleOptions& options) {
  const LossScaleOptions dynamic = AsDynamic(options);
  if (absl::Status status = CheckOptions(dynamic); !status.ok()) return status;
  return LossScaler(dynamic);
}

void LossScaler::Update(bool overflow) {
  if (overflow) {
    state_.clean_steps = 0;
    if (state_.hysteresis_left > 1) {
      --state_.hysteresis_left;
    } else {
      state_.scale = std::max(state_.scale / 2, options_.min_scale);
    }
    return;
  }
  if (++state_.clean_steps < options_.growth_interval) return;
  state_.clean_steps = 0;
  state_.hysteresis_left = options_.hysteresis;
  state_.scale = std::min(state_.scale * 2, options_.max_scale);
}

absl::Status LossScaler::SetState(const LossScaleState& state) {
  if (absl::Status status = CheckState(state, options_); !status.ok()) {
    return status;
  }
  state_ = state;
  return absl::OkStatus();
}

}  // namespace onepass

// The factor that keeps fp16 gradients from vanishing: the loss is multiplied
// by it before the backward pass, the gradients divided by it in the step
// (Micikevicius et al. 2018). Always a power of two, so that scaling rounds
// nothing but subnormals.
//
//   ASSIGN_OR_RETURN(LossScaler scaler, LossScaler::Create(options));
//   loss *= scaler.scale();
//   ...                                    // gradients divided by scale()
//   scaler.Update(/*overflow=*/!norm_is_finite);
//
// The dynamic rule and its defaults are those of DeepSpeed without
// consecutive_hysteresis: steps without overflow do not refill the hysteresis,
// growth does. Three things differ: an overflow at min_scale is no error, the
// scale stays; growth ends at max_scale; the factor is always 2.

#ifndef ONEPASS_OFFLOAD_LOSS_SCALER_H_
#define ONEPASS_OFFLOAD_LOSS_SCALER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/state.h"

namespace onepass {

struct LossScaleOptions {
  enum class Mode : uint8_t {
    kNone,     // always 1
    kStatic,   // always initial_scale
    kDynamic,  // halved after overflows, doubled after steps without
  };

  Mode mode = Mode::kNone;
  double initial_scale = 65536;
  // Dynamic only, as all that follow. Halved at the hysteresis-th overflow
  // since the hysteresis was last refilled, and at each further one, but never
  // below min_scale.
  int64_t hysteresis = 2;
  double min_scale = 1;
  // Doubled, up to max_scale, and the hysteresis refilled, after so many steps
  // without overflow in a row.
  int64_t growth_interval = 1000;
  double max_scale = 0x1p64;
};

class LossScaler {
 public:
  // InvalidArgument, with the name of an option that the mode has: a scale that
  // is no power of two from 2^-126 to 2^126, initial_scale outside [min_scale,
  // max_scale], hysteresis or growth_interval below 1.
  static absl::StatusOr<LossScaler> Create(const LossScaleOptions& options);

  double scale() const { return state_.scale; }
  // Once for every step, skipped or not.
  void Update(bool overflow);

  const LossScaleState& state() const { return state_; }
  // InvalidArgument, with nothing changed and the name of what is wrong: scale
  // is no power of two in [min_scale, max_scale], hysteresis_left outside [1,
  // hysteresis], clean_steps outside [0, growth_interval). A scaler that is not
  // dynamic takes its own state only.
  absl::Status SetState(const LossScaleState& state);

 private:
  explicit LossScaler(const LossScaleOptions& options);

  LossScaleOptions options_;  // as those of a dynamic one
  LossScaleState state_;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_LOSS_SCALER_H_

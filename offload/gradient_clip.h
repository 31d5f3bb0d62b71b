// The factor that every gradient is multiplied by in the step.
//
//   const double norm = GradientNorm(sum);
//   ASSIGN_OR_RETURN(const float factor, ClipFactor(norm, max_norm));

#ifndef ONEPASS_OFFLOAD_GRADIENT_CLIP_H_
#define ONEPASS_OFFLOAD_GRADIENT_CLIP_H_

#include "absl/status/statusor.h"
#include "dispatch/norm_sum.h"

namespace onepass {

// The root of the sum, in double; infinity or NaN where a gradient was.
double GradientNorm(const NormSum& sum);

// clip = max((norm / loss_scale + 1e-6) / max_norm, 1), and 1 where max_norm is
// 0 (no clipping); factor = 1 / (clip * loss_scale), computed in double and
// rounded once to fp32 (the rule of DeepSpeed's ZeRO-3). `norm` is that of the
// gradients as they are, still scaled. InvalidArgument: a norm that is not
// finite (such a step is to be skipped), a negative or non-finite max_norm, a
// loss_scale that is not a finite number above 0, or a factor that fp32 cannot
// hold: 0 or infinite.
absl::StatusOr<float> ClipFactor(double norm, double max_norm,
                                 double loss_scale = 1);

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_GRADIENT_CLIP_H_

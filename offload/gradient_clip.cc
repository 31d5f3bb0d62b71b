#include "offload/gradient_clip.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dispatch/fp_environment.h"

namespace onepass {
namespace {

constexpr double kNormSlack = 1e-6;

// Not inlined: their arithmetic may not leave the environment the callers set.
[[gnu::noinline]] void Root(const double& total, double& norm) {
  norm = std::sqrt(total);
}

[[gnu::noinline]] absl::Status Factor(const double& norm,
                                      const double& max_norm,
                                      const double& loss_scale, float& factor) {
  if (!std::isfinite(norm) || norm < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gradient norm is ", norm, ", expected a finite number of at least 0"));
  }
  if (!std::isfinite(max_norm) || max_norm < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_norm is ", max_norm, ", expected a finite number of at least 0"));
  }
  if (!std::isfinite(loss_scale) || loss_scale <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "loss_scale is ", loss_scale, ", expected a finite number above 0"));
  }
  double clip = 1;
  if (max_norm > 0) {
    clip = std::max((norm / loss_scale + kNormSlack) / max_norm, 1.0);
  }
  factor = static_cast<float>(1 / (clip * loss_scale));
  if (!std::isfinite(factor) || factor == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the clip factor is ", factor, " in fp32 for norm ", norm,
                     ", max_norm ", max_norm, ", loss_scale ", loss_scale));
  }
  return absl::OkStatus();
}

}  // namespace

double GradientNorm(const NormSum& sum) {
  const double total = sum.Total();
  double norm;
  const ScopedFpEnvironment fp;
  Root(total, norm);
  return norm;
}

absl::StatusOr<float> ClipFactor(double norm, double max_norm,
                                 double loss_scale) {
  float factor;
  const ScopedFpEnvironment fp;
  absl::Status status = Factor(norm, max_norm, loss_scale, factor);
  if (!status.ok()) return status;
  return factor;
}

}  // namespace onepass

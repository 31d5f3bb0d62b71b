// What a user sets for Adam, and what of it changes with the step.
//
//   AdamOptions options;
//   options.lr = 3e-4;
//   ASSIGN_OR_RETURN(AdamConstants constants,
//                    ComputeAdamConstants(options, t));

#ifndef ONEPASS_OFFLOAD_ADAM_OPTIONS_H_
#define ONEPASS_OFFLOAD_ADAM_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/adam_constants.h"
#include "dispatch/kernel.h"
#include "dispatch/state.h"

namespace onepass {

// Options of one parameter group. All are rounded to fp32 before anything else,
// so that constants computed in double and the kernel, in fp32, agree.
struct AdamOptions {
  enum class Mode {
    kAdamW,  // decoupled weight decay (Loshchilov and Hutter 2019)
    kL2,     // weight decay added to the gradient (Kingma and Ba 2015)
  };

  double lr = 1e-3;           // >= 0
  double beta1 = 0.9;         // in [0, 1), as fp32
  double beta2 = 0.999;       // in [0, 1), as fp32
  double eps = 1e-8;          // >= 0, added to the bias-corrected root
  double weight_decay = 0.0;  // >= 0
  Mode mode = Mode::kAdamW;
  bool bias_correction = true;
};

// InvalidArgument names the option, what was expected and what came. Checked
// after rounding to fp32: a beta of 0.99999999 becomes 1 and is refused.
absl::Status ValidateAdamOptions(const AdamOptions& options);

// Constants of step `t`, counted from 1: a pure function of its arguments, so
// that a resumed run gets those of an uninterrupted one, with the same bits on
// every platform (no libm). InvalidArgument: options that are not valid, t
// below 1, or a step size that overflows fp32.
absl::StatusOr<AdamConstants> ComputeAdamConstants(const AdamOptions& options,
                                                   int64_t t);

// The same options for those who compute constants elsewhere; lr apart. Checks
// nothing.
AdamRule ToAdamRule(const AdamOptions& options);

// What a checkpoint holds of a group: its options as fp32 values, which give
// the constants of `options` again. Without names of parameters.
StateGroup ToStateGroup(const AdamOptions& options, int64_t step);
AdamOptions ToAdamOptions(const StateGroup& group);

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_ADAM_OPTIONS_H_

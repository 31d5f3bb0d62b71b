// For sources, never for headers: they go to trainers, too.
//
//   ONEPASS_RETURN_IF_ERROR(CheckScale(args));
//   ONEPASS_ASSIGN_OR_RETURN(event, device.CreateEvent());
//
// Their own variables have names that no expression has: one that is called
// with a `status` of the caller's means that, and not what is being made.

#ifndef ONEPASS_DISPATCH_RETURN_IF_ERROR_H_
#define ONEPASS_DISPATCH_RETURN_IF_ERROR_H_

#include <utility>

#include "absl/status/status.h"

// Leaves the function with the absl::Status of `expression` where it is an
// error.
#define ONEPASS_RETURN_IF_ERROR(expression)                                 \
  do {                                                                      \
    if (absl::Status onepass_status = (expression); !onepass_status.ok()) { \
      return onepass_status;                                                \
    }                                                                       \
  } while (false)

// Moves the value of an absl::StatusOr into `variable`, or leaves the function
// with its error.
#define ONEPASS_ASSIGN_OR_RETURN(variable, expression)        \
  do {                                                        \
    auto onepass_result = (expression);                       \
    if (!onepass_result.ok()) return onepass_result.status(); \
    variable = *std::move(onepass_result);                    \
  } while (false)

#endif  // ONEPASS_DISPATCH_RETURN_IF_ERROR_H_

// Where kernels and dispatcher meet: a dispatcher with all the built-in
// kernels.
//
//   ASSIGN_OR_RETURN(Dispatcher dispatcher, CreateDefaultDispatcher());
//   RETURN_IF_ERROR(dispatcher.Register(kernel_of_my_own));

#ifndef ONEPASS_KERNELS_DEFAULT_H_
#define ONEPASS_KERNELS_DEFAULT_H_

#include "absl/status/statusor.h"
#include "dispatch/dispatcher.h"

namespace onepass {

// Fails only where a built-in kernel's descriptor is wrong.
absl::StatusOr<Dispatcher> CreateDefaultDispatcher(
    DispatcherOptions options = {});

}  // namespace onepass

#endif  // ONEPASS_KERNELS_DEFAULT_H_

#include "kernels/default.h"

#include <utility>

#include "absl/status/status.h"
#include "kernels/table.h"

namespace onepass {

absl::StatusOr<Dispatcher> CreateDefaultDispatcher(DispatcherOptions options) {
  Dispatcher dispatcher(std::move(options));
  for (int i = 0; i < kBuiltinKernelCount; ++i) {
    absl::Status status = dispatcher.Register(*kBuiltinKernels[i]);
    if (!status.ok()) return status;
  }
  return dispatcher;
}

}  // namespace onepass

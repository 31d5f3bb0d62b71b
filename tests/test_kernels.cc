#include "tests/test_kernels.h"

#include <cstdlib>

#include "absl/base/config.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/dispatcher.h"
#include "kernels/default.h"

namespace onepass {

const Kernel& ScalarKernel() {
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  if (!dispatcher.ok()) std::abort();
  for (const KernelReport& report : dispatcher->Report()) {
    if (absl::string_view(report.kernel->name) == "scalar") {
      return *report.kernel;
    }
  }
  std::abort();
}

std::string KernelName(const testing::TestParamInfo<const Kernel*>& info) {
  return info.param->name;
}

int64_t LongTestStride() {
  const char* long_tests = std::getenv("ONEPASS_LONG_TESTS");
  const bool reduced =
      long_tests != nullptr && absl::string_view(long_tests) == "reduced";
  return reduced ? kReducedStride : 1;
}

bool UnderSanitizer() {
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
  return true;
#else
  return false;
#endif
}

bool UnderEmulator() { return std::getenv("ONEPASS_EMULATED") != nullptr; }

}  // namespace onepass

#include "tests/runnable_kernels.h"

#include <cstdlib>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/cpu_features.h"
#include "dispatch/dispatcher.h"
#include "kernels/default.h"

namespace onepass {
namespace {

absl::Status VectorBitsStatus() {
  const char* expected = std::getenv("ONEPASS_VECTOR_BITS");
  if (expected == nullptr || *expected == '\0') return absl::OkStatus();
  const CpuFeatures cpu = DetectCpu();
  const std::string bits =
      std::to_string(cpu.sve_bits != 0 ? cpu.sve_bits : cpu.rvv_bits);
  if (bits == expected) return absl::OkStatus();
  return absl::FailedPreconditionError("vectors have " + bits +
                                       " bits here, not " + expected);
}

}  // namespace

std::vector<const Kernel*> RunnableKernels() {
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  if (!dispatcher.ok()) return {};
  const char* pinned = std::getenv("ONEPASS_KERNEL");
  std::vector<const Kernel*> kernels;
  for (const KernelReport& report : dispatcher->Report()) {
    if (!report.supported) continue;
    if (pinned != nullptr && *pinned != '\0' &&
        absl::string_view(pinned) != report.kernel->name) {
      continue;
    }
    kernels.push_back(report.kernel);
  }
  return kernels;
}

absl::Status PinnedStatus() {
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  if (!dispatcher.ok()) return dispatcher.status();
  absl::Status status = dispatcher->Select().status();
  return status.ok() ? VectorBitsStatus() : status;
}

}  // namespace onepass

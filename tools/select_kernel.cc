#include "tools/select_kernel.h"

#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/default.h"
#include "tools/command_line.h"

namespace onepass {

absl::StatusOr<KernelChoice> ChooseKernel(const std::string& name) {
  DispatcherOptions options;
  options.kernel = name;
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher(options);
  if (!dispatcher.ok()) return dispatcher.status();
  absl::StatusOr<const Kernel*> selected = dispatcher->Select();
  if (selected.ok()) return KernelChoice{*std::move(dispatcher), selected};

  const char* variable = std::getenv("ONEPASS_KERNEL");
  const std::string forced =
      name.empty() && variable != nullptr ? variable : name;
  std::string hint;
  if (absl::IsNotFound(selected.status())) {
    std::vector<std::string> names;
    for (const KernelReport& report : dispatcher->Report()) {
      names.push_back(report.kernel->name);
    }
    hint = DidYouMean(forced, names);
  }
  const char* flag = name.empty() ? "ONEPASS_KERNEL: " : "--kernel: ";
  selected =
      absl::Status(selected.status().code(),
                   absl::StrCat(flag, selected.status().message(), hint));
  if (absl::IsNotFound(selected.status())) return selected.status();
  return KernelChoice{*std::move(dispatcher), selected};
}

}  // namespace onepass

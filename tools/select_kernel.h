// The kernels that subcommands know, and the one that they run on.
//
//   ASSIGN_OR_RETURN(KernelChoice choice, ChooseKernel("avx2"));
//   Work(*choice.selected);

#ifndef ONEPASS_TOOLS_SELECT_KERNEL_H_
#define ONEPASS_TOOLS_SELECT_KERNEL_H_

#include <string>

#include "absl/status/statusor.h"
#include "dispatch/dispatcher.h"
#include "dispatch/kernel.h"

namespace onepass {

struct KernelChoice {
  Dispatcher dispatcher;
  // Or why the kernel asked for cannot run here.
  absl::StatusOr<const Kernel*> selected;
};

// `name` empty: what ONEPASS_KERNEL names, else by rank. NotFound: an unknown
// name; the message has the nearest one.
absl::StatusOr<KernelChoice> ChooseKernel(const std::string& name);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_SELECT_KERNEL_H_

// Flags that several subcommands have, each defined once.
//
//   void AddFlags(Flags& flags) override {
//     AddThreadsFlag(flags, &threads_);
//     AddKernelFlag(flags, &kernel_);
//   }
//   ... in Run():
//   RETURN_IF_ERROR(CheckThreads(threads_));
//   ASSIGN_OR_RETURN(KernelChoice choice, ChooseKernel(kernel_));

#ifndef ONEPASS_TOOLS_COMMON_FLAGS_H_
#define ONEPASS_TOOLS_COMMON_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tools/command_line.h"

namespace onepass {

// --threads, for ThreadPoolOptions::threads; `help` where there is more to say.
void AddThreadsFlag(
    Flags& flags, int64_t* threads,
    absl::string_view help = "0: one for each processor allowed.");
// InvalidArgument: a number that no pool can have.
absl::Status CheckThreads(int64_t threads);

// --kernel, for ChooseKernel() of tools/select_kernel.h.
void AddKernelFlag(Flags& flags, std::string* kernel);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_COMMON_FLAGS_H_

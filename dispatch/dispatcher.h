// Chooses the kernel that runs, by rank, among those this machine supports.
//
//   ASSIGN_OR_RETURN(Dispatcher dispatcher, CreateDefaultDispatcher());
//   ASSIGN_OR_RETURN(const Kernel* kernel, dispatcher.Select());
//
// The choice depends on ranks and names only, never on the order of linking or
// registering. ONEPASS_KERNEL=<name> in the environment, or
// DispatcherOptions::kernel, forces one. The dispatcher knows no kernel by
// name: //kernels:default brings the built-in ones, and one built elsewhere is
// passed to Register() by whoever links it.

#ifndef ONEPASS_DISPATCH_DISPATCHER_H_
#define ONEPASS_DISPATCH_DISPATCHER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/kernel.h"

namespace onepass {

struct DispatcherOptions {
  // The kernel to force. Empty: what ONEPASS_KERNEL names, else by rank.
  std::string kernel;
  // Whether a kernel can run here; null asks the kernel itself. Tests set it to
  // see the choice of a machine that is not this one. The dispatcher itself
  // runs code of a kernel (block_numel) only where the kernel says that it can.
  std::function<bool(const Kernel&)> supported;
};

// What a dispatcher knows of one kernel.
struct KernelReport {
  const Kernel* kernel;
  bool supported;
  bool selected;
  // Of this machine; 0 where the kernel cannot run here.
  int64_t block_numel;
};

class Dispatcher {
 public:
  explicit Dispatcher(DispatcherOptions options = {});

  // Adds a kernel, which must outlive the dispatcher.
  // InvalidArgument: no name, a null operation (named), no gradient or moment
  // type, a block size below 1. AlreadyExists: the name is taken. On an error
  // the dispatcher is as it was.
  absl::Status Register(const Kernel& kernel);

  // The forced kernel, or the supported one of the highest rank (of equal ranks
  // the first by name). NotFound: the forced name is unknown.
  // FailedPrecondition: it cannot run here, or nothing can. The message lists
  // what there is.
  absl::StatusOr<const Kernel*> Select() const;

  // All kernels, in the order in which they would be chosen.
  std::vector<KernelReport> Report() const;

 private:
  struct Entry {
    const Kernel* kernel;
    int rank;
    bool supported;
    int64_t block_numel;  // 0 where it cannot run here
  };

  // "avx512 (not supported here), scalar"
  std::string ListKernels() const;

  DispatcherOptions options_;
  std::vector<Entry> entries_;  // by falling rank, then by name
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_DISPATCHER_H_

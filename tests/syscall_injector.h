// The system calls by which a function touches files: recorded, made to fail
// one by one, or the last thing that a process does before it is killed.
//
//   if (absl::Status status = CanInject(); !status.ok()) {
//     GTEST_SKIP() << status.message();
//   }
//   ASSIGN_OR_RETURN(std::vector<FileCall> calls, TraceFileCalls(dir, save));
//   for (size_t k = 0; k < calls.size(); ++k) {
//     ASSIGN_OR_RETURN(InjectionOutcome outcome, RunKilledAt(dir, k, save));
//     ASSERT_TRUE(outcome.injected);
//     ...                                // what is on the disk now?
//   }
//
// The function runs in a forked child, of which this process is the tracer
// (ptrace); what it returns is the status that the child exits with, 0 to 255.
// It may start threads, which are followed; threads that this process had
// before are not there. What it changes in memory is lost. Assertions of
// GoogleTest are of no use in it. A child that takes more than a minute is
// killed by SIGALRM.
//
// Calls count that name a file at or below `dir`, or a descriptor that is open
// on one: opening, reading, writing, syncing, cutting, renaming, removing,
// looking at names and attributes, closing. (In the list in
// syscall_injector.cc, to which one more is a line.) Not those of memory that
// is mapped, of io_uring, and of processes that the child starts. With more
// than one thread, their order is another in each run.
//
// One thread at a time calls these, in a process without other children.

#ifndef ONEPASS_TESTS_SYSCALL_INJECTOR_H_
#define ONEPASS_TESTS_SYSCALL_INJECTOR_H_

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace onepass {

struct FileCall {
  // As "openat".
  std::string name;
  // Absolute and without symbolic links, but for the last part: the path that
  // the call names, or that of its descriptor.
  std::string path;
  // Of a call with two paths (of renaming, linking) the second.
  std::string target;
};

struct InjectionOutcome {
  // Whether there was a k-th call. If not, the child came to its own end.
  bool injected = false;
  // The k-th.
  FileCall call;
  // What the function returned; -1: a signal ended the child.
  int exit_status = -1;
  // That signal, or 0.
  int signal = 0;
};

// Whether calls can be injected here; the message says why not:
// FailedPrecondition under sanitizers and emulators, of another architecture,
// or where the system does not let a process trace its child.
absl::Status CanInject();

// The calls of `function` in the order in which they began. FailedPrecondition:
// it did not return 0.
absl::StatusOr<std::vector<FileCall>> TraceFileCalls(
    const std::string& dir, absl::FunctionRef<int()> function);

// Kills the child (SIGKILL, all its threads) instead of its k-th call, counted
// from 0.
absl::StatusOr<InjectionOutcome> RunKilledAt(const std::string& dir, int k,
                                             absl::FunctionRef<int()> function);

// The k-th call is not made, and fails with `error`, an errno.
absl::StatusOr<InjectionOutcome> RunFailingAt(
    const std::string& dir, int k, int error,
    absl::FunctionRef<int()> function);

}  // namespace onepass

#endif  // ONEPASS_TESTS_SYSCALL_INJECTOR_H_

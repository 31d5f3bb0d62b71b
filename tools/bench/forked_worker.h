// A process that works when its parent says so: what several processes do at
// the same time is measured with one of these for each.
//
//   ASSIGN_OR_RETURN(auto worker, ForkedWorker::Start("process 1", [] {
//     ... in the child: make a thread pool, take memory ...
//     return [=](double argument) -> absl::StatusOr<double> { ... };
//   }));
//   RETURN_IF_ERROR(worker->AwaitReady());
//   RETURN_IF_ERROR(worker->Send(argument));          // returns at once
//   ASSIGN_OR_RETURN(double result, worker->Receive());
//
// A child of fork() has no thread but the one that called it, so start workers
// before there are others, from a thread that outlives them: they end with it.
// Errors are named after the worker.

#ifndef ONEPASS_TOOLS_BENCH_FORKED_WORKER_H_
#define ONEPASS_TOOLS_BENCH_FORKED_WORKER_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace onepass {

class ForkedWorker {
 public:
  using Work = std::function<absl::StatusOr<double>(double argument)>;

  // Forks a child that calls `prepare` and then the work that it returns, once
  // for each Send(). Neither may throw: the child ends. ResourceExhausted: the
  // system refuses a process.
  static absl::StatusOr<std::unique_ptr<ForkedWorker>> Start(
      std::string name, absl::FunctionRef<absl::StatusOr<Work>()> prepare);

  // Ends the child, whatever it does, and waits for its end.
  ~ForkedWorker();

  ForkedWorker(const ForkedWorker&) = delete;
  ForkedWorker& operator=(const ForkedWorker&) = delete;

  // Waits until `prepare` has returned, once, before anything is sent.
  absl::Status AwaitReady();
  // Lets the child work.
  absl::Status Send(double argument);
  // Waits for what the work returned; one for each Send(). An error of the
  // child, or Unavailable where it has ended, with how.
  absl::StatusOr<double> Receive();

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }

 private:
  ForkedWorker(std::string name, pid_t pid, int socket)
      : name_(std::move(name)), pid_(pid), socket_(socket) {}

  // Why nothing comes from the child, or goes there, any more.
  absl::Status Ended();

  const std::string name_;
  pid_t pid_;  // -1 once it was waited for
  const int socket_;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_FORKED_WORKER_H_

// Saves that go on while the trainer does.
//
//   ASSIGN_OR_RETURN(auto own, communicator.Duplicate());
//   AsyncSaver saver(runtime_of_its_own_pool, std::move(own));
//   ...
//   ASSIGN_OR_RETURN(StateLease lease, optimizer.LeaseStateBehindFences());
//   RETURN_IF_ERROR(
//       saver.Start("runs", "step-100", std::move(lease), meta, {}));
//   ...                                          // steps go on
//   ASSIGN_OR_RETURN(SaveReport report, saver.Wait());
//
// What is saved is the state at the call: small things are copied by it,
// tensors stay in their place until they have been read, and who changes them
// waits for that (StateFences in dispatch/state.h). So it takes no more memory
// than any other save.

#ifndef ONEPASS_CHECKPOINT_ASYNC_SAVE_H_
#define ONEPASS_CHECKPOINT_ASYNC_SAVE_H_

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/meta.h"
#include "checkpoint/save.h"
#include "dispatch/communicator.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"

namespace onepass {

// One save at a time. By one thread at a time.
class AsyncSaver {
 public:
  // What `runtime` names outlives the saver; its pool is used by nobody else
  // meanwhile. The communicator is the saver's own.
  AsyncSaver(const Runtime& runtime,
             std::unique_ptr<Communicator> communicator);
  // Waits for the save.
  ~AsyncSaver();

  // Collective: all ranks start the same save, and none waits for another one
  // here. A save that is under way is waited for first; where nobody looked at
  // how that ended (Wait()), and it failed, its error is returned and nothing
  // is started. The budget of `options`, where there is one, outlives the save.
  // InvalidArgument: the lease has no fences.
  absl::Status Start(absl::string_view parent, absl::string_view name,
                     StateLease lease, CheckpointMeta meta,
                     SaveOptions options);

  // Whether a save is under way: Wait() would wait.
  bool busy() const { return busy_; }
  // How the last save ended, once it has: as SaveCheckpoint(). NotFound: there
  // was none since the last call.
  absl::StatusOr<SaveReport> Wait();
  // Lets no more state be read for the save under way, which then fails with
  // Cancelled, on the other ranks as well, unless all was read already. It
  // still waits for its budget, if it does.
  void Cancel();

 private:
  const Runtime runtime_;
  const std::unique_ptr<Communicator> communicator_;
  std::thread thread_;
  std::atomic<bool> busy_{false};
  std::shared_ptr<StateLease> lease_;  // of the save under way
  absl::StatusOr<SaveReport> result_;
  bool unseen_ = false;  // the result
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_ASYNC_SAVE_H_

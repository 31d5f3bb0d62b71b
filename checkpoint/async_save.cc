#include "checkpoint/async_save.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace onepass {

AsyncSaver::AsyncSaver(const Runtime& runtime,
                       std::unique_ptr<Communicator> communicator)
    : runtime_(runtime), communicator_(std::move(communicator)) {}

AsyncSaver::~AsyncSaver() {
  if (thread_.joinable()) thread_.join();
}

absl::Status AsyncSaver::Start(absl::string_view parent, absl::string_view name,
                               StateLease lease, CheckpointMeta meta,
                               SaveOptions options) {
  if (thread_.joinable()) thread_.join();
  if (unseen_ && !result_.ok()) {
    unseen_ = false;
    return absl::Status(
        result_.status().code(),
        absl::StrCat("the save before failed: ", result_.status().message()));
  }
  if (lease.fences() == nullptr) {
    return absl::InvalidArgumentError(
        "the lease has no fences: its owner could not go on meanwhile");
  }
  lease_ = std::make_shared<StateLease>(std::move(lease));
  busy_ = true;
  unseen_ = true;
  const auto save = [this, parent = std::string(parent),
                     name = std::string(name), meta = std::move(meta), options,
                     lease = lease_] {
    result_ = SaveCheckpoint(runtime_, *communicator_, parent, name, *lease,
                             meta, options);
    // Where it failed early, or tensors were none of it.
    lease->fences()->OpenAll();
    busy_ = false;
  };
  try {
    thread_ = std::thread(save);
  } catch (const std::system_error& error) {
    busy_ = false;
    unseen_ = false;
    lease_ = nullptr;
    // The others wait for this rank, and need not until their deadline.
    communicator_->Abort("no thread for the save");
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread for the save: ", error.what()));
  }
  return absl::OkStatus();
}

absl::StatusOr<SaveReport> AsyncSaver::Wait() {
  if (thread_.joinable()) thread_.join();
  lease_ = nullptr;
  if (!unseen_) return absl::NotFoundError("no save was started since");
  unseen_ = false;
  return result_;
}

void AsyncSaver::Cancel() {
  if (lease_ == nullptr) return;
  lease_->fences()->Cancel(absl::CancelledError("the save was cancelled"));
}

}  // namespace onepass

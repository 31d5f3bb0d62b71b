#include "dispatch/thread_communicator.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dispatch/collective.h"

namespace onepass {
namespace {

// What the ranks share. A call has two stages. In the first, ranks come in and
// wait for the others; it may fail, and then nobody has read anything. In the
// second, which begins when all are there and called the same, each reads the
// memory of the others; it ends when all have, whatever happens meanwhile, so
// that nobody leaves while its memory is read.
class Group {
 public:
  Group(int size, const CommunicatorOptions& options)
      : size_(size), options_(options), roll_(size) {}

  int size() const { return size_; }

  // The call of one rank; `read` is its part in the second stage.
  absl::Status Run(int rank, const Collective& call,
                   absl::FunctionRef<void()> read);
  // What ranks called, and the group of a Duplicate(). Only inside `read`.
  const RollCall& roll() const { return roll_; }
  std::shared_ptr<Group> duplicate() const { return duplicate_; }

  // Makes all calls that have not come to the second stage return `failure`, or
  // what failed before.
  void Fail(const absl::Status& failure);

 private:
  // The mutex is held.
  void FailLocked(const absl::Status& failure);
  void BeginReading(const Collective& call);
  void EndReading();

  const int size_;
  const CommunicatorOptions options_;

  std::mutex mutex_;
  std::condition_variable changed_;  // `stage_` or `failure_`
  // Of all calls: even where ranks come in, odd where they read.
  int64_t stage_ = 0;
  RollCall roll_;
  int finished_ = 0;  // ranks that have read
  std::shared_ptr<Group> duplicate_;
  absl::Status failure_;
};

absl::Status Group::Run(int rank, const Collective& call,
                        absl::FunctionRef<void()> read) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_.ok()) return failure_;
  const int64_t coming_in = stage_;
  const int64_t reading = stage_ + 1;
  roll_.Enter(rank, call);
  if (roll_.complete()) {
    BeginReading(call);
  } else if (!changed_.wait_until(lock, DeadlineAfter(options_.timeout), [&] {
               return stage_ != coming_in || !failure_.ok();
             })) {
    FailLocked(roll_.Silence(call, options_.timeout));
  }
  if (stage_ == coming_in) return failure_;

  lock.unlock();
  read();
  lock.lock();

  if (++finished_ == size_) {
    EndReading();
  } else {
    changed_.wait(lock, [&] { return stage_ != reading; });
  }
  return absl::OkStatus();
}

void Group::Fail(const absl::Status& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  FailLocked(failure);
}

void Group::FailLocked(const absl::Status& failure) {
  if (!failure_.ok()) return;
  failure_ = failure;
  changed_.notify_all();
}

void Group::BeginReading(const Collective& call) {
  if (absl::Status status = roll_.Agreement(); !status.ok()) {
    FailLocked(status);
    return;
  }
  if (call.function == Collective::Function::kDuplicate) {
    duplicate_ = std::make_shared<Group>(size_, options_);
  }
  ++stage_;
  changed_.notify_all();
}

void Group::EndReading() {
  roll_.Clear();
  duplicate_.reset();
  finished_ = 0;
  ++stage_;
  changed_.notify_all();
}

class ThreadCommunicator final : public CollectiveCommunicator {
 public:
  ThreadCommunicator(int rank, std::shared_ptr<Group> group)
      : CollectiveCommunicator(rank, group->size()), group_(std::move(group)) {}

  ~ThreadCommunicator() override { Leave(Destroyed()); }

  absl::StatusOr<std::unique_ptr<Communicator>> Duplicate() override {
    Collective call;
    call.function = Collective::Function::kDuplicate;
    std::shared_ptr<Group> duplicate;
    if (absl::Status status =
            group_->Run(rank(), call, [&] { duplicate = group_->duplicate(); });
        !status.ok()) {
      return status;
    }
    return std::make_unique<ThreadCommunicator>(rank(), std::move(duplicate));
  }

 private:
  absl::Status Run(const Collective& call) override {
    return group_->Run(rank(), call, [&] {
      // Each begins with itself: they do not all read the same rank at once.
      for (int i = 0; i < size(); ++i) {
        const int sender = (rank() + i) % size();
        CopyBytes(group_->roll()[sender], sender, call, rank());
      }
    });
  }

  void Leave(const absl::Status& reason) override { group_->Fail(reason); }

  const std::shared_ptr<Group> group_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>>
CreateThreadCommunicators(int ranks, const CommunicatorOptions& options) {
  if (ranks < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communicator: ranks is ", ranks, ", expected at least 1"));
  }
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  const auto group = std::make_shared<Group>(ranks, options);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(std::make_unique<ThreadCommunicator>(rank, group));
  }
  return communicators;
}

}  // namespace onepass

// What the backends of dispatch/communicator.h share: the checks of arguments,
// where the bytes of each rank lie, who has called what, and how errors say it.
//
//   class ThreadCommunicator : public CollectiveCommunicator {
//     ~ThreadCommunicator() override { Leave(Destroyed()); }
//     absl::Status Run(const Collective& call) override { ... }
//     void Leave(const absl::Status& reason) override { ... }
//     absl::StatusOr<std::unique_ptr<Communicator>> Duplicate() override { ...
//     }
//   };

#ifndef ONEPASS_DISPATCH_COLLECTIVE_H_
#define ONEPASS_DISPATCH_COLLECTIVE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/communicator.h"

namespace onepass {

// A rank's call of one of the functions.
struct Collective {
  enum class Function : int32_t {
    kAllGather,
    kAllToAll,
    kBroadcast,
    kBarrier,
    kDuplicate,
  };

  // What all ranks must have alike.
  Function function = Function::kBarrier;
  int32_t root = 0;
  int64_t bytes = 0;

  // The caller's memory. In a broadcast the root only sends, and the others
  // only receive; what they do not is null.
  const char* send = nullptr;
  char* receive = nullptr;

  // Where the bytes for `rank` begin, and where those from it go. Null: there
  // are none.
  const char* SendTo(int rank) const;
  char* ReceiveFrom(int rank) const;
};

// Copies what `sender` has for `receiver`, the caller of `to`, where `from` is
// what `sender` called.
void CopyBytes(const Collective& from, int sender, const Collective& to,
               int receiver);

// Which ranks have called, and what.
class RollCall {
 public:
  explicit RollCall(int ranks) : calls_(ranks), called_(ranks) { Clear(); }

  // Nobody has called.
  void Clear();
  // `rank`, which had not, has.
  void Enter(int rank, const Collective& call);

  bool Has(int rank) const { return called_[rank]; }
  bool complete() const { return missing_ == 0; }
  // What a rank that has called did.
  const Collective& operator[](int rank) const { return calls_[rank]; }

  // Where all have called: whether all called the same. FailedPrecondition:
  // says which ranks called what.
  absl::Status Agreement() const;
  // DeadlineExceeded: names the ranks that have not called what `call` is.
  absl::Status Silence(const Collective& call,
                       std::chrono::milliseconds timeout) const;

 private:
  std::vector<Collective> calls_;
  std::vector<bool> called_;
  int missing_ = 0;
};

// "rank 2", "ranks 1, 3".
std::string RankNames(absl::Span<const int> ranks);

// "all_gather".
absl::string_view Name(Collective::Function function);

// InvalidArgument: a timeout that is not above 0.
absl::Status CheckOptions(const CommunicatorOptions& options);

// From now on; the clock's range is enough for every timeout.
std::chrono::steady_clock::time_point DeadlineAfter(
    std::chrono::milliseconds timeout);

// Checks arguments, and makes one function of the four that move data.
class CollectiveCommunicator : public Communicator {
 public:
  int rank() const final { return rank_; }
  int size() const final { return size_; }

  absl::Status AllGather(const void* mine, void* all, int64_t bytes) final;
  absl::Status AllToAll(const void* send, void* received, int64_t bytes) final;
  absl::Status Broadcast(void* data, int64_t bytes, int root) final;
  absl::Status Barrier() final;
  void Abort(absl::string_view reason) final;

 protected:
  CollectiveCommunicator(int rank, int size) : rank_(rank), size_(size) {}

  // Moves the bytes of a call whose own arguments are right.
  virtual absl::Status Run(const Collective& call) = 0;
  // Makes the calls of all ranks return `reason`, unless they have an error
  // already.
  virtual void Leave(const absl::Status& reason) = 0;

  // The reason with which a destructor leaves.
  absl::Status Destroyed() const;

 private:
  const int rank_;
  const int size_;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_COLLECTIVE_H_

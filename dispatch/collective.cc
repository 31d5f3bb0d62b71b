#include "dispatch/collective.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace onepass {
namespace {

using Function = Collective::Function;

bool Same(const Collective& a, const Collective& b) {
  return a.function == b.function && a.root == b.root && a.bytes == b.bytes;
}

std::string Describe(const Collective& call) {
  const absl::string_view name = Name(call.function);
  switch (call.function) {
    case Function::kBarrier:
    case Function::kDuplicate:
      return std::string(name);
    case Function::kBroadcast:
      return absl::StrCat(name, " of ", call.bytes, " bytes from rank ",
                          call.root);
    default:
      return absl::StrCat(name, " of ", call.bytes, " bytes");
  }
}

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a);
  const auto b_begin = reinterpret_cast<uintptr_t>(b);
  return a_begin <= b_begin
             ? b_begin - a_begin < static_cast<uintptr_t>(a_bytes)
             : a_begin - b_begin < static_cast<uintptr_t>(b_bytes);
}

template <typename... Parts>
absl::Status Invalid(Function function, const Parts&... parts) {
  return absl::InvalidArgumentError(
      absl::StrCat(Name(function), ": ", parts...));
}

struct Argument {
  absl::string_view name;
  const void* memory;
};

// `parts` times `bytes` is the most that an argument holds.
absl::Status Check(Function function, int64_t bytes, int parts,
                   std::initializer_list<Argument> arguments) {
  if (bytes < 0) {
    return Invalid(function, "bytes is ", bytes, ", expected at least 0");
  }
  int64_t most;
  if (__builtin_mul_overflow(bytes, int64_t{parts}, &most)) {
    return Invalid(function, "bytes is ", bytes, ", and ", parts,
                   " times that does not fit into 64 bits");
  }
  for (const Argument& argument : arguments) {
    if (argument.memory != nullptr || bytes == 0) continue;
    return Invalid(function, argument.name, " is null, bytes is ", bytes);
  }
  return absl::OkStatus();
}

}  // namespace

const char* Collective::SendTo(int rank) const {
  if (bytes == 0) return nullptr;
  return function == Function::kAllToAll ? send + rank * bytes : send;
}

char* Collective::ReceiveFrom(int rank) const {
  if (bytes == 0) return nullptr;
  if (function == Function::kBroadcast) return rank == root ? receive : nullptr;
  return receive + rank * bytes;
}

void CopyBytes(const Collective& from, int sender, const Collective& to,
               int receiver) {
  const char* const source = from.SendTo(receiver);
  char* const target = to.ReceiveFrom(sender);
  // The same: a rank's own place in what it gathers.
  if (source == nullptr || target == nullptr || source == target) return;
  std::memcpy(target, source, to.bytes);
}

void RollCall::Clear() {
  std::fill(called_.begin(), called_.end(), false);
  missing_ = static_cast<int>(called_.size());
}

void RollCall::Enter(int rank, const Collective& call) {
  calls_[rank] = call;
  called_[rank] = true;
  --missing_;
}

absl::Status RollCall::Agreement() const {
  if (std::all_of(calls_.begin(), calls_.end(), [this](const Collective& call) {
        return Same(call, calls_[0]);
      })) {
    return absl::OkStatus();
  }
  const int size = static_cast<int>(calls_.size());
  std::vector<std::string> groups;
  std::vector<bool> told(size, false);
  for (int first = 0; first < size; ++first) {
    if (told[first]) continue;
    std::vector<int> ranks;
    for (int rank = first; rank < size; ++rank) {
      if (!Same(calls_[rank], calls_[first])) continue;
      told[rank] = true;
      ranks.push_back(rank);
    }
    groups.push_back(
        absl::StrCat(RankNames(ranks), " called ", Describe(calls_[first])));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks did not call the same: ", absl::StrJoin(groups, "; ")));
}

absl::Status RollCall::Silence(const Collective& call,
                               std::chrono::milliseconds timeout) const {
  std::vector<int> silent;
  for (size_t rank = 0; rank < called_.size(); ++rank) {
    if (!called_[rank]) silent.push_back(static_cast<int>(rank));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(RankNames(silent), " did not call ", Name(call.function),
                   " within ", timeout.count(), " ms"));
}

std::string RankNames(absl::Span<const int> ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(ranks, ", "));
}

absl::string_view Name(Function function) {
  switch (function) {
    case Function::kAllGather:
      return "all_gather";
    case Function::kAllToAll:
      return "all_to_all";
    case Function::kBroadcast:
      return "broadcast";
    case Function::kBarrier:
      return "barrier";
    case Function::kDuplicate:
      return "duplicate";
  }
  return "an unknown function";
}

absl::Status CheckOptions(const CommunicatorOptions& options) {
  if (options.timeout.count() > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("communicator: timeout is ",
                                                 options.timeout.count(),
                                                 " ms, expected above 0"));
}

std::chrono::steady_clock::time_point DeadlineAfter(
    std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kYear = std::chrono::hours(365 * 24);
  return std::chrono::steady_clock::now() + std::min(timeout, kYear);
}

absl::Status CollectiveCommunicator::AllGather(const void* mine, void* all,
                                               int64_t bytes) {
  constexpr Function kFunction = Function::kAllGather;
  if (absl::Status status =
          Check(kFunction, bytes, size_, {{"mine", mine}, {"all", all}});
      !status.ok()) {
    return status;
  }
  Collective call;
  call.function = kFunction;
  call.bytes = bytes;
  call.send = static_cast<const char*>(mine);
  call.receive = static_cast<char*>(all);
  if (bytes > 0 && call.send != call.ReceiveFrom(rank_) &&
      Overlap(mine, bytes, all, bytes * size_)) {
    return Invalid(kFunction,
                   "mine overlaps all, and is not the caller's place in it");
  }
  return Run(call);
}

absl::Status CollectiveCommunicator::AllToAll(const void* send, void* received,
                                              int64_t bytes) {
  constexpr Function kFunction = Function::kAllToAll;
  if (absl::Status status = Check(kFunction, bytes, size_,
                                  {{"send", send}, {"received", received}});
      !status.ok()) {
    return status;
  }
  if (bytes > 0 && Overlap(send, bytes * size_, received, bytes * size_)) {
    return Invalid(kFunction, "send and received overlap");
  }
  Collective call;
  call.function = kFunction;
  call.bytes = bytes;
  call.send = static_cast<const char*>(send);
  call.receive = static_cast<char*>(received);
  return Run(call);
}

absl::Status CollectiveCommunicator::Broadcast(void* data, int64_t bytes,
                                               int root) {
  constexpr Function kFunction = Function::kBroadcast;
  if (absl::Status status = Check(kFunction, bytes, 1, {{"data", data}});
      !status.ok()) {
    return status;
  }
  if (root < 0 || root >= size_) {
    return Invalid(kFunction, "root is ", root, ", expected 0 to ", size_ - 1);
  }
  Collective call;
  call.function = kFunction;
  call.root = root;
  call.bytes = bytes;
  if (root == rank_) {
    call.send = static_cast<const char*>(data);
  } else {
    call.receive = static_cast<char*>(data);
  }
  return Run(call);
}

absl::Status CollectiveCommunicator::Barrier() { return Run(Collective()); }

void CollectiveCommunicator::Abort(absl::string_view reason) {
  Leave(absl::AbortedError(absl::StrCat("rank ", rank_, " aborted: ", reason)));
}

absl::Status CollectiveCommunicator::Destroyed() const {
  return absl::AbortedError(
      absl::StrCat("rank ", rank_, " destroyed its communicator"));
}

}  // namespace onepass

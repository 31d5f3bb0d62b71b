#include "tools/ranks.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dispatch/return_if_error.h"
#include "dispatch/thread_communicator.h"
#include "xxhash.h"

namespace onepass {
namespace {

// What went wrong, of what all ranks report.
class Outcome {
 public:
  void Report(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Aborted is what a rank is told of another that has left, maybe before
    // that has reported why.
    if (absl::IsAborted(status)) {
      consequence_.Update(status);
    } else {
      cause_.Update(status);
    }
  }
  void Report(std::exception_ptr exception) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (exception_ == nullptr) exception_ = exception;
  }
  // Once all have reported.
  absl::Status Take() {
    if (exception_ != nullptr) std::rethrow_exception(exception_);
    return cause_.ok() ? consequence_ : cause_;
  }

 private:
  std::mutex mutex_;
  absl::Status cause_;  // the first
  absl::Status consequence_;
  std::exception_ptr exception_;
};

// A hash of the processors that the calling thread may run on.
absl::StatusOr<uint64_t> HashOfProcessors() {
  // The system refuses a mask that is too short for its own.
  constexpr size_t kMostWords = size_t{1} << 16;
  for (size_t words = CPU_SETSIZE / 64; words <= kMostWords; words *= 2) {
    std::vector<uint64_t> mask(words);
    if (sched_getaffinity(0, words * sizeof(uint64_t),
                          reinterpret_cast<cpu_set_t*>(mask.data())) == 0) {
      while (!mask.empty() && mask.back() == 0) mask.pop_back();
      return XXH3_64bits(mask.data(), mask.size() * sizeof(uint64_t));
    }
    if (errno != EINVAL) break;
  }
  return absl::InternalError(
      absl::StrCat("the processors allowed: ", std::strerror(errno)));
}

}  // namespace

absl::Status RunThreadRanks(
    int ranks, absl::FunctionRef<absl::Status(Communicator&)> work) {
  if (ranks < 1 || ranks > kMaxThreadRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks is ", ranks, ", expected 1 to ", kMaxThreadRanks));
  }
  std::vector<std::unique_ptr<Communicator>> communicators;
  ONEPASS_ASSIGN_OR_RETURN(communicators, CreateThreadCommunicators(ranks, {}));
  Outcome outcome;
  // Whether all threads are there; nobody begins before that is known.
  std::promise<bool> complete;
  const auto run = [&, begins = complete.get_future().share()](int rank) {
    if (!begins.get()) return;
    try {
      outcome.Report(work(*communicators[rank]));
    } catch (...) {
      outcome.Report(std::current_exception());
    }
    communicators[rank].reset();
  };
  std::vector<std::thread> threads;
  threads.reserve(ranks - 1);
  const auto join = [&] {
    for (std::thread& thread : threads) thread.join();
  };
  // The standard library reports a refused thread in no other way.
  try {
    for (int rank = 1; rank < ranks; ++rank) threads.emplace_back(run, rank);
  } catch (const std::system_error& error) {
    complete.set_value(false);
    join();
    return absl::ResourceExhaustedError(
        absl::StrCat("could not start the thread of rank ", threads.size() + 1,
                     ": ", error.what()));
  } catch (...) {
    complete.set_value(false);
    join();
    throw;
  }
  complete.set_value(true);
  run(0);
  join();
  return outcome.Take();
}

absl::StatusOr<RankNeighbours> FindNeighbours(Communicator& communicator) {
  struct Place {
    uint64_t host;
    uint64_t processors;
  };
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) {
    return absl::InternalError(
        absl::StrCat("the name of the host: ", std::strerror(errno)));
  }
  Place mine = {XXH3_64bits(name, std::strlen(name)), 0};
  ONEPASS_ASSIGN_OR_RETURN(mine.processors, HashOfProcessors());
  std::vector<Place> places(communicator.size());
  ONEPASS_RETURN_IF_ERROR(
      communicator.AllGather(&mine, places.data(), sizeof(Place)));
  RankNeighbours neighbours = {0, 0};
  for (const Place& place : places) {
    if (place.host != mine.host) continue;
    ++neighbours.on_host;
    if (place.processors == mine.processors) ++neighbours.on_processors;
  }
  return neighbours;
}

absl::Status CheckSameOnAllRanks(Communicator& communicator,
                                 absl::string_view what,
                                 absl::string_view value) {
  const uint64_t mine = XXH3_64bits(value.data(), value.size());
  std::vector<uint64_t> all(communicator.size());
  ONEPASS_RETURN_IF_ERROR(
      communicator.AllGather(&mine, all.data(), sizeof(mine)));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " has another ", what, " than rank 0"));
  }
  return absl::OkStatus();
}

}  // namespace onepass

#include "tools/ranks.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dispatch/return_if_error.h"
#include "dispatch/thread_communicator.h"

namespace onepass {
namespace {

// What went wrong first.
class FirstError {
 public:
  void Report(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (exception_ == nullptr) status_.Update(status);
  }
  void Report(std::exception_ptr exception) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (exception_ == nullptr && status_.ok()) exception_ = exception;
  }
  // Once all have reported.
  absl::Status Take() {
    if (exception_ != nullptr) std::rethrow_exception(exception_);
    return status_;
  }

 private:
  std::mutex mutex_;
  absl::Status status_;
  std::exception_ptr exception_;
};

}  // namespace

absl::Status RunThreadRanks(
    int ranks, absl::FunctionRef<absl::Status(Communicator&)> work) {
  if (ranks < 1 || ranks > kMaxThreadRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks is ", ranks, ", expected 1 to ", kMaxThreadRanks));
  }
  std::vector<std::unique_ptr<Communicator>> communicators;
  ONEPASS_ASSIGN_OR_RETURN(communicators, CreateThreadCommunicators(ranks, {}));
  FirstError first;
  const auto run = [&](std::unique_ptr<Communicator> communicator) {
    // An error is reported before the others can hear of it.
    try {
      first.Report(work(*communicator));
    } catch (...) {
      first.Report(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) {
    // The standard library reports a refused thread in no other way.
    try {
      threads.emplace_back(run, std::move(communicators[rank]));
    } catch (const std::system_error& error) {
      first.Report(absl::ResourceExhaustedError(absl::StrCat(
          "could not start the thread of rank ", rank, ": ", error.what())));
      break;
    }
  }
  std::unique_ptr<Communicator> mine = std::move(communicators[0]);
  const bool all = static_cast<int>(threads.size()) == ranks - 1;
  // Those that have no thread are gone.
  communicators.clear();
  if (all) {
    run(std::move(mine));
  } else {
    mine.reset();
  }
  for (std::thread& thread : threads) thread.join();
  return first.Take();
}

absl::StatusOr<RankNeighbours> FindNeighbours(Communicator& communicator) {
  struct Place {
    char host[256];
    cpu_set_t processors;
  };
  Place mine;
  std::memset(&mine, 0, sizeof(mine));
  if (gethostname(mine.host, sizeof(mine.host) - 1) != 0 ||
      sched_getaffinity(0, sizeof(mine.processors), &mine.processors) != 0) {
    return absl::InternalError(
        absl::StrCat("the name of the host, or the processors allowed: ",
                     std::strerror(errno)));
  }
  std::vector<Place> places(communicator.size());
  ONEPASS_RETURN_IF_ERROR(
      communicator.AllGather(&mine, places.data(), sizeof(Place)));
  RankNeighbours neighbours = {0, 0};
  for (const Place& place : places) {
    if (std::strcmp(place.host, mine.host) != 0) continue;
    ++neighbours.on_host;
    if (CPU_EQUAL(&place.processors, &mine.processors)) {
      ++neighbours.on_processors;
    }
  }
  return neighbours;
}

}  // namespace onepass

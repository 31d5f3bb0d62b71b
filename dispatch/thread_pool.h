// A static thread pool: worker i always takes range i, so that memory touched
// first by a worker is updated by the same one.
//
//   ASSIGN_OR_RETURN(auto pool, ThreadPool::Create({}));
//   pool->ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
//     ...
//   });
//
// There is no global pool: it is created once and handed to whoever works. The
// child of a fork() has none of its threads: it needs a pool of its own. Limits
// of processor time, as containers have, are not looked at: where there is one,
// set ThreadPoolOptions::threads.

#ifndef ONEPASS_DISPATCH_THREAD_POOL_H_
#define ONEPASS_DISPATCH_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace onepass {

struct ThreadPoolOptions {
  // Workers, the calling thread among them. 0: one for each processor that the
  // affinity mask of the creating thread allows, whatever its numbers.
  int threads = 0;
};

class ThreadPool {
 public:
  // Upper bound of ThreadPoolOptions::threads.
  static constexpr int kMaxThreads = 4096;

  // Processors in the affinity mask of the calling thread: the workers of a
  // pool that it creates with 0 threads.
  static int AllowedProcessors();

  // InvalidArgument: threads below 0 or above kMaxThreads. ResourceExhausted:
  // the system refused a thread; those started before are joined.
  static absl::StatusOr<std::unique_ptr<ThreadPool>> Create(
      const ThreadPoolOptions& options);

  // Joins the workers. No Run() may be under way.
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Workers, the calling thread among them; at least 1.
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(i) once for each i in [0, threads()), number 0 on the calling
  // thread, and returns when all have returned. Calls from several threads take
  // turns. A call from inside `work` runs all its parts on the calling worker;
  // calls that go round through the workers of another pool wait for
  // themselves. `work` runs in the floating-point environment of
  // dispatch/fp_environment.h and must not throw. Allocates nothing.
  void Run(absl::FunctionRef<void(int worker)> work);

  // Cuts [0, numel) into one range for each worker, at multiples of `grain` (>=
  // 1), as evenly as that allows, and calls work(begin, end) for each range
  // that is not empty. The same numel, grain and threads give the same ranges.
  // Work that fits into one grain runs on the calling thread alone.
  void ParallelFor(int64_t numel, int64_t grain,
                   absl::FunctionRef<void(int64_t begin, int64_t end)> work);

 private:
  ThreadPool() = default;

  void WorkerLoop(int worker);
  // Lets the workers see `work_`.
  void Publish();
  // Returns when `generation_` is no longer `seen`.
  void AwaitGeneration(uint32_t seen);

  std::vector<std::thread> workers_;

  std::mutex run_mutex_;  // one Run() at a time

  // A run is published by storing `work_` and then advancing `generation_`.
  const absl::FunctionRef<void(int)>* work_ = nullptr;  // null: stop
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> unfinished_{0};

  // For sleeping only: guards no data beside the waiting itself.
  std::mutex sleep_mutex_;
  std::condition_variable work_published_;
  std::condition_variable work_done_;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_THREAD_POOL_H_

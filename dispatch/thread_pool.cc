#include "dispatch/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dispatch/fp_environment.h"

namespace onepass {
namespace {

// Looks this many times before sleeping: some ten microseconds where a pause
// takes 140 cycles, enough from one piece of a step to the next. Waking a
// sleeper costs some 50 more (docs/performance.md), but to spin for as long
// would take the processor from others that share it.
constexpr int kSpins = 200;

// The pools whose work this thread is doing now, innermost first. Frames live
// on the thread's stack.
struct Frame {
  const ThreadPool* pool;
  const Frame* outer;
};
thread_local const Frame* innermost_frame = nullptr;

bool IsRunning(const ThreadPool* pool) {
  for (const Frame* frame = innermost_frame; frame != nullptr;
       frame = frame->outer) {
    if (frame->pool == pool) return true;
  }
  return false;
}

// Runs a part of the work of `pool`, in the environment that computations need.
void RunPart(const ThreadPool* pool, absl::FunctionRef<void(int)> work,
             int worker) {
  const Frame frame = {pool, innermost_frame};
  innermost_frame = &frame;
  {
    const ScopedFpEnvironment fp;
    work(worker);
  }
  innermost_frame = frame.outer;
}

void Pause() {
#if defined(__x86_64__)
  asm volatile("pause");
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int ThreadPool::AllowedProcessors() {
  // Doubles the mask until the kernel's fits: cpu_set_t ends at 1024
  // processors.
  for (int processors = 1024; processors <= (1 << 20); processors *= 2) {
    cpu_set_t* mask = CPU_ALLOC(processors);
    if (mask == nullptr) return 1;
    const size_t size = CPU_ALLOC_SIZE(processors);
    const bool known = sched_getaffinity(0, size, mask) == 0;
    const bool too_small = !known && errno == EINVAL;
    const int count = known ? CPU_COUNT_S(size, mask) : 1;
    CPU_FREE(mask);
    if (!too_small) return count;
  }
  return 1;
}

absl::StatusOr<std::unique_ptr<ThreadPool>> ThreadPool::Create(
    const ThreadPoolOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(absl::StrCat(
        "threads is ", options.threads, ", expected 0 to ", kMaxThreads));
  }
  const int threads =
      options.threads == 0 ? AllowedProcessors() : options.threads;
  auto pool = absl::WrapUnique(new ThreadPool);
  pool->workers_.reserve(threads - 1);
  for (int worker = 1; worker < threads; ++worker) {
    // The standard library reports a refused thread in no other way.
    try {
      pool->workers_.emplace_back(&ThreadPool::WorkerLoop, pool.get(), worker);
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("could not start thread ", worker + 1, " of ", threads,
                       ": ", error.what()));
    }
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  work_ = nullptr;
  Publish();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(absl::FunctionRef<void(int)> work) {
  if (IsRunning(this)) {
    for (int worker = 0; worker < threads(); ++worker) {
      RunPart(this, work, worker);
    }
    return;
  }
  std::lock_guard<std::mutex> run_lock(run_mutex_);
  work_ = &work;
  unfinished_.store(static_cast<int>(workers_.size()),
                    std::memory_order_relaxed);
  Publish();
  RunPart(this, work, 0);
  for (int spin = 0; spin < kSpins; ++spin) {
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    Pause();
  }
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  work_done_.wait(lock, [this] {
    return unfinished_.load(std::memory_order_acquire) == 0;
  });
}

void ThreadPool::ParallelFor(
    int64_t numel, int64_t grain,
    absl::FunctionRef<void(int64_t begin, int64_t end)> work) {
  if (numel <= 0) return;
  grain = std::max(grain, int64_t{1});
  if (numel <= grain) {
    RunPart(
        this, [&](int) { work(0, numel); }, 0);
    return;
  }
  const int64_t grains = numel / grain + (numel % grain != 0);
  const int64_t parts = threads();
  // The first `longer` workers take one grain more than the others.
  const int64_t share = grains / parts;
  const int64_t longer = grains % parts;
  Run([&](int worker) {
    const int64_t first = worker * share + std::min<int64_t>(worker, longer);
    const int64_t last = first + share + (worker < longer ? 1 : 0);
    if (first == last) return;
    // The last grain may be short.
    work(first * grain, last == grains ? numel : last * grain);
  });
}

void ThreadPool::Publish() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  work_published_.notify_all();
}

void ThreadPool::AwaitGeneration(uint32_t seen) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (generation_.load(std::memory_order_acquire) != seen) return;
    Pause();
  }
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  work_published_.wait(lock, [this, seen] {
    return generation_.load(std::memory_order_acquire) != seen;
  });
}

void ThreadPool::WorkerLoop(int worker) {
  for (uint32_t seen = 0;; ++seen) {
    AwaitGeneration(seen);
    const absl::FunctionRef<void(int)>* work = work_;
    if (work == nullptr) return;
    RunPart(this, *work, worker);
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      // The last one. The mutex: a caller that has just seen work unfinished is
      // asleep by then, or will look again.
      { std::lock_guard<std::mutex> lock(sleep_mutex_); }
      work_done_.notify_one();
    }
  }
}

}  // namespace onepass

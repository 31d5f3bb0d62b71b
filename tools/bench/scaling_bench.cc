#include "tools/bench/scaling_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dispatch/dtype.h"
#include "dispatch/thread_pool.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "tools/bench/adam_state.h"
#include "tools/bench/forked_worker.h"

namespace onepass {
namespace {

using Clock = std::chrono::steady_clock;

// A process takes this much beside its state, and that much for each of its
// threads, at most: copies of the parent's pages that it writes to, page
// tables, stacks.
constexpr int64_t kProcessBytes = int64_t{4} << 20;
constexpr int64_t kThreadBytes = int64_t{128} << 10;

// Elements of a thread in one step of a process: long beside the wake-up of its
// threads, short beside the time that processes run for.
constexpr int64_t kStepNumel = int64_t{1} << 20;

// What as many processes of one thread as processors reach of one process with
// as many threads: they do not starve one another.
constexpr double kLeastAggregate = 0.90;

// More threads than processors are of interest, not the square of them.
constexpr int kMostOversubscribed = 4;

absl::Status Validate(const ScalingOptions& options) {
  if (options.max_numel < ScalingOptions::kLeastNumel) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_numel is ", options.max_numel,
                     ", expected at least ", ScalingOptions::kLeastNumel));
  }
  if (options.threads < 0 || options.threads > ThreadPool::kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("--threads is ", options.threads, ", expected 0 to ",
                     ThreadPool::kMaxThreads));
  }
  if (options.rounds < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rounds is ", options.rounds, ", expected at least 1"));
  }
  if (!(options.slice_s > 0 && std::isfinite(options.slice_s))) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice_s is ", options.slice_s, ", expected above 0"));
  }
  return absl::OkStatus();
}

int MostThreads(const ScalingOptions& options) {
  return options.threads == 0 ? ThreadPool::AllowedProcessors()
                              : options.threads;
}

// Some processes, which run at the same time.
struct Team {
  int processes;
  int threads;
  int64_t numel;  // of each process
};

std::vector<Team> Teams(int threads, int64_t max_numel) {
  const int64_t share = std::max<int64_t>(max_numel / threads, 1);
  const int oversubscribed = std::min(threads, kMostOversubscribed);
  // One thread alone has all elements, too: a share may fit into its cache.
  return {{1, threads, max_numel},
          {1, 1, max_numel},
          {threads, 1, share},
          {oversubscribed, threads,
           std::max<int64_t>(max_numel / oversubscribed, 1)}};
}

// Elements [offset, offset + numel) of a span.
AdamSpan Part(const AdamSpan& span, int64_t offset, int64_t numel) {
  AdamSpan part = span;
  part.numel = numel;
  part.param = span.param + offset;
  part.grad = static_cast<const float*>(span.grad) + offset;
  part.exp_avg = static_cast<float*>(span.exp_avg) + offset;
  part.exp_avg_sq = static_cast<float*>(span.exp_avg_sq) + offset;
  part.copy = static_cast<uint16_t*>(span.copy) + offset;
  return part;
}

absl::StatusOr<CpuAdam> MakeAdam(const Kernel& kernel, ThreadPool& pool) {
  return CpuAdam::Create(kernel, pool, {AdamOptions{}});
}

absl::Status Step(const CpuAdam& adam, const AdamSpan& span) {
  return adam.Step(span, /*t=*/100, /*grad_scale=*/0.5f);
}

// One process of a team. Create() and what it returns run in the child.
class Stepper {
 public:
  static absl::StatusOr<std::shared_ptr<Stepper>> Create(const Kernel& kernel,
                                                         const Team& team) {
    absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
        ThreadPool::Create({team.threads});
    if (!pool.ok()) return pool.status();
    absl::StatusOr<CpuAdam> adam = MakeAdam(kernel, **pool);
    if (!adam.ok()) return adam.status();
    const int64_t step_numel = std::min(team.numel, kStepNumel * team.threads);
    AdamStateOptions options;
    options.equal_bases = true;
    options.piece_numel = step_numel;
    absl::StatusOr<AdamState> state =
        AdamState::Create(**pool, team.numel, options);
    if (!state.ok()) return state.status();
    return std::make_shared<Stepper>(*std::move(pool), *std::move(adam),
                                     *std::move(state), step_numel);
  }

  Stepper(std::unique_ptr<ThreadPool> pool, CpuAdam adam, AdamState state,
          int64_t step_numel)
      : pool_(std::move(pool)),
        adam_(std::move(adam)),
        state_(std::move(state)),
        span_(state_.Span()),
        step_numel_(step_numel) {
    // A step here is a cut of the step over all of the state, and stores as
    // that does.
    if (adam_.StreamsCopy(span_.copy_type, span_.copy_stores, span_.numel)) {
      span_.copy_stores = CopyStores::kStreaming;
    }
  }

  // Steps until that time of MonotonicSeconds(), at least once: elements a
  // second, since the beginning of that slice of time. One that is let run late
  // has less of it.
  absl::StatusOr<double> RunUntil(double deadline, double slice_s) {
    const double begin = deadline - slice_s;
    double now;
    int64_t done = 0;
    do {
      const int64_t numel = std::min(step_numel_, span_.numel - offset_);
      const absl::Status status = Step(adam_, Part(span_, offset_, numel));
      if (!status.ok()) return status;
      done += numel;
      offset_ = (offset_ + numel) % span_.numel;
      now = MonotonicSeconds();
    } while (now < deadline);
    return static_cast<double>(done) / (now - begin);
  }

 private:
  const std::unique_ptr<ThreadPool> pool_;
  const CpuAdam adam_;
  const AdamState state_;
  AdamSpan span_;
  const int64_t step_numel_;
  int64_t offset_ = 0;
};

absl::StatusOr<std::vector<ProcessesPoint>> MeasureProcesses(
    const Kernel& kernel, const ScalingOptions& options, int threads) {
  using Workers = std::vector<std::unique_ptr<ForkedWorker>>;
  const std::vector<Team> teams = Teams(threads, options.max_numel);
  // All are there from the beginning, so that rounds can take turns: those of
  // other teams wait for a message.
  std::vector<Workers> workers(teams.size());
  for (size_t i = 0; i < teams.size(); ++i) {
    const Team& team = teams[i];
    for (int process = 1; process <= team.processes; ++process) {
      absl::StatusOr<std::unique_ptr<ForkedWorker>> worker =
          ForkedWorker::Start(
              absl::StrCat("process ", process, " of ", team.processes,
                           " with ", team.threads, " threads"),
              [&]() -> absl::StatusOr<ForkedWorker::Work> {
                absl::StatusOr<std::shared_ptr<Stepper>> stepper =
                    Stepper::Create(kernel, team);
                if (!stepper.ok()) return stepper.status();
                return [stepper = *std::move(stepper),
                        slice_s = options.slice_s](double deadline) {
                  return stepper->RunUntil(deadline, slice_s);
                };
              });
      if (!worker.ok()) return worker.status();
      workers[i].push_back(*std::move(worker));
    }
  }
  for (const Workers& team : workers) {
    for (const auto& worker : team) {
      if (absl::Status status = worker->AwaitReady(); !status.ok()) {
        return status;
      }
    }
  }

  // Elements a second of a team in a round.
  std::vector<std::vector<double>> rates(teams.size());
  std::vector<Variant> variants;
  for (size_t i = 0; i < teams.size(); ++i) {
    variants.push_back(
        {"processes", [&, i]() -> absl::Status {
           const double deadline = MonotonicSeconds() + options.slice_s;
           for (const auto& worker : workers[i]) {
             if (absl::Status status = worker->Send(deadline); !status.ok()) {
               return status;
             }
           }
           double rate = 0;
           for (const auto& worker : workers[i]) {
             const absl::StatusOr<double> one = worker->Receive();
             if (!one.ok()) return one.status();
             rate += *one;
           }
           rates[i].push_back(rate);
           return absl::OkStatus();
         }});
  }
  const auto seconds = MeasureInterleaved(variants, options.rounds);
  if (!seconds.ok()) return seconds.status();
  std::vector<ProcessesPoint> points;
  for (size_t i = 0; i < teams.size(); ++i) {
    // The first round is not counted.
    rates[i].erase(rates[i].begin(), rates[i].end() - options.rounds);
    ProcessesPoint point;
    point.processes = teams[i].processes;
    point.threads = teams[i].threads;
    point.gb_per_s = SpreadOf(rates[i]).median * AdamState::kMovedBytes / 1e9;
    point.ratio = RatioOf(rates[i], rates[0]);
    if (threads > 1 && point.processes == threads && point.threads == 1) {
      point.target = absl::StrFormat(">= %.2f", kLeastAggregate);
      point.reached = point.ratio.median >= kLeastAggregate;
    }
    points.push_back(std::move(point));
  }
  return points;
}

absl::StatusOr<std::vector<ElementsPoint>> MeasureElements(
    const CpuAdam& one_thread, const AdamSpan& span,
    const ScalingOptions& options) {
  std::vector<int64_t> sizes;
  for (int64_t numel = ScalingOptions::kLeastNumel; numel < options.max_numel;
       numel *= 4) {
    sizes.push_back(numel);
    if (numel > options.max_numel / 4) break;
  }
  sizes.push_back(options.max_numel);
  // Small ones again and again: those that fit into a cache are timed from
  // there, and the time is long beside the clock's ticks.
  const auto repeats = [&options](int64_t numel) {
    return std::max<int64_t>(options.max_numel / 4 / numel, 1);
  };
  std::vector<Variant> variants;
  for (const int64_t numel : sizes) {
    variants.push_back(
        {absl::StrCat(numel, " elements"),
         [&one_thread, part = Part(span, 0, numel), times = repeats(numel)] {
           absl::Status status;
           for (int64_t i = 0; i < times && status.ok(); ++i) {
             status = Step(one_thread, part);
           }
           return status;
         }});
  }
  const auto seconds = MeasureInterleaved(variants, options.rounds);
  if (!seconds.ok()) return seconds.status();
  std::vector<ElementsPoint> points;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::vector<double> ns = (*seconds)[i];
    const double elements =
        static_cast<double>(sizes[i]) * static_cast<double>(repeats(sizes[i]));
    for (double& value : ns) value *= 1e9 / elements;
    const Spread spread = SpreadOf(std::move(ns));
    points.push_back(
        {sizes[i], spread, AdamState::kMovedBytes / spread.median});
  }
  return points;
}

absl::StatusOr<std::vector<ThreadsPoint>> MeasureThreads(
    const std::vector<std::unique_ptr<ThreadPool>>& pools,
    const std::vector<CpuAdam>& adams, const AdamSpan& span, int64_t rounds) {
  std::vector<Variant> variants;
  for (size_t i = 0; i < pools.size(); ++i) {
    variants.push_back({absl::StrCat(pools[i]->threads(), " threads"),
                        [&, i] { return Step(adams[i], span); }});
  }
  const auto seconds = MeasureInterleaved(variants, rounds);
  if (!seconds.ok()) return seconds.status();
  std::vector<ThreadsPoint> points;
  for (size_t i = 0; i < pools.size(); ++i) {
    const double bytes =
        static_cast<double>(span.numel) * AdamState::kMovedBytes;
    points.push_back({pools[i]->threads(),
                      bytes / SpreadOf((*seconds)[i]).median / 1e9,
                      RatioOf((*seconds)[0], (*seconds)[i])});
  }
  return points;
}

PoolPoint MeasurePool(ThreadPool& pool, int64_t rounds) {
  constexpr int kPausesARound = 10;
  constexpr int kRunsAPause = 10;
  // Far longer than a worker looks for work before it sleeps.
  constexpr auto kPause = std::chrono::milliseconds(5);
  const auto run_us = [&pool] {
    const Clock::time_point begin = Clock::now();
    pool.Run([](int) {});
    return std::chrono::duration<double, std::micro>(Clock::now() - begin)
        .count();
  };
  std::vector<double> awake;
  std::vector<double> asleep;
  for (int64_t i = 0; i < rounds * kPausesARound; ++i) {
    std::this_thread::sleep_for(kPause);
    asleep.push_back(run_us());
    for (int run = 0; run < kRunsAPause; ++run) awake.push_back(run_us());
  }
  return {pool.threads(), SpreadOf(std::move(awake)),
          SpreadOf(std::move(asleep))};
}

}  // namespace

absl::StatusOr<int64_t> ScalingBytes(const ScalingOptions& options) {
  if (absl::Status status = Validate(options); !status.ok()) return status;
  const int threads = MostThreads(options);
  // Processes, which come first and end before the rest begins, take most.
  int64_t bytes = 0;
  for (const Team& team : Teams(threads, options.max_numel)) {
    int64_t state;
    // State, and the rest of a page at the end of each of its arrays.
    if (__builtin_mul_overflow(team.numel, AdamState::kElementBytes, &state) ||
        __builtin_add_overflow(
            state, kProcessBytes + team.threads * kThreadBytes, &state) ||
        __builtin_mul_overflow(state, int64_t{team.processes}, &state) ||
        __builtin_add_overflow(bytes, state, &bytes)) {
      return absl::OutOfRangeError(
          absl::StrCat("--max_numel is ", options.max_numel,
                       ": the bytes of so many elements do not fit 64 bits"));
    }
  }
  return bytes;
}

absl::StatusOr<ScalingReport> MeasureScaling(const Kernel& kernel,
                                             const ScalingOptions& options) {
  const absl::StatusOr<int64_t> bytes = ScalingBytes(options);
  if (!bytes.ok()) return bytes.status();
  if (!kernel.copy_types.Contains(DType::kBFloat16)) {
    return absl::FailedPreconditionError(
        absl::StrCat("kernel ", kernel.name, " writes no bf16 copies"));
  }
  const int threads = MostThreads(options);
  ScalingReport report;
  // First: there are no threads yet.
  auto processes = MeasureProcesses(kernel, options, threads);
  if (!processes.ok()) return processes.status();
  report.processes = *std::move(processes);

  std::vector<std::unique_ptr<ThreadPool>> pools;  // of 1, 2, 4, ...
  std::vector<CpuAdam> adams;                      // on each
  for (int count = 1;; count = std::min(2 * count, threads)) {
    absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
        ThreadPool::Create({count});
    if (!pool.ok()) return pool.status();
    pools.push_back(*std::move(pool));
    absl::StatusOr<CpuAdam> adam = MakeAdam(kernel, *pools.back());
    if (!adam.ok()) return adam.status();
    adams.push_back(*std::move(adam));
    if (count == threads) break;
  }
  AdamStateOptions state_options;
  state_options.equal_bases = true;
  const absl::StatusOr<AdamState> state =
      AdamState::Create(*pools.back(), options.max_numel, state_options);
  if (!state.ok()) return state.status();
  const AdamSpan span = state->Span();
  report.store =
      adams.front().StreamsCopy(span.copy_type, span.copy_stores, span.numel)
          ? "streaming"
          : "ordinary";
  auto by_elements = MeasureElements(adams.front(), span, options);
  if (!by_elements.ok()) return by_elements.status();
  report.elements = *std::move(by_elements);
  auto by_threads = MeasureThreads(pools, adams, span, options.rounds);
  if (!by_threads.ok()) return by_threads.status();
  report.threads = *std::move(by_threads);
  report.pool = MeasurePool(*pools.back(), options.rounds);
  return report;
}

}  // namespace onepass

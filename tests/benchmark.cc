#include "tests/benchmark.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "dispatch/thread_pool.h"
#include "tests/runnable_kernels.h"

namespace onepass {
namespace {

// Some leaves, and a last one that is short and no multiple of a vector.
constexpr int64_t kOnceNumel = 2 * kLeafNumel + 77;
// fp32 arrays of 64 KiB: those of an Adam step lie in the second cache.
constexpr int64_t kInCacheNumel = int64_t{1} << 14;
// fp32 arrays of 256 MiB: those of an Adam step are more than caches hold. An
// L3 of 300 MiB may hold the one or two arrays of another operation.
constexpr int64_t kLargeNumel = int64_t{1} << 26;

BenchmarkPlan MakePlan(bool once) {
  BenchmarkPlan plan;
  plan.once = once;
  plan.kernels = RunnableKernels();
  if (once) {
    plan.numels = {kOnceNumel};
    plan.threads = {1, 2};
    return plan;
  }
  plan.numels = {kInCacheNumel, kLargeNumel};
  const int processors = ThreadPool::AllowedProcessors();
  for (int threads = 1; threads < processors; threads *= 2) {
    plan.threads.push_back(threads);
  }
  plan.threads.push_back(processors);
  return plan;
}

// Hands all on to the reporter that the flags ask for, and counts errors.
class CountingReporter : public benchmark::BenchmarkReporter {
 public:
  explicit CountingReporter(benchmark::BenchmarkReporter& next) : next_(next) {}

  bool ReportContext(const Context& context) override {
    return next_.ReportContext(context);
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) failed_ += run.error_occurred;
    next_.ReportRuns(runs);
  }
  void Finalize() override { next_.Finalize(); }

  int failed() const { return failed_; }

 private:
  benchmark::BenchmarkReporter& next_;
  int failed_ = 0;
};

// Whether `name` is among the arguments after the first, and is taken out.
bool TakeFlag(absl::string_view name, int& argc, char** argv) {
  char** end = std::remove(argv + 1, argv + argc, name);
  const bool found = end != argv + argc;
  argc = static_cast<int>(end - argv);
  argv[argc] = nullptr;
  return found;
}

int Fail(const std::string& message) {
  std::cerr << "benchmark: " << message << std::endl;
  return 1;
}

int Main(int argc, char** argv) {
  const bool once = TakeFlag("--once", argc, argv);
  std::vector<char*> arguments(argv, argv + argc);
  // No time at all: a benchmark ends after its first iteration.
  std::string no_time = "--benchmark_min_time=0";
  if (once) arguments.push_back(no_time.data());
  int arguments_count = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&arguments_count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(arguments_count,
                                             arguments.data())) {
    return 1;
  }

  if (absl::Status status = PinnedStatus(); !status.ok()) {
    const std::string reason(status.message());
    if (!once || !absl::IsFailedPrecondition(status)) return Fail(reason);
    std::cout << "SKIPPED: " << reason << std::endl;
    return 0;
  }
  RegisterBenchmarks(MakePlan(once));

  CountingReporter reporter(*benchmark::CreateDefaultDisplayReporter());
  if (benchmark::RunSpecifiedBenchmarks(&reporter) == 0) {
    return Fail("there is none to run");
  }
  if (reporter.failed() == 0) return 0;
  return Fail(std::to_string(reporter.failed()) + " failed");
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) { return onepass::Main(argc, argv); }

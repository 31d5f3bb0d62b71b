// Adam on the CPU as a trainer calls it, on the best kernel: whole and in
// pieces with two buffers, for each number of threads. Bytes are those of the
// state, read and written.

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "tests/benchmark.h"
#include "tests/random_arrays.h"

namespace onepass {
namespace {

// Far enough for the bias corrections of a long training.
constexpr int64_t kStep = 1000;
constexpr float kGradScale = 0.5f;

constexpr int64_t kPieceNumels[] = {int64_t{1} << 16, int64_t{1} << 19,
                                    int64_t{1} << 22};

struct Types {
  DType grad;
  DType moments;
};

constexpr Types kTypes[] = {{DType::kFloat32, DType::kFloat32},
                            {DType::kBFloat16, DType::kFloat32},
                            {DType::kBFloat16, DType::kBFloat16}};

int64_t Bytes(const AdamSpan& span) {
  return span.numel *
         (2 * static_cast<int64_t>(sizeof(float)) + ByteSize(span.grad_type) +
          2 * ByteSize(span.exp_avg_type) + 2 * ByteSize(span.exp_avg_sq_type) +
          ByteSize(span.copy_type));
}

AdamSpan MakeSpan(int64_t numel, const Types& types, RandomArrays& arrays) {
  AdamSpan span;
  span.numel = numel;
  span.grad_type = types.grad;
  span.exp_avg_type = types.moments;
  span.exp_avg_sq_type = types.moments;
  span.param = arrays.Add<float>(DType::kFloat32, numel);
  span.grad = arrays.Add(span.grad_type, numel);
  span.exp_avg = arrays.Add(span.exp_avg_type, numel);
  span.exp_avg_sq = arrays.AddPositive(span.exp_avg_sq_type, numel);
  return span;
}

absl::Status MeasureStep(benchmark::State& state, const CpuAdam& adam,
                         AdamSpan span, RandomArrays& arrays) {
  span.copy = arrays.Add(span.copy_type, span.numel);
  if (!arrays.status().ok()) return arrays.status();
  for (auto _ : state) {
    absl::Status status = adam.Step(span, kStep, kGradScale);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status MeasurePieces(benchmark::State& state, const CpuAdam& adam,
                           const AdamSpan& span, int64_t piece_numel,
                           RandomArrays& arrays) {
  void* const buffers[] = {arrays.Add(span.copy_type, piece_numel),
                           arrays.Add(span.copy_type, piece_numel)};
  if (!arrays.status().ok()) return arrays.status();
  int64_t pieces = 0;
  for (auto _ : state) {
    absl::Status status = adam.StepPieces(
        span, kStep, kGradScale, piece_numel,
        [&](const AdamPiece&) -> absl::StatusOr<void*> {
          return buffers[pieces % 2];
        },
        [&](const AdamPiece&, void*) {
          ++pieces;
          return absl::OkStatus();
        });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// In pieces where `piece_numel` is not 0.
absl::Status Measure(benchmark::State& state, const Kernel& kernel,
                     const Types& types, int64_t piece_numel) {
  const int64_t numel = state.range(0);
  absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
      ThreadPool::Create({static_cast<int>(state.range(1))});
  if (!pool.ok()) return pool.status();
  AdamOptions options;
  // Weights tend to at most its inverse: they do not grow without end.
  options.weight_decay = 0.1;
  absl::StatusOr<CpuAdam> adam = CpuAdam::Create(kernel, **pool, {options});
  if (!adam.ok()) return adam.status();
  RandomArrays arrays(**pool);
  const AdamSpan span = MakeSpan(numel, types, arrays);
  const absl::Status status =
      piece_numel == 0 ? MeasureStep(state, *adam, span, arrays)
                       : MeasurePieces(state, *adam, span, piece_numel, arrays);
  state.SetItemsProcessed(state.iterations() * numel);
  state.SetBytesProcessed(state.iterations() * Bytes(span));
  return status;
}

void Register(const BenchmarkPlan& plan, const Types& types,
              int64_t piece_numel) {
  const Kernel& kernel = *plan.kernels.front();
  std::string name = absl::StrCat(piece_numel == 0 ? "Step/" : "StepPieces/",
                                  kernel.name, "/grad:", Name(types.grad),
                                  "/moments:", Name(types.moments));
  if (piece_numel != 0) absl::StrAppend(&name, "/piece_numel:", piece_numel);
  auto* const benchmark = benchmark::RegisterBenchmark(
      name.c_str(), [&kernel, types, piece_numel](benchmark::State& state) {
        const absl::Status status = Measure(state, kernel, types, piece_numel);
        if (!status.ok()) state.SkipWithError(status.ToString().c_str());
      });
  // The threads' time is that of the clock.
  benchmark->ArgNames({"numel", "threads"})->UseRealTime();
  for (int64_t numel : plan.numels) {
    if (numel <= piece_numel) continue;
    for (int threads : plan.threads) benchmark->Args({numel, threads});
  }
}

}  // namespace

void RegisterBenchmarks(const BenchmarkPlan& plan) {
  for (const Types& types : kTypes) Register(plan, types, /*piece_numel=*/0);
  const std::vector<int64_t> piece_numels =
      plan.once ? std::vector<int64_t>{kLeafNumel}
                : std::vector<int64_t>(std::begin(kPieceNumels),
                                       std::end(kPieceNumels));
  for (int64_t piece_numel : piece_numels) {
    Register(plan, kTypes[0], piece_numel);
  }
}

}  // namespace onepass

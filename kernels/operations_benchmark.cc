// Every operation of every kernel that runs here, on one thread. Names are
// OPERATION/KERNEL/TYPES/ELEMENTS; bytes are those read and written, without
// those that a cache reads for itself before a write.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "tests/benchmark.h"
#include "tests/random_arrays.h"

namespace onepass {
namespace {

constexpr DType kWideTypes[] = {DType::kFloat32, DType::kBFloat16,
                                DType::kFloat16};
constexpr DType kNarrowTypes[] = {DType::kBFloat16, DType::kFloat16,
                                  DType::kFloat8E4M3};
constexpr DType kFloat32AndBFloat16[] = {DType::kFloat32, DType::kBFloat16};

// What one benchmark calls again and again.
using Work = std::function<void()>;
// Makes it, over arrays of `numel` elements that it adds to `arrays`.
using MakeWork = std::function<Work(int64_t numel, RandomArrays& arrays)>;

void Measure(benchmark::State& state, const MakeWork& make_work,
             int64_t bytes) {
  absl::StatusOr<std::unique_ptr<ThreadPool>> pool = ThreadPool::Create({1});
  if (!pool.ok()) return state.SkipWithError(pool.status().ToString().c_str());
  const int64_t numel = state.range(0);
  RandomArrays arrays(**pool);
  const Work work = make_work(numel, arrays);
  if (!arrays.status().ok()) {
    return state.SkipWithError(arrays.status().ToString().c_str());
  }
  for (auto _ : state) {
    work();
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * numel);
  state.SetBytesProcessed(state.iterations() * numel * bytes);
}

// `bytes` are those of one element, read and written.
void Register(const BenchmarkPlan& plan, const std::string& name, int64_t bytes,
              const MakeWork& make_work) {
  auto* const benchmark = benchmark::RegisterBenchmark(
      name.c_str(), [make_work, bytes](benchmark::State& state) {
        Measure(state, make_work, bytes);
      });
  benchmark->ArgName("numel");
  for (int64_t numel : plan.numels) benchmark->Arg(numel);
}

// The moments tend to the gradient and its square, the weights to at most
// step_size / decay: none of them to infinity or the subnormals, however often.
AdamConstants MakeConstants() {
  AdamConstants constants;
  constants.beta1 = 0.9f;
  constants.beta2 = 0.999f;
  constants.one_minus_beta1 = 0.1f;
  constants.one_minus_beta2 = 0.001f;
  constants.eps = 1e-8f;
  constants.step_size = -0.001f;
  constants.decay = -0.0001f;
  constants.decay_mode = WeightDecay::kAdamW;
  return constants;
}

// What an Adam step does with the copy.
struct Copy {
  const char* name;
  bool written;
  DType type;
  bool streamed;
};

constexpr Copy kCopies[] = {
    {"none", false, DType::kBFloat16, false},
    {"bf16", true, DType::kBFloat16, false},
    {"fp16", true, DType::kFloat16, false},
    {"bf16_streamed", true, DType::kBFloat16, true},
};

void RegisterAdamStep(const BenchmarkPlan& plan, const Kernel& kernel,
                      DType grad, DType moments, const Copy& copy) {
  if (!kernel.gradient_types.Contains(grad) ||
      !kernel.moment_types.Contains(moments) ||
      (copy.written && !kernel.copy_types.Contains(copy.type)) ||
      (copy.streamed && !kernel.operations->streams_copies)) {
    return;
  }
  AdamStepArgs args;
  args.grad_type = grad;
  args.exp_avg_type = moments;
  args.exp_avg_sq_type = moments;
  args.grad_scale = 0.5f;
  args.constants = MakeConstants();
  args.copy_type = copy.type;
  args.stream_copy = copy.streamed;
  BenchmarkPlan step_plan = plan;
  // Stores around the caches are for arrays that these do not hold.
  if (copy.streamed) step_plan.numels = {plan.numels.back()};
  Register(step_plan,
           absl::StrCat("adam_step/", kernel.name, "/grad:", Name(grad),
                        "/moments:", Name(moments), "/copy:", copy.name),
           8 + ByteSize(grad) + 4 * ByteSize(moments) +
               (copy.written ? ByteSize(copy.type) : 0),
           [&kernel, types = args, copies = copy.written](
               int64_t numel, RandomArrays& arrays) {
             AdamStepArgs args = types;
             args.numel = numel;
             args.param = arrays.Add<float>(DType::kFloat32, numel);
             args.grad = arrays.Add(args.grad_type, numel);
             args.exp_avg = arrays.Add(args.exp_avg_type, numel);
             args.exp_avg_sq = arrays.AddPositive(args.exp_avg_sq_type, numel);
             if (copies) args.copy = arrays.Add(args.copy_type, numel);
             return [&kernel, args] { kernel.operations->adam_step(args); };
           });
}

// What an accumulation of gradients does with one more term.
struct Accumulation {
  const char* name;
  bool with_sum;
  bool with_leaf_sums;
  float divisor;
  DType out_type;
};

// Sums in fp32 stay where they are, so they are read and written in place: a
// sum stops to grow at 2^24 terms, and one that is divided tends to a term's
// size.
constexpr Accumulation kAccumulations[] = {
    {"first", false, false, 1, DType::kFloat32},
    {"next", true, false, 1, DType::kFloat32},
    {"last", true, false, 8, DType::kFloat32},
    {"last_with_norm", true, true, 8, DType::kFloat32},
    {"last_with_norm", true, true, 8, DType::kBFloat16},
};

void RegisterAccumulate(const BenchmarkPlan& plan, const Kernel& kernel,
                        const Accumulation& accumulation, DType term) {
  Register(
      plan,
      absl::StrCat("accumulate/", kernel.name, "/", accumulation.name,
                   "/term:", Name(term), "/out:", Name(accumulation.out_type)),
      (accumulation.with_sum ? 4 : 0) + ByteSize(term) +
          ByteSize(accumulation.out_type),
      [&kernel, accumulation, term](int64_t numel, RandomArrays& arrays) {
        AccumulateArgs args;
        args.numel = numel;
        args.term_type = term;
        args.out_type = accumulation.out_type;
        args.divisor = accumulation.divisor;
        args.term = arrays.Add(term, numel);
        float* sum = arrays.Add<float>(DType::kFloat32, numel);
        if (accumulation.with_sum) args.sum = sum;
        args.out = accumulation.out_type == DType::kFloat32
                       ? sum
                       : arrays.Add(accumulation.out_type, numel);
        std::vector<double> leaf_sums(
            accumulation.with_leaf_sums ? LeafCount(numel) : 0);
        return [&kernel, args, leaf_sums]() mutable {
          if (!leaf_sums.empty()) args.leaf_sums = leaf_sums.data();
          kernel.operations->accumulate(args);
        };
      });
}

void RegisterScale(const BenchmarkPlan& plan, const Kernel& kernel) {
  Register(plan, absl::StrCat("scale/", kernel.name), 8,
           [&kernel](int64_t numel, RandomArrays& arrays) {
             ScaleArgs args;
             args.numel = numel;
             args.out = arrays.Add<float>(DType::kFloat32, numel);
             args.in = args.out;
             args.factor = 0.5f;
             return [&kernel, args]() mutable {
               kernel.operations->scale(args);
               // Back and forth.
               args.factor = 1 / args.factor;
             };
           });
}

void RegisterCast(const BenchmarkPlan& plan, const Kernel& kernel, DType in,
                  DType out) {
  Register(plan,
           absl::StrCat("cast/", kernel.name, "/", Name(in), "/", Name(out)),
           ByteSize(in) + ByteSize(out),
           [&kernel, in, out](int64_t numel, RandomArrays& arrays) {
             CastArgs args;
             args.numel = numel;
             args.in_type = in;
             args.out_type = out;
             args.in = arrays.Add(in, numel);
             args.out = arrays.Add(out, numel);
             return [&kernel, args] { kernel.operations->cast(args); };
           });
}

void RegisterSquaredNorm(const BenchmarkPlan& plan, const Kernel& kernel,
                         DType type) {
  Register(plan, absl::StrCat("squared_norm/", kernel.name, "/", Name(type)),
           ByteSize(type),
           [&kernel, type](int64_t numel, RandomArrays& arrays) {
             SquaredNormArgs args;
             args.numel = numel;
             args.type = type;
             args.x = arrays.Add(type, numel);
             std::vector<double> leaf_sums(LeafCount(numel));
             return [&kernel, args, leaf_sums]() mutable {
               args.leaf_sums = leaf_sums.data();
               kernel.operations->squared_norm(args);
             };
           });
}

void RegisterAbsMax(const BenchmarkPlan& plan, const Kernel& kernel,
                    DType type) {
  Register(plan, absl::StrCat("absmax/", kernel.name, "/", Name(type)),
           ByteSize(type),
           [&kernel, type](int64_t numel, RandomArrays& arrays) {
             AbsMaxArgs args;
             args.numel = numel;
             args.type = type;
             args.x = arrays.Add(type, numel);
             std::vector<float> leaf_absmax(LeafCount(numel));
             return [&kernel, args, leaf_absmax]() mutable {
               args.leaf_absmax = leaf_absmax.data();
               kernel.operations->absmax(args);
             };
           });
}

// Remainders are any 16 bits, as those of bf16 are.
void RegisterSplitRemainder(const BenchmarkPlan& plan, const Kernel& kernel) {
  Register(plan, absl::StrCat("split_remainder/", kernel.name), 8,
           [&kernel](int64_t numel, RandomArrays& arrays) {
             SplitRemainderArgs args;
             args.numel = numel;
             args.master = arrays.Add<float>(DType::kFloat32, numel);
             args.param = arrays.Add<uint16_t>(DType::kBFloat16, numel);
             args.remainder = arrays.Add<int16_t>(DType::kBFloat16, numel);
             return
                 [&kernel, args] { kernel.operations->split_remainder(args); };
           });
}

void RegisterJoinRemainder(const BenchmarkPlan& plan, const Kernel& kernel) {
  Register(plan, absl::StrCat("join_remainder/", kernel.name), 8,
           [&kernel](int64_t numel, RandomArrays& arrays) {
             JoinRemainderArgs args;
             args.numel = numel;
             args.param = arrays.Add<uint16_t>(DType::kBFloat16, numel);
             args.remainder = arrays.Add<int16_t>(DType::kBFloat16, numel);
             args.master = arrays.Add<float>(DType::kFloat32, numel);
             return
                 [&kernel, args] { kernel.operations->join_remainder(args); };
           });
}

void RegisterQuantize(const BenchmarkPlan& plan, const Kernel& kernel,
                      DType type) {
  Register(plan, absl::StrCat("quantize/", kernel.name, "/", Name(type)),
           4 + ByteSize(type),
           [&kernel, type](int64_t numel, RandomArrays& arrays) {
             QuantizeArgs args;
             args.numel = numel;
             args.in = arrays.Add<float>(DType::kFloat32, numel);
             args.codes = arrays.Add(type, numel);
             args.scales = arrays.Add<float>(DType::kFloat32, LeafCount(numel));
             args.type = type;
             return [&kernel, args] { kernel.operations->quantize(args); };
           });
}

void RegisterDequantize(const BenchmarkPlan& plan, const Kernel& kernel,
                        DType type) {
  Register(plan, absl::StrCat("dequantize/", kernel.name, "/", Name(type)),
           4 + ByteSize(type),
           [&kernel, type](int64_t numel, RandomArrays& arrays) {
             DequantizeArgs args;
             args.numel = numel;
             args.codes = arrays.Add(type, numel);
             args.scales = static_cast<float*>(
                 arrays.AddPositive(DType::kFloat32, LeafCount(numel)));
             args.out = arrays.Add<float>(DType::kFloat32, numel);
             args.type = type;
             return [&kernel, args] { kernel.operations->dequantize(args); };
           });
}

void RegisterAll(const BenchmarkPlan& plan, const Kernel& kernel) {
  for (DType grad : kWideTypes) {
    for (DType moments : kFloat32AndBFloat16) {
      for (const Copy& copy : kCopies) {
        RegisterAdamStep(plan, kernel, grad, moments, copy);
      }
    }
  }
  for (const Accumulation& accumulation : kAccumulations) {
    for (DType term : kWideTypes) {
      RegisterAccumulate(plan, kernel, accumulation, term);
    }
  }
  RegisterScale(plan, kernel);
  for (DType narrow : kNarrowTypes) {
    RegisterCast(plan, kernel, DType::kFloat32, narrow);
    RegisterCast(plan, kernel, narrow, DType::kFloat32);
  }
  for (DType type : kWideTypes) RegisterSquaredNorm(plan, kernel, type);
  for (DType type : kWideTypes) RegisterAbsMax(plan, kernel, type);
  RegisterSplitRemainder(plan, kernel);
  RegisterJoinRemainder(plan, kernel);
  for (DType type : {DType::kFloat16, DType::kFloat8E4M3}) {
    RegisterQuantize(plan, kernel, type);
    RegisterDequantize(plan, kernel, type);
  }
}

}  // namespace

void RegisterBenchmarks(const BenchmarkPlan& plan) {
  for (const Kernel* kernel : plan.kernels) RegisterAll(plan, *kernel);
}

}  // namespace onepass

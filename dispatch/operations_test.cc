#include "dispatch/operations.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/adam_constants.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/allocation_counter.h"
#include "tests/counting_kernel.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

constexpr AdamConstants kConstants = {
    0.9f,  0.99f, 0.1f,  0.01f,  1e-8f,
    0.01f, -0.1f, 1.25f, -1e-3f, WeightDecay::kAdamW};

// --- What is refused. ---

constexpr int64_t kNumel = 64;

// A pointer among an operation's arguments.
template <typename Args>
struct SpanField {
  std::string name;
  int64_t element_bytes;
  bool written;
  void (*set)(Args& args, uintptr_t address);
  int64_t numel = kNumel;
  bool optional = false;  // null is not an error
};

template <typename Args, auto member>
SpanField<Args> Field(const char* name, DType type, bool written,
                      int64_t numel = kNumel) {
  using Pointer =
      std::remove_reference_t<decltype(std::declval<Args&>().*member)>;
  return {name, ByteSize(type), written,
          [](Args& args, uintptr_t address) {
            args.*member = reinterpret_cast<Pointer>(address);
          },
          numel};
}

// Calls an operation with one thing wrong at a time: each call is refused, with
// a message that opens with the operation's name, and reaches no kernel.
template <typename Args>
class Refusals {
 public:
  using Call =
      std::function<absl::Status(const Kernel&, ThreadPool&, const Args&)>;

  // `args` is complete but for its pointers. `in_place` names the two spans
  // that may be the same.
  Refusals(std::string operation, const Args& args,
           std::vector<SpanField<Args>> spans, Call call,
           std::pair<std::string, std::string> in_place = {})
      : operation_(std::move(operation)),
        args_(args),
        spans_(std::move(spans)),
        call_(std::move(call)),
        in_place_(std::move(in_place)) {
    args_.numel = kNumel;
    Place(args_, 3 * kBytes);
  }

  // What all operations have in common.
  void TryAll() {
    TrySizes();
    for (const SpanField<Args>& span : spans_) {
      if (!span.optional) {
        Refused([&](Args& a) { span.set(a, 0); }, span.name + " is null");
      }
      if (span.element_bytes == 1) continue;
      const uintptr_t odd = Address(3 * kBytes, span) + 1;
      Refused([&](Args& a) { span.set(a, odd); }, "not aligned");
    }
    TryOverlaps();
  }

  void Refused(const std::function<void(Args&)>& change,
               const std::string& problem) {
    Args args = args_;
    change(args);
    const int64_t before = OperationCounts<0>().Total();
    const absl::Status status = call_(kernel_, *pool_, args);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << problem << ": " << status;
    const std::string message(status.message());
    EXPECT_THAT(message, StartsWith(operation_ + ": "));
    EXPECT_THAT(message, HasSubstr(problem));
    EXPECT_EQ(OperationCounts<0>().Total(), before) << problem;
  }

 private:
  static constexpr int64_t kBytes = kNumel * sizeof(float);

  uintptr_t Address(int64_t stride, const SpanField<Args>& span) const {
    return reinterpret_cast<uintptr_t>(memory_.data()) + kBytes +
           (&span - spans_.data()) * stride;
  }

  void Place(Args& args, int64_t stride) const {
    for (const SpanField<Args>& span : spans_) {
      span.set(args, Address(stride, span));
    }
  }

  void Accepted(const Args& args, int64_t calls, const std::string& what) {
    const int64_t before = OperationCounts<0>().Total();
    const absl::Status status = call_(kernel_, *pool_, args);
    EXPECT_TRUE(status.ok()) << operation_ << ", " << what << ": " << status;
    EXPECT_EQ(OperationCounts<0>().Total(), before + calls) << what;
  }

  void TrySizes() {
    Args args = args_;
    Accepted(args, 1, "as it is");
    Place(args, kBytes);
    Accepted(args, 1, "one span directly after the other");
    for (const SpanField<Args>& span : spans_) span.set(args, 0);
    args.numel = 0;
    Accepted(args, 0, "nothing of null");
    for (int64_t numel : {int64_t{-1}, -kMost - 1, kMost, kMost / 8 + 1}) {
      Refused([numel](Args& a) { a.numel = numel; },
              "numel is " + std::to_string(numel) + ", expected 0 to");
    }
  }

  void TryOverlaps() {
    for (const SpanField<Args>& a : spans_) {
      for (const SpanField<Args>& b : spans_) {
        if (&a == &b || !(a.written || b.written)) continue;
        const uintptr_t begin = Address(3 * kBytes, a);
        // The same beginning; b's first element in a's last; the other way
        // round.
        const uintptr_t last = begin + (a.numel - 1) * a.element_bytes;
        const uintptr_t before = begin - (b.numel - 1) * b.element_bytes;
        for (uintptr_t address : {begin, last, before}) {
          address -= address % b.element_bytes;
          const std::pair pair(std::min(a.name, b.name),
                               std::max(a.name, b.name));
          Args args = args_;
          b.set(args, address);
          if (address == begin && pair == in_place_) {
            Accepted(args, 1, a.name + " is " + b.name);
            continue;
          }
          Refused([&](Args& changed) { changed = args; }, " overlaps ");
          const std::string message(call_(kernel_, *pool_, args).message());
          EXPECT_THAT(message, AllOf(HasSubstr(a.name), HasSubstr(b.name)));
        }
      }
    }
  }

  const std::string operation_;
  Args args_;
  const std::vector<SpanField<Args>> spans_;
  const Call call_;
  const std::pair<std::string, std::string> in_place_;
  std::vector<float> memory_ = std::vector<float>(16 * kNumel);
  const Kernel kernel_ = MakeCountingKernel<0>(ScalarKernel(), "counting");
  const std::unique_ptr<ThreadPool> pool_ = MakePool(2);
};

AdamStepArgs AdamArgs(DType grad_type, DType moment_type, DType copy_type) {
  AdamStepArgs args = {};
  args.grad_type = grad_type;
  args.exp_avg_type = moment_type;
  args.exp_avg_sq_type = moment_type;
  args.copy_type = copy_type;
  args.grad_scale = 0.5f;
  args.constants = kConstants;
  return args;
}

TEST(OperationsRefusalTest, AdamStep) {
  using Args = AdamStepArgs;
  const auto call = [](const Kernel& kernel, ThreadPool& pool,
                       const Args& args) {
    return AdamStep(kernel, pool, args);
  };
  for (DType grad : {kF32, kF16}) {
    for (DType moment : {kF32, kBF16}) {
      std::vector<SpanField<Args>> spans = {
          Field<Args, &Args::param>("param", kF32, true),
          Field<Args, &Args::grad>("grad", grad, false),
          Field<Args, &Args::exp_avg>("exp_avg", moment, true),
          Field<Args, &Args::exp_avg_sq>("exp_avg_sq", moment, true)};
      const Args args = AdamArgs(grad, moment, kBF16);
      Refusals<Args>("adam_step", args, spans, call).TryAll();
      spans.push_back(Field<Args, &Args::copy>("copy", kBF16, true));
      spans.back().optional = true;
      Refusals<Args> refusals("adam_step", args, spans, call);
      refusals.TryAll();
      refusals.Refused([](Args& a) { a.copy_type = kF32; },
                       "copy_type is fp32, expected bf16, fp16");
      refusals.Refused([](Args& a) { a.copy_type = kE4M3; },
                       "copy_type is e4m3, expected bf16, fp16");
      refusals.Refused([](Args& a) { a.grad_type = kE4M3; },
                       "grad_type is e4m3, expected fp32, bf16, fp16");
      refusals.Refused([](Args& a) { a.exp_avg_type = kF16; },
                       "exp_avg_type is fp16, expected fp32, bf16");
      refusals.Refused([](Args& a) { a.exp_avg_sq_type = kF16; },
                       "exp_avg_sq_type is fp16, expected fp32, bf16");
      for (float scale : {kInfinity, -kInfinity, kNaN}) {
        refusals.Refused([scale](Args& a) { a.grad_scale = scale; },
                         "grad_scale is ");
      }
      refusals.Refused([](Args& a) { a.constants.step_size = kNaN; },
                       "constants.step_size is nan");
      refusals.Refused([](Args& a) { a.constants.beta2 = kInfinity; },
                       "constants.beta2 is inf");
      refusals.Refused(
          [](Args& a) { a.constants.decay_mode = static_cast<WeightDecay>(7); },
          "constants.decay_mode is 7");
    }
  }
}

TEST(OperationsRefusalTest, AdamStepOfAKernelWithoutCopies) {
  Kernel kernel = MakeCountingKernel<0>(ScalarKernel(), "no_copies");
  kernel.copy_types = {};
  float state[4] = {};
  uint16_t copy;
  AdamStepArgs args = AdamArgs(kF32, kF32, kBF16);
  args.numel = 1;
  args.param = &state[0];
  args.grad = &state[1];
  args.exp_avg = &state[2];
  args.exp_avg_sq = &state[3];
  EXPECT_TRUE(CheckAdamStep(kernel, args).ok());
  args.copy = &copy;
  const absl::Status status = CheckAdamStep(kernel, args);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(),
            "adam_step: copy_type is bf16, expected none: not supported");
}

TEST(OperationsRefusalTest, Accumulate) {
  using Args = AccumulateArgs;
  for (bool with_norm : {false, true}) {
    auto call = [with_norm](const Kernel& kernel, ThreadPool& pool,
                            const Args& args) {
      NormSum sum;
      const absl::Status status =
          Accumulate(kernel, pool, args, with_norm ? &sum : nullptr);
      EXPECT_EQ(sum, NormSum());  // of zeros, or not touched
      return status;
    };
    Args args = {};
    args.divisor = 2;
    for (DType term : {kF32, kBF16, kF16}) {
      for (DType out : {kF32, kBF16, kF16}) {
        args.term_type = term;
        args.out_type = out;
        const auto term_field = Field<Args, &Args::term>("term", term, false);
        const auto out_field = Field<Args, &Args::out>("out", out, true);
        auto sum_field = Field<Args, &Args::sum>("sum", kF32, false);
        sum_field.optional = true;
        Refusals<Args>("accumulate", args, {term_field, out_field}, call)
            .TryAll();
        Refusals<Args> refusals(
            "accumulate", args, {term_field, out_field, sum_field}, call,
            out == kF32 ? std::pair<std::string, std::string>("out", "sum")
                        : std::pair<std::string, std::string>());
        refusals.TryAll();
        refusals.Refused(
            [](Args& a) { a.term = a.out = const_cast<float*>(a.sum); },
            "out overlaps");
        refusals.Refused([](Args& a) { a.term_type = kE4M3; },
                         "term_type is e4m3, expected fp32, bf16, fp16");
        refusals.Refused([](Args& a) { a.out_type = kE4M3; },
                         "out_type is e4m3, expected fp32, bf16, fp16");
        refusals.Refused([](Args& a) { a.divisor = 0; }, "divisor is 0");
        refusals.Refused([](Args& a) { a.divisor = -0.0f; }, "divisor is 0");
        refusals.Refused([](Args& a) { a.divisor = kNaN; }, "divisor is nan");
        double leaf_sum;
        refusals.Refused([&](Args& a) { a.leaf_sums = &leaf_sum; },
                         "leaf_sums is set");
        refusals.Refused([](Args& a) { a.divisor = kInfinity; },
                         "divisor is inf");
      }
    }
  }
}

TEST(OperationsRefusalTest, Scale) {
  using Args = ScaleArgs;
  Args args = {};
  args.factor = 2;
  Refusals<Args> refusals("scale", args,
                          {Field<Args, &Args::in>("in", kF32, false),
                           Field<Args, &Args::out>("out", kF32, true)},
                          Scale, {"in", "out"});
  refusals.TryAll();
  refusals.Refused([](Args& a) { a.factor = kNaN; }, "factor is nan");
  refusals.Refused([](Args& a) { a.factor = kInfinity; }, "factor is inf");
}

TEST(OperationsRefusalTest, Cast) {
  using Args = CastArgs;
  for (DType in : kAllDTypes) {
    for (DType out : kAllDTypes) {
      Args args = {};
      args.in_type = in;
      args.out_type = out;
      Refusals<Args> refusals("cast", args,
                              {Field<Args, &Args::in>("in", in, false),
                               Field<Args, &Args::out>("out", out, true)},
                              Cast);
      for (int unknown : {4, 31, 32, 255}) {
        const DType type = static_cast<DType>(unknown);
        refusals.Refused([type](Args& a) { a.in_type = type; }, "in_type is ");
        refusals.Refused([type](Args& a) { a.out_type = type; },
                         "out_type is ");
      }
      if ((in == kF32) != (out == kF32)) {
        refusals.TryAll();
      } else {
        refusals.Refused([](Args&) {}, std::string("from ") + Name(in) +
                                           " to " + Name(out) +
                                           ", expected from or to fp32");
      }
    }
  }
}

TEST(OperationsRefusalTest, SquaredNorm) {
  using Args = SquaredNormArgs;
  auto call = [](const Kernel& kernel, ThreadPool& pool, const Args& args) {
    NormSum sum;
    const absl::Status status =
        SquaredNorm(kernel, pool, args.numel, args.x, args.type, sum);
    EXPECT_EQ(sum, NormSum());  // of zeros, or not touched
    return status;
  };
  for (DType type : {kF32, kBF16, kF16}) {
    Args args = {};
    args.type = type;
    Refusals<Args> refusals("squared_norm", args,
                            {Field<Args, &Args::x>("x", type, false)}, call);
    refusals.TryAll();
    refusals.Refused([](Args& a) { a.type = kE4M3; },
                     "type is e4m3, expected fp32, bf16, fp16");
  }
}

TEST(OperationsRefusalTest, AbsMax) {
  using Args = AbsMaxArgs;
  for (DType type : {kF32, kBF16, kF16}) {
    Args args = {};
    args.type = type;
    Refusals<Args> refusals(
        "absmax", args,
        {Field<Args, &Args::x>("x", type, false),
         Field<Args, &Args::leaf_absmax>("leaf_absmax", kF32, true, 1)},
        AbsMax);
    refusals.TryAll();
    refusals.Refused([](Args& a) { a.type = kE4M3; },
                     "type is e4m3, expected fp32, bf16, fp16");
  }
}

TEST(OperationsRefusalTest, SplitAndJoinRemainder) {
  using Split = SplitRemainderArgs;
  Refusals<Split>("split_remainder", Split{},
                  {Field<Split, &Split::master>("master", kF32, false),
                   Field<Split, &Split::param>("param", kBF16, true),
                   Field<Split, &Split::remainder>("remainder", kBF16, true)},
                  SplitRemainder)
      .TryAll();
  using Join = JoinRemainderArgs;
  Refusals<Join>("join_remainder", Join{},
                 {Field<Join, &Join::param>("param", kBF16, false),
                  Field<Join, &Join::remainder>("remainder", kBF16, false),
                  Field<Join, &Join::master>("master", kF32, true)},
                 JoinRemainder)
      .TryAll();
}

TEST(OperationsRefusalTest, QuantizeAndDequantize) {
  for (DType type : {kF16, kE4M3}) {
    using In = QuantizeArgs;
    In in = {};
    in.type = type;
    Refusals<In> quantize("quantize", in,
                          {Field<In, &In::in>("in", kF32, false),
                           Field<In, &In::codes>("codes", type, true),
                           Field<In, &In::scales>("scales", kF32, true, 1)},
                          Quantize);
    quantize.TryAll();
    using Out = DequantizeArgs;
    Out out = {};
    out.type = type;
    Refusals<Out> dequantize(
        "dequantize", out,
        {Field<Out, &Out::codes>("codes", type, false),
         Field<Out, &Out::scales>("scales", kF32, false, 1),
         Field<Out, &Out::out>("out", kF32, true)},
        Dequantize);
    dequantize.TryAll();
    for (DType bad : {kF32, kBF16}) {
      const std::string problem =
          std::string("type is ") + Name(bad) + ", expected fp16, e4m3";
      quantize.Refused([bad](In& a) { a.type = bad; }, problem);
      dequantize.Refused([bad](Out& a) { a.type = bad; }, problem);
    }
  }
}

// The sums of kNumel elements, which are less than a leaf.
template <typename Args>
SpanField<Args> LeafSumsField() {
  return {"leaf_sums", sizeof(double), true,
          [](Args& args, uintptr_t address) {
            args.leaf_sums = reinterpret_cast<double*>(address);
          },
          LeafCount(kNumel)};
}

// The checks alone, and the operation where they find nothing wrong.
template <typename Args>
auto CheckedBy(void (*KernelOperations::*operation)(const Args&)) {
  return [operation](const Kernel& kernel, ThreadPool&, const Args& args) {
    const absl::Status status = CheckArgs(args);
    if (status.ok() && args.numel > 0) (kernel.operations->*operation)(args);
    return status;
  };
}

TEST(OperationsRefusalTest, ChecksTakeLeafSums) {
  using Sum = AccumulateArgs;
  for (DType out : {kF32, kBF16}) {
    Sum args = {};
    args.divisor = 2;
    args.out_type = out;
    auto sum = Field<Sum, &Sum::sum>("sum", kF32, false);
    sum.optional = true;
    auto leaf_sums = LeafSumsField<Sum>();
    leaf_sums.optional = true;
    Refusals<Sum>("accumulate", args,
                  {Field<Sum, &Sum::term>("term", kF32, false),
                   Field<Sum, &Sum::out>("out", out, true), sum, leaf_sums},
                  CheckedBy(&KernelOperations::accumulate),
                  out == kF32
                      ? std::pair<std::string, std::string>("out", "sum")
                      : std::pair<std::string, std::string>())
        .TryAll();
  }
  using Norm = SquaredNormArgs;
  Refusals<Norm> norm(
      "squared_norm", Norm{},
      {Field<Norm, &Norm::x>("x", kF32, false), LeafSumsField<Norm>()},
      CheckedBy(&KernelOperations::squared_norm));
  norm.TryAll();
  norm.Refused([](Norm& a) { a.type = kE4M3; },
               "type is e4m3, expected fp32, bf16, fp16");
}

TEST(OperationsRefusalTest, LeafSumsAreAsLongAsTheLeaves) {
  // The last of three meets what comes behind it.
  std::vector<double> memory(3 + 2 * kLeafNumel);
  auto* const x = reinterpret_cast<float*>(&memory[2]);
  constexpr int64_t n = 2 * kLeafNumel;
  EXPECT_TRUE(CheckArgs(SquaredNormArgs{n, x, memory.data()}).ok());
  EXPECT_EQ(CheckArgs(SquaredNormArgs{n + 1, x, memory.data()}).message(),
            "squared_norm: leaf_sums overlaps x");
}

TEST(OperationsRefusalTest, SumLeaves) {
  std::vector<double> leaf_sums(8);
  NormSum sum;
  const auto error = [](const SumLeavesArgs& args) {
    const absl::Status status = CheckArgs(args);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  const SumLeavesArgs good = {8, leaf_sums.data(), &sum};
  EXPECT_TRUE(CheckArgs(good).ok());
  EXPECT_TRUE(CheckArgs(SumLeavesArgs{}).ok());
  for (int64_t count : {int64_t{-1}, kMost}) {
    SumLeavesArgs args = good;
    args.count = count;
    EXPECT_THAT(error(args), HasSubstr("sum_leaves: count is " +
                                       std::to_string(count) + ", expected 0"));
  }
  SumLeavesArgs args = good;
  args.leaf_sums = nullptr;
  EXPECT_EQ(error(args), "sum_leaves: leaf_sums is null, count is 8");
  args = good;
  args.sum = nullptr;
  EXPECT_EQ(error(args), "sum_leaves: sum is null, count is 8");
  args.sum = reinterpret_cast<NormSum*>(reinterpret_cast<uintptr_t>(&sum) + 4);
  EXPECT_THAT(error(args), HasSubstr("sum is at"));
  // Its last bytes, and the first byte behind it.
  args = good;
  const char* const end = reinterpret_cast<const char*>(&sum + 1);
  args.leaf_sums = reinterpret_cast<const double*>(end - sizeof(double));
  EXPECT_EQ(error(args), "sum_leaves: sum overlaps leaf_sums");
  args.leaf_sums = reinterpret_cast<const double*>(end);
  EXPECT_TRUE(CheckArgs(args).ok());
}

TEST(OperationsRefusalTest, AdvanceStep) {
  int64_t step = 0;
  float lr = 1;
  AdamConstants constants;
  const AdvanceStepArgs good = {&step, &lr, &constants, AdamRule()};
  EXPECT_TRUE(CheckArgs(good).ok());
  const auto refused = [&](const std::function<void(AdvanceStepArgs&)>& change,
                           const std::string& problem) {
    AdvanceStepArgs args = good;
    change(args);
    const absl::Status status = CheckArgs(args);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(StartsWith("advance_step: "), HasSubstr(problem)));
  };
  using Args = AdvanceStepArgs;
  refused([](Args& a) { a.step = nullptr; }, "step is null");
  refused([](Args& a) { a.lr = nullptr; }, "lr is null");
  refused([](Args& a) { a.constants = nullptr; }, "constants is null");
  refused([&](Args& a) { a.lr = &constants.decay; }, "constants overlaps lr");
  refused([&](Args& a) { a.lr = reinterpret_cast<float*>(&step) + 1; },
          "step overlaps lr");
  refused([](Args& a) { a.rule.beta1 = 1; },
          "rule.beta1 is 1, expected in [0, 1)");
  refused([](Args& a) { a.rule.beta2 = kNaN; }, "rule.beta2 is nan");
  refused([](Args& a) { a.rule.eps = -1; }, "rule.eps is -1");
  refused([](Args& a) { a.rule.weight_decay = kInfinity; },
          "rule.weight_decay is inf");
  refused([](Args& a) { a.rule.decay_mode = static_cast<WeightDecay>(7); },
          "rule.decay_mode is 7");
}

TEST(OperationsRefusalTest, DeferredAdamStep) {
  std::vector<float> state(64);
  AdamConstants constants;
  DeferredAdamStepArgs args;
  args.step.numel = 1;
  args.step.param = &state[0];
  args.step.grad = &state[1];
  args.step.exp_avg = &state[2];
  args.step.exp_avg_sq = &state[3];
  args.constants = &constants;
  const auto check = [&] { return CheckAdamStep({kF32}, {kF32}, {}, args); };
  EXPECT_TRUE(check().ok());
  args.constants = nullptr;
  EXPECT_EQ(check().message(), "adam_step: constants is null, numel is 1");
  // Its last word is the first moment.
  static_assert(sizeof(AdamConstants) == 40);
  args.step.exp_avg = &state[19];
  args.constants = reinterpret_cast<const AdamConstants*>(&state[10]);
  EXPECT_EQ(check().message(), "adam_step: constants overlaps exp_avg");
  args.constants = reinterpret_cast<const AdamConstants*>(&state[20]);
  EXPECT_TRUE(check().ok());
  args.step.exp_avg_type = kBF16;
  EXPECT_EQ(check().message(),
            "adam_step: exp_avg_type is bf16, expected fp32");
}

TEST(OperationsRefusalTest, AdamStepOfTypes) {
  float state[4] = {};
  AdamStepArgs args = AdamArgs(kF32, kF32, kBF16);
  args.numel = 1;
  args.param = &state[0];
  args.grad = &state[1];
  args.exp_avg = &state[2];
  args.exp_avg_sq = &state[3];
  EXPECT_TRUE(CheckAdamStep({kF32}, {kF32}, {}, args).ok());
  EXPECT_EQ(CheckAdamStep({kF16}, {kF32}, {}, args).message(),
            "adam_step: grad_type is fp32, expected fp16");
  EXPECT_EQ(CheckAdamStep({kF32}, {kBF16}, {}, args).message(),
            "adam_step: exp_avg_type is fp32, expected bf16");
  uint16_t copy;
  args.copy = &copy;
  EXPECT_TRUE(CheckAdamStep({kF32}, {kF32}, {kBF16}, args).ok());
  EXPECT_EQ(CheckAdamStep({kF32}, {kF32}, {kF16}, args).message(),
            "adam_step: copy_type is bf16, expected fp16");
}

// --- Parts. ---

TEST(AdamStepPartTest, MovesEachPointerByItsElements) {
  std::vector<float> memory(500);
  AdamStepArgs args = AdamArgs(kF16, kBF16, kF16);
  args.exp_avg_sq_type = kF32;
  args.numel = 90;
  args.param = memory.data();
  args.grad = memory.data() + 100;
  args.exp_avg = memory.data() + 200;
  args.exp_avg_sq = memory.data() + 300;
  args.copy = memory.data() + 400;
  auto bytes = [](const void* to, const void* from) {
    return static_cast<const char*>(to) - static_cast<const char*>(from);
  };
  AdamStepArgs part = AdamStepPart(args, 11, 33);
  EXPECT_EQ(part.numel, 33);
  EXPECT_EQ(bytes(part.param, args.param), 44);
  EXPECT_EQ(bytes(part.grad, args.grad), 22);
  EXPECT_EQ(bytes(part.exp_avg, args.exp_avg), 22);
  EXPECT_EQ(bytes(part.exp_avg_sq, args.exp_avg_sq), 44);
  EXPECT_EQ(bytes(part.copy, args.copy), 22);
  args.copy = nullptr;
  EXPECT_EQ(AdamStepPart(args, 11, 33).copy, nullptr);
}

// --- What is computed: the same bits, however it is cut. ---

using Random = std::mt19937_64;

// Of either sign, finite, below 2 in magnitude.
std::vector<float> RandomFloats(Random& random, int64_t numel) {
  std::vector<float> values(numel);
  for (float& value : values) {
    const uint32_t bits = static_cast<uint32_t>(random()) & 0xbfffffff;
    std::memcpy(&value, &bits, sizeof(value));
  }
  return values;
}
std::vector<uint16_t> RandomHalves(Random& random, int64_t numel) {
  std::vector<uint16_t> values(numel);
  for (uint16_t& value : values) {
    value = static_cast<uint16_t>(random()) & 0xbfff;
  }
  return values;
}

// More leaves than a worker sums at a time, and a tail.
constexpr int64_t kLongNumel = 66 * kLeafNumel + 37;

// Inputs and outputs of all the operations.
class Workload {
 public:
  Workload() {
    Random random(1);
    x_ = RandomFloats(random, kLongNumel);
    param_ = RandomFloats(random, kLongNumel);
    exp_avg_ = RandomFloats(random, kLongNumel);
    exp_avg_sq_ = RandomHalves(random, kLongNumel);
    for (uint16_t& bits : exp_avg_sq_) bits &= 0x7fff;  // not negative
    halves_ = RandomHalves(random, kLongNumel);
  }

  absl::Status Run(const Kernel& kernel, ThreadPool& pool) {
    constexpr int64_t n = kLongNumel;
    AdamStepArgs adam = AdamArgs(kBF16, kF32, kBF16);
    adam.numel = n;
    adam.param = param_.data();
    adam.grad = halves_.data();
    adam.exp_avg = exp_avg_.data();
    adam.exp_avg_sq = exp_avg_sq_.data();
    adam.exp_avg_sq_type = kBF16;
    adam.copy = copy_.data();
    absl::Status status = AdamStep(kernel, pool, adam);
    auto then = [&status](const absl::Status& next) { status.Update(next); };
    const AccumulateArgs accumulate = {
        n, x_.data(), halves_.data(), mean_.data(), nullptr, kF16, kBF16, 3};
    then(Accumulate(kernel, pool, accumulate));
    AccumulateArgs with_norm = accumulate;
    with_norm.out = mean_with_norm_.data();
    then(Accumulate(kernel, pool, with_norm, &mean_sum_));
    then(Scale(kernel, pool, {n, x_.data(), scaled_.data(), 1.5f}));
    then(Cast(kernel, pool, {n, x_.data(), narrow_.data(), kF32, kE4M3}));
    then(Cast(kernel, pool, {n, narrow_.data(), wide_.data(), kE4M3, kF32}));
    then(SquaredNorm(kernel, pool, n, x_.data(), kF32, sum_));
    then(SquaredNorm(kernel, pool, n, mean_.data(), kBF16, stored_mean_sum_));
    then(AbsMax(kernel, pool, {n, halves_.data(), absmax_.data(), kF16}));
    then(SplitRemainder(kernel, pool,
                        {n, x_.data(), high_.data(), low_.data()}));
    then(JoinRemainder(kernel, pool,
                       {n, high_.data(), low_.data(), joined_.data()}));
    for (DType type : {kF16, kE4M3}) {
      const bool is_half = type == kF16;
      void* const codes =
          is_half ? static_cast<void*>(half_codes_.data()) : byte_codes_.data();
      std::vector<float>& scales = is_half ? half_scales_ : byte_scales_;
      then(Quantize(kernel, pool, {n, x_.data(), codes, scales.data(), type}));
      then(Dequantize(kernel, pool,
                      {n, codes, scales.data(),
                       (is_half ? of_halves_ : of_bytes_).data(), type}));
    }
    return status;
  }

  // Names what differs.
  void ExpectSame(const Workload& other) const {
    EXPECT_TRUE(Same(param_, other.param_)) << "adam_step param";
    EXPECT_TRUE(Same(exp_avg_, other.exp_avg_)) << "adam_step exp_avg";
    EXPECT_TRUE(Same(exp_avg_sq_, other.exp_avg_sq_)) << "adam_step exp_avg_sq";
    EXPECT_TRUE(Same(copy_, other.copy_)) << "adam_step copy";
    EXPECT_TRUE(Same(mean_, other.mean_)) << "accumulate";
    EXPECT_TRUE(Same(mean_, other.mean_with_norm_)) << "accumulate with norm";
    EXPECT_TRUE(Same(scaled_, other.scaled_)) << "scale";
    EXPECT_TRUE(Same(narrow_, other.narrow_)) << "cast to e4m3";
    EXPECT_TRUE(Same(wide_, other.wide_)) << "cast to fp32";
    EXPECT_TRUE(Same(absmax_, other.absmax_)) << "absmax";
    EXPECT_TRUE(Same(high_, other.high_)) << "split_remainder param";
    EXPECT_TRUE(Same(low_, other.low_)) << "split_remainder remainder";
    EXPECT_TRUE(Same(joined_, other.joined_)) << "join_remainder";
    EXPECT_TRUE(Same(joined_, other.x_)) << "join_remainder does not invert";
    EXPECT_TRUE(Same(half_codes_, other.half_codes_)) << "quantize to fp16";
    EXPECT_TRUE(Same(half_scales_, other.half_scales_)) << "its scales";
    EXPECT_TRUE(Same(of_halves_, other.of_halves_)) << "dequantize of fp16";
    EXPECT_TRUE(Same(byte_codes_, other.byte_codes_)) << "quantize to e4m3";
    EXPECT_TRUE(Same(byte_scales_, other.byte_scales_)) << "its scales";
    EXPECT_TRUE(Same(of_bytes_, other.of_bytes_)) << "dequantize of e4m3";
    EXPECT_EQ(sum_, other.sum_) << "squared_norm";
    EXPECT_EQ(mean_sum_, other.mean_sum_) << "accumulate's norm";
    EXPECT_EQ(mean_sum_, other.stored_mean_sum_) << "not of what is stored";
  }

  const std::vector<float>& x() const { return x_; }
  const NormSum& sum() const { return sum_; }
  // That outputs were written at all.
  bool Wrote() const {
    return copy_.back() != 0 && mean_.back() != 0 && scaled_.back() != 0 &&
           absmax_.back() != 0 && high_.back() != 0 && sum_.Total() != 0 &&
           half_scales_.back() != 0 && byte_scales_.back() != 0 &&
           of_halves_ != zeros_ && of_bytes_ != zeros_;
  }

 private:
  template <typename T>
  static bool Same(const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
  }

  std::vector<float> x_, param_, exp_avg_;
  std::vector<uint16_t> exp_avg_sq_, halves_;
  std::vector<float> scaled_ = std::vector<float>(kLongNumel);
  std::vector<float> wide_ = std::vector<float>(kLongNumel);
  std::vector<float> joined_ = std::vector<float>(kLongNumel);
  std::vector<uint16_t> copy_ = std::vector<uint16_t>(kLongNumel);
  std::vector<uint16_t> mean_ = std::vector<uint16_t>(kLongNumel);
  std::vector<uint16_t> mean_with_norm_ = std::vector<uint16_t>(kLongNumel);
  std::vector<uint16_t> high_ = std::vector<uint16_t>(kLongNumel);
  std::vector<int16_t> low_ = std::vector<int16_t>(kLongNumel);
  std::vector<uint8_t> narrow_ = std::vector<uint8_t>(kLongNumel);
  std::vector<float> absmax_ = std::vector<float>(LeafCount(kLongNumel));
  std::vector<uint16_t> half_codes_ = std::vector<uint16_t>(kLongNumel);
  std::vector<uint8_t> byte_codes_ = std::vector<uint8_t>(kLongNumel);
  std::vector<float> half_scales_ = absmax_, byte_scales_ = absmax_;
  std::vector<float> of_halves_ = std::vector<float>(kLongNumel);
  std::vector<float> of_bytes_ = std::vector<float>(kLongNumel);
  const std::vector<float> zeros_ = std::vector<float>(kLongNumel);
  NormSum sum_, mean_sum_, stored_mean_sum_;
};

// Spans with memory and constants of their own.
class AdamSpans {
 public:
  explicit AdamSpans(const std::vector<int64_t>& numels) {
    Random random(3);
    for (int64_t numel : numels) {
      Memory& memory = memory_.emplace_back();
      memory.param = RandomFloats(random, numel);
      memory.exp_avg = RandomFloats(random, numel);
      memory.grad = RandomHalves(random, numel);
      memory.exp_avg_sq = RandomHalves(random, numel);
      for (uint16_t& bits : memory.exp_avg_sq) bits &= 0x7fff;
      memory.copy.resize(numel);
      AdamStepArgs& args = args_.emplace_back(AdamArgs(kBF16, kF32, kBF16));
      args.numel = numel;
      args.param = memory.param.data();
      args.grad = memory.grad.data();
      args.exp_avg = memory.exp_avg.data();
      args.exp_avg_sq = memory.exp_avg_sq.data();
      args.exp_avg_sq_type = kBF16;
      args.copy = memory.copy.data();
      args.constants.step_size *= static_cast<float>(args_.size());
    }
  }

  std::vector<AdamStepArgs>& args() { return args_; }
  bool operator==(const AdamSpans& other) const {
    return memory_ == other.memory_;
  }

 private:
  struct Memory {
    // By values: none of them is NaN.
    bool operator==(const Memory& other) const {
      return param == other.param && exp_avg == other.exp_avg &&
             exp_avg_sq == other.exp_avg_sq && copy == other.copy;
    }

    std::vector<float> param, exp_avg;
    std::vector<uint16_t> grad, exp_avg_sq, copy;
  };

  std::vector<Memory> memory_;
  std::vector<AdamStepArgs> args_;
};

TEST(OperationsRefusalTest, AdamStepOfSpansNamesTheBadOneAndChangesNothing) {
  const Kernel kernel = MakeCountingKernel<0>(ScalarKernel(), "counting");
  const auto pool = MakePool(2);
  const auto error = [&](absl::Span<const AdamStepArgs> spans) {
    const int64_t before = OperationCounts<0>().Total();
    const absl::Status status = AdamStep(kernel, *pool, spans);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(OperationCounts<0>().Total(), before);
    return std::string(status.message());
  };
  const std::vector<int64_t> numels = {5000, 0, 31};
  for (size_t bad = 0; bad < numels.size(); ++bad) {
    AdamSpans spans(numels);
    spans.args()[bad].grad_scale = kNaN;
    EXPECT_EQ(error(spans.args()),
              "adam_step: grad_scale is nan, expected a finite number (span " +
                  std::to_string(bad) + ")");
    EXPECT_TRUE(spans == AdamSpans(numels));
  }
  // Each is all right, with memory that no machine has; all are too much.
  const auto address = [](uint64_t value) {
    return reinterpret_cast<float*>(value);
  };
  AdamStepArgs large = AdamArgs(kF32, kF32, kBF16);
  large.numel = kMost / 8;
  large.param = address(4);
  large.grad = address(uint64_t{1} << 62);
  large.exp_avg = address(uint64_t{2} << 62);
  large.exp_avg_sq = address(uint64_t{3} << 62);
  EXPECT_TRUE(CheckAdamStep(kernel, large).ok());
  EXPECT_THAT(error(std::vector<AdamStepArgs>(9, large)),
              HasSubstr("numel of all spans does not fit 64 bits (span 8)"));
}

class OperationsTest : public testing::TestWithParam<const Kernel*> {
 protected:
  const Kernel& kernel() const { return *GetParam(); }
};

TEST_P(OperationsTest, AnyNumberOfThreadsGivesTheSameBits) {
  Workload expected;
  ASSERT_TRUE(expected.Run(kernel(), *MakePool(1)).ok());
  ASSERT_TRUE(expected.Wrote());
  for (int threads : {1, 2, 3, 7}) {
    SCOPED_TRACE(threads);
    Workload workload;
    ASSERT_TRUE(workload.Run(kernel(), *MakePool(threads)).ok());
    expected.ExpectSame(workload);
  }
}

TEST_P(OperationsTest, AdamStepOfSpansIsThatOfEach) {
  const std::vector<int64_t> kNumels[] = {
      {},
      {0},
      {1},
      {1, 2, 3},
      {kLeafNumel, kLeafNumel},
      {kLeafNumel - 1, 1, 2 * kLeafNumel + 1, 0, 0},
      {5000, 0, 31, 13 * kLeafNumel + 7, 1, 6000}};
  for (const std::vector<int64_t>& numels : kNumels) {
    AdamSpans expected(numels);
    for (const AdamStepArgs& args : expected.args()) {
      ASSERT_TRUE(AdamStep(kernel(), *MakePool(1), args).ok());
    }
    for (int threads : {1, 2, 3, 7}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(numels) << ", "
                                      << threads << " threads");
      AdamSpans spans(numels);
      EXPECT_EQ(spans == expected,
                std::count(numels.begin(), numels.end(), 0) ==
                    static_cast<int64_t>(numels.size()));
      ASSERT_TRUE(AdamStep(kernel(), *MakePool(threads), spans.args()).ok());
      EXPECT_TRUE(spans == expected);
    }
  }
}

TEST_P(OperationsTest, AdamStepOfSpansAllocatesNothing) {
  const auto pool = MakePool(3);
  AdamSpans spans({5000, 31, 6 * kLeafNumel});
  const int64_t before = AllocationCount();
  const absl::Status status = AdamStep(kernel(), *pool, spans.args());
  EXPECT_EQ(AllocationCount(), before);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OperationsSpreadTest, WorkersShareTheElementsOfAllSpans) {
  const Kernel kernel = MakeCountingKernel<2>(ScalarKernel(), "counting");
  OperationCounter& counts = OperationCounts<2>();
  const auto pool = MakePool(3);
  // Two leaves for each: the first takes the first span, the others halves of
  // the second.
  AdamSpans spans({2 * kLeafNumel, 4 * kLeafNumel - 9});
  ASSERT_TRUE(AdamStep(kernel, *pool, spans.args()).ok());
  EXPECT_EQ(counts.adam_step, 3);
  EXPECT_EQ(counts.adam_step_numel, 6 * kLeafNumel - 9);
  // What fits a leaf is the caller's alone.
  AdamSpans small({1, 2, 3});
  ASSERT_TRUE(AdamStep(kernel, *pool, small.args()).ok());
  EXPECT_EQ(counts.adam_step, 6);
}

TEST(OperationsSpreadTest, EachWorkerTakesItsPart) {
  const Kernel kernel = MakeCountingKernel<1>(ScalarKernel(), "counting");
  OperationCounter& counts = OperationCounts<1>();
  const int64_t numel = 6 * kLeafNumel - 5;
  std::vector<float> state(4 * numel);
  AdamStepArgs args = AdamArgs(kF32, kF32, kBF16);
  args.numel = numel;
  args.param = &state[0];
  args.grad = &state[numel];
  args.exp_avg = &state[2 * numel];
  args.exp_avg_sq = &state[3 * numel];
  const auto pool = MakePool(3);
  ASSERT_TRUE(AdamStep(kernel, *pool, args).ok());
  EXPECT_EQ(counts.adam_step, 3);
  EXPECT_EQ(counts.adam_step_numel, numel);
  NormSum sum;
  ASSERT_TRUE(SquaredNorm(kernel, *pool, numel, state.data(), kF32, sum).ok());
  EXPECT_EQ(counts.squared_norm, 3);
  ASSERT_TRUE(
      Scale(kernel, *pool, {numel, state.data(), state.data(), 2.0f}).ok());
  EXPECT_EQ(counts.scale, 3);
}

TEST_P(OperationsTest, NormIsTheSameForCutsAtLeaves) {
  const auto pool = MakePool(2);
  Random random(2);
  const std::vector<float> x = RandomFloats(random, kLongNumel);
  NormSum expected;
  ASSERT_TRUE(
      SquaredNorm(kernel(), *pool, kLongNumel, x.data(), kF32, expected).ok());
  for (int round = 0; round < 5; ++round) {
    std::vector<int64_t> cuts = {0, kLongNumel};
    for (int i = 0; i <= round * 3; ++i) {
      cuts.push_back(static_cast<int64_t>(random() % 67) * kLeafNumel);
    }
    std::sort(cuts.begin(), cuts.end());
    NormSum sum;
    for (size_t i = cuts.size() - 1; i > 0; --i) {  // from the last on
      ASSERT_TRUE(SquaredNorm(kernel(), *pool, cuts[i] - cuts[i - 1],
                              x.data() + cuts[i - 1], kF32, sum)
                      .ok());
    }
    EXPECT_EQ(sum, expected);
    EXPECT_EQ(sum.Total(), expected.Total());
  }
}

TEST_P(OperationsTest, NothingIsAllocated) {
  const auto pool = MakePool(2);
  Workload workload;
  ASSERT_TRUE(workload.Run(kernel(), *pool).ok());
  const int64_t before = AllocationCount();
  const absl::Status status = workload.Run(kernel(), *pool);
  EXPECT_EQ(AllocationCount(), before);
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Kernels, OperationsTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

}  // namespace
}  // namespace onepass

#include "dispatch/operations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

constexpr DTypeSet kAnyType = {DType::kFloat32, DType::kBFloat16,
                               DType::kFloat16, DType::kFloat8E4M3};

// One span of an operation.
struct Span {
  absl::string_view name;
  const void* data;
  int64_t element_bytes;
  bool written = false;
  // The span that a written one may be, exactly; it may not overlap it
  // otherwise.
  absl::string_view may_equal = {};
  // Whether it may be null.
  bool optional = false;
  // Its elements, where they are not as many as the operation's.
  std::optional<int64_t> numel = std::nullopt;
};

Span Optional(Span span) {
  span.optional = true;
  return span;
}

Span OfNumel(int64_t numel, Span span) {
  span.numel = numel;
  return span;
}

absl::Status Invalid(absl::string_view operation, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(operation, ": ", problem));
}

// `size` is what the operation calls its `numel`.
absl::Status CheckSpans(absl::string_view operation, int64_t numel,
                        std::initializer_list<Span> spans,
                        absl::string_view size = "numel") {
  // Leaves room for pointer differences in bytes of the widest element.
  constexpr int64_t kMostElements = std::numeric_limits<int64_t>::max() /
                                    static_cast<int64_t>(sizeof(double));
  if (numel < 0 || numel > kMostElements) {
    return Invalid(operation, absl::StrCat(size, " is ", numel,
                                           ", expected 0 to ", kMostElements));
  }
  if (numel == 0) return absl::OkStatus();
  for (const Span& span : spans) {
    if (span.data == nullptr) {
      if (span.optional) continue;
      return Invalid(operation, absl::StrCat(span.name, " is null, ", size,
                                             " is ", numel));
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(span.data);
    if (address % static_cast<uintptr_t>(span.element_bytes) != 0) {
      return Invalid(operation,
                     absl::StrCat(span.name, " is at 0x", absl::Hex(address),
                                  ", not aligned to its elements of ",
                                  span.element_bytes, " bytes"));
    }
  }
  const auto bytes = [numel](const Span& span) {
    return span.data == nullptr
               ? 0
               : span.numel.value_or(numel) * span.element_bytes;
  };
  for (const Span& a : spans) {
    if (!a.written) continue;
    for (const Span& b : spans) {
      if (&a == &b || (a.may_equal == b.name && a.data == b.data)) continue;
      if (MemoryOverlaps(a.data, bytes(a), b.data, bytes(b))) {
        return Invalid(operation, absl::StrCat(a.name, " overlaps ", b.name));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckType(absl::string_view operation, absl::string_view name,
                       DType type, DTypeSet expected) {
  if (expected.Contains(type)) return absl::OkStatus();
  std::string list;
  for (DType one : kAllDTypes) {
    if (expected.Contains(one)) {
      absl::StrAppend(&list, list.empty() ? "" : ", ", Name(one));
    }
  }
  return Invalid(operation,
                 absl::StrCat(name, " is ", Name(type), ", expected ",
                              list.empty() ? "none: not supported" : list));
}

absl::Status CheckFinite(absl::string_view operation, absl::string_view name,
                         float value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return Invalid(operation, absl::StrCat(name, " is ", value,
                                         ", expected a finite number"));
}

absl::Status CheckDecayMode(absl::string_view operation, absl::string_view name,
                            WeightDecay decay_mode) {
  switch (decay_mode) {
    case WeightDecay::kNone:
    case WeightDecay::kL2:
    case WeightDecay::kAdamW:
      return absl::OkStatus();
  }
  return Invalid(operation,
                 absl::StrCat(name, " is ", static_cast<int>(decay_mode),
                              ", expected a WeightDecay"));
}

// Whether the constants can be those of a step; offload/adam_options.h makes
// none that cannot.
absl::Status CheckConstants(absl::string_view operation,
                            const AdamConstants& c) {
  const struct {
    absl::string_view name;
    float value;
  } constants[] = {{"constants.beta1", c.beta1},
                   {"constants.beta2", c.beta2},
                   {"constants.one_minus_beta1", c.one_minus_beta1},
                   {"constants.one_minus_beta2", c.one_minus_beta2},
                   {"constants.eps", c.eps},
                   {"constants.weight_decay", c.weight_decay},
                   {"constants.step_size", c.step_size},
                   {"constants.bias_correction2", c.bias_correction2},
                   {"constants.decay", c.decay}};
  for (const auto& constant : constants) {
    absl::Status status = CheckFinite(operation, constant.name, constant.value);
    if (!status.ok()) return status;
  }
  return CheckDecayMode(operation, "constants.decay_mode", c.decay_mode);
}

// Their spans are of so many words.
constexpr int64_t kConstantsWord = alignof(AdamConstants);
constexpr int64_t kConstantsWords = sizeof(AdamConstants) / kConstantsWord;

// `elements` elements of `type` further on.
template <typename Pointer>
Pointer Advance(Pointer pointer, DType type, int64_t elements) {
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>,
                         const char, char>;
  return pointer == nullptr
             ? pointer
             : static_cast<Byte*>(pointer) + elements * ByteSize(type);
}

// Calls leaf_sums(begin, end, sums) for stretches of leaves of [0, numel), on
// all workers, and adds what it wrote to `sum`. Leaf sums live on the workers'
// stacks: nothing is allocated.
void AddLeafSums(
    ThreadPool& pool, int64_t numel, NormSum& sum,
    absl::FunctionRef<void(int64_t begin, int64_t end, double* sums)>
        leaf_sums) {
  constexpr int64_t kLeaves = 64;
  std::mutex mutex;
  pool.ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    NormSum local;
    double sums[kLeaves];
    for (int64_t i = begin; i < end; i += kLeaves * kLeafNumel) {
      const int64_t stop = std::min(end, i + kLeaves * kLeafNumel);
      leaf_sums(i, stop, sums);
      for (int64_t leaf = 0; leaf < LeafCount(stop - i); ++leaf) {
        local.Add(sums[leaf]);
      }
    }
    std::lock_guard<std::mutex> lock(mutex);
    sum.Merge(local);
  });
}

constexpr absl::string_view kSquaredNorm = "squared_norm";

absl::Status CheckNormType(DType type) {
  return CheckType(kSquaredNorm, "type", type, kGradientTypes);
}

}  // namespace

bool MemoryOverlaps(const void* a, int64_t a_bytes, const void* b,
                    int64_t b_bytes) {
  if (a_bytes == 0 || b_bytes == 0) return false;
  const uintptr_t x = reinterpret_cast<uintptr_t>(a);
  const uintptr_t y = reinterpret_cast<uintptr_t>(b);
  return x < y ? y - x < static_cast<uintptr_t>(a_bytes)
               : x - y < static_cast<uintptr_t>(b_bytes);
}

absl::Status CheckAdamStep(DTypeSet gradient_types, DTypeSet moment_types,
                           DTypeSet copy_types, const AdamStepArgs& args) {
  constexpr absl::string_view kName = "adam_step";
  ONEPASS_RETURN_IF_ERROR(
      CheckType(kName, "grad_type", args.grad_type, gradient_types));
  ONEPASS_RETURN_IF_ERROR(
      CheckType(kName, "exp_avg_type", args.exp_avg_type, moment_types));
  ONEPASS_RETURN_IF_ERROR(
      CheckType(kName, "exp_avg_sq_type", args.exp_avg_sq_type, moment_types));
  ONEPASS_RETURN_IF_ERROR(CheckFinite(kName, "grad_scale", args.grad_scale));
  ONEPASS_RETURN_IF_ERROR(CheckConstants(kName, args.constants));
  if (args.copy != nullptr) {
    ONEPASS_RETURN_IF_ERROR(
        CheckType(kName, "copy_type", args.copy_type, copy_types));
  }
  return CheckSpans(
      kName, args.numel,
      {Span{"param", args.param, sizeof(float), true},
       Span{"grad", args.grad, ByteSize(args.grad_type)},
       Span{"exp_avg", args.exp_avg, ByteSize(args.exp_avg_type), true},
       Span{"exp_avg_sq", args.exp_avg_sq, ByteSize(args.exp_avg_sq_type),
            true},
       Optional({"copy", args.copy, ByteSize(args.copy_type), true})});
}

absl::Status CheckAdamStep(const Kernel& kernel, const AdamStepArgs& args) {
  return CheckAdamStep(kernel.gradient_types, kernel.moment_types,
                       kernel.copy_types, args);
}

absl::Status CheckAdamStep(DTypeSet gradient_types, DTypeSet moment_types,
                           DTypeSet copy_types,
                           const DeferredAdamStepArgs& args) {
  const AdamStepArgs& step = args.step;
  ONEPASS_RETURN_IF_ERROR(
      CheckAdamStep(gradient_types, moment_types, copy_types, step));
  return CheckSpans(
      "adam_step", step.numel,
      {OfNumel(kConstantsWords,
               {"constants", args.constants, kConstantsWord, true}),
       Span{"param", step.param, sizeof(float)},
       Span{"exp_avg", step.exp_avg, ByteSize(step.exp_avg_type)},
       Span{"exp_avg_sq", step.exp_avg_sq, ByteSize(step.exp_avg_sq_type)},
       Optional({"copy", step.copy, ByteSize(step.copy_type)})});
}

AdamStepArgs AdamStepPart(const AdamStepArgs& args, int64_t offset,
                          int64_t numel) {
  AdamStepArgs part = args;
  part.numel = numel;
  part.param += offset;
  part.grad = Advance(args.grad, args.grad_type, offset);
  part.exp_avg = Advance(args.exp_avg, args.exp_avg_type, offset);
  part.exp_avg_sq = Advance(args.exp_avg_sq, args.exp_avg_sq_type, offset);
  part.copy = Advance(args.copy, args.copy_type, offset);
  return part;
}

absl::Status AdamStep(const Kernel& kernel, ThreadPool& pool,
                      const AdamStepArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckAdamStep(kernel, args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->adam_step(AdamStepPart(args, begin, end - begin));
  });
  return absl::OkStatus();
}

absl::Status AdamStep(const Kernel& kernel, ThreadPool& pool,
                      absl::Span<const AdamStepArgs> spans) {
  int64_t numel = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    absl::Status status = CheckAdamStep(kernel, spans[i]);
    if (status.ok() && __builtin_add_overflow(numel, spans[i].numel, &numel)) {
      status = Invalid("adam_step", "numel of all spans does not fit 64 bits");
    }
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(status.message(), " (span ", i, ")"));
    }
  }
  pool.ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // of the span, in all of them
    for (const AdamStepArgs& span : spans) {
      const int64_t from = std::max(begin, first);
      const int64_t to = std::min(end, first + span.numel);
      if (from < to) {
        kernel.operations->adam_step(
            AdamStepPart(span, from - first, to - from));
      }
      first += span.numel;
    }
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const AccumulateArgs& args) {
  constexpr absl::string_view kName = "accumulate";
  ONEPASS_RETURN_IF_ERROR(
      CheckType(kName, "term_type", args.term_type, kGradientTypes));
  ONEPASS_RETURN_IF_ERROR(
      CheckType(kName, "out_type", args.out_type, kGradientTypes));
  ONEPASS_RETURN_IF_ERROR(CheckFinite(kName, "divisor", args.divisor));
  // By its bits: where the caller reads subnormals as zero, a comparison would.
  uint32_t divisor_bits;
  std::memcpy(&divisor_bits, &args.divisor, sizeof(divisor_bits));
  if (divisor_bits << 1 == 0) return Invalid(kName, "divisor is 0");
  return CheckSpans(
      kName, args.numel,
      {Span{"out", args.out, ByteSize(args.out_type), true,
            args.out_type == DType::kFloat32 ? "sum" : ""},
       Span{"term", args.term, ByteSize(args.term_type)},
       Optional({"sum", args.sum, sizeof(float)}),
       OfNumel(LeafCount(args.numel),
               Optional({"leaf_sums", args.leaf_sums, sizeof(double), true}))});
}

absl::Status Accumulate(const Kernel& kernel, ThreadPool& pool,
                        const AccumulateArgs& args, NormSum* sum) {
  if (args.leaf_sums != nullptr) {
    return Invalid("accumulate",
                   "leaf_sums is set, expected null: pass a NormSum");
  }
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  auto part = [&](int64_t begin, int64_t end, double* sums) {
    AccumulateArgs part = args;
    part.numel = end - begin;
    part.sum = args.sum == nullptr ? nullptr : args.sum + begin;
    part.term = Advance(args.term, args.term_type, begin);
    part.out = Advance(args.out, args.out_type, begin);
    part.leaf_sums = sums;
    kernel.operations->accumulate(part);
  };
  if (sum == nullptr) {
    pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
      part(begin, end, nullptr);
    });
  } else {
    AddLeafSums(pool, args.numel, *sum, part);
  }
  return absl::OkStatus();
}

absl::Status CheckArgs(const ScaleArgs& args) {
  constexpr absl::string_view kName = "scale";
  ONEPASS_RETURN_IF_ERROR(CheckFinite(kName, "factor", args.factor));
  return CheckSpans(kName, args.numel,
                    {Span{"in", args.in, sizeof(float)},
                     Span{"out", args.out, sizeof(float), true, "in"}});
}

absl::Status Scale(const Kernel& kernel, ThreadPool& pool,
                   const ScaleArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->scale(
        {end - begin, args.in + begin, args.out + begin, args.factor});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const CastArgs& args) {
  constexpr absl::string_view kName = "cast";
  ONEPASS_RETURN_IF_ERROR(CheckType(kName, "in_type", args.in_type, kAnyType));
  ONEPASS_RETURN_IF_ERROR(
      CheckType(kName, "out_type", args.out_type, kAnyType));
  if ((args.in_type == DType::kFloat32) == (args.out_type == DType::kFloat32)) {
    return Invalid(
        kName, absl::StrCat("from ", Name(args.in_type), " to ",
                            Name(args.out_type), ", expected from or to fp32"));
  }
  return CheckSpans(kName, args.numel,
                    {Span{"in", args.in, ByteSize(args.in_type)},
                     Span{"out", args.out, ByteSize(args.out_type), true}});
}

absl::Status Cast(const Kernel& kernel, ThreadPool& pool,
                  const CastArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->cast({end - begin, Advance(args.in, args.in_type, begin),
                             Advance(args.out, args.out_type, begin),
                             args.in_type, args.out_type});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const SquaredNormArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckNormType(args.type));
  return CheckSpans(
      kSquaredNorm, args.numel,
      {Span{"x", args.x, ByteSize(args.type)},
       OfNumel(LeafCount(args.numel),
               {"leaf_sums", args.leaf_sums, sizeof(double), true})});
}

absl::Status SquaredNorm(const Kernel& kernel, ThreadPool& pool, int64_t numel,
                         const void* x, DType type, NormSum& sum) {
  ONEPASS_RETURN_IF_ERROR(CheckNormType(type));
  ONEPASS_RETURN_IF_ERROR(
      CheckSpans(kSquaredNorm, numel, {Span{"x", x, ByteSize(type)}}));
  AddLeafSums(pool, numel, sum, [&](int64_t begin, int64_t end, double* sums) {
    kernel.operations->squared_norm(
        {end - begin, Advance(x, type, begin), sums, type});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const SumLeavesArgs& args) {
  // A sum is aligned as its words are.
  static_assert(sizeof(NormSum) % alignof(NormSum) == 0);
  constexpr int64_t kWord = alignof(NormSum);
  constexpr int64_t kWords = sizeof(NormSum) / alignof(NormSum);
  return CheckSpans("sum_leaves", args.count,
                    {Span{"leaf_sums", args.leaf_sums, sizeof(double)},
                     OfNumel(kWords, {"sum", args.sum, kWord, true})},
                    "count");
}

absl::Status CheckArgs(const AdvanceStepArgs& args) {
  constexpr absl::string_view kName = "advance_step";
  const AdamRule& rule = args.rule;
  const struct {
    absl::string_view name;
    float value;
    bool valid;
    absl::string_view expected;
  } numbers[] = {
      {"beta1", rule.beta1, rule.beta1 >= 0 && rule.beta1 < 1, "in [0, 1)"},
      {"beta2", rule.beta2, rule.beta2 >= 0 && rule.beta2 < 1, "in [0, 1)"},
      {"eps", rule.eps, std::isfinite(rule.eps) && rule.eps >= 0,
       "a finite number of at least 0"},
      {"weight_decay", rule.weight_decay,
       std::isfinite(rule.weight_decay) && rule.weight_decay >= 0,
       "a finite number of at least 0"}};
  for (const auto& number : numbers) {
    if (number.valid) continue;
    return Invalid(kName,
                   absl::StrCat("rule.", number.name, " is ", number.value,
                                ", expected ", number.expected));
  }
  ONEPASS_RETURN_IF_ERROR(
      CheckDecayMode(kName, "rule.decay_mode", rule.decay_mode));
  return CheckSpans(kName, 1,
                    {Span{"step", args.step, sizeof(int64_t), true},
                     Span{"lr", args.lr, sizeof(float)},
                     OfNumel(kConstantsWords, {"constants", args.constants,
                                               kConstantsWord, true})});
}

absl::Status CheckArgs(const AbsMaxArgs& args) {
  constexpr absl::string_view kName = "absmax";
  ONEPASS_RETURN_IF_ERROR(CheckType(kName, "type", args.type, kGradientTypes));
  return CheckSpans(
      kName, args.numel,
      {Span{"x", args.x, ByteSize(args.type)},
       OfNumel(LeafCount(args.numel),
               {"leaf_absmax", args.leaf_absmax, sizeof(float), true})});
}

absl::Status AbsMax(const Kernel& kernel, ThreadPool& pool,
                    const AbsMaxArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->absmax({end - begin, Advance(args.x, args.type, begin),
                               args.leaf_absmax + begin / kLeafNumel,
                               args.type});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const SplitRemainderArgs& args) {
  return CheckSpans("split_remainder", args.numel,
                    {Span{"master", args.master, sizeof(float)},
                     Span{"param", args.param, sizeof(uint16_t), true},
                     Span{"remainder", args.remainder, sizeof(int16_t), true}});
}

absl::Status SplitRemainder(const Kernel& kernel, ThreadPool& pool,
                            const SplitRemainderArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->split_remainder({end - begin, args.master + begin,
                                        args.param + begin,
                                        args.remainder + begin});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const JoinRemainderArgs& args) {
  return CheckSpans("join_remainder", args.numel,
                    {Span{"param", args.param, sizeof(uint16_t)},
                     Span{"remainder", args.remainder, sizeof(int16_t)},
                     Span{"master", args.master, sizeof(float), true}});
}

absl::Status JoinRemainder(const Kernel& kernel, ThreadPool& pool,
                           const JoinRemainderArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->join_remainder({end - begin, args.param + begin,
                                       args.remainder + begin,
                                       args.master + begin});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const QuantizeArgs& args) {
  constexpr absl::string_view kName = "quantize";
  ONEPASS_RETURN_IF_ERROR(CheckType(kName, "type", args.type, kQuantizedTypes));
  return CheckSpans(kName, args.numel,
                    {Span{"in", args.in, sizeof(float)},
                     Span{"codes", args.codes, ByteSize(args.type), true},
                     OfNumel(LeafCount(args.numel),
                             {"scales", args.scales, sizeof(float), true})});
}

absl::Status Quantize(const Kernel& kernel, ThreadPool& pool,
                      const QuantizeArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->quantize({end - begin, args.in + begin,
                                 Advance(args.codes, args.type, begin),
                                 args.scales + begin / kLeafNumel, args.type});
  });
  return absl::OkStatus();
}

absl::Status CheckArgs(const DequantizeArgs& args) {
  constexpr absl::string_view kName = "dequantize";
  ONEPASS_RETURN_IF_ERROR(CheckType(kName, "type", args.type, kQuantizedTypes));
  return CheckSpans(
      kName, args.numel,
      {Span{"codes", args.codes, ByteSize(args.type)},
       OfNumel(LeafCount(args.numel), {"scales", args.scales, sizeof(float)}),
       Span{"out", args.out, sizeof(float), true}});
}

absl::Status Dequantize(const Kernel& kernel, ThreadPool& pool,
                        const DequantizeArgs& args) {
  ONEPASS_RETURN_IF_ERROR(CheckArgs(args));
  pool.ParallelFor(args.numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    kernel.operations->dequantize(
        {end - begin, Advance(args.codes, args.type, begin),
         args.scales + begin / kLeafNumel, args.out + begin, args.type});
  });
  return absl::OkStatus();
}

}  // namespace onepass

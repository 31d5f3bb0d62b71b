#include "tools/golden.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "dispatch/dtype.h"
#include "dispatch/norm_sum.h"
#include "dispatch/operations.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "offload/gradient_clip.h"
#include "xxhash.h"

namespace onepass {

const char kGoldenDigest[] = "9f7fc6751c356f21";

namespace {

constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kBFloat16,
                                 DType::kFloat16};
constexpr DType kMomentTypes[] = {DType::kFloat32, DType::kBFloat16};
constexpr int kCopies = 3;  // no copy, then one of each of
constexpr DType kCopyTypes[] = {DType::kBFloat16, DType::kFloat16};
constexpr int kDecayModes = 3;
constexpr WeightDecay kDecays[kDecayModes] = {
    WeightDecay::kNone, WeightDecay::kL2, WeightDecay::kAdamW};

// What elements are made of; see golden.h.
struct Range {
  uint32_t low;
  uint32_t count;
};
struct Content {
  Range range;
  bool non_finite = false;
  bool non_negative = false;
};

struct Array {
  Array(DType type, int64_t numel)
      : type(type), numel(numel), bytes(numel * ByteSize(type)) {}

  void* data() { return bytes.data(); }
  template <typename Element>
  Element* as() {
    return reinterpret_cast<Element*>(bytes.data());
  }
  void Set(int64_t i, uint32_t code) {
    const int64_t size = ByteSize(type);
    std::memcpy(&bytes[i * size], &code, size);
  }

  DType type;
  int64_t numel;
  std::vector<unsigned char> bytes;
};

uint64_t Word(uint64_t array, uint64_t i) {
  uint64_t x = ((array << 32) + i + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint32_t Element(DType type, const Content& content, uint64_t word) {
  const bool half = type == DType::kFloat16;
  const int mantissa_bits = half ? 10 : 23;
  const uint32_t sign = content.non_negative ? 0 : (word >> 31) & 1;
  const uint32_t draw = (word >> 32) & 0xffff;
  const uint32_t near = (word >> 48) & 3;
  const uint32_t kind = word >> 56;
  uint32_t mantissa = word & ((uint32_t{1} << mantissa_bits) - 1);
  uint32_t exponent =
      half ? draw % 31 : content.range.low + draw % content.range.count;
  if (kind < 8) {
    exponent = 0;
    mantissa = 0;
  } else if (kind < 16) {
    exponent = 0;
  } else if (kind < 40) {
    const int dropped = kind < 24 ? 16 : kind < 32 ? 13 : 20;
    if (!half) {
      mantissa = ((mantissa >> dropped) << dropped) +
                 (uint32_t{1} << (dropped - 1)) - 1 + near;
    }
  } else if (content.non_finite && kind < 56) {
    exponent = half ? 31 : 255;
    mantissa = kind < 48 ? 0 : mantissa | 1;
  }
  const uint32_t code =
      (sign << (half ? 15 : 31)) | (exponent << mantissa_bits) | mantissa;
  return type == DType::kBFloat16 ? code >> 16 : code;
}

class Digest {
 public:
  Digest() : state_(XXH64_createState(), &XXH64_freeState) {
    XXH64_reset(state_.get(), 0);
  }

  void Add(const void* data, size_t bytes) {
    XXH64_update(state_.get(), data, bytes);
  }
  void Add(const Array& array) { Add(array.bytes.data(), array.bytes.size()); }
  // The payload of NaN in fp32 and bf16 is not promised.
  void AddCanonical(Array array) {
    const bool wide = array.type == DType::kFloat32;
    const uint32_t infinity = wide ? 0x7f800000 : 0x7f80;
    const uint32_t magnitude_mask = wide ? 0x7fffffff : 0x7fff;
    const int64_t size = ByteSize(array.type);
    for (int64_t i = 0; i < array.numel; ++i) {
      uint32_t code = 0;
      std::memcpy(&code, &array.bytes[i * size], size);
      if ((code & magnitude_mask) > infinity) {
        array.Set(i, wide ? 0x7fc00000 : 0x7fc0);
      }
    }
    Add(array);
  }
  void AddTotal(const NormSum& sum) {
    const double total = sum.Total();
    uint64_t bits = 0x7ff8000000000000;
    if (!std::isnan(total)) std::memcpy(&bits, &total, sizeof(bits));
    Add(&bits, sizeof(bits));
  }

  std::string Hex() const {
    char hex[17];
    std::snprintf(hex, sizeof(hex), "%016llx",
                  static_cast<unsigned long long>(XXH64_digest(state_.get())));
    return hex;
  }

 private:
  std::unique_ptr<XXH64_state_t, decltype(&XXH64_freeState)> state_;
};

struct AdamCase {
  int number;
  DType grad_type;
  DType exp_avg_type;
  DType exp_avg_sq_type;
  int copy;  // 0: none, else kCopyTypes[copy - 1]
  WeightDecay decay;
  bool non_finite;
};

class Workload {
 public:
  Workload(const Kernel& kernel, ThreadPool& pool, int64_t piece_numel)
      : kernel_(kernel), pool_(pool), piece_numel_(piece_numel) {}

  absl::StatusOr<std::string> Run() {
    if (absl::Status status = RunAdam(); !status.ok()) return status;
    for (int64_t numel : {1, 47, 4096, 9001, 30011}) {
      absl::Status status = RunOperations(numel, /*non_finite=*/false);
      if (!status.ok()) return status;
    }
    for (int64_t numel : {3, 777}) {
      absl::Status status = RunOperations(numel, /*non_finite=*/true);
      if (!status.ok()) return status;
    }
    return digest_.Hex();
  }

 private:
  Array Make(DType type, int64_t numel, const Content& content) {
    Array array(type, numel);
    for (int64_t i = 0; i < numel; ++i) {
      array.Set(i, Element(type, content, Word(arrays_made_, i)));
    }
    ++arrays_made_;
    return array;
  }

  Array MakeRaw(DType type, int64_t numel) {
    Array array(type, numel);
    for (int64_t i = 0; i < numel; ++i) {
      array.Set(i, static_cast<uint32_t>(Word(arrays_made_, i)));
    }
    ++arrays_made_;
    return array;
  }

  absl::Status RunAdam() {
    int c = 0;
    for (DType grad : kFloatTypes) {
      for (DType exp_avg : kMomentTypes) {
        for (DType exp_avg_sq : kMomentTypes) {
          for (int copy = 0; copy < kCopies; ++copy) {
            for (WeightDecay decay : kDecays) {
              absl::Status status = RunAdamCase(
                  {c++, grad, exp_avg, exp_avg_sq, copy, decay, false});
              if (!status.ok()) return status;
            }
          }
        }
      }
    }
    for (DType grad : kFloatTypes) {
      for (int copy = 0; copy < kCopies; ++copy) {
        absl::Status status =
            RunAdamCase({c, grad, kMomentTypes[c % 2], kMomentTypes[c / 2 % 2],
                         copy, kDecays[c % kDecayModes], true});
        if (!status.ok()) return status;
        ++c;
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunAdamCase(const AdamCase& adam_case) {
    constexpr int kSteps = 3;
    constexpr double kBeta1[] = {0.9, 0.95, 0.8, 0, 0.99};
    constexpr double kBeta2[] = {0.999, 0.95, 0.999999, 0.5};
    constexpr int64_t kFirstStep[] = {1, 10, 1, 1000, 3, 1, 1095904};
    const int c = adam_case.number;
    const bool wide = c % 2 == 0;
    const bool non_finite = adam_case.non_finite;
    const int64_t numel = 1 + 89 * (41 * c % 108);

    AdamOptions options;
    options.beta1 = kBeta1[c % 5];
    options.beta2 = kBeta2[c % 4];
    options.eps = non_finite ? 0 : c % 4 < 2 ? 1e-8 : 1e-5;
    options.weight_decay = adam_case.decay == WeightDecay::kNone ? 0 : 0.1;
    options.mode = adam_case.decay == WeightDecay::kL2
                       ? AdamOptions::Mode::kL2
                       : AdamOptions::Mode::kAdamW;
    options.bias_correction = c % 11 != 10;
    absl::StatusOr<CpuAdam> adam = CpuAdam::Create(kernel_, pool_, {options});
    if (!adam.ok()) return adam.status();

    const Range param_range = wide ? Range{97, 60} : Range{115, 12};
    const Range grad_range = wide ? Range{63, 104} : Range{105, 20};
    const Range exp_avg_range = wide ? Range{63, 104} : Range{105, 17};
    const Range exp_avg_sq_range = wide ? Range{1, 206} : Range{90, 28};
    Array param = Make(DType::kFloat32, numel, {param_range, non_finite});
    Array exp_avg =
        Make(adam_case.exp_avg_type, numel, {exp_avg_range, non_finite});
    Array exp_avg_sq =
        Make(adam_case.exp_avg_sq_type, numel,
             {exp_avg_sq_range, non_finite, /*non_negative=*/true});
    for (int s = 0; s < kSteps; ++s) {
      options.lr = 1e-3 / (1 + s);
      if (absl::Status status = adam->SetOptions(0, options); !status.ok()) {
        return status;
      }
      Array grad = Make(adam_case.grad_type, numel, {grad_range, non_finite});
      AdamSpan span;
      span.numel = numel;
      span.param = param.as<float>();
      span.grad = grad.data();
      span.exp_avg = exp_avg.data();
      span.exp_avg_sq = exp_avg_sq.data();
      span.grad_type = grad.type;
      span.exp_avg_type = exp_avg.type;
      span.exp_avg_sq_type = exp_avg_sq.type;
      const int64_t t = kFirstStep[c % 7] + s;
      const float grad_scale = static_cast<float>(1.0 / (3 + 2 * c));
      Array copy(kCopyTypes[std::max(adam_case.copy - 1, 0)], numel);
      absl::Status status =
          adam_case.copy == 0 ? adam->Step(span, t, grad_scale)
                              : StepWithCopy(*adam, span, t, grad_scale, copy);
      if (!status.ok()) return status;
      digest_.AddCanonical(param);
      digest_.AddCanonical(exp_avg);
      digest_.AddCanonical(exp_avg_sq);
      if (adam_case.copy != 0) digest_.Add(copy);
    }
    return absl::OkStatus();
  }

  absl::Status StepWithCopy(CpuAdam& adam, AdamSpan span, int64_t t,
                            float grad_scale, Array& copy) {
    span.copy_type = copy.type;
    if (piece_numel_ == 0) {
      span.copy = copy.data();
      return adam.Step(span, t, grad_scale);
    }
    Array staging(copy.type, copy.numel);
    const int64_t size = ByteSize(copy.type);
    return adam.StepPieces(
        span, t, grad_scale, piece_numel_,
        [&](const AdamPiece&) -> absl::StatusOr<void*> {
          return staging.data();
        },
        [&](const AdamPiece& piece, void* filled) {
          std::memcpy(&copy.bytes[piece.offset * size], filled,
                      piece.numel * size);
          return absl::OkStatus();
        });
  }

  absl::Status RunOperations(int64_t numel, bool non_finite) {
    absl::Status status = RunAccumulate(numel, non_finite);
    if (status.ok()) status = RunScale(numel, non_finite);
    if (status.ok()) status = RunCast(numel, non_finite);
    if (status.ok()) status = RunNorm(numel, non_finite);
    if (status.ok()) status = RunRemainder(numel);
    return status;
  }

  absl::Status RunAccumulate(int64_t numel, bool non_finite) {
    const Content content = {{97, 44}, non_finite};
    for (DType term_type : kFloatTypes) {
      Array sum = Make(DType::kFloat32, numel, content);
      Array term = Make(term_type, numel, content);
      for (DType out_type : kFloatTypes) {
        for (float divisor : {1.0f, 3.0f, 7.0f}) {
          for (bool with_sum : {false, true}) {
            Array out(out_type, numel);
            const bool with_norm = divisor != 1 || with_sum;
            NormSum norm;
            AccumulateArgs args = {};
            args.numel = numel;
            args.sum = with_sum ? sum.as<float>() : nullptr;
            args.term = term.data();
            args.out = out.data();
            args.term_type = term_type;
            args.out_type = out_type;
            args.divisor = divisor;
            absl::Status status =
                Accumulate(kernel_, pool_, args, with_norm ? &norm : nullptr);
            if (!status.ok()) return status;
            AddResult(out);
            if (with_norm) digest_.AddTotal(norm);
          }
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunScale(int64_t numel, bool non_finite) {
    Array in = Make(DType::kFloat32, numel, {{1, 254}, non_finite});
    for (double factor : {1.0 / 3, 1e30}) {
      Array out(DType::kFloat32, numel);
      absl::Status status = Scale(
          kernel_, pool_,
          {numel, in.as<float>(), out.as<float>(), static_cast<float>(factor)});
      if (!status.ok()) return status;
      AddResult(out);
    }
    return absl::OkStatus();
  }

  absl::Status RunCast(int64_t numel, bool non_finite) {
    struct Target {
      DType type;
      Range range;
    };
    constexpr Target kTargets[] = {{DType::kBFloat16, {1, 254}},
                                   {DType::kFloat16, {101, 43}},
                                   {DType::kFloat8E4M3, {115, 22}}};
    auto cast = [&](Array in, DType out_type) {
      Array out(out_type, numel);
      absl::Status status = Cast(
          kernel_, pool_, {numel, in.data(), out.data(), in.type, out_type});
      AddResult(out);
      return status;
    };
    for (const Target& target : kTargets) {
      absl::Status status =
          cast(Make(DType::kFloat32, numel, {target.range, non_finite}),
               target.type);
      if (!status.ok()) return status;
    }
    for (const Target& target : kTargets) {
      absl::Status status = cast(MakeRaw(target.type, numel), DType::kFloat32);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status RunNorm(int64_t numel, bool non_finite) {
    for (DType type : kFloatTypes) {
      for (Range range : {Range{1, 254}, Range{110, 20}}) {
        Array x = Make(type, numel, {range, non_finite});
        NormSum norm;
        absl::Status status =
            SquaredNorm(kernel_, pool_, numel, x.data(), type, norm);
        if (!status.ok()) return status;
        digest_.AddTotal(norm);
        if (norm.finite()) {
          for (double max_norm : {0.0, 1.5}) {
            absl::StatusOr<float> factor =
                ClipFactor(GradientNorm(norm), max_norm, /*loss_scale=*/1024);
            if (!factor.ok()) return factor.status();
            digest_.Add(&*factor, sizeof(*factor));
          }
        }
        Array largest(DType::kFloat32, LeafCount(numel));
        status = AbsMax(kernel_, pool_,
                        {numel, x.data(), largest.as<float>(), type});
        if (!status.ok()) return status;
        digest_.Add(largest);
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunRemainder(int64_t numel) {
    Array master = MakeRaw(DType::kFloat32, numel);
    Array param(DType::kBFloat16, numel);
    Array remainder(DType::kBFloat16, numel);  // 16 bits an element
    absl::Status status =
        SplitRemainder(kernel_, pool_,
                       {numel, master.as<float>(), param.as<uint16_t>(),
                        remainder.as<int16_t>()});
    if (!status.ok()) return status;
    digest_.Add(param);
    digest_.Add(remainder);

    param = MakeRaw(DType::kBFloat16, numel);
    remainder = MakeRaw(DType::kBFloat16, numel);
    status = JoinRemainder(kernel_, pool_,
                           {numel, param.as<uint16_t>(),
                            remainder.as<int16_t>(), master.as<float>()});
    if (!status.ok()) return status;
    digest_.Add(master);
    return absl::OkStatus();
  }

  // Of accumulate, scale and cast: NaN is canonical in the narrow types.
  void AddResult(const Array& out) {
    if (out.type == DType::kFloat32) {
      digest_.AddCanonical(out);
    } else {
      digest_.Add(out);
    }
  }

  const Kernel& kernel_;
  ThreadPool& pool_;
  const int64_t piece_numel_;
  uint64_t arrays_made_ = 0;
  Digest digest_;
};

}  // namespace

absl::StatusOr<std::string> RunGoldenWorkload(const Kernel& kernel,
                                              ThreadPool& pool,
                                              int64_t piece_numel) {
  return Workload(kernel, pool, piece_numel).Run();
}

}  // namespace onepass

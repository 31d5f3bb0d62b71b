// The interface of a kernel plugin: one constant descriptor, no constructor.
//
// A plugin is a `Kernel` whose `operations` point at code compiled for one
// instruction set. Everything here is plain data, so that a kernel's source can
// include it without pulling in a single function of the standard library.
//
//   const Kernel kMine = {"mine",         /*rank=*/[] { return 500; },
//                         &MineSupported, kGradientTypes,
//                         kMomentTypes,   kCopyTypes,
//                         &kMineOperations};
//   RETURN_IF_ERROR(dispatcher.Register(kMine));
//
// Operations cannot fail and check nothing. Callers outside tests use the
// checked, parallel forms in dispatch/operations.h. Every operation sets the
// floating-point environment it needs and restores the caller's; no operation
// touches a byte outside its spans, whatever their length or alignment beyond
// that of an element. Results are specified bit by bit: kernels/generic/ holds
// the formulas, which are the same on every instruction set.
//
// To add an instruction set, see CONTRIBUTING.md. To add an operation: its
// argument struct and field here, one header in kernels/generic/, its name in
// FirstNullOperation of dispatch/dispatcher.cc, its checked form in
// dispatch/operations.h.

#ifndef ONEPASS_DISPATCH_KERNEL_H_
#define ONEPASS_DISPATCH_KERNEL_H_

#include <cstdint>

#include "dispatch/dtype.h"

namespace onepass {

// Elements of a leaf: sums of squares and largest magnitudes are taken leaf by
// leaf, so that they do not depend on how a tensor is cut, as long as each cut
// falls on a multiple of a leaf.
inline constexpr int64_t kLeafNumel = 4096;

// Leaves that `numel` elements are cut into; the last may be short.
inline constexpr int64_t LeafCount(int64_t numel) {
  return numel / kLeafNumel + (numel % kLeafNumel != 0);
}

// Types that the built-in kernels take.
inline constexpr DTypeSet kGradientTypes = {DType::kFloat32, DType::kBFloat16,
                                            DType::kFloat16};
inline constexpr DTypeSet kMomentTypes = {DType::kFloat32, DType::kBFloat16};
inline constexpr DTypeSet kCopyTypes = {DType::kBFloat16, DType::kFloat16};

// Types of codes that have a scale for each leaf, and the largest magnitude
// that a code gets: e4m3's largest, and half of fp16's, on which no rounding
// comes near to infinity.
inline constexpr DTypeSet kQuantizedTypes = {DType::kFloat16,
                                             DType::kFloat8E4M3};
inline constexpr float QuantizedLargest(DType type) {
  return type == DType::kFloat16 ? 32752.0f : 448.0f;
}

enum class WeightDecay : uint8_t {
  kNone,
  // Added to the gradient before the moments: g += weight_decay * p.
  kL2,
  // Decoupled (Loshchilov and Hutter 2019): p += decay * p, decay < 0.
  kAdamW,
};

// What Adam (Kingma and Ba 2015) needs in one step beside the elements, rounded
// once to the fp32 values every kernel uses. offload/adam_options.h computes
// it.
struct AdamConstants {
  float beta1 = 0;
  float beta2 = 0;
  float one_minus_beta1 = 1;
  float one_minus_beta2 = 1;
  float eps = 0;
  float weight_decay = 0;
  float step_size = 0;         // -lr / (1 - beta1^t)
  float bias_correction2 = 1;  // 1 / sqrt(1 - beta2^t)
  float decay = 0;             // -lr * weight_decay, for WeightDecay::kAdamW
  WeightDecay decay_mode = WeightDecay::kNone;
};

// For each of `numel` elements, in fp32, every operation rounded once to
// nearest even and fma fused:
//
//   g = grad * grad_scale
//   kL2:     g = fma(param, weight_decay, g)
//   m = fma(g, one_minus_beta1, exp_avg * beta1)
//   v = fma(g * g, one_minus_beta2, exp_avg_sq * beta2)
//   u = m / fma(sqrt(v), bias_correction2, eps)
//   kAdamW:  param = fma(param, decay, param)
//   param = fma(u, step_size, param)
//   copy  = param rounded to copy_type            (if copy is not null)
//
// m and v are rounded when they are stored in 16 bits; u uses them unrounded.
struct AdamStepArgs {
  int64_t numel = 0;
  float* param = nullptr;      // in, out: fp32 master weights
  const void* grad = nullptr;  // in: grad_type
  void* exp_avg = nullptr;     // in, out: first moment, exp_avg_type
  void* exp_avg_sq = nullptr;  // in, out: second moment, exp_avg_sq_type
  void* copy = nullptr;        // out: copy_type, or null
  DType grad_type = DType::kFloat32;
  DType exp_avg_type = DType::kFloat32;
  DType exp_avg_sq_type = DType::kFloat32;
  DType copy_type = DType::kBFloat16;  // of no meaning where copy is null
  // Asks for stores of the copy that go around the caches (offload/cpu_adam.h
  // says when that is worth while); a kernel that has none
  // (KernelOperations::streams_copies) stores it as ever. The bits are the
  // same.
  bool stream_copy = false;
  float grad_scale = 1;
  AdamConstants constants;
};

// out = ((sum + term) / divisor), widened to fp32, added, divided and rounded
// to out_type once. `sum` null stands for "no sum yet": out = term / divisor.
// `out` may be `sum` itself where out_type is fp32. `leaf_sums`, where not
// null, takes the sums of squares of the *stored* results, one a leaf, as
// SquaredNorm.
struct AccumulateArgs {
  int64_t numel = 0;
  const float* sum = nullptr;         // in, or null
  const void* term = nullptr;         // in: term_type
  void* out = nullptr;                // out: out_type
  double* leaf_sums = nullptr;        // out: LeafCount(numel) doubles, or null
  DType term_type = DType::kFloat32;  // fp32, bf16 or fp16
  DType out_type = DType::kFloat32;   // fp32, bf16 or fp16
  float divisor = 1;                  // 1 for all but the last term of a mean
};

// out = in * factor, fp32. `out` may be `in` itself.
struct ScaleArgs {
  int64_t numel = 0;
  const float* in = nullptr;
  float* out = nullptr;
  float factor = 1;
};

// out = in, rounded to nearest even. One of the two types is fp32, the other is
// not. bf16 and fp16 overflow to infinity and keep subnormals; e4m3 saturates
// to 448. NaN becomes 0x7fc0, 0x7e00, 0x7f.
struct CastArgs {
  int64_t numel = 0;
  const void* in = nullptr;
  void* out = nullptr;
  DType in_type = DType::kFloat32;
  DType out_type = DType::kFloat32;
};

// For each leaf of x its sum of squares in double: 16 accumulators, of which
// number j takes elements j, j + 16, ..., combined by halving (8, 4, 2, 1).
// Infinity and NaN in a leaf make its sum infinity or NaN.
struct SquaredNormArgs {
  int64_t numel = 0;
  const void* x = nullptr;       // in: type
  double* leaf_sums = nullptr;   // out: LeafCount(numel) doubles
  DType type = DType::kFloat32;  // fp32, bf16 or fp16
};

// For each leaf of x its largest magnitude; NaN (0x7fc00000) if it holds a NaN.
struct AbsMaxArgs {
  int64_t numel = 0;
  const void* x = nullptr;       // in: type
  float* leaf_absmax = nullptr;  // out: LeafCount(numel) floats
  DType type = DType::kFloat32;  // fp32, bf16 or fp16
};

// Takes an fp32 master x apart: low = x & 0xffff as int16, high = x >> 16,
// param = high + (low < 0) as bf16 bits. The pair rebuilds all 2^32 patterns.
// `param` is x rounded half up in magnitude, not to nearest even: it differs
// from a cast where x lies exactly between two bf16 values (32,640 values), and
// 131,070 NaN masters look finite or infinite in it.
struct SplitRemainderArgs {
  int64_t numel = 0;
  const float* master = nullptr;  // in
  uint16_t* param = nullptr;      // out: bf16
  int16_t* remainder = nullptr;   // out
};

// The inverse: x = ((param - (remainder < 0)) << 16) | (remainder & 0xffff).
struct JoinRemainderArgs {
  int64_t numel = 0;
  const uint16_t* param = nullptr;     // in: bf16
  const int16_t* remainder = nullptr;  // in
  float* master = nullptr;             // out
};

// For each leaf of `in` a scale s and codes, in fp32:
//
//   s    = (largest magnitude of the leaf) / QuantizedLargest(type)
//   code = x / s rounded to `type`
//
// Where s is zero or subnormal (its inverse may overflow), it is stored as 1
// and the codes as +0: never NaN. Where the largest magnitude is infinity or
// NaN (0x7fc00000), s is that, for the owner of the leaf to find; the codes are
// then of no use.
struct QuantizeArgs {
  int64_t numel = 0;
  const float* in = nullptr;     // in
  void* codes = nullptr;         // out: type
  float* scales = nullptr;       // out: LeafCount(numel) floats
  DType type = DType::kFloat16;  // fp16 or e4m3
};

// out = code * s. (Infinity where the largest magnitude of a leaf lay within
// the last place of fp32's and s was rounded up.)
struct DequantizeArgs {
  int64_t numel = 0;
  const void* codes = nullptr;    // in: type
  const float* scales = nullptr;  // in: LeafCount(numel) floats
  float* out = nullptr;           // out
  DType type = DType::kFloat16;   // fp16 or e4m3
};

// The code of a kernel. All pointers are set.
struct KernelOperations {
  // Elements that the kernel updates at a time, a constant on one machine: cut
  // spans at multiples of it to keep off the slower tail. A function, because
  // the vector length of SVE and RVV is known only at run time.
  int64_t (*block_numel)();
  void (*adam_step)(const AdamStepArgs& args);
  void (*accumulate)(const AccumulateArgs& args);
  void (*scale)(const ScaleArgs& args);
  void (*cast)(const CastArgs& args);
  void (*squared_norm)(const SquaredNormArgs& args);
  void (*absmax)(const AbsMaxArgs& args);
  void (*split_remainder)(const SplitRemainderArgs& args);
  void (*join_remainder)(const JoinRemainderArgs& args);
  void (*quantize)(const QuantizeArgs& args);
  void (*dequantize)(const DequantizeArgs& args);
  // Whether AdamStepArgs::stream_copy makes a difference.
  bool streams_copies = false;
};

struct Kernel {
  const char* name;  // lower case, unique in a dispatcher
  // The highest supported one is chosen. A constant on one machine, and a
  // function because it may depend on the machine: whether SVE comes before
  // NEON is a matter of its vector length. Called whether supported or not.
  int (*rank)();
  // Whether this processor and operating system can run the operations.
  bool (*supported)();
  DTypeSet gradient_types;  // of adam_step
  DTypeSet moment_types;    // of adam_step, each moment its own
  DTypeSet copy_types;      // of adam_step; empty where it writes no copies
  const KernelOperations* operations;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_KERNEL_H_

// The golden workload: every operation of a kernel and the CPU Adam over data
// that is made by integer arithmetic, with all results hashed into one number.
// It is the same for every kernel, processor, compiler, number of threads and
// piece size.
//
//   ASSIGN_OR_RETURN(std::string digest,
//                    RunGoldenWorkload(*kernel, *pool, 0));
//   if (digest != kGoldenDigest) ...   // other bits are computed here
//
// The workload is described here so fully that it can be written again from
// this text: tests/golden_reference.py is that, in numpy, and prints the same
// digest. To change the workload, change text, code and script, and then the
// digest to what the script prints.
//
// DATA. Arrays are numbered from 0 in the order in which they are made. Element
// i of array a comes from a 64-bit word w (splitmix64, modulo 2^64):
//
//   x = (a * 2^32 + i + 1) * 0x9e3779b97f4a7c15
//   x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9
//   x = (x ^ x >> 27) * 0x94d049bb133111eb
//   w = x ^ x >> 31
//
// A *raw* array holds the lowest bits of w. The others are made of its fields,
// with a range [low, low + count) of biased fp32 exponents:
//
//   mantissa   bits 0-22 (fp16: 0-9), bit 0 being the lowest
//   sign       bit 31, or 0 in arrays that are not negative
//   exponent   low + draw % count (fp16: draw % 31), draw = bits 32-47
//   kind       bits 56-63; changes the others:
//     0-7      exponent = mantissa = 0
//     8-15     exponent = 0
//     16-39    (not in fp16) near half way between neighbours of bf16 (16-23,
//              b = 16), fp16 (24-31, b = 13) or e4m3 (32-39, b = 20): the lower
//              b bits of the mantissa become 2^(b - 1) - 1 + near, near = bits
//              48-49
//     40-47    (in non-finite data) infinity
//     48-55    (in non-finite data) NaN: mantissa |= 1
//
// bf16 is the upper half of the fp32 pattern.
//
// ADAM. Case c counts from 0 over, outermost first, gradient fp32, bf16, fp16;
// exp_avg fp32, bf16; exp_avg_sq fp32, bf16; copy none, bf16, fp16; decay none,
// L2, AdamW. Cases of non-finite data go on counting over gradient and copy
// alone, with exp_avg bf16 where c is odd, exp_avg_sq bf16 where c / 2 is, and
// decay number c % 3. For each case:
//
//   numel         1 + 89 * (41 * c % 108)
//   beta1         0.9, 0.95, 0.8, 0, 0.99                 [c % 5]
//   beta2         0.999, 0.95, 0.999999, 0.5              [c % 4]
//   eps           1e-8, 1e-8, 1e-5, 1e-5                  [c % 4]
//                 0 with non-finite data
//   weight_decay  0.1 for L2 and AdamW, else 0
//   bias correction, but not where c % 11 is 10
//
// Arrays are made in this order (low, count):
//
//                 c even     c odd
//   param         97, 60     115, 12
//   exp_avg       63, 104    105, 17
//   exp_avg_sq    1, 206     90, 28     not negative
//
// Then come steps s = 0, 1, 2. Each makes
//
//   grad          63, 104    105, 20
//
// and updates the arrays, after which param, exp_avg, exp_avg_sq and the copy,
// if any, are hashed, with
//
//   t             1, 10, 1, 1000, 3, 1, 1095904           [c % 7] + s
//   lr            1e-3 / (1 + s)
//   grad_scale    1 / (3 + 2 * c) in double, rounded to fp32
//
// (t = 1095905 with beta2 0.999999 is one of the few steps in which pow(), or
// another order of multiplications, gives another correction in fp32.)
//
// OPERATIONS. For each numel of 1, 47, 4096, 9001, 30011, and, with non-finite
// data, 3 and 777:
//
// 1. Accumulate. For term type fp32, bf16, fp16 make sum (fp32) and term, both
//    (97, 44); for out type fp32, bf16, fp16, for divisor 1, 3, 7, without and
//    with sum: hash out and, but for divisor 1 without sum, the norm's total.
// 2. Scale. Make in (1, 254); for factor 1 / 3 and 1e30, rounded to fp32: hash
//    out.
// 3. Cast. For fp32 (1, 254) to bf16, fp32 (101, 43) to fp16, fp32 (115, 22) to
//    e4m3, then raw bf16, fp16, e4m3 to fp32: make in, hash out.
// 4. Norm. For type fp32, bf16, fp16, for (1, 254) and (110, 20): make x; hash
//    the total of its squared norm; where that is finite, the clip factors for
//    max_norm 0 and 1.5 with loss scale 1024; then the largest magnitudes.
// 5. Remainder. Make master, raw; split it; hash param, remainder. Make param
//    and remainder, raw; join them; hash master.
//
// DIGEST. XXH64 with seed 0 of all that is hashed, one after another, little
// endian. The payload of some NaN is not promised: in param, exp_avg,
// exp_avg_sq, in fp32 results of accumulate, scale and cast, and in totals NaN
// is replaced by 0x7fc00000, 0x7fc0 (bf16) or 0x7ff8000000000000.

#ifndef ONEPASS_TOOLS_GOLDEN_H_
#define ONEPASS_TOOLS_GOLDEN_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"

namespace onepass {

// What RunGoldenWorkload must return.
extern const char kGoldenDigest[];

// Runs the workload and returns its digest, 16 hexadecimal digits. With
// `piece_numel` 0 each step is one CpuAdam::Step, else steps with a copy are
// taken by CpuAdam::StepPieces. Errors are those of the operations: a kernel
// that lacks a type of the workload cannot run it. Takes well below a second.
absl::StatusOr<std::string> RunGoldenWorkload(const Kernel& kernel,
                                              ThreadPool& pool,
                                              int64_t piece_numel);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_GOLDEN_H_

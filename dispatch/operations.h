// Every operation of a kernel, checked and spread over a thread pool: the edge
// that kernels, which cannot fail, rely on.
//
//   RETURN_IF_ERROR(Cast(*kernel, *pool, {numel, x, y, DType::kFloat32,
//                                         DType::kBFloat16}));
//
// All return InvalidArgument, with the operation, the argument, what was
// expected and what came, for: a negative or overflowing numel, a null pointer
// with numel above 0, a pointer that is not aligned to its element, a type that
// the operation or the kernel does not take, and spans that overlap where one
// is written (the same span twice is fine where dispatch/kernel.h says so).
// Nothing is read or written then. Work is cut at multiples of a leaf; results
// do not depend on the number of threads. None of them allocates, unless it
// fails.

#ifndef ONEPASS_DISPATCH_OPERATIONS_H_
#define ONEPASS_DISPATCH_OPERATIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "dispatch/adam_constants.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/thread_pool.h"

namespace onepass {

// Adds `count` sums of leaves to `sum`: what SquaredNorm does after the kernel,
// where leaf sums are in memory of their own.
struct SumLeavesArgs {
  int64_t count = 0;
  const double* leaf_sums = nullptr;  // in
  NormSum* sum = nullptr;             // in, out; zeroed memory is a sum of 0
};

// For steps whose number and learning rate live where the operations run, so
// that a captured sequence of them is right each time it is run:
// step = step + 1, and constants = ComputeConstants(rule, lr, step). Values
// there that make no sense are not found.
struct AdvanceStepArgs {
  int64_t* step = nullptr;             // in, out: updates until now
  const float* lr = nullptr;           // in
  AdamConstants* constants = nullptr;  // out
  AdamRule rule;
};

// An AdamStepArgs of whose constants all but decay_mode are read when it runs.
struct DeferredAdamStepArgs {
  AdamStepArgs step;
  const AdamConstants* constants = nullptr;  // in
};

// Whether two stretches of memory share a byte.
bool MemoryOverlaps(const void* a, int64_t a_bytes, const void* b,
                    int64_t b_bytes);

// The checks of an operation alone, for those who run it themselves. Of
// AccumulateArgs and SquaredNormArgs they take the leaf sums, too.
absl::Status CheckAdamStep(DTypeSet gradient_types, DTypeSet moment_types,
                           DTypeSet copy_types, const AdamStepArgs& args);
absl::Status CheckAdamStep(const Kernel& kernel, const AdamStepArgs& args);
absl::Status CheckAdamStep(DTypeSet gradient_types, DTypeSet moment_types,
                           DTypeSet copy_types,
                           const DeferredAdamStepArgs& args);
absl::Status CheckArgs(const AccumulateArgs& args);
absl::Status CheckArgs(const ScaleArgs& args);
absl::Status CheckArgs(const CastArgs& args);
absl::Status CheckArgs(const SquaredNormArgs& args);
absl::Status CheckArgs(const AbsMaxArgs& args);
absl::Status CheckArgs(const SplitRemainderArgs& args);
absl::Status CheckArgs(const JoinRemainderArgs& args);
absl::Status CheckArgs(const QuantizeArgs& args);
absl::Status CheckArgs(const DequantizeArgs& args);
absl::Status CheckArgs(const SumLeavesArgs& args);
absl::Status CheckArgs(const AdvanceStepArgs& args);

absl::Status AdamStep(const Kernel& kernel, ThreadPool& pool,
                      const AdamStepArgs& args);
// The same over several spans, which do not overlap, as if they were one: the
// workers share all of their elements. Each is checked, and named by its index
// in an error, before any is updated.
absl::Status AdamStep(const Kernel& kernel, ThreadPool& pool,
                      absl::Span<const AdamStepArgs> spans);
// The arguments for elements [offset, offset + numel) of `args`.
AdamStepArgs AdamStepPart(const AdamStepArgs& args, int64_t offset,
                          int64_t numel);

// The squares of the stored results are added to `sum` where it is not null;
// `args.leaf_sums` is to be null.
absl::Status Accumulate(const Kernel& kernel, ThreadPool& pool,
                        const AccumulateArgs& args, NormSum* sum = nullptr);

absl::Status Scale(const Kernel& kernel, ThreadPool& pool,
                   const ScaleArgs& args);

absl::Status Cast(const Kernel& kernel, ThreadPool& pool, const CastArgs& args);

// Adds the squares of x[0, numel) to `sum`, leaf by leaf from x[0] on.
absl::Status SquaredNorm(const Kernel& kernel, ThreadPool& pool, int64_t numel,
                         const void* x, DType type, NormSum& sum);

absl::Status AbsMax(const Kernel& kernel, ThreadPool& pool,
                    const AbsMaxArgs& args);

absl::Status SplitRemainder(const Kernel& kernel, ThreadPool& pool,
                            const SplitRemainderArgs& args);

absl::Status JoinRemainder(const Kernel& kernel, ThreadPool& pool,
                           const JoinRemainderArgs& args);

// Scales that are not finite are no error.
absl::Status Quantize(const Kernel& kernel, ThreadPool& pool,
                      const QuantizeArgs& args);

absl::Status Dequantize(const Kernel& kernel, ThreadPool& pool,
                        const DequantizeArgs& args);

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_OPERATIONS_H_

// The largest magnitude of each leaf, compared as integers: the bits of
// non-negative floats are ordered like their values, with NaN above infinity.
// See AbsMaxArgs.

#ifndef ONEPASS_KERNELS_GENERIC_ABSMAX_H_
#define ONEPASS_KERNELS_GENERIC_ABSMAX_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/leaf.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

// Of elements [begin, end) of x, at most a leaf: the bits of a float.
template <typename T, DType type>
ONEPASS_INLINE uint32_t LeafAbsMax(const void* x, int64_t begin, int64_t end) {
  auto largest = T::ZeroU32();
  ForEachVector<T>(
      end - begin, [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
        const auto bits = T::Bits(Load<T, type>(x, begin + i, lanes));
        largest = T::Max(largest, T::And(bits, T::SetU32(kF32AbsMask)));
      });
  const uint32_t bits = T::ReduceMax(largest);
  return bits > kF32Infinity ? kF32CanonicalNaN : bits;
}

template <typename T, DType type>
[[gnu::noinline]] void AbsMaxLoop(const AbsMaxArgs& args) {
  const ScopedFpEnvironment fp;
  const AbsMaxArgs a = args;
  ForEachLeaf(a.numel, [&](int64_t leaf, int64_t begin, int64_t end) {
    const uint32_t bits = LeafAbsMax<T, type>(a.x, begin, end);
    __builtin_memcpy(&a.leaf_absmax[leaf], &bits, sizeof(bits));
  });
}

template <typename T>
void AbsMax(const AbsMaxArgs& args) {
  WithDType(GradientTypes{}, args.type,
            [&](auto type) { AbsMaxLoop<T, type.value>(args); });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_ABSMAX_H_

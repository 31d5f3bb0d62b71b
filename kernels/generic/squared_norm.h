// The sum of squares of each leaf. See SquaredNormArgs.

#ifndef ONEPASS_KERNELS_GENERIC_SQUARED_NORM_H_
#define ONEPASS_KERNELS_GENERIC_SQUARED_NORM_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/leaf.h"

namespace onepass {
namespace generic {

template <typename T, DType type>
[[gnu::noinline]] void SquaredNormLoop(const SquaredNormArgs& args) {
  const ScopedFpEnvironment fp;
  const SquaredNormArgs a = args;
  auto load = [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    return Load<T, type>(a.x, i, lanes);
  };
  ForEachLeaf(a.numel, [&](int64_t leaf, int64_t begin, int64_t end) {
    a.leaf_sums[leaf] = LeafSum<T>(begin, end, load);
  });
}

template <typename T>
void SquaredNorm(const SquaredNormArgs& args) {
  WithDType(GradientTypes{}, args.type,
            [&](auto type) { SquaredNormLoop<T, type.value>(args); });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_SQUARED_NORM_H_

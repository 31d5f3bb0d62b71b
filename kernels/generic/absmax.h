// The largest magnitude of each leaf, compared as integers: the bits of
// non-negative floats are ordered like their values, with NaN above infinity.
// See AbsMaxArgs.

#ifndef ONEPASS_KERNELS_GENERIC_ABSMAX_H_
#define ONEPASS_KERNELS_GENERIC_ABSMAX_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

template <typename T, DType type>
[[gnu::noinline]] void AbsMaxLoop(const AbsMaxArgs& args) {
  const ScopedFpEnvironment fp;
  const AbsMaxArgs a = args;
  for (int64_t begin = 0; begin < a.numel; begin += kLeafNumel) {
    const int64_t rest = a.numel - begin;
    auto largest = T::SetU32(0);
    ForEachVector<T>(rest < kLeafNumel ? rest : kLeafNumel,
                     [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
                       largest = T::Max(
                           largest,
                           T::And(T::Bits(Load<T, type>(a.x, begin + i, lanes)),
                                  T::SetU32(kF32AbsMask)));
                     });
    uint32_t bits = T::ReduceMax(largest);
    if (bits > kF32Infinity) bits = kF32CanonicalNaN;
    __builtin_memcpy(&a.leaf_absmax[begin / kLeafNumel], &bits, sizeof(bits));
  }
}

template <typename T>
void AbsMax(const AbsMaxArgs& args) {
  WithDType(GradientTypes{}, args.type,
            [&](auto type) { AbsMaxLoop<T, type.value>(args); });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_ABSMAX_H_

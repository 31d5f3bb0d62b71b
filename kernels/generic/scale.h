// out = in * factor. See ScaleArgs.

#ifndef ONEPASS_KERNELS_GENERIC_SCALE_H_
#define ONEPASS_KERNELS_GENERIC_SCALE_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

template <typename T>
void Scale(const ScaleArgs& args) {
  const ScopedFpEnvironment fp;
  const ScaleArgs a = args;
  ForEachVector<T>(
      a.numel,
      [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
        T::StoreF32(a.out + i,
                    T::Mul(T::LoadF32(a.in + i, lanes), T::Set(a.factor)),
                    lanes);
      },
      Input<DType::kFloat32>{a.in});
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_SCALE_H_

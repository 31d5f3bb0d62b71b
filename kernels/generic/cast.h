// Between fp32 and a narrower type. See CastArgs.

#ifndef ONEPASS_KERNELS_GENERIC_CAST_H_
#define ONEPASS_KERNELS_GENERIC_CAST_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

template <typename T, DType in_type, DType out_type>
[[gnu::noinline]] void CastLoop(const CastArgs& args) {
  const ScopedFpEnvironment fp;
  const CastArgs a = args;
  ForEachVector<T>(
      a.numel,
      [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
        Store<T, out_type>(a.out, i, Load<T, in_type>(a.in, i, lanes), lanes);
      },
      Input<in_type>{a.in});
}

template <typename T>
void Cast(const CastArgs& args) {
  if (args.in_type == DType::kFloat32) {
    WithDType(NarrowTypes{}, args.out_type,
              [&](auto out) { CastLoop<T, DType::kFloat32, out.value>(args); });
  } else {
    WithDType(NarrowTypes{}, args.in_type,
              [&](auto in) { CastLoop<T, in.value, DType::kFloat32>(args); });
  }
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_CAST_H_

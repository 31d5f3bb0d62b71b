// A running sum of gradients, its mean on the last term, and the norm of what
// was stored. See AccumulateArgs.

#ifndef ONEPASS_KERNELS_GENERIC_ACCUMULATE_H_
#define ONEPASS_KERNELS_GENERIC_ACCUMULATE_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/leaf.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

// What is the same for all elements is decided outside the loop: compilers
// would divide by 1 and drop the result rather than branch.
template <typename T, DType term_type, DType out_type, bool has_sum,
          bool divides>
[[gnu::noinline]] void AccumulateLoop(const AccumulateArgs& args) {
  const ScopedFpEnvironment fp;
  const AccumulateArgs a = args;
  // Returns what was stored, widened again.
  auto step = [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    auto x = Load<T, term_type>(a.term, i, lanes);
    if constexpr (has_sum) x = T::Add(T::LoadF32(a.sum + i, lanes), x);
    if constexpr (divides) x = T::Div(x, T::Set(a.divisor));
    Store<T, out_type>(a.out, i, x, lanes);
    if constexpr (out_type == DType::kFloat32) {
      return x;
    } else {
      return Load<T, out_type>(a.out, i, lanes);
    }
  };
  if (a.leaf_sums == nullptr) {
    ForEachVector<T>(a.numel, [&](int64_t i, auto lanes)
                                  ONEPASS_LAMBDA_INLINE { step(i, lanes); });
    return;
  }
  ForEachLeaf(a.numel, [&](int64_t leaf, int64_t begin, int64_t end) {
    a.leaf_sums[leaf] = LeafSum<T>(begin, end, step);
  });
}

template <typename T, DType term_type, DType out_type, bool has_sum>
void AccumulateOfTypes(const AccumulateArgs& args) {
  // x / 1 is x.
  if (args.divisor == 1.0f) {
    AccumulateLoop<T, term_type, out_type, has_sum, false>(args);
  } else {
    AccumulateLoop<T, term_type, out_type, has_sum, true>(args);
  }
}

template <typename T>
void Accumulate(const AccumulateArgs& args) {
  WithDType(GradientTypes{}, args.term_type, [&](auto term) {
    WithDType(GradientTypes{}, args.out_type, [&](auto out) {
      if (args.sum == nullptr) {
        AccumulateOfTypes<T, term.value, out.value, false>(args);
      } else {
        AccumulateOfTypes<T, term.value, out.value, true>(args);
      }
    });
  });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_ACCUMULATE_H_

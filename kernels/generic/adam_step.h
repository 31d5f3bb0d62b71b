// Adam in one pass: scale the gradient, update moments and master weight, write
// the 16-bit copy. The formula and its order are those of AdamStepArgs.

#ifndef ONEPASS_KERNELS_GENERIC_ADAM_STEP_H_
#define ONEPASS_KERNELS_GENERIC_ADAM_STEP_H_

#include <cstdint>
#include <type_traits>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

// Where AdamStepArgs::copy is null, and where it is not.
struct NoCopy {};
template <DType copy_type, bool is_streaming>
struct Copy {
  static constexpr DType type = copy_type;
  static constexpr bool streaming = is_streaming;
};

// Not inlined into one function of all types: each instance is a loop of its
// own. T is local to its source file, so the instances are too.
template <typename T, DType grad_type, DType exp_avg_type,
          DType exp_avg_sq_type, typename CopyKind, WeightDecay decay_mode>
[[gnu::noinline]] void AdamStepLoop(const AdamStepArgs& args) {
  const ScopedFpEnvironment fp;
  // A copy that no store through a span can alias, so that it stays in
  // registers.
  const AdamStepArgs a = args;
  const AdamConstants& c = a.constants;
  auto update = [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    auto p = T::LoadF32(a.param + i, lanes);
    auto g = T::Mul(Load<T, grad_type>(a.grad, i, lanes), T::Set(a.grad_scale));
    if constexpr (decay_mode == WeightDecay::kL2) {
      g = T::Fma(p, T::Set(c.weight_decay), g);
    }
    const auto m = T::Fma(
        g, T::Set(c.one_minus_beta1),
        T::Mul(Load<T, exp_avg_type>(a.exp_avg, i, lanes), T::Set(c.beta1)));
    const auto v =
        T::Fma(T::Mul(g, g), T::Set(c.one_minus_beta2),
               T::Mul(Load<T, exp_avg_sq_type>(a.exp_avg_sq, i, lanes),
                      T::Set(c.beta2)));
    const auto u = T::Div(
        m, T::Fma(T::Sqrt(v), T::Set(c.bias_correction2), T::Set(c.eps)));
    if constexpr (decay_mode == WeightDecay::kAdamW) {
      p = T::Fma(p, T::Set(c.decay), p);
    }
    p = T::Fma(u, T::Set(c.step_size), p);
    T::StoreF32(a.param + i, p, lanes);
    Store<T, exp_avg_type>(a.exp_avg, i, m, lanes);
    Store<T, exp_avg_sq_type>(a.exp_avg_sq, i, v, lanes);
    return p;
  };
  const Input<DType::kFloat32> param = {a.param};
  const Input<grad_type> grad = {a.grad};
  const Input<exp_avg_type> exp_avg = {a.exp_avg};
  const Input<exp_avg_sq_type> exp_avg_sq = {a.exp_avg_sq};
  if constexpr (std::is_same_v<CopyKind, NoCopy>) {
    ForEachVector<T>(a.numel, update, param, grad, exp_avg, exp_avg_sq);
  } else {
    ForEachVectorWithCopy<T, CopyKind::type, CopyKind::streaming>(
        a.numel, a.copy, update, param, grad, exp_avg, exp_avg_sq);
  }
}

template <typename T, DType grad_type, DType exp_avg_type,
          DType exp_avg_sq_type, typename CopyKind>
void AdamStepOfTypes(const AdamStepArgs& args) {
  switch (args.constants.decay_mode) {
    case WeightDecay::kNone:
      return AdamStepLoop<T, grad_type, exp_avg_type, exp_avg_sq_type, CopyKind,
                          WeightDecay::kNone>(args);
    case WeightDecay::kL2:
      return AdamStepLoop<T, grad_type, exp_avg_type, exp_avg_sq_type, CopyKind,
                          WeightDecay::kL2>(args);
    case WeightDecay::kAdamW:
      return AdamStepLoop<T, grad_type, exp_avg_type, exp_avg_sq_type, CopyKind,
                          WeightDecay::kAdamW>(args);
  }
}

template <typename T>
void AdamStep(const AdamStepArgs& args) {
  WithDType(GradientTypes{}, args.grad_type, [&](auto grad) {
    WithDType(MomentTypes{}, args.exp_avg_type, [&](auto m) {
      WithDType(MomentTypes{}, args.exp_avg_sq_type, [&](auto v) {
        if (args.copy == nullptr) {
          AdamStepOfTypes<T, grad.value, m.value, v.value, NoCopy>(args);
          return;
        }
        WithDType(CopyTypes{}, args.copy_type, [&](auto copy) {
          if constexpr (T::kStreams) {
            if (args.stream_copy) {
              AdamStepOfTypes<T, grad.value, m.value, v.value,
                              Copy<copy.value, true>>(args);
              return;
            }
          }
          AdamStepOfTypes<T, grad.value, m.value, v.value,
                          Copy<copy.value, false>>(args);
        });
      });
    });
  });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_ADAM_STEP_H_

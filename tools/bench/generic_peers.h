// The peers, over the traits of an instruction set (kernels/generic/kernel.h
// says what these are).

#ifndef ONEPASS_TOOLS_BENCH_GENERIC_PEERS_H_
#define ONEPASS_TOOLS_BENCH_GENERIC_PEERS_H_

#include <cstdint>

#include "dispatch/dtype.h"
#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/inline.h"
#include "kernels/generic/loop.h"
#include "tools/bench/peers.h"

namespace onepass {
namespace generic {

template <typename T, bool streaming>
[[gnu::noinline]] void TwinLoop(const AdamStepArgs& args) {
  const ScopedFpEnvironment fp;
  const AdamStepArgs a = args;
  const auto* grad = static_cast<const float*>(a.grad);
  auto* exp_avg = static_cast<float*>(a.exp_avg);
  auto* exp_avg_sq = static_cast<float*>(a.exp_avg_sq);
  // What is loaded goes where it came from.
  auto move = [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    const auto p = T::LoadF32(a.param + i, lanes);
    const auto m = T::LoadF32(exp_avg + i, lanes);
    const auto v = T::LoadF32(exp_avg_sq + i, lanes);
    // Else compilers know that memory has these values, and store nothing.
    asm volatile("" ::: "memory");
    T::StoreF32(a.param + i, p, lanes);
    T::StoreF32(exp_avg + i, m, lanes);
    T::StoreF32(exp_avg_sq + i, v, lanes);
    return T::LoadF32(grad + i, lanes);
  };
  using F32 = Input<DType::kFloat32>;
  ForEachVectorWithCopy<T, DType::kBFloat16, streaming>(
      a.numel, a.copy, move, F32{a.param}, F32{grad}, F32{exp_avg},
      F32{exp_avg_sq});
}

template <typename T>
void Twin(const AdamStepArgs& args) {
  if constexpr (T::kStreams) {
    if (args.stream_copy) return TwinLoop<T, true>(args);
  }
  TwinLoop<T, false>(args);
}

// Moments and weights of one vector, denominators by a true division. Returns
// the weights.
template <typename T, typename Lanes>
ONEPASS_INLINE typename T::F32 UpdateWithTwoDivisions(const AdamStepArgs& a,
                                                      typename T::F32 g,
                                                      int64_t i, Lanes lanes) {
  const AdamConstants& c = a.constants;
  auto* exp_avg = static_cast<float*>(a.exp_avg) + i;
  auto* exp_avg_sq = static_cast<float*>(a.exp_avg_sq) + i;
  const auto m = T::Fma(g, T::Set(c.one_minus_beta1),
                        T::Mul(T::LoadF32(exp_avg, lanes), T::Set(c.beta1)));
  const auto v = T::Fma(T::Mul(g, g), T::Set(c.one_minus_beta2),
                        T::Mul(T::LoadF32(exp_avg_sq, lanes), T::Set(c.beta2)));
  const auto denominator =
      T::Add(T::Div(T::Sqrt(v), T::Set(c.bias_correction2)), T::Set(c.eps));
  auto p = T::LoadF32(a.param + i, lanes);
  p = T::Fma(p, T::Set(c.decay), p);
  p = T::Fma(T::Div(m, denominator), T::Set(c.step_size), p);
  T::StoreF32(exp_avg, m, lanes);
  T::StoreF32(exp_avg_sq, v, lanes);
  T::StoreF32(a.param + i, p, lanes);
  return p;
}

template <typename T>
[[gnu::noinline]] void ScalingStep(const AdamStepArgs& args, float* grad,
                                   float loss_scale) {
  const ScopedFpEnvironment fp;
  const AdamStepArgs a = args;
  ForEachVector<T>(a.numel, [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    const auto g = T::Div(T::LoadF32(grad + i, lanes), T::Set(loss_scale));
    T::StoreF32(grad + i, g, lanes);
    UpdateWithTwoDivisions<T>(a, g, i, lanes);
  });
}

template <typename T>
[[gnu::noinline]] void OnePassTwoDiv(const AdamStepArgs& args) {
  const ScopedFpEnvironment fp;
  const AdamStepArgs a = args;
  const auto* grad = static_cast<const float*>(a.grad);
  ForEachVectorWithCopy<T, DType::kBFloat16, /*streaming=*/false>(
      a.numel, a.copy, [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
        const auto g =
            T::Mul(T::LoadF32(grad + i, lanes), T::Set(a.grad_scale));
        return UpdateWithTwoDivisions<T>(a, g, i, lanes);
      });
}

template <typename T>
constexpr Peers MakePeers() {
  return {&Twin<T>, &ScalingStep<T>, &OnePassTwoDiv<T>};
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_GENERIC_PEERS_H_

// Between fp32 and codes with a scale for each leaf. See QuantizeArgs and
// DequantizeArgs.

#ifndef ONEPASS_KERNELS_GENERIC_QUANTIZE_H_
#define ONEPASS_KERNELS_GENERIC_QUANTIZE_H_

#include <cstdint>

#include "dispatch/fp_environment.h"
#include "dispatch/kernel.h"
#include "kernels/generic/absmax.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/leaf.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

using QuantizedTypes = DTypeList<DType::kFloat16, DType::kFloat8E4M3>;
static_assert(QuantizedTypes::kSet == kQuantizedTypes);

template <typename T, DType type>
[[gnu::noinline]] void QuantizeLoop(const QuantizeArgs& args) {
  constexpr uint32_t kLeastNormal = 0x00800000;
  constexpr float kLargest = QuantizedLargest(type);
  const ScopedFpEnvironment fp;
  const QuantizeArgs a = args;
  ForEachLeaf(a.numel, [&](int64_t leaf, int64_t begin, int64_t end) {
    const uint32_t largest = LeafAbsMax<T, DType::kFloat32>(a.in, begin, end);
    float scale;
    __builtin_memcpy(&scale, &largest, sizeof(scale));
    if (largest < kF32Infinity) scale /= kLargest;
    uint32_t scale_bits;
    __builtin_memcpy(&scale_bits, &scale, sizeof(scale_bits));
    if (scale_bits < kLeastNormal) {
      a.scales[leaf] = 1;
      ForEachVector<T>(end - begin, [&](int64_t i,
                                        auto lanes) ONEPASS_LAMBDA_INLINE {
        Store<T, type>(a.codes, begin + i, T::FromBits(T::ZeroU32()), lanes);
      });
      return;
    }
    a.scales[leaf] = scale;
    ForEachVector<T>(end - begin, [&](int64_t i,
                                      auto lanes) ONEPASS_LAMBDA_INLINE {
      Store<T, type>(a.codes, begin + i,
                     T::Div(T::LoadF32(a.in + begin + i, lanes), T::Set(scale)),
                     lanes);
    });
  });
}

template <typename T>
void Quantize(const QuantizeArgs& args) {
  WithDType(QuantizedTypes{}, args.type,
            [&](auto type) { QuantizeLoop<T, type.value>(args); });
}

template <typename T, DType type>
[[gnu::noinline]] void DequantizeLoop(const DequantizeArgs& args) {
  const ScopedFpEnvironment fp;
  const DequantizeArgs a = args;
  ForEachLeaf(a.numel, [&](int64_t leaf, int64_t begin, int64_t end) {
    const float scale = a.scales[leaf];
    ForEachVector<T>(
        end - begin, [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
          T::StoreF32(
              a.out + begin + i,
              T::Mul(Load<T, type>(a.codes, begin + i, lanes), T::Set(scale)),
              lanes);
        });
  });
}

template <typename T>
void Dequantize(const DequantizeArgs& args) {
  WithDType(QuantizedTypes{}, args.type,
            [&](auto type) { DequantizeLoop<T, type.value>(args); });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_QUANTIZE_H_

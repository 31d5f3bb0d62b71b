// An fp32 master as a bf16 parameter and an int16 remainder, and back. See
// SplitRemainderArgs and JoinRemainderArgs. Integers only.

#ifndef ONEPASS_KERNELS_GENERIC_REMAINDER_H_
#define ONEPASS_KERNELS_GENERIC_REMAINDER_H_

#include <cstdint>

#include "dispatch/kernel.h"
#include "kernels/generic/loop.h"

namespace onepass {
namespace generic {

template <typename T>
void SplitRemainder(const SplitRemainderArgs& args) {
  const SplitRemainderArgs a = args;
  // int16 and uint16 may alias: both are the same element.
  auto* remainder = reinterpret_cast<uint16_t*>(a.remainder);
  ForEachVector<T>(a.numel, [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    const auto bits = T::Bits(T::LoadF32(a.master + i, lanes));
    const auto negative =
        T::And(T::template ShiftRight<15>(bits), T::SetU32(1));
    T::StoreU16(a.param + i,
                T::And(T::Add(T::template ShiftRight<16>(bits), negative),
                       T::SetU32(0xffff)),
                lanes);
    T::StoreU16(remainder + i, T::And(bits, T::SetU32(0xffff)), lanes);
  });
}

template <typename T>
void JoinRemainder(const JoinRemainderArgs& args) {
  const JoinRemainderArgs a = args;
  const auto* remainder = reinterpret_cast<const uint16_t*>(a.remainder);
  ForEachVector<T>(a.numel, [&](int64_t i, auto lanes) ONEPASS_LAMBDA_INLINE {
    const auto low = T::LoadU16(remainder + i, lanes);
    const auto high =
        T::Sub(T::LoadU16(a.param + i, lanes), T::template ShiftRight<15>(low));
    T::StoreF32(a.master + i,
                T::FromBits(T::Or(T::template ShiftLeft<16>(high), low)),
                lanes);
  });
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_REMAINDER_H_

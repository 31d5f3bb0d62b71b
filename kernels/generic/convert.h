// Loading any element type as fp32 lanes, and storing fp32 lanes as any type:
// the one place where the encodings stand. Formulas are integer operations,
// which are the same on every instruction set; where a set converts half
// precision itself (Traits::kHardwareHalf), its instruction is used, with NaN
// made canonical first.

#ifndef ONEPASS_KERNELS_GENERIC_CONVERT_H_
#define ONEPASS_KERNELS_GENERIC_CONVERT_H_

#include <cstdint>

#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "kernels/generic/inline.h"

namespace onepass {
namespace generic {

// Bits of fp32.
inline constexpr uint32_t kF32AbsMask = 0x7fffffff;
inline constexpr uint32_t kF32Infinity = 0x7f800000;
inline constexpr uint32_t kF32CanonicalNaN = 0x7fc00000;

// The element that a type is stored as.
template <DType type>
struct Storage {
  using Type = uint16_t;
};
template <>
struct Storage<DType::kFloat32> {
  using Type = float;
};
template <>
struct Storage<DType::kFloat8E4M3> {
  using Type = uint8_t;
};

// `bits` shifted right by `shift`, rounded to nearest, ties to even. A carry
// out of the mantissa moves into the exponent, as it should.
template <typename T, int shift>
ONEPASS_INLINE typename T::U32 ShiftRightToNearestEven(typename T::U32 bits) {
  const auto half_less_one = T::SetU32((uint32_t{1} << (shift - 1)) - 1);
  const auto lowest_kept =
      T::And(T::template ShiftRight<shift>(bits), T::SetU32(1));
  return T::template ShiftRight<shift>(
      T::Add(bits, T::Add(half_less_one, lowest_kept)));
}

template <typename T>
ONEPASS_INLINE typename T::Mask IsNaN(typename T::U32 magnitude) {
  return T::Greater(magnitude, T::SetU32(kF32Infinity));
}

// Overflow becomes infinity by the carry, infinity stays.
template <typename T>
ONEPASS_INLINE typename T::U32 EncodeBFloat16(typename T::F32 x) {
  const auto bits = T::Bits(x);
  const auto magnitude = T::And(bits, T::SetU32(kF32AbsMask));
  return T::Select(IsNaN<T>(magnitude), T::SetU32(0x7fc0),
                   ShiftRightToNearestEven<T, 16>(bits));
}

template <typename T>
ONEPASS_INLINE typename T::F32 DecodeBFloat16(typename T::U32 code) {
  return T::FromBits(T::template ShiftLeft<16>(code));
}

// A narrow format with `mantissa` explicit bits and exponent bias `bias`, from
// fp32 magnitudes: normals are rounded as integers and rebased; below the least
// normal, adding the power of two whose last place is the format's least
// subnormal rounds to a multiple of it, once and to nearest even.
template <typename T, int mantissa, int bias>
ONEPASS_INLINE typename T::U32 EncodeNarrowMagnitude(
    typename T::U32 magnitude) {
  constexpr int kShift = 23 - mantissa;
  constexpr uint32_t kLeastNormal = uint32_t{127 - bias + 1} << 23;
  constexpr uint32_t kRounder = uint32_t{127 - bias + 1 + kShift} << 23;
  const auto normal = T::Sub(ShiftRightToNearestEven<T, kShift>(magnitude),
                             T::SetU32(uint32_t{127 - bias} << mantissa));
  const auto rounder = T::SetU32(kRounder);
  const auto subnormal = T::Sub(
      T::Bits(T::Add(T::FromBits(magnitude), T::FromBits(rounder))), rounder);
  return T::Select(T::Greater(T::SetU32(kLeastNormal), magnitude), subnormal,
                   normal);
}

// The inverse, finite values only: read as fp32 with the wrong bias, which one
// exact multiplication by a power of two puts right, subnormals too.
template <typename T, int mantissa, int bias>
ONEPASS_INLINE typename T::F32 DecodeNarrowMagnitude(
    typename T::U32 magnitude) {
  constexpr uint32_t kRebase = uint32_t{127 + 127 - bias} << 23;
  return T::Mul(T::FromBits(T::template ShiftLeft<23 - mantissa>(magnitude)),
                T::FromBits(T::SetU32(kRebase)));
}

template <typename T>
ONEPASS_INLINE typename T::U32 EncodeFloat16(typename T::F32 x) {
  const auto bits = T::Bits(x);
  const auto magnitude = T::And(bits, T::SetU32(kF32AbsMask));
  const auto infinity = T::SetU32(0x7c00);
  const auto rounded = EncodeNarrowMagnitude<T, 10, 15>(magnitude);
  // 65520 and above rounds to infinity's code or beyond it.
  const auto saturated =
      T::Select(T::Greater(rounded, infinity), infinity, rounded);
  const auto sign = T::And(T::template ShiftRight<16>(bits), T::SetU32(0x8000));
  return T::Select(IsNaN<T>(magnitude), T::SetU32(0x7e00),
                   T::Or(sign, saturated));
}

template <typename T>
ONEPASS_INLINE typename T::F32 DecodeFloat16(typename T::U32 code) {
  const auto magnitude = T::And(code, T::SetU32(0x7fff));
  const auto sign = T::template ShiftLeft<16>(T::And(code, T::SetU32(0x8000)));
  const auto finite = T::Bits(DecodeNarrowMagnitude<T, 10, 15>(magnitude));
  const auto infinity_or_nan =
      T::Or(T::template ShiftLeft<13>(magnitude), T::SetU32(kF32Infinity));
  return T::FromBits(
      T::Or(sign, T::Select(T::Greater(magnitude, T::SetU32(0x7bff)),
                            infinity_or_nan, finite)));
}

// OCP 8-bit floating point specification, revision 1.0: E4M3. Saturates.
template <typename T>
ONEPASS_INLINE typename T::U32 EncodeFloat8E4M3(typename T::F32 x) {
  const auto bits = T::Bits(x);
  const auto magnitude = T::And(bits, T::SetU32(kF32AbsMask));
  const auto largest = T::SetU32(0x7e);  // 448
  const auto rounded = EncodeNarrowMagnitude<T, 3, 7>(magnitude);
  const auto saturated =
      T::Select(T::Greater(rounded, largest), largest, rounded);
  const auto sign = T::And(T::template ShiftRight<24>(bits), T::SetU32(0x80));
  return T::Select(IsNaN<T>(magnitude), T::SetU32(0x7f),
                   T::Or(sign, saturated));
}

template <typename T>
ONEPASS_INLINE typename T::F32 DecodeFloat8E4M3(typename T::U32 code) {
  const auto magnitude = T::And(code, T::SetU32(0x7f));
  const auto sign = T::template ShiftLeft<24>(T::And(code, T::SetU32(0x80)));
  const auto finite = T::Bits(DecodeNarrowMagnitude<T, 3, 7>(magnitude));
  return T::FromBits(
      T::Or(sign, T::Select(T::Greater(magnitude, T::SetU32(0x7e)),
                            T::SetU32(kF32CanonicalNaN), finite)));
}

// Elements i, i + 1, ... as fp32; `lanes` says how many, as in Traits.
template <typename T, DType type, typename Lanes>
ONEPASS_INLINE typename T::F32 Load(const void* base, int64_t i, Lanes lanes) {
  const auto* p = static_cast<const typename Storage<type>::Type*>(base) + i;
  if constexpr (type == DType::kFloat32) {
    return T::LoadF32(p, lanes);
  } else if constexpr (type == DType::kBFloat16) {
    return DecodeBFloat16<T>(T::LoadU16(p, lanes));
  } else if constexpr (type == DType::kFloat16) {
    if constexpr (T::kHardwareHalf) {
      return T::LoadHalf(p, lanes);
    } else {
      return DecodeFloat16<T>(T::LoadU16(p, lanes));
    }
  } else {
    return DecodeFloat8E4M3<T>(T::LoadU8(p, lanes));
  }
}

template <typename T, DType type, typename Lanes>
ONEPASS_INLINE void Store(void* base, int64_t i, typename T::F32 x,
                          Lanes lanes) {
  auto* p = static_cast<typename Storage<type>::Type*>(base) + i;
  if constexpr (type == DType::kFloat32) {
    T::StoreF32(p, x, lanes);
  } else if constexpr (type == DType::kBFloat16) {
    T::StoreU16(p, EncodeBFloat16<T>(x), lanes);
  } else if constexpr (type == DType::kFloat16) {
    if constexpr (T::kHardwareHalf) {
      const auto magnitude = T::And(T::Bits(x), T::SetU32(kF32AbsMask));
      T::StoreHalf(
          p,
          T::FromBits(T::Select(IsNaN<T>(magnitude),
                                T::SetU32(kF32CanonicalNaN), T::Bits(x))),
          lanes);
    } else {
      T::StoreU16(p, EncodeFloat16<T>(x), lanes);
    }
  } else {
    T::StoreU8(p, EncodeFloat8E4M3<T>(x), lanes);
  }
}

// A type as a constant, for generic lambdas.
template <DType type>
struct DTypeTag {
  static constexpr DType value = type;
};

template <DType... types>
struct DTypeList {
  static constexpr DTypeSet kSet = {types...};
};

using GradientTypes =
    DTypeList<DType::kFloat32, DType::kBFloat16, DType::kFloat16>;
using MomentTypes = DTypeList<DType::kFloat32, DType::kBFloat16>;
using CopyTypes = DTypeList<DType::kBFloat16, DType::kFloat16>;
static_assert(GradientTypes::kSet == kGradientTypes);
static_assert(MomentTypes::kSet == kMomentTypes);
static_assert(CopyTypes::kSet == kCopyTypes);
// What fp32 is cast to and from.
using NarrowTypes =
    DTypeList<DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3>;

// Calls body(DTypeTag<type>) for the run-time `type`, one of the list.
template <DType... types, typename Body>
ONEPASS_INLINE void WithDType(DTypeList<types...>, DType type,
                              const Body& body) {
  (void)((type == types ? (body(DTypeTag<types>{}), true) : false) || ...);
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_CONVERT_H_

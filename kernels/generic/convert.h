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

// `bits` plus what makes a shift right by `shift` round to nearest, ties to
// even. A carry out of the mantissa moves into the exponent, as it should.
template <typename T, int shift>
ONEPASS_INLINE typename T::U32 AddRounding(typename T::U32 bits) {
  constexpr uint32_t kHalf = uint32_t{1} << (shift - 1);
  const auto half_less_one = T::SetU32(kHalf - 1);
  if constexpr (T::kTestsBits) {
    const auto lowest_kept = T::template TestBit<shift>(bits);
    return T::Add(bits,
                  T::Select(lowest_kept, T::SetU32(kHalf), half_less_one));
  } else {
    const auto lowest_kept =
        T::And(T::template ShiftRight<shift>(bits), T::SetU32(1));
    return T::Add(bits, T::Add(lowest_kept, half_less_one));
  }
}

template <typename T, int shift>
ONEPASS_INLINE typename T::U32 ShiftRightToNearestEven(typename T::U32 bits) {
  return T::template ShiftRight<shift>(AddRounding<T, shift>(bits));
}

// The bits of x, of all NaN the canonical one's.
template <typename T>
ONEPASS_INLINE typename T::U32 CanonicalBits(typename T::F32 x) {
  return T::Select(T::IsNaN(x), T::SetU32(kF32CanonicalNaN), T::Bits(x));
}

// The code is the upper half of each lane; what is left below it is not zero.
// Overflow becomes infinity by the carry, infinity and the canonical NaN stay.
template <typename T>
ONEPASS_INLINE typename T::U32 EncodeBFloat16(typename T::F32 x) {
  return AddRounding<T, 16>(CanonicalBits<T>(x));
}

template <typename T>
ONEPASS_INLINE typename T::F32 DecodeBFloat16(typename T::U32 code) {
  return T::FromBits(T::template ShiftLeft<16>(code));
}

// IEEE 754 binary16.
struct Float16Format {
  static constexpr int kBits = 16;
  static constexpr int kMantissaBits = 10;
  static constexpr int kBias = 15;
  static constexpr uint32_t kLargest = 0x7bff;   // finite
  static constexpr uint32_t kOverflow = 0x7c00;  // infinity
  static constexpr uint32_t kNaN = 0x7e00;
};

// OCP 8-bit floating point specification, revision 1.0: E4M3. Saturates.
struct Float8E4M3Format {
  static constexpr int kBits = 8;
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr uint32_t kLargest = 0x7e;   // 448
  static constexpr uint32_t kOverflow = 0x7e;  // 448 too
  static constexpr uint32_t kNaN = 0x7f;
};

// To a format of fewer exponent bits. Normals are rounded as integers and
// rebased; below the least normal, adding the power of two whose last place is
// the format's least subnormal rounds to a multiple of it, once and to nearest
// even.
template <typename T, typename Format>
ONEPASS_INLINE typename T::U32 EncodeNarrow(typename T::F32 x) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kRebase = 127 - Format::kBias;
  constexpr uint32_t kLeastNormal = (kRebase + 1) << 23;
  constexpr uint32_t kRounder = (kRebase + 1 + kShift) << 23;
  const auto bits = T::Bits(x);
  const auto magnitude = T::And(bits, T::SetU32(kF32AbsMask));
  const auto normal = T::Sub(ShiftRightToNearestEven<T, kShift>(magnitude),
                             T::SetU32(kRebase << Format::kMantissaBits));
  const auto rounder = T::SetU32(kRounder);
  const auto subnormal = T::Sub(
      T::Bits(T::Add(T::FromBits(magnitude), T::FromBits(rounder))), rounder);
  const auto rounded = T::Select(T::Greater(T::SetU32(kLeastNormal), magnitude),
                                 subnormal, normal);
  const auto overflow = T::SetU32(Format::kOverflow);
  const auto saturated =
      T::Select(T::Greater(rounded, overflow), overflow, rounded);
  const auto sign = T::And(T::template ShiftRight<32 - Format::kBits>(bits),
                           T::SetU32(uint32_t{1} << (Format::kBits - 1)));
  return T::Select(T::Greater(magnitude, T::SetU32(kF32Infinity)),
                   T::SetU32(Format::kNaN), T::Or(sign, saturated));
}

// The inverse. Finite codes are read as fp32 with the wrong bias, which one
// exact multiplication by a power of two puts right, subnormals too.
template <typename T, typename Format>
ONEPASS_INLINE typename T::F32 DecodeNarrow(typename T::U32 code) {
  constexpr uint32_t kRebase = uint32_t{127 + 127 - Format::kBias} << 23;
  constexpr uint32_t kSign = uint32_t{1} << (Format::kBits - 1);
  const auto magnitude = T::And(code, T::SetU32(kSign - 1));
  const auto sign =
      T::template ShiftLeft<32 - Format::kBits>(T::And(code, T::SetU32(kSign)));
  const auto misread =
      T::template ShiftLeft<23 - Format::kMantissaBits>(magnitude);
  const auto finite =
      T::Bits(T::Mul(T::FromBits(misread), T::FromBits(T::SetU32(kRebase))));
  // Infinity keeps its mantissa of zero, NaN one that is not.
  const auto not_finite = T::Or(misread, T::SetU32(kF32Infinity));
  return T::FromBits(
      T::Or(sign, T::Select(T::Greater(magnitude, T::SetU32(Format::kLargest)),
                            not_finite, finite)));
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
      return DecodeNarrow<T, Float16Format>(T::LoadU16(p, lanes));
    }
  } else {
    return DecodeNarrow<T, Float8E4M3Format>(T::LoadU8(p, lanes));
  }
}

template <typename T, DType type, typename Lanes>
ONEPASS_INLINE void Store(void* base, int64_t i, typename T::F32 x,
                          Lanes lanes) {
  auto* p = static_cast<typename Storage<type>::Type*>(base) + i;
  if constexpr (type == DType::kFloat32) {
    T::StoreF32(p, x, lanes);
  } else if constexpr (type == DType::kBFloat16) {
    T::StoreUpperU16(p, EncodeBFloat16<T>(x), lanes);
  } else if constexpr (type == DType::kFloat16) {
    if constexpr (T::kHardwareHalf) {
      T::StoreHalf(p, T::FromBits(CanonicalBits<T>(x)), lanes);
    } else {
      T::StoreU16(p, EncodeNarrow<T, Float16Format>(x), lanes);
    }
  } else {
    T::StoreU8(p, EncodeNarrow<T, Float8E4M3Format>(x), lanes);
  }
}

// Elements i, i + 1, ... of a 16-bit type: two vectors in one store, where the
// traits have one, and around the caches where `streaming`.
template <typename T, DType type, bool streaming>
ONEPASS_INLINE void StorePair(void* base, int64_t i, typename T::F32 a,
                              typename T::F32 b) {
  auto* p = static_cast<uint16_t*>(base) + i;
  if constexpr (streaming && type == DType::kBFloat16) {
    T::StreamUpperU16(p, EncodeBFloat16<T>(a), EncodeBFloat16<T>(b));
  } else if constexpr (streaming) {
    static_assert(type == DType::kFloat16 && T::kHardwareHalf);
    T::StreamHalf(p, T::FromBits(CanonicalBits<T>(a)),
                  T::FromBits(CanonicalBits<T>(b)));
  } else if constexpr (T::kStoresPairs && type == DType::kBFloat16) {
    T::StoreUpperU16(p, EncodeBFloat16<T>(a), EncodeBFloat16<T>(b));
  } else {
    Store<T, type>(base, i, a, T::All());
    Store<T, type>(base, i + T::Lanes(), b, T::All());
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

// Element types of gradients, optimizer state and weights.
//
//   DTypeSet types{DType::kFloat32, DType::kBFloat16};
//   types.Contains(DType::kFloat16);      // false
//   ByteSize(DType::kBFloat16);           // 2
//
// To add a type: a value here, its row in dtype.cc, and its encoding in
// kernels/generic/convert.h.

#ifndef ONEPASS_DISPATCH_DTYPE_H_
#define ONEPASS_DISPATCH_DTYPE_H_

#include <cstdint>
#include <initializer_list>

namespace onepass {

// The values are stable: they may be stored.
enum class DType : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  // OCP 8-bit floating point, E4M3 (no infinity, largest finite value 448).
  kFloat8E4M3 = 3,
};

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                       DType::kFloat16, DType::kFloat8E4M3};

// Bytes of one element.
int64_t ByteSize(DType type);

// The name users see: "fp32", "bf16", "fp16", "e4m3".
const char* Name(DType type);

// A set of types, as a bit mask.
class DTypeSet {
 public:
  constexpr DTypeSet(std::initializer_list<DType> types) {
    for (DType type : types) bits_ |= Bit(type);
  }

  constexpr bool Contains(DType type) const { return (bits_ & Bit(type)) != 0; }
  constexpr bool empty() const { return bits_ == 0; }

  friend constexpr bool operator==(DTypeSet a, DTypeSet b) {
    return a.bits_ == b.bits_;
  }

 private:
  static constexpr uint32_t Bit(DType type) {
    // Values that are no type are in no set.
    const uint32_t value = static_cast<uint32_t>(type);
    return value < 32 ? uint32_t{1} << value : 0;
  }

  uint32_t bits_ = 0;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_DTYPE_H_

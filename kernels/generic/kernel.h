// All operations of a kernel, from the traits of one instruction set:
//
//   namespace {
//   struct Avx512 { ... };
//   }
//   extern constexpr KernelOperations kAvx512Operations =
//       generic::MakeOperations<Avx512>();
//
// Traits are what an instruction set can do with one vector, all static. They
// stand in kernels/<isa>/traits.h, in an unnamed namespace, so that nothing
// instantiated over them leaves the object; a source that instantiates
// something is made by kernel_objects() of kernels.bzl. They hold no formula:
// those are in this folder, once.
//
//   types (possibly sizeless: never members or elements,
//   never captured by copy)
//     F32, U32     as many fp32 or uint32 lanes, Lanes() of them
//     Mask         the result of a comparison
//   lanes
//     int64_t Lanes()          constant on one machine, a power of two, >= 1;
//                              supported() refuses a machine of other lengths
//     int64_t kLeastLanes      on all machines that supported() takes
//     int kUnroll              vectors that one turn of a loop updates: 1, 2
//                              or 4
//     int64_t kPrefetchNumel   how many elements before they are loaded a turn
//                              asks for the lines of its inputs; 0: it leaves
//                              that to the processor
//     auto All()               all lanes
//     auto First(int64_t n)    lanes 0 to n - 1, 0 < n <= Lanes(); the others
//                              load as zero, store nothing and touch no memory.
//                              May be of another type than All().
//   memory, at any address aligned to the element
//     F32 LoadF32(const float*, lanes)       StoreF32(float*, F32, lanes)
//     U32 LoadU16(const uint16_t*, lanes)    StoreU16(uint16_t*, U32, lanes)
//     U32 LoadU8(const uint8_t*, lanes)      StoreU8(uint8_t*, U32, lanes)
//                              loads extend with zeros; stores take codes that
//                              fit their element
//     StoreUpperU16(uint16_t*, U32, lanes)   the upper 16 bits of each lane
//     bool kStoresPairs        whether this exists: of all lanes of two vectors
//     StoreUpperU16(uint16_t*, U32, U32)
//     bool kStreams            whether these exist (and kUnroll is 2 or more,
//                              and kHardwareHalf): stores of two vectors, to an
//                              address aligned to what they write, around the
//                              caches; EndStreaming() after the last makes them
//                              visible in order
//     StreamUpperU16(uint16_t*, U32, U32)   StreamHalf(uint16_t*, F32, F32)
//     EndStreaming()
//   fp32, each rounded once in the environment of the call
//     F32 Set(float)   Add(a, b)   Mul(a, b)   Div(a, b)   Sqrt(a)
//     F32 Fma(a, b, c)         a * b + c, fused
//     Mask IsNaN(a)
//   uint32
//     U32 SetU32(uint32_t)   ZeroU32()
//     U32 Add(a, b)   Sub(a, b)   And(a, b)   Or(a, b)
//     U32 ShiftLeft<n>(a)   ShiftRight<n>(a)    logical
//     Mask Greater(a, b)       a > b, for values below 2^31
//     bool kTestsBits          whether this exists: one instruction
//     Mask TestBit<n>(a)       bit n is set
//     U32 Select(mask, a, b)   a where the mask is set, else b
//     U32 Max(a, b)            for values below 2^31
//     uint32_t ReduceMax(a)    over all lanes
//     U32 Bits(F32)   F32 FromBits(U32)
//   half precision
//     bool kHardwareHalf       whether these exist, exact for all but NaN:
//     F32 LoadHalf(const uint16_t*, lanes)   StoreHalf(uint16_t*, F32, lanes)
//   sums of squares
//     Sums                     a double accumulator for each of the first 16
//                              lanes, or for all where there are fewer
//     Sums ZeroSums()
//     Sums AddSquares(Sums, F32 x)   adds the square of each such lane of x, in
//                              double
//     StoreSums(double*, Sums)
//
// Where instructions take a scalar beside a vector, Set() and SetU32() may
// return the scalar itself, with overloads of the operations for it: it is the
// last operand of an operation (of Fma also the second), the first or the
// second of Greater, the second of Select, and that of FromBits.

#ifndef ONEPASS_KERNELS_GENERIC_KERNEL_H_
#define ONEPASS_KERNELS_GENERIC_KERNEL_H_

#include <cstdint>

#include "dispatch/kernel.h"
#include "kernels/generic/absmax.h"
#include "kernels/generic/accumulate.h"
#include "kernels/generic/adam_step.h"
#include "kernels/generic/cast.h"
#include "kernels/generic/loop.h"
#include "kernels/generic/quantize.h"
#include "kernels/generic/remainder.h"
#include "kernels/generic/scale.h"
#include "kernels/generic/squared_norm.h"

namespace onepass {
namespace generic {

template <typename T>
int64_t BlockNumel() {
  return T::kUnroll * T::Lanes();
}

template <typename T>
constexpr KernelOperations MakeOperations() {
  KernelOperations operations{};
  operations.block_numel = &BlockNumel<T>;
  operations.adam_step = &AdamStep<T>;
  operations.accumulate = &Accumulate<T>;
  operations.scale = &Scale<T>;
  operations.cast = &Cast<T>;
  operations.squared_norm = &SquaredNorm<T>;
  operations.absmax = &AbsMax<T>;
  operations.split_remainder = &SplitRemainder<T>;
  operations.join_remainder = &JoinRemainder<T>;
  operations.quantize = &Quantize<T>;
  operations.dequantize = &Dequantize<T>;
  operations.streams_copies = T::kStreams;
  return operations;
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_KERNEL_H_

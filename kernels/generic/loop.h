// The walk over a span: whole blocks of vectors, then the rest with lanes
// masked. A tail is the same formula on fewer lanes, never another one.

#ifndef ONEPASS_KERNELS_GENERIC_LOOP_H_
#define ONEPASS_KERNELS_GENERIC_LOOP_H_

#include <cstdint>

#include "kernels/generic/inline.h"

namespace onepass {
namespace generic {

// Vectors that one turn of the loop updates. With two, a turn of the widest
// vectors fills whole cache lines of 16-bit copies.
inline constexpr int kUnroll = 2;

// Calls body(i, lanes) for i = 0, T::Lanes(), ... below numel.
template <typename T, typename Body>
ONEPASS_INLINE void ForEachVector(int64_t numel, const Body& body) {
  const int64_t width = T::Lanes();
  int64_t i = 0;
  for (; i + kUnroll * width <= numel; i += kUnroll * width) {
    body(i, T::All());
    body(i + width, T::All());
  }
  for (; i < numel; i += width) {
    body(i, T::First(numel - i < width ? numel - i : width));
  }
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_LOOP_H_

// The walk over a span: whole blocks of vectors, then the rest with lanes
// masked. A tail is the same formula on fewer lanes, never another one.

#ifndef ONEPASS_KERNELS_GENERIC_LOOP_H_
#define ONEPASS_KERNELS_GENERIC_LOOP_H_

#include <cstdint>

#include "kernels/generic/inline.h"

namespace onepass {
namespace generic {

// Calls body(i, lanes) for i = 0, T::Lanes(), ... below numel.
template <typename T, typename Body>
ONEPASS_INLINE void ForEachVector(int64_t numel, const Body& body) {
  static_assert(T::kUnroll == 1 || T::kUnroll == 2);
  const int64_t width = T::Lanes();
  int64_t i = 0;
  const int64_t last_block = numel - T::kUnroll * width;
  for (; i <= last_block; i += T::kUnroll * width) {
    body(i, T::All());
    if constexpr (T::kUnroll == 2) body(i + width, T::All());
  }
  for (; i < numel; i += width) {
    body(i, T::First(numel - i < width ? numel - i : width));
  }
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_LOOP_H_

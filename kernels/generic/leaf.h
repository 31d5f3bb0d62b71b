// Leaves, and the sum of squares of one, added in one fixed order on every
// instruction set.

#ifndef ONEPASS_KERNELS_GENERIC_LEAF_H_
#define ONEPASS_KERNELS_GENERIC_LEAF_H_

#include <cstdint>

#include "dispatch/kernel.h"
#include "kernels/generic/inline.h"

namespace onepass {
namespace generic {

// Accumulators of a leaf: element j goes to accumulator j % kRow.
inline constexpr int kRow = 16;

// Calls body(leaf, begin, end) for the leaves of [0, numel).
template <typename Body>
ONEPASS_INLINE void ForEachLeaf(int64_t numel, const Body& body) {
  for (int64_t begin = 0; begin < numel; begin += kLeafNumel) {
    const int64_t rest = numel - begin;
    body(begin / kLeafNumel, begin,
         begin + (rest < kLeafNumel ? rest : kLeafNumel));
  }
}

// Calls load(i, lanes) -> fp32 lanes for all elements of [begin, end), at most
// a leaf, and returns the sum of their squares. The rows are walked in steps of
// a vector, or of the part of a longer one that a row fills.
template <typename T, typename LoadLanes>
ONEPASS_INLINE double LeafSum(int64_t begin, int64_t end,
                              const LoadLanes& load) {
  const int64_t width = T::Lanes() < kRow ? T::Lanes() : kRow;
  typename T::RowSums sums;
  int64_t row = begin;
  for (; row + kRow <= end; row += kRow) {
    if (T::Lanes() <= kRow) {
      for (int64_t j = 0; j < kRow; j += width) {
        sums.AddSquares(j, load(row + j, T::All()));
      }
    } else {
      sums.AddSquares(0, load(row, T::First(kRow)));
    }
  }
  // The rest of the last row. Lanes beyond `end` read as zero and add +0.
  for (int64_t j = 0; row + j < end; j += width) {
    const int64_t rest = end - row - j;
    sums.AddSquares(j, load(row + j, T::First(rest < width ? rest : width)));
  }
  double row_sums[kRow];
  sums.Store(row_sums);
  for (int half = kRow / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) row_sums[j] += row_sums[j + half];
  }
  return row_sums[0];
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_LEAF_H_

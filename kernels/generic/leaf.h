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

// Calls load(i, lanes) for all elements of [begin, end), a row of `vectors`
// vectors (or of the part of a longer one that a row fills) at a time, and
// writes the accumulators. They are local variables, one a vector of a row: the
// types of vectors may be sizeless, which arrays and members cannot be.
template <typename T, int vectors, typename LoadLanes, typename... Sums>
ONEPASS_INLINE void SumRows(int64_t begin, int64_t end, const LoadLanes& load,
                            double* out, Sums&... sums) {
  if constexpr (sizeof...(sums) < vectors) {
    auto next = T::ZeroSums();
    SumRows<T, vectors>(begin, end, load, out, sums..., next);
  } else {
    constexpr int64_t kWidth = kRow / vectors;
    int64_t i = begin;
    auto add = [&](auto& sum) ONEPASS_LAMBDA_INLINE {
      // Only a single vector may be longer than what it fills.
      if (vectors > 1 || T::Lanes() == kWidth) {
        sum = T::AddSquares(sum, load(i, T::All()));
      } else {
        sum = T::AddSquares(sum, load(i, T::First(kWidth)));
      }
      i += kWidth;
    };
    const int64_t last_row = end - kRow;
    while (i <= last_row) (add(sums), ...);
    // The rest of the last row. Lanes beyond `end` read as zero and add +0.
    auto add_rest = [&](auto& sum) ONEPASS_LAMBDA_INLINE {
      const int64_t rest = end - i;
      if (rest <= 0) return;
      sum =
          T::AddSquares(sum, load(i, T::First(rest < kWidth ? rest : kWidth)));
      i += kWidth;
    };
    (add_rest(sums), ...);
    int64_t j = 0;
    ((T::StoreSums(out + j, sums), j += kWidth), ...);
  }
}

// Calls load(i, lanes) -> fp32 lanes for all elements of [begin, end), at most
// a leaf, and returns the sum of their squares. `vectors` is found from the
// length of one, which may be known at run time only.
template <typename T, int vectors = 1, typename LoadLanes>
ONEPASS_INLINE double LeafSum(int64_t begin, int64_t end,
                              const LoadLanes& load) {
  if constexpr (T::kLeastLanes * vectors < kRow) {
    if (T::Lanes() * vectors < kRow) {
      return LeafSum<T, 2 * vectors>(begin, end, load);
    }
  }
  double sums[kRow];
  SumRows<T, vectors>(begin, end, load, sums);
  for (int half = kRow / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_LEAF_H_

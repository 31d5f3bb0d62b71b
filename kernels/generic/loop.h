// The walk over a span: whole turns of vectors, then the rest with lanes
// masked. A tail is the same formula on fewer lanes, never another one.

#ifndef ONEPASS_KERNELS_GENERIC_LOOP_H_
#define ONEPASS_KERNELS_GENERIC_LOOP_H_

#include <cstdint>

#include "dispatch/dtype.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/inline.h"

namespace onepass {
namespace generic {

// A span that a walk reads, in memory order.
template <DType type>
struct Input {
  const void* data;
};

// Asks for the cache line of byte `offset` after element i, of `size` bytes, of
// `data`.
template <int64_t size, int64_t offset>
ONEPASS_INLINE void PrefetchLine(const void* data, int64_t i) {
#if defined(__x86_64__)
  // With its address written down: compilers would advance a pointer for each
  // span, where one index does for all.
  asm volatile("prefetcht0 %c2(%0,%1,%c3)"
               :
               : "r"(data), "r"(i), "i"(offset), "i"(size));
#else
  __builtin_prefetch(reinterpret_cast<const void*>(
      reinterpret_cast<uintptr_t>(data) + i * size + offset));
#endif
}

// Asks for what the turn T::kPrefetchNumel elements after element i will read
// of `input`, where the traits want that: several streams at once outrun the
// prefetchers of some processors (docs/performance.md). Lines beyond the end
// are asked for too; that reads nothing and cannot fault.
template <typename T, int64_t line = 0, DType type>
ONEPASS_INLINE void PrefetchTurn(Input<type> input, int64_t i) {
  constexpr int64_t kLineBytes = 64;
  constexpr int64_t kSize = sizeof(typename Storage<type>::Type);
  if constexpr (T::kPrefetchNumel > 0 &&
                line * kLineBytes < T::kUnroll * T::kLeastLanes * kSize) {
    PrefetchLine<kSize, T::kPrefetchNumel * kSize + line * kLineBytes>(
        input.data, i);
    PrefetchTurn<T, line + 1>(input, i);
  }
}

// Calls body(i, lanes) for i = 0, T::Lanes(), ... below numel. `inputs` are
// what it reads.
template <typename T, typename Body, DType... types>
ONEPASS_INLINE void ForEachVector(int64_t numel, const Body& body,
                                  Input<types>... inputs) {
  static_assert(T::kUnroll == 1 || T::kUnroll == 2 || T::kUnroll == 4);
  const int64_t width = T::Lanes();
  int64_t i = 0;
  const int64_t last_turn = numel - T::kUnroll * width;
  for (; i <= last_turn; i += T::kUnroll * width) {
    (PrefetchTurn<T>(inputs, i), ...);
    body(i, T::All());
    if constexpr (T::kUnroll >= 2) body(i + width, T::All());
    if constexpr (T::kUnroll == 4) {
      body(i + 2 * width, T::All());
      body(i + 3 * width, T::All());
    }
  }
  for (; i < numel; i += width) {
    body(i, T::First(numel - i < width ? numel - i : width));
  }
}

// The same for a body that returns fp32 lanes, which are stored at element i of
// `copy` as `type`: by stores that go around the caches, where `streaming`,
// which only traits with T::kStreams have.
template <typename T, DType type, bool streaming, typename Body, DType... types>
ONEPASS_INLINE void ForEachVectorWithCopy(int64_t numel, void* copy,
                                          const Body& body,
                                          Input<types>... inputs) {
  const int64_t width = T::Lanes();
  int64_t i = 0;
  // Elements [i, end), with lanes masked.
  auto masked = [&](int64_t end) ONEPASS_LAMBDA_INLINE {
    while (i < end) {
      const int64_t n = end - i < width ? end - i : width;
      Store<T, type>(copy, i, body(i, T::First(n)), T::First(n));
      i += n;
    }
  };
  auto pair = [&](int64_t first) ONEPASS_LAMBDA_INLINE {
    const auto a = body(first, T::All());
    const auto b = body(first + width, T::All());
    StorePair<T, type, streaming>(copy, first, a, b);
  };
  if constexpr (streaming) {
    static_assert(T::kStreams && T::kUnroll >= 2);
    // Such stores are of whole, aligned pairs.
    const int64_t pair_numel = 2 * width;
    const int64_t ahead =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(copy) /
                             sizeof(uint16_t)) %
        pair_numel;
    const int64_t unaligned = ahead == 0 ? 0 : pair_numel - ahead;
    masked(unaligned < numel ? unaligned : numel);
  }
  const int64_t last_turn = numel - T::kUnroll * width;
  for (; i <= last_turn; i += T::kUnroll * width) {
    (PrefetchTurn<T>(inputs, i), ...);
    if constexpr (T::kUnroll == 1) {
      Store<T, type>(copy, i, body(i, T::All()), T::All());
    } else {
      pair(i);
      if constexpr (T::kUnroll == 4) pair(i + 2 * width);
    }
  }
  masked(numel);
  if constexpr (streaming) T::EndStreaming();
}

}  // namespace generic
}  // namespace onepass

#endif  // ONEPASS_KERNELS_GENERIC_LOOP_H_

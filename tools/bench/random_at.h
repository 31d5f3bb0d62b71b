// Numbers for what is measured: of a fixed sequence, normal, none near the ends
// of a type. `onepass bench` and the benchmarks beside the code
// (tests/random_arrays.h) take theirs from here.

#ifndef ONEPASS_TOOLS_BENCH_RANDOM_AT_H_
#define ONEPASS_TOOLS_BENCH_RANDOM_AT_H_

#include <cstdint>

namespace onepass {

// Number i, in +-[0.5, 1.5] (the finalizer of splitmix64, Steele, Lea and Flood
// 2014).
inline float RandomAt(int64_t i) {
  uint64_t z = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  z ^= z >> 31;
  const float magnitude = 0.5f + static_cast<float>(z >> 40) * 0x1p-24f;
  return (z & 1) != 0 ? -magnitude : magnitude;
}

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_RANDOM_AT_H_

// Arrays for a benchmark: random normal numbers, all memory touched, each part
// first by the worker that a ParallelFor over leaves gives it to.
//
//   RandomArrays arrays(*pool);
//   float* param = arrays.Add<float>(DType::kFloat32, numel);
//   void* exp_avg_sq = arrays.AddPositive(DType::kBFloat16, numel);
//   if (!arrays.ok()) ...
//
// The same calls give the same numbers, whatever the threads. They lie in
// [2^-4, 1) in magnitude: normal in all types, and no sum or square of a few is
// near the ends of one. Never time on zeros, subnormals or pages never written.

#ifndef ONEPASS_TESTS_RANDOM_ARRAYS_H_
#define ONEPASS_TESTS_RANDOM_ARRAYS_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "dispatch/dtype.h"
#include "dispatch/thread_pool.h"

namespace onepass {

class RandomArrays {
 public:
  // `pool` must outlive the result.
  explicit RandomArrays(ThreadPool& pool) : pool_(pool) {}

  // Numbers of both signs. Null where memory is short. The arrays end with this
  // object.
  template <typename T = void>
  T* Add(DType type, int64_t numel) {
    return static_cast<T*>(Allocate(type, numel, /*positive=*/false));
  }
  // Numbers above 0.
  void* AddPositive(DType type, int64_t numel) {
    return Allocate(type, numel, /*positive=*/true);
  }

  // Whether there was memory for all arrays.
  bool ok() const { return ok_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  void* Allocate(DType type, int64_t numel, bool positive);

  ThreadPool& pool_;
  std::vector<std::unique_ptr<void, Free>> blocks_;
  bool ok_ = true;
};

}  // namespace onepass

#endif  // ONEPASS_TESTS_RANDOM_ARRAYS_H_

// Arrays for a benchmark: random normal numbers in buffers as those of `onepass
// bench` (dispatch/host_buffer.h), each page touched first by the worker that a
// ParallelFor over leaves gives it to.
//
//   RandomArrays arrays(*pool);
//   float* param = arrays.Add<float>(DType::kFloat32, numel);
//   void* exp_avg_sq = arrays.AddPositive(DType::kBFloat16, numel);
//   RETURN_IF_ERROR(arrays.status());
//
// The numbers are those of tools/bench/random_at.h, one array's after those of
// the array before, cut to the bits of their type: the same calls give the same
// ones, whatever the threads. All types have them as normal numbers, and no sum
// or square of a few is near the ends of one. Never time on zeros, subnormals
// or pages never written.

#ifndef ONEPASS_TESTS_RANDOM_ARRAYS_H_
#define ONEPASS_TESTS_RANDOM_ARRAYS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/thread_pool.h"

namespace onepass {

class RandomArrays {
 public:
  // `pool` must outlive the result.
  explicit RandomArrays(ThreadPool& pool) : pool_(pool) {}

  // Numbers of both signs. Null where the system refuses the memory; status()
  // then says so. The arrays end with this object.
  template <typename T = void>
  T* Add(DType type, int64_t numel) {
    return static_cast<T*>(Allocate(type, numel, /*positive=*/false));
  }
  // Numbers above 0.
  void* AddPositive(DType type, int64_t numel) {
    return Allocate(type, numel, /*positive=*/true);
  }

  // The first error of those above: that of HostBuffer::Create().
  const absl::Status& status() const { return status_; }

 private:
  void* Allocate(DType type, int64_t numel, bool positive);

  ThreadPool& pool_;
  std::vector<HostBuffer> buffers_;
  // How many the arrays have so far.
  int64_t numbers_ = 0;
  absl::Status status_;
};

}  // namespace onepass

#endif  // ONEPASS_TESTS_RANDOM_ARRAYS_H_

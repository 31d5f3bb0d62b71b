// An optimizer state to measure steps on: large arrays of random numbers,
// normal ones unless AdamStateOptions::moments makes them smaller, each page
// touched first by the worker that updates it.
//
//   ASSIGN_OR_RETURN(AdamState state, AdamState::Create(*pool, numel, {}));
//   RETURN_IF_ERROR(adam.Step(state.Span(), t, factor));

#ifndef ONEPASS_TOOLS_BENCH_ADAM_STATE_H_
#define ONEPASS_TOOLS_BENCH_ADAM_STATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/thread_pool.h"
#include "offload/cpu_adam.h"

namespace onepass {

// Elements in a HostBuffer, some bytes from its begin.
class StateArray {
 public:
  // Array number i of a program begins i times as many bytes beyond a page: a
  // multiple of a cache line, that leaves none at the place of another.
  static constexpr int64_t kStaggerBytes = 9 * 64;

  // Zeros; element_bytes of `options` is that of `type`, whatever it says.
  // Errors: those of HostBuffer::Create().
  static absl::StatusOr<StateArray> Create(ThreadPool& pool, DType type,
                                           int64_t numel, int64_t offset_bytes,
                                           HostBufferOptions options = {});

  bool huge_pages() const { return buffer_.huge_pages(); }
  template <typename T = void>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  HostBuffer buffer_;
  char* data_ = nullptr;
};

struct AdamStateOptions {
  bool huge_pages = true;
  // All arrays begin at one offset modulo 4096, rather than apart.
  bool equal_bases = false;
  // HostBufferOptions::piece_numel.
  int64_t piece_numel = 0;
  // What gradients and moments are multiplied by.
  float moments = 1;
};

class AdamState {
 public:
  static constexpr int kArrays = 5;
  // Of one element: param, grad, exp_avg and exp_avg_sq in fp32, the copy in
  // bf16.
  static constexpr int64_t kElementBytes = 4 * 4 + 2;
  // That a step reads and writes of it: all but the gradient are written, all
  // but the copy are read.
  static constexpr int64_t kMovedBytes = 4 * 4 + 3 * 4 + 2;

  // Errors: those of HostBuffer::Create().
  static absl::StatusOr<AdamState> Create(ThreadPool& pool, int64_t numel,
                                          const AdamStateOptions& options);

  // With the copy.
  AdamSpan Span() const;
  // The gradient of the span, to be written.
  float* grad() const { return grad_.data<float>(); }
  bool huge_pages() const { return param_.huge_pages(); }

 private:
  int64_t numel_ = 0;
  StateArray param_;
  StateArray grad_;
  StateArray exp_avg_;
  StateArray exp_avg_sq_;
  StateArray copy_;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_ADAM_STATE_H_

#include "tools/bench/adam_state.h"

#include <cmath>
#include <utility>

#include "dispatch/kernel.h"
#include "tools/bench/random_at.h"

namespace onepass {

absl::StatusOr<StateArray> StateArray::Create(ThreadPool& pool, DType type,
                                              int64_t numel,
                                              int64_t offset_bytes,
                                              HostBufferOptions options) {
  options.element_bytes = ByteSize(type);
  absl::StatusOr<HostBuffer> buffer = HostBuffer::Create(
      pool, numel * options.element_bytes + offset_bytes, options);
  if (!buffer.ok()) return buffer.status();
  StateArray array;
  array.buffer_ = *std::move(buffer);
  array.data_ = array.buffer_.as<char>() + offset_bytes;
  return array;
}

absl::StatusOr<AdamState> AdamState::Create(ThreadPool& pool, int64_t numel,
                                            const AdamStateOptions& options) {
  AdamState state;
  state.numel_ = numel;
  HostBufferOptions of_buffer;
  of_buffer.huge_pages = options.huge_pages;
  of_buffer.piece_numel = options.piece_numel;
  int64_t i = 0;
  for (StateArray* array : {&state.param_, &state.grad_, &state.exp_avg_,
                            &state.exp_avg_sq_, &state.copy_}) {
    const DType type =
        array == &state.copy_ ? DType::kBFloat16 : DType::kFloat32;
    const int64_t offset =
        options.equal_bases ? 0 : i++ * StateArray::kStaggerBytes;
    absl::StatusOr<StateArray> made =
        StateArray::Create(pool, type, numel, offset, of_buffer);
    if (!made.ok()) return made.status();
    *array = *std::move(made);
  }
  pool.ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      state.param_.data<float>()[j] = RandomAt(j);
      state.grad_.data<float>()[j] = RandomAt(numel + j) * options.moments;
      state.exp_avg_.data<float>()[j] =
          RandomAt(2 * numel + j) * options.moments;
      state.exp_avg_sq_.data<float>()[j] =
          std::fabs(RandomAt(3 * numel + j)) * options.moments;
    }
  });
  return state;
}

AdamSpan AdamState::Span() const {
  AdamSpan span;
  span.numel = numel_;
  span.param = param_.data<float>();
  span.grad = grad_.data();
  span.exp_avg = exp_avg_.data();
  span.exp_avg_sq = exp_avg_sq_.data();
  span.copy = copy_.data();
  span.copy_type = DType::kBFloat16;
  return span;
}

}  // namespace onepass

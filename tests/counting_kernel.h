// A kernel that counts what is called on it: proves which path ran.
//
//   Kernel counting = MakeCountingKernel<0>(ScalarKernel(), "counting");
//   ... run something on it ...
//   EXPECT_EQ(OperationCounts<0>().scale, 0);
//
// Operations have no context, so each counting kernel is a slot of its own.

#ifndef ONEPASS_TESTS_COUNTING_KERNEL_H_
#define ONEPASS_TESTS_COUNTING_KERNEL_H_

#include <atomic>
#include <cstdint>

#include "dispatch/kernel.h"

namespace onepass {

struct OperationCounter {
  std::atomic<int64_t> adam_step{0};
  std::atomic<int64_t> adam_step_with_copy{0};  // among adam_step
  std::atomic<int64_t> adam_step_streaming{0};  // among adam_step_with_copy
  std::atomic<int64_t> adam_step_numel{0};
  std::atomic<int64_t> accumulate{0};
  std::atomic<int64_t> scale{0};
  std::atomic<int64_t> scale_numel{0};
  std::atomic<int64_t> cast{0};
  std::atomic<int64_t> cast_numel{0};
  std::atomic<int64_t> squared_norm{0};
  std::atomic<int64_t> absmax{0};
  std::atomic<int64_t> split_remainder{0};
  std::atomic<int64_t> join_remainder{0};
  std::atomic<int64_t> quantize{0};
  std::atomic<int64_t> dequantize{0};

  int64_t Total() const {
    return adam_step + accumulate + scale + cast + squared_norm + absmax +
           split_remainder + join_remainder + quantize + dequantize;
  }
};

template <int slot>
OperationCounter& OperationCounts() {
  static OperationCounter counter;
  return counter;
}

namespace counting_kernel_internal {

template <int slot>
const KernelOperations*& Base() {
  static const KernelOperations* base = nullptr;
  return base;
}

template <int slot>
inline constexpr KernelOperations kOperations = {
    [] { return Base<slot>()->block_numel(); },
    [](const AdamStepArgs& args) {
      OperationCounter& counts = OperationCounts<slot>();
      ++counts.adam_step;
      counts.adam_step_with_copy += args.copy != nullptr;
      counts.adam_step_streaming += args.copy != nullptr && args.stream_copy;
      counts.adam_step_numel += args.numel;
      Base<slot>()->adam_step(args);
    },
    [](const AccumulateArgs& args) {
      ++OperationCounts<slot>().accumulate;
      Base<slot>()->accumulate(args);
    },
    [](const ScaleArgs& args) {
      ++OperationCounts<slot>().scale;
      OperationCounts<slot>().scale_numel += args.numel;
      Base<slot>()->scale(args);
    },
    [](const CastArgs& args) {
      ++OperationCounts<slot>().cast;
      OperationCounts<slot>().cast_numel += args.numel;
      Base<slot>()->cast(args);
    },
    [](const SquaredNormArgs& args) {
      ++OperationCounts<slot>().squared_norm;
      Base<slot>()->squared_norm(args);
    },
    [](const AbsMaxArgs& args) {
      ++OperationCounts<slot>().absmax;
      Base<slot>()->absmax(args);
    },
    [](const SplitRemainderArgs& args) {
      ++OperationCounts<slot>().split_remainder;
      Base<slot>()->split_remainder(args);
    },
    [](const JoinRemainderArgs& args) {
      ++OperationCounts<slot>().join_remainder;
      Base<slot>()->join_remainder(args);
    },
    [](const QuantizeArgs& args) {
      ++OperationCounts<slot>().quantize;
      Base<slot>()->quantize(args);
    },
    [](const DequantizeArgs& args) {
      ++OperationCounts<slot>().dequantize;
      Base<slot>()->dequantize(args);
    },
};

// With what is no function, as the base has it.
template <int slot>
KernelOperations& Operations() {
  static KernelOperations operations = kOperations<slot>;
  return operations;
}

}  // namespace counting_kernel_internal

// A kernel that does what `base` does, and counts. It has the lowest rank there
// is; change the descriptor (rank, copy_types) before it is used. `base` is one
// a slot.
template <int slot>
Kernel MakeCountingKernel(const Kernel& base, const char* name) {
  counting_kernel_internal::Base<slot>() = base.operations;
  Kernel kernel = base;
  kernel.name = name;
  kernel.rank = [] { return -1000; };
  KernelOperations& operations = counting_kernel_internal::Operations<slot>();
  operations.streams_copies = base.operations->streams_copies;
  kernel.operations = &operations;
  return kernel;
}

}  // namespace onepass

#endif  // ONEPASS_TESTS_COUNTING_KERNEL_H_

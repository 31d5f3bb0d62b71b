// Adam on the CPU: one pass over the state of a span, with the gradient scale
// and, where wanted, the 16-bit copy of the weights in it.
//
//   ASSIGN_OR_RETURN(CpuAdam adam, CpuAdam::Create(*kernel, *pool, {options}));
//   AdamSpan span;
//   span.numel = n; span.param = w; span.grad = g; ...
//   RETURN_IF_ERROR(adam.Step(span, t, factor));
//
// In pieces, whose copies travel while the next piece is updated:
//
//   RETURN_IF_ERROR(adam.StepPieces(
//       span, t, factor, piece_numel,
//       [&](const AdamPiece& piece) -> absl::StatusOr<void*> {
//         return NextStagingBuffer(piece.numel);   // waits until it is free
//       },
//       [&](const AdamPiece& piece, void* copy) -> absl::Status {
//         return StartTransfer(piece.offset, piece.numel, copy);
//       }));
//
// Pieces of any size, any number of threads and any kernel give the same bits.

#ifndef ONEPASS_OFFLOAD_CPU_ADAM_H_
#define ONEPASS_OFFLOAD_CPU_ADAM_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "offload/adam_options.h"

namespace onepass {

// How copies of updated weights are stored. Streaming stores go around the
// caches; the bits are the same.
enum class CopyStores : uint8_t {
  // Streaming for a copy of at least kStreamedCopyBytes, of a whole Step() or
  // of a piece of StepPieces(): it would push other state out of the caches.
  kAuto,
  kOrdinary,
  // Ordinary where the kernel has no others.
  kStreaming,
};

// Measured, as docs/performance.md says.
inline constexpr int64_t kStreamedCopyBytes = int64_t{1} << 20;

// Whether `kernel` stores `numel` elements of `copy_type` around the caches
// where it is asked for `stores`.
bool StreamsCopy(const Kernel& kernel, DType copy_type, CopyStores stores,
                 int64_t numel);

// The optimizer state of `numel` elements in host memory, owned by the caller.
// No two arrays overlap; each is aligned to its element.
struct AdamSpan {
  int64_t numel = 0;
  int group = 0;           // index of the options
  float* param = nullptr;  // fp32 master weights
  const void* grad = nullptr;
  void* exp_avg = nullptr;     // zero before the first step
  void* exp_avg_sq = nullptr;  // zero before the first step
  void* copy = nullptr;        // Step() only: numel of copy_type, or null
  DType grad_type = DType::kFloat32;
  DType exp_avg_type = DType::kFloat32;
  DType exp_avg_sq_type = DType::kFloat32;
  DType copy_type = DType::kBFloat16;  // of `copy`, and of the pieces' buffers
  CopyStores copy_stores = CopyStores::kAuto;
};

// Elements [offset, offset + numel) of a span.
struct AdamPiece {
  int64_t offset;
  int64_t numel;
};

class CpuAdam {
 public:
  // `kernel` and `pool` must outlive the result. InvalidArgument: no group, or
  // options that are not valid (the message names group and option).
  static absl::StatusOr<CpuAdam> Create(const Kernel& kernel, ThreadPool& pool,
                                        std::vector<AdamOptions> groups);

  // Options of a group, effective at the next step. On an error they stay.
  absl::Status SetOptions(int group, const AdamOptions& options);
  const std::vector<AdamOptions>& groups() const { return groups_; }

  // Whether a step can write copies of this type: where it is not, call Step()
  // without a copy and cast the weights afterwards. The gradient scale is fused
  // on every kernel.
  bool copy_supported(DType type) const {
    return kernel_->copy_types.Contains(type);
  }
  // onepass::StreamsCopy() for the kernel, of all elements of a Step(), or
  // those of a whole piece: a shorter last one is stored alike.
  bool StreamsCopy(DType copy_type, CopyStores stores, int64_t numel) const {
    return onepass::StreamsCopy(*kernel_, copy_type, stores, numel);
  }
  // Piece sizes are rounded down to a multiple of it, in elements.
  int64_t block_numel() const { return kernel_->operations->block_numel(); }
  const Kernel& kernel() const { return *kernel_; }

  // Updates the span as step `t` (from 1), each gradient multiplied by
  // `grad_scale` as it is loaded, and writes `span.copy` where it is not null.
  // InvalidArgument, with nothing changed: a bad span (see AdamStep in
  // dispatch/operations.h), an unknown group, t below 1, a grad_scale that is
  // not finite, a copy type that the kernel has not.
  absl::Status Step(const AdamSpan& span, int64_t t, float grad_scale) const;

  // The same in pieces of `piece_numel` elements (pieces of up to kLeafNumel
  // are updated by the calling thread alone), rounded down to a multiple of
  // block_numel() but at least one block; the last may be shorter. Before each
  // piece `before_piece` returns the buffer for its copy: piece.numel elements
  // of span.copy_type, apart from the span's arrays. After it, `after_piece`
  // gets that buffer, filled. Both are called on the calling thread, in order
  // of offset, never for an empty piece. `span.copy` must be null.
  //
  // An error of a callback or an unusable buffer ends the step at once and is
  // returned; its message then says up to which element the span was updated:
  // every piece that `after_piece` was called for.
  // All other errors come before anything is changed, as in Step().
  absl::Status StepPieces(
      const AdamSpan& span, int64_t t, float grad_scale, int64_t piece_numel,
      absl::FunctionRef<absl::StatusOr<void*>(const AdamPiece& piece)>
          before_piece,
      absl::FunctionRef<absl::Status(const AdamPiece& piece, void* copy)>
          after_piece) const;

 private:
  CpuAdam(const Kernel& kernel, ThreadPool& pool,
          std::vector<AdamOptions> groups);

  // The operation's arguments for a whole span.
  absl::StatusOr<AdamStepArgs> MakeArgs(const AdamSpan& span, int64_t t,
                                        float grad_scale) const;

  const Kernel* kernel_;
  ThreadPool* pool_;
  std::vector<AdamOptions> groups_;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_CPU_ADAM_H_

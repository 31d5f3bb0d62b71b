#include "offload/cpu_adam.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dispatch/operations.h"

namespace onepass {
namespace {

absl::Status Annotate(const absl::Status& status, const std::string& context) {
  return absl::Status(status.code(), absl::StrCat(context, status.message()));
}

// Whether the buffer of a piece lies apart from all arrays of its span, not
// only from the piece itself.
absl::Status CheckApart(const AdamStepArgs& span, const void* buffer,
                        int64_t numel) {
  const struct {
    const char* name;
    const void* data;
    DType type;
  } arrays[] = {{"param", span.param, DType::kFloat32},
                {"grad", span.grad, span.grad_type},
                {"exp_avg", span.exp_avg, span.exp_avg_type},
                {"exp_avg_sq", span.exp_avg_sq, span.exp_avg_sq_type}};
  for (const auto& array : arrays) {
    if (MemoryOverlaps(buffer, numel * ByteSize(span.copy_type), array.data,
                       span.numel * ByteSize(array.type))) {
      return absl::InvalidArgumentError(
          absl::StrCat("the buffer overlaps the span's ", array.name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool StreamsCopy(const Kernel& kernel, DType copy_type, CopyStores stores,
                 int64_t numel) {
  if (!kernel.operations->streams_copies) return false;
  switch (stores) {
    case CopyStores::kAuto:
      return numel >= kStreamedCopyBytes / ByteSize(copy_type);
    case CopyStores::kOrdinary:
      return false;
    case CopyStores::kStreaming:
      return true;
  }
  return false;
}

CpuAdam::CpuAdam(const Kernel& kernel, ThreadPool& pool,
                 std::vector<AdamOptions> groups)
    : kernel_(&kernel), pool_(&pool), groups_(std::move(groups)) {}

absl::StatusOr<CpuAdam> CpuAdam::Create(const Kernel& kernel, ThreadPool& pool,
                                        std::vector<AdamOptions> groups) {
  if (groups.empty()) {
    return absl::InvalidArgumentError(
        "no parameter group, expected at least 1");
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    if (absl::Status status = ValidateAdamOptions(groups[i]); !status.ok()) {
      return Annotate(status, absl::StrCat("group ", i, ": "));
    }
  }
  return CpuAdam(kernel, pool, std::move(groups));
}

absl::Status CpuAdam::SetOptions(int group, const AdamOptions& options) {
  if (group < 0 || group >= static_cast<int>(groups_.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group is ", group, ", expected 0 to ", groups_.size() - 1));
  }
  if (absl::Status status = ValidateAdamOptions(options); !status.ok()) {
    return Annotate(status, absl::StrCat("group ", group, ": "));
  }
  groups_[group] = options;
  return absl::OkStatus();
}

absl::Status CpuAdam::Step(const AdamSpan& span, int64_t t,
                           float grad_scale) const {
  absl::StatusOr<AdamStepArgs> args = MakeArgs(span, t, grad_scale);
  if (!args.ok()) return args.status();
  args->copy = span.copy;
  args->stream_copy = StreamsCopy(span.copy_type, span.copy_stores, span.numel);
  return AdamStep(*kernel_, *pool_, *args);
}

absl::Status CpuAdam::StepPieces(
    const AdamSpan& span, int64_t t, float grad_scale, int64_t piece_numel,
    absl::FunctionRef<absl::StatusOr<void*>(const AdamPiece& piece)>
        before_piece,
    absl::FunctionRef<absl::Status(const AdamPiece& piece, void* copy)>
        after_piece) const {
  if (piece_numel < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("piece_numel is ", piece_numel, ", expected at least 1"));
  }
  if (span.copy != nullptr) {
    return absl::InvalidArgumentError(
        "span.copy is set, but copies of pieces go to the buffers of "
        "before_piece");
  }
  if (!copy_supported(span.copy_type)) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", kernel_->name, " writes no copies in ",
                     Name(span.copy_type), "; see CpuAdam::copy_supported"));
  }
  absl::StatusOr<AdamStepArgs> args = MakeArgs(span, t, grad_scale);
  if (!args.ok()) return args.status();
  // The whole span is checked before its first piece is updated.
  if (absl::Status status = CheckAdamStep(*kernel_, *args); !status.ok()) {
    return status;
  }

  const int64_t block = block_numel();
  const int64_t step = std::max(piece_numel / block, int64_t{1}) * block;
  // Of all pieces alike: a shorter last one goes to one of the same buffers.
  args->stream_copy =
      StreamsCopy(span.copy_type, span.copy_stores, std::min(step, span.numel));
  for (int64_t offset = 0; offset < span.numel;) {
    const AdamPiece piece = {offset, std::min(step, span.numel - offset)};
    const int64_t end = offset + piece.numel;
    auto failed = [&](const absl::Status& status, const char* where,
                      int64_t updated) {
      return Annotate(
          status, absl::StrCat(where, " of elements ", offset, " to ", end,
                               ", of the span's ", span.numel, " the first ",
                               updated, " are updated: "));
    };
    absl::StatusOr<void*> buffer = before_piece(piece);
    if (!buffer.ok()) return failed(buffer.status(), "before_piece", offset);
    if (*buffer == nullptr) {
      return failed(absl::InvalidArgumentError("the buffer is null"),
                    "before_piece", offset);
    }
    if (absl::Status status = CheckApart(*args, *buffer, piece.numel);
        !status.ok()) {
      return failed(status, "before_piece", offset);
    }
    AdamStepArgs part = AdamStepPart(*args, offset, piece.numel);
    part.copy = *buffer;
    if (absl::Status status = AdamStep(*kernel_, *pool_, part); !status.ok()) {
      return failed(status, "update", offset);
    }
    if (absl::Status status = after_piece(piece, *buffer); !status.ok()) {
      return failed(status, "after_piece", end);
    }
    offset = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<AdamStepArgs> CpuAdam::MakeArgs(const AdamSpan& span, int64_t t,
                                               float grad_scale) const {
  if (span.group < 0 || span.group >= static_cast<int>(groups_.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "span.group is ", span.group, ", expected 0 to ", groups_.size() - 1));
  }
  absl::StatusOr<AdamConstants> constants =
      ComputeAdamConstants(groups_[span.group], t);
  if (!constants.ok()) {
    return Annotate(constants.status(),
                    absl::StrCat("group ", span.group, ": "));
  }
  AdamStepArgs args;
  args.numel = span.numel;
  args.param = span.param;
  args.grad = span.grad;
  args.exp_avg = span.exp_avg;
  args.exp_avg_sq = span.exp_avg_sq;
  args.copy = nullptr;
  args.grad_type = span.grad_type;
  args.exp_avg_type = span.exp_avg_type;
  args.exp_avg_sq_type = span.exp_avg_sq_type;
  args.copy_type = span.copy_type;
  args.grad_scale = grad_scale;
  args.constants = *constants;
  return args;
}

}  // namespace onepass

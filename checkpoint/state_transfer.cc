#include "checkpoint/state_transfer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

const char* At(const StateView& view, int64_t offset) {
  return static_cast<const char*>(view.data) + offset * ByteSize(view.type);
}

DType DTypeOf(StateType type) {
  switch (type) {
    case StateType::kBFloat16:
      return DType::kBFloat16;
    case StateType::kFloat16:
    case StateType::kScaledFloat16:
      return DType::kFloat16;
    case StateType::kScaledFloat8E4M3:
      return DType::kFloat8E4M3;
    default:
      return DType::kFloat32;
  }
}

// Whether elements are stored in `form` as they lie in memory.
bool IsCopied(StateType type, ExportForm form) {
  if (type == StateType::kInt16Remainder) return form != ExportForm::kRebuilt;
  return form == ExportForm::kExact || type == StateType::kFloat32;
}

// Scales of leaves from `first` on.
absl::Status CheckFinite(const StateTensor& tensor, int64_t first,
                         absl::Span<const float> scales) {
  for (size_t i = 0; i < scales.size(); ++i) {
    if (std::isfinite(scales[i])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("state \"", tensor.name, "\" has the scale ", scales[i],
                     " at leaf ", first + static_cast<int64_t>(i),
                     ": it holds what is not finite, and has no codes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StateTransfer> StateTransfer::Create(
    const Runtime& runtime, const StateTensors& tensors,
    const StateTransferOptions& options) {
  StateTransfer transfer(runtime, tensors);
  transfer.options_ = options;
  if (!tensors.on_device()) return transfer;
  ONEPASS_ASSIGN_OR_RETURN(transfer.stream_,
                           runtime.device.CreateStream("checkpoint"));
  int64_t largest = 0;  // of what is converted on the device, in elements
  for (const StateTensor& tensor : tensors.tensors()) {
    if (IsCopied(tensor.type, tensors.form())) continue;
    int64_t numel = 0;
    for (const StateView* view : tensor.views) {
      numel += view->on_device ? view->numel : 0;
    }
    largest = std::max(largest, numel);
  }
  if (largest == 0) return transfer;
  if (options.granularity == ExportGranularity::kAll) {
    if (options.fences == nullptr) {
      ONEPASS_RETURN_IF_ERROR(transfer.ConvertAll());
      return transfer;
    }
    ONEPASS_RETURN_IF_ERROR(options.fences->BeginReading());
    const absl::Status status = transfer.ConvertAll();
    options.fences->EndReading();
    ONEPASS_RETURN_IF_ERROR(status);
    return transfer;
  }
  int64_t numel = largest;
  if (options.granularity == ExportGranularity::kChunk) {
    numel = options.scratch_bytes / kFloatBytes / kLeafNumel * kLeafNumel;
    if (numel == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("scratch_bytes is ", options.scratch_bytes,
                       ", expected at least ", kLeafNumel * kFloatBytes));
    }
    numel = std::min(numel, largest);
  }
  ONEPASS_ASSIGN_OR_RETURN(transfer.scratch_,
                           runtime.device.Allocate(numel * kFloatBytes));
  return transfer;
}

absl::Status StateTransfer::ConvertAll() {
  converted_.resize(tensors_->tensors().size());
  for (size_t i = 0; i < converted_.size(); ++i) {
    const StateTensor& tensor = tensors_->tensors()[i];
    if (IsCopied(tensor.type, tensors_->form())) continue;
    for (const StateView* view : tensor.views) {
      // What lies on the device is the end of a tensor, in one view.
      if (!view->on_device || view->numel == 0) continue;
      if (converted_[i].data() != nullptr) {
        return absl::UnimplementedError(absl::StrCat(
            "state \"", tensor.name, "\" has several views on the device"));
      }
      ONEPASS_ASSIGN_OR_RETURN(
          converted_[i], runtime_.device.Allocate(view->numel * kFloatBytes));
      ONEPASS_RETURN_IF_ERROR(Convert(tensor, *view, 0, view->numel,
                                      converted_[i].as<float>(),
                                      stream_.get()));
    }
  }
  return stream_->Synchronize();
}

absl::Status StateTransfer::Read(const StoredArray& array, int64_t first,
                                 int64_t numel, char* out) {
  if (options_.fences == nullptr) {
    return ReadBehindFences(array, first, numel, out);
  }
  ONEPASS_RETURN_IF_ERROR(options_.fences->BeginReading());
  const absl::Status status = ReadBehindFences(array, first, numel, out);
  options_.fences->EndReading();
  return status;
}

absl::Status StateTransfer::ReadBehindFences(const StoredArray& array,
                                             int64_t first, int64_t numel,
                                             char* out) {
  const StateTensor& tensor = tensors_->tensor_of(array);
  const int64_t element = ByteSize(array.type);
  absl::Status status;
  int64_t done = 0;
  for (const StateView* view : tensor.views) {
    if (done == numel || !status.ok()) break;
    // In the units of the array.
    const int64_t begin =
        array.scales ? view->offset / kLeafNumel : view->offset;
    const int64_t size = array.scales ? LeafCount(view->numel) : view->numel;
    const int64_t offset = first + done - begin;
    if (offset >= size) continue;
    const Part part = {view, offset, std::min(numel - done, size - offset),
                       done};
    status = ReadPart(tensor, part, array.scales, out + done * element);
    done += part.numel;
  }
  // Whatever happened: `out` is the caller's again.
  if (stream_ != nullptr) status.Update(stream_->Synchronize());
  if (!status.ok() || !array.scales) return status;
  return CheckFinite(tensor, first,
                     absl::MakeConstSpan(reinterpret_cast<const float*>(out),
                                         static_cast<size_t>(numel)));
}

absl::Status StateTransfer::ReadPart(const StateTensor& tensor,
                                     const Part& part, bool scales, char* out) {
  const StateView& view = *part.view;
  const void* from = nullptr;
  int64_t bytes = 0;
  if (scales) {
    from = view.scales + part.offset;
    bytes = part.numel * kFloatBytes;
  } else if (IsCopied(tensor.type, tensors_->form())) {
    from = At(view, part.offset);
    bytes = part.numel * ByteSize(view.type);
  } else {
    return ReadConverted(tensor, part, reinterpret_cast<float*>(out));
  }
  if (view.on_device) return stream_->CopyToHost(out, from, bytes);
  std::memcpy(out, from, bytes);
  return absl::OkStatus();
}

absl::Status StateTransfer::ReadConverted(const StateTensor& tensor,
                                          const Part& part, float* out) {
  const StateView& view = *part.view;
  if (IsScaled(view.type)) {
    ONEPASS_RETURN_IF_ERROR(CheckScales(tensor, part));
  }
  if (!view.on_device) {
    return Convert(tensor, view, part.offset, part.numel, out, nullptr);
  }
  if (options_.granularity == ExportGranularity::kAll) {
    const size_t index = &tensor - tensors_->tensors().data();
    return stream_->CopyToHost(out, converted_[index].as<float>() + part.offset,
                               part.numel * kFloatBytes);
  }
  const int64_t most = scratch_.bytes() / kFloatBytes;
  for (int64_t i = 0; i < part.numel; i += most) {
    const int64_t numel = std::min(most, part.numel - i);
    float* const scratch = scratch_.as<float>();
    ONEPASS_RETURN_IF_ERROR(
        Convert(tensor, view, part.offset + i, numel, scratch, stream_.get()));
    ONEPASS_RETURN_IF_ERROR(
        stream_->CopyToHost(out + i, scratch, numel * kFloatBytes));
  }
  return absl::OkStatus();
}

absl::Status StateTransfer::CheckScales(const StateTensor& tensor,
                                        const Part& part) {
  const StateView& view = *part.view;
  const int64_t first = part.offset / kLeafNumel;
  const int64_t end = LeafCount(part.offset + part.numel);
  const float* scales = view.scales + first;
  std::vector<float> copied;
  if (view.on_device) {
    copied.resize(end - first);
    ONEPASS_RETURN_IF_ERROR(stream_->CopyToHost(copied.data(), scales,
                                                (end - first) * kFloatBytes));
    ONEPASS_RETURN_IF_ERROR(stream_->Synchronize());
    scales = copied.data();
  }
  return CheckFinite(tensor, view.offset / kLeafNumel + first,
                     absl::MakeConstSpan(scales, end - first));
}

template <typename Args>
absl::Status StateTransfer::Run(const Args& args, Stream* stream) {
  if (stream != nullptr) return stream->Run({args});
  if constexpr (std::is_same_v<Args, CastArgs>) {
    return Cast(runtime_.kernel, runtime_.pool, args);
  } else if constexpr (std::is_same_v<Args, DequantizeArgs>) {
    return Dequantize(runtime_.kernel, runtime_.pool, args);
  } else {
    return JoinRemainder(runtime_.kernel, runtime_.pool, args);
  }
}

absl::Status StateTransfer::Convert(const StateTensor& tensor,
                                    const StateView& view, int64_t offset,
                                    int64_t numel, float* out, Stream* stream) {
  const DType type = DTypeOf(view.type);
  if (view.type == StateType::kInt16Remainder) {
    JoinRemainderArgs args;
    args.numel = numel;
    args.param =
        reinterpret_cast<const uint16_t*>(At(*ParamOf(tensor, view), offset));
    args.remainder = reinterpret_cast<const int16_t*>(At(view, offset));
    args.master = out;
    return Run(args, stream);
  }
  if (!IsScaled(view.type)) {
    return Run(CastArgs{numel, At(view, offset), out, type, DType::kFloat32},
               stream);
  }
  // To the end of the leaf, if it begins inside of one; then by leaves.
  while (numel > 0) {
    const int64_t in_leaf = offset % kLeafNumel;
    const int64_t n =
        in_leaf == 0 ? numel : std::min(numel, kLeafNumel - in_leaf);
    DequantizeArgs args;
    args.numel = n;
    args.codes = At(view, offset);
    args.scales = view.scales + offset / kLeafNumel;
    args.out = out;
    args.type = type;
    ONEPASS_RETURN_IF_ERROR(Run(args, stream));
    offset += n;
    out += n;
    numel -= n;
  }
  return absl::OkStatus();
}

const StateView* StateTransfer::ParamOf(const StateTensor& tensor,
                                        const StateView& view) const {
  const StateTensor& param = tensors_->tensors()[tensor.param];
  const auto found = std::find(tensor.views.begin(), tensor.views.end(), &view);
  return param.views[found - tensor.views.begin()];
}

absl::Status StateTransfer::Write(const StoredArray& array, int64_t first,
                                  int64_t numel, const char* in) {
  const StateTensor& tensor = tensors_->tensor_of(array);
  const int64_t element = ByteSize(array.type);
  int64_t done = 0;
  for (const StateView* view : tensor.views) {
    if (done == numel) break;
    const int64_t begin =
        array.scales ? view->offset / kLeafNumel : view->offset;
    const int64_t size = array.scales ? LeafCount(view->numel) : view->numel;
    const int64_t offset = first + done - begin;
    if (offset >= size) continue;
    const int64_t n = std::min(numel - done, size - offset);
    const StateTarget& target = static_cast<const StateTarget&>(*view);
    char* const base = array.scales ? reinterpret_cast<char*>(target.out_scales)
                                    : static_cast<char*>(target.out_data);
    char* const to = base + offset * element;
    const char* const from = in + done * element;
    if (view->on_device) {
      ONEPASS_RETURN_IF_ERROR(stream_->CopyToDevice(to, from, n * element));
    } else {
      std::memcpy(to, from, n * element);
    }
    done += n;
  }
  return absl::OkStatus();
}

absl::Status StateTransfer::FinishWriting() {
  return stream_ != nullptr ? stream_->Synchronize() : absl::OkStatus();
}

}  // namespace onepass

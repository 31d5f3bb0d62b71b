#include "checkpoint/state_dict.h"

#include "absl/strings/str_cat.h"

namespace onepass {

absl::Status StateDict::Open(const std::vector<StoredArray>& arrays) {
  if (!filling_.empty()) {
    return absl::FailedPreconditionError("the state dict is filled already");
  }
  for (const StoredArray& array : arrays) {
    Tensor& tensor = tensors_[array.name];
    tensor.type = array.type;
    tensor.shape = array.shape;
    tensor.box = array.box;
    tensor.bytes.resize(static_cast<size_t>(array.bytes()));
    filling_.push_back({array.name, &tensor});
  }
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<char>> StateDict::Next(int array, int64_t bytes) {
  const Filling& filling = filling_[array];
  return absl::MakeSpan(filling.tensor->bytes)
      .subspan(static_cast<size_t>(filling.done), static_cast<size_t>(bytes));
}

absl::Status StateDict::Written(int array, int64_t bytes) {
  filling_[array].done += bytes;
  return absl::OkStatus();
}

absl::Status StateDict::Close() {
  for (const Filling& filling : filling_) {
    const size_t bytes = filling.tensor->bytes.size();
    if (filling.done == static_cast<int64_t>(bytes)) continue;
    return absl::FailedPreconditionError(absl::StrCat("state \"", filling.name,
                                                      "\" has ", filling.done,
                                                      " of ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace onepass

#include "checkpoint/state_tensors.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

absl::Status Invalid(absl::string_view name, absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat("state \"", name, "\" ", problem));
}

std::string Sizes(absl::Span<const int64_t> sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

bool SameBox(const Box& a, const Box& b) {
  return a.offset == b.offset && a.extent == b.extent;
}

// Whether elements of one lie as those of the other.
bool SameCuts(const StateTensor& a, const StateTensor& b) {
  if (!SameBox(a.box, b.box) || a.views.size() != b.views.size()) return false;
  for (size_t i = 0; i < a.views.size(); ++i) {
    if (a.views[i]->offset != b.views[i]->offset ||
        a.views[i]->numel != b.views[i]->numel ||
        a.views[i]->on_device != b.views[i]->on_device) {
      return false;
    }
  }
  return true;
}

}  // namespace

const char* Name(ExportForm form) {
  switch (form) {
    case ExportForm::kExact:
      return "exact";
    case ExportForm::kUnscaled:
      return "unscaled";
    case ExportForm::kRebuilt:
      return "rebuilt";
  }
  return "unknown";
}

std::string ScalesName(absl::string_view tensor) {
  return absl::StrCat(tensor, ".scale");
}

SafetensorsType StoredType(StateType type, ExportForm form) {
  if (type == StateType::kInt16Remainder) {
    return form == ExportForm::kRebuilt ? SafetensorsType::kF32
                                        : SafetensorsType::kI16;
  }
  if (form != ExportForm::kExact) return SafetensorsType::kF32;
  switch (type) {
    case StateType::kBFloat16:
      return SafetensorsType::kBF16;
    case StateType::kFloat16:
    case StateType::kScaledFloat16:
      return SafetensorsType::kF16;
    // As bytes: readers that do not know the type take it for another.
    case StateType::kScaledFloat8E4M3:
      return SafetensorsType::kU8;
    default:
      return SafetensorsType::kF32;
  }
}

int64_t NumelOf(absl::Span<const int64_t> shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

bool IsFlatRange(absl::Span<const int64_t> shape, const Box& box,
                 int64_t* begin) {
  if (box.extent.size() == 1) {
    *begin = box.offset[0];
    return true;
  }
  *begin = 0;
  return absl::MakeConstSpan(box.extent) == shape;
}

absl::StatusOr<StateTensors> StateTensors::Create(
    std::vector<const StateView*> views, ExportForm form) {
  StateTensors result;
  result.form_ = form;
  absl::flat_hash_map<std::string, int> index_of_name;
  for (const StateView* view : views) {
    if (result.tensors_.empty() || result.tensors_.back().name != view->name) {
      const int index = static_cast<int>(result.tensors_.size());
      if (!index_of_name.emplace(view->name, index).second) {
        return Invalid(view->name, "is there twice");
      }
      StateTensor& tensor = result.tensors_.emplace_back();
      tensor.name = view->name;
      tensor.type = view->type;
      tensor.shape = view->shape;
      tensor.box = view->box;
    }
    result.tensors_.back().views.push_back(view);
    result.on_device_ |= view->on_device && view->numel > 0;
  }
  for (size_t i = 0; i < result.tensors_.size(); ++i) {
    StateTensor& tensor = result.tensors_[i];
    ONEPASS_RETURN_IF_ERROR(result.Check(tensor));
    tensor.numel = tensor.box.numel();
    if (tensor.type == StateType::kInt16Remainder) {
      ONEPASS_RETURN_IF_ERROR(result.FindParam(index_of_name, tensor));
    }
    result.AddArrays(static_cast<int>(i));
  }
  absl::flat_hash_set<std::string> names;
  for (const StoredArray& array : result.arrays_) {
    if (!names.insert(array.name).second) {
      return Invalid(array.name, "has the name of the scales of another");
    }
  }
  return result;
}

absl::Status StateTensors::Check(const StateTensor& tensor) const {
  const absl::StatusOr<int64_t> checked = CheckBox(tensor.shape, tensor.box);
  if (!checked.ok()) {
    return Invalid(
        tensor.name,
        absl::StrCat("has shape ", Sizes(tensor.shape), " and a box of offset ",
                     Sizes(tensor.box.offset), " and extent ",
                     Sizes(tensor.box.extent), ": ",
                     checked.status().message()));
  }
  const int64_t numel = *checked;
  int64_t end = 0;
  for (const StateView* view : tensor.views) {
    if (view->type != tensor.type || view->shape != tensor.shape ||
        !SameBox(view->box, tensor.box)) {
      return Invalid(tensor.name,
                     "has views of different types, shapes or boxes");
    }
    if (view->offset != end || view->numel < 0 || view->numel > numel - end) {
      return Invalid(
          tensor.name,
          absl::StrCat("has a view of ", view->numel, " elements from ",
                       view->offset, " on, expected one from ", end,
                       " on and inside the box's ", numel));
    }
    if (end % kLeafNumel != 0) {
      return Invalid(tensor.name,
                     absl::StrCat("has views that are cut at ", end,
                                  ", expected a multiple of ", kLeafNumel));
    }
    end += view->numel;
    if (view->numel > 0 &&
        (view->data == nullptr ||
         (IsScaled(view->type) && view->scales == nullptr))) {
      return Invalid(tensor.name, "has a view without data or scales");
    }
  }
  if (end != numel) {
    return Invalid(tensor.name, absl::StrCat("has views of ", end,
                                             " elements, expected the ", numel,
                                             " of its box"));
  }
  if (IsScaled(tensor.type) && !HasLeavesOfTensor(tensor.shape, tensor.box)) {
    return Invalid(tensor.name,
                   absl::StrCat("is of type ", Name(tensor.type),
                                ", which needs a range of the tensor's "
                                "elements that is cut at multiples of ",
                                kLeafNumel));
  }
  return absl::OkStatus();
}

absl::Status StateTensors::FindParam(
    const absl::flat_hash_map<std::string, int>& index_of_name,
    StateTensor& tensor) const {
  absl::string_view name = tensor.name;
  const size_t dot = name.rfind('.');
  name = name.substr(0, dot == name.npos ? 0 : dot);
  const std::string param = absl::StrCat(name, ".", Name(StateKind::kParam));
  const auto found = index_of_name.find(param);
  if (found != index_of_name.end() &&
      tensors_[found->second].type == StateType::kBFloat16 &&
      SameCuts(tensors_[found->second], tensor)) {
    tensor.param = found->second;
    return absl::OkStatus();
  }
  return Invalid(
      tensor.name,
      absl::StrCat("is a remainder, expected \"", param,
                   "\", its weight, of bf16 and of the same box and views"));
}

void StateTensors::AddArrays(int index) {
  const StateTensor& tensor = tensors_[index];
  if (tensor.numel == 0 && NumelOf(tensor.shape) != 0) return;
  arrays_.push_back({tensor.name, StoredType(tensor.type, form_), tensor.shape,
                     tensor.box, tensor.numel, index, tensor.type,
                     /*scales=*/false});
  if (!IsScaled(tensor.type) || form_ != ExportForm::kExact) return;
  int64_t begin = 0;
  IsFlatRange(tensor.shape, tensor.box, &begin);
  const int64_t count = LeafCount(tensor.numel);
  arrays_.push_back({ScalesName(tensor.name),
                     SafetensorsType::kF32,
                     {LeafCount(NumelOf(tensor.shape))},
                     {{begin / kLeafNumel}, {count}},
                     count,
                     index,
                     tensor.type,
                     /*scales=*/true});
}

}  // namespace onepass

// The tensors of a StateLease, and the arrays that each of them is stored as.
//
//   ASSIGN_OR_RETURN(StateTensors tensors,
//                    StateTensors::Create(lease.views(), ExportForm::kExact));
//   for (const StoredArray& array : tensors.arrays()) ...
//
// An array is what one entry of a safetensors file, or of a state dict, holds:
// elements of one type, of one box of one shape. A scaled tensor is two, its
// codes and its scales; any other is one.

#ifndef ONEPASS_CHECKPOINT_STATE_TENSORS_H_
#define ONEPASS_CHECKPOINT_STATE_TENSORS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/safetensors.h"
#include "dispatch/state.h"

namespace onepass {

// What values are stored as. The values are stable.
enum class ExportForm : uint8_t {
  // As they are: codes and scales. What is restored has the same bits.
  kExact = 0,
  // fp32 values. An int16 remainder stays what it is.
  kUnscaled = 1,
  // As kUnscaled; a remainder and its weight become the fp32 master.
  kRebuilt = 2,
};

// "exact", "unscaled", "rebuilt".
const char* Name(ExportForm form);

// All of one state tensor that one rank has.
struct StateTensor {
  std::string name;
  StateType type;
  std::vector<int64_t> shape;
  Box box;
  int64_t numel;  // of the box
  // Its views, one after the other, the caller's.
  std::vector<const StateView*> views;
  // Of a remainder: the tensor of its weight. Else -1.
  int param = -1;
};

struct StoredArray {
  // That of the tensor, with ".scale" after it for scales.
  std::string name;
  SafetensorsType type;
  // Of scales: their number, and which of them. A box of one dimension where
  // that of the tensor is.
  std::vector<int64_t> shape;
  Box box;
  int64_t numel;  // of the box
  int tensor;
  StateType state_type;  // of the tensor
  bool scales;

  int64_t bytes() const { return numel * ByteSize(type); }
};

// The name of the scales of a tensor.
std::string ScalesName(absl::string_view tensor);
// What the elements of a tensor are stored as.
SafetensorsType StoredType(StateType type, ExportForm form);

class StateTensors {
 public:
  // `views` outlive the result. InvalidArgument, with the tensor and what is
  // wrong: a view that breaks a rule of dispatch/state.h, a box outside its
  // shape, two arrays of one name, kRebuilt where the weight of a remainder is
  // not there or of another box.
  static absl::StatusOr<StateTensors> Create(
      std::vector<const StateView*> views, ExportForm form);
  template <typename View>
  static absl::StatusOr<StateTensors> Create(const std::vector<View>& views,
                                             ExportForm form) {
    std::vector<const StateView*> pointers;
    for (const View& view : views) pointers.push_back(&view);
    return Create(std::move(pointers), form);
  }

  ExportForm form() const { return form_; }
  // In the order of their first views.
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  // In the order of the tensors; scales directly after their codes. Of a tensor
  // of which this rank has nothing there are none: others have all of it, and
  // readers may know a part by where it begins.
  const std::vector<StoredArray>& arrays() const { return arrays_; }
  const StateTensor& tensor_of(const StoredArray& array) const {
    return tensors_[array.tensor];
  }
  bool on_device() const { return on_device_; }  // whether any of them is

 private:
  absl::Status Check(const StateTensor& tensor) const;
  absl::Status FindParam(
      const absl::flat_hash_map<std::string, int>& index_of_name,
      StateTensor& tensor) const;
  void AddArrays(int tensor);

  ExportForm form_ = ExportForm::kExact;
  std::vector<StateTensor> tensors_;
  std::vector<StoredArray> arrays_;
  bool on_device_ = false;
};

// Elements of a whole shape that CheckBox() took.
int64_t NumelOf(absl::Span<const int64_t> shape);

// Whether the box is a range of the elements of its tensor in C order, and
// where that begins: it has one dimension, or is all of the tensor.
bool IsFlatRange(absl::Span<const int64_t> shape, const Box& box,
                 int64_t* begin);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_STATE_TENSORS_H_

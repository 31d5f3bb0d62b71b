#include "checkpoint/box_runs.h"

#include <algorithm>

#include "checkpoint/state_tensors.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

// A box of at least one dimension as runs of elements of its tensor, as long as
// they can be, in ascending order.
class Rows {
 public:
  Rows(absl::Span<const int64_t> shape, const Box& box)
      : shape_(shape), box_(box) {
    // Dimensions that the box has whole belong to one run, and one more.
    int d = static_cast<int>(shape.size()) - 1;
    for (; d > 0 && box.extent[d] == shape[d]; --d) numel_ *= shape[d];
    numel_ *= box.extent[d];
    dimensions_ = d;
    for (int i = 0; i < dimensions_; ++i) count_ *= box.extent[i];
  }

  int64_t count() const { return count_; }
  int64_t numel() const { return numel_; }  // of each

  // The index in the whole tensor of the first element of a row.
  int64_t First(int64_t row) const {
    int64_t first = 0;
    int64_t stride = 1;
    for (int d = static_cast<int>(shape_.size()) - 1; d >= 0; --d) {
      int64_t at = box_.offset[d];
      if (d < dimensions_) {
        at += row % box_.extent[d];
        row /= box_.extent[d];
      }
      first += at * stride;
      stride *= shape_[d];
    }
    return first;
  }

  // The first row that ends after element `begin` of the tensor.
  int64_t FirstAfter(int64_t begin) const {
    int64_t low = 0;
    int64_t high = count_;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (First(middle) + numel_ > begin) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

 private:
  const absl::Span<const int64_t> shape_;
  const Box& box_;
  int dimensions_ = 0;  // that rows are counted over
  int64_t count_ = 1;
  int64_t numel_ = 1;
};

// Of a box of a tensor's own dimensions: where an element lies in it.
int64_t PositionIn(absl::Span<const int64_t> shape, const Box& box,
                   int64_t element) {
  int64_t position = 0;
  int64_t stride = 1;
  for (int d = static_cast<int>(shape.size()) - 1; d >= 0; --d) {
    position += (element % shape[d] - box.offset[d]) * stride;
    stride *= box.extent[d];
    element /= shape[d];
  }
  return position;
}

struct Flat {
  int64_t begin;
  int64_t end;
};

}  // namespace

absl::Status ForEachCommonRun(
    absl::Span<const int64_t> shape, const Box& a, const Box& b,
    absl::FunctionRef<absl::Status(int64_t i, int64_t j, int64_t n)> visit) {
  const int64_t a_numel = a.numel();
  const int64_t b_numel = b.numel();
  if (a_numel == 0 || b_numel == 0) return absl::OkStatus();
  int64_t begin = 0;
  const bool a_flat = IsFlatRange(shape, a, &begin);
  const Flat a_range = {begin, begin + a_numel};
  const bool b_flat = IsFlatRange(shape, b, &begin);
  const Flat b_range = {begin, begin + b_numel};
  if (a_flat && b_flat) {
    const int64_t from = std::max(a_range.begin, b_range.begin);
    const int64_t to = std::min(a_range.end, b_range.end);
    if (from >= to) return absl::OkStatus();
    return visit(from - a_range.begin, from - b_range.begin, to - from);
  }
  if (a_flat || b_flat) {
    const Flat& range = a_flat ? a_range : b_range;
    const Rows rows(shape, a_flat ? b : a);
    for (int64_t row = rows.FirstAfter(range.begin); row < rows.count();
         ++row) {
      const int64_t first = rows.First(row);
      if (first >= range.end) break;
      const int64_t from = std::max(range.begin, first);
      const int64_t to = std::min(range.end, first + rows.numel());
      const int64_t in_box = row * rows.numel() + (from - first);
      const int64_t in_range = from - range.begin;
      ONEPASS_RETURN_IF_ERROR(a_flat ? visit(in_range, in_box, to - from)
                                     : visit(in_box, in_range, to - from));
    }
    return absl::OkStatus();
  }
  Box common;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t from = std::max(a.offset[d], b.offset[d]);
    const int64_t to =
        std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    if (from >= to) return absl::OkStatus();
    common.offset.push_back(from);
    common.extent.push_back(to - from);
  }
  const Rows rows(shape, common);
  for (int64_t row = 0; row < rows.count(); ++row) {
    const int64_t first = rows.First(row);
    ONEPASS_RETURN_IF_ERROR(visit(PositionIn(shape, a, first),
                                  PositionIn(shape, b, first), rows.numel()));
  }
  return absl::OkStatus();
}

}  // namespace onepass

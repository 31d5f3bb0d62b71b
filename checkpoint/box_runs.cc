#include "checkpoint/box_runs.h"

#include <algorithm>
#include <vector>

#include "checkpoint/state_tensors.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

// The rows of a box of at least one dimension, in C order: visit(first, n) with
// the index of its first element in the whole tensor.
absl::Status ForEachRow(
    absl::Span<const int64_t> shape, const Box& box,
    absl::FunctionRef<absl::Status(int64_t first, int64_t n)> visit) {
  const int last = static_cast<int>(shape.size()) - 1;
  std::vector<int64_t> at = box.offset;
  while (true) {
    int64_t first = 0;
    for (int d = 0; d <= last; ++d) first = first * shape[d] + at[d];
    ONEPASS_RETURN_IF_ERROR(visit(first, box.extent[last]));
    int d = last - 1;
    for (; d >= 0; --d) {
      if (++at[d] < box.offset[d] + box.extent[d]) break;
      at[d] = box.offset[d];
    }
    if (d < 0) return absl::OkStatus();
  }
}

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
    int64_t position = 0;  // in the box that is no range
    return ForEachRow(shape, a_flat ? b : a,
                      [&](int64_t first, int64_t n) -> absl::Status {
                        const int64_t from = std::max(range.begin, first);
                        const int64_t to = std::min(range.end, first + n);
                        const int64_t in_box = position + (from - first);
                        position += n;
                        if (from >= to) return absl::OkStatus();
                        const int64_t in_range = from - range.begin;
                        return a_flat ? visit(in_range, in_box, to - from)
                                      : visit(in_box, in_range, to - from);
                      });
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
  return ForEachRow(shape, common, [&](int64_t first, int64_t n) {
    return visit(PositionIn(shape, a, first), PositionIn(shape, b, first), n);
  });
}

}  // namespace onepass

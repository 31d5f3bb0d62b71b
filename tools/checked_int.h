// Sums and products of sizes that may not fit 64 bits.
//
//   const CheckedInt bytes = CheckedInt(rows) * columns * 4 + header;
//   ASSIGN_OR_RETURN(int64_t value, bytes.Get("bytes of a table"));

#ifndef ONEPASS_TOOLS_CHECKED_INT_H_
#define ONEPASS_TOOLS_CHECKED_INT_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace onepass {

// An integer that remembers whether a result on the way to it did not fit.
class CheckedInt {
 public:
  CheckedInt(int64_t value) : value_(value) {}  // NOLINT: meant to convert

  friend CheckedInt operator+(CheckedInt a, CheckedInt b) {
    CheckedInt sum(0);
    sum.overflow_ = __builtin_add_overflow(a.value_, b.value_, &sum.value_) ||
                    a.overflow_ || b.overflow_;
    return sum;
  }
  friend CheckedInt operator*(CheckedInt a, CheckedInt b) {
    CheckedInt product(0);
    product.overflow_ =
        __builtin_mul_overflow(a.value_, b.value_, &product.value_) ||
        a.overflow_ || b.overflow_;
    return product;
  }
  // One that did not fit is the larger.
  friend CheckedInt Max(CheckedInt a, CheckedInt b) {
    if (a.overflow_ || b.overflow_) return a.overflow_ ? a : b;
    return std::max(a.value_, b.value_);
  }

  friend CheckedInt Min(CheckedInt a, CheckedInt b) {
    if (a.overflow_ || b.overflow_) return a.overflow_ ? b : a;
    return std::min(a.value_, b.value_);
  }

  // OutOfRange: "the number of WHAT does not fit 64 bits".
  absl::StatusOr<int64_t> Get(absl::string_view what) const {
    if (!overflow_) return value_;
    return absl::OutOfRangeError(
        absl::StrCat("the number of ", what, " does not fit 64 bits"));
  }

 private:
  int64_t value_;
  bool overflow_ = false;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_CHECKED_INT_H_

// An exact sum of sums of squares: the order of adding and merging does not
// matter, so neither do threads, pieces and ranks.
//
//   NormSum sum;
//   for (double leaf : leaf_sums) sum.Add(leaf);
//   sum.Merge(of_another_rank);
//   double norm = std::sqrt(sum.Total());   // rounded once, in Total()

#ifndef ONEPASS_DISPATCH_NORM_SUM_H_
#define ONEPASS_DISPATCH_NORM_SUM_H_

#include <array>
#include <cstdint>
#include <type_traits>

namespace onepass {

// Fixed-point: 640 bits from 2^-298, the square of the least subnormal float,
// up. 618 bits hold 2^64 squares of the largest float. Trivially
// copyable: ranks of one byte order may exchange its bytes and Merge() them,
// and zeroed memory is a sum of nothing. Equal sums may differ in their bytes:
// compare with ==.
class NormSum {
 public:
  // Adds a leaf's sum of squares exactly. `leaf_sum` is a sum in double of at
  // most 2^32 squares of floats, so a multiple of 2^-298 and below 2^289, or
  // infinite, or NaN; a value outside is counted as infinite.
  void Add(double leaf_sum);

  void Merge(const NormSum& other);

  // Whether nothing added was infinite or NaN.
  bool finite() const { return !has_infinity_ && !has_nan_; }

  // The sum rounded once to nearest even; infinity or NaN where one was added.
  double Total() const;

  // Whether both hold the same sum.
  friend bool operator==(const NormSum& a, const NormSum& b);
  friend bool operator!=(const NormSum& a, const NormSum& b) {
    return !(a == b);
  }

 private:
  static constexpr int kLimbs = 20;
  static constexpr int kLimbBits = 32;
  static constexpr int kLeastExponent = -298;  // of bit 0 of limb 0
  static constexpr int kMostExponent = 288;    // of the leading bit of a leaf

  // After each 2^24 additions what exceeds 32 bits of a limb is carried up,
  // long before 2^31 of them could overflow its 64.
  void CountAddition();
  void Carry();

  std::array<uint64_t, kLimbs> limbs_{};
  uint32_t additions_ = 0;  // since the last carry
  // Booleans, and no padding: all bytes that ranks exchange have a value.
  uint16_t has_infinity_ = false;
  uint16_t has_nan_ = false;
};

static_assert(std::has_unique_object_representations_v<NormSum>);

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_NORM_SUM_H_

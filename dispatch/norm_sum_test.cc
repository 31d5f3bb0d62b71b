#include "dispatch/norm_sum.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"

namespace onepass {
namespace {

constexpr int kLeast = -298;  // exponent of the square of the least float
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr float kMaxFloat = std::numeric_limits<float>::max();

uint64_t Bits(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

double Square(float x) { return static_cast<double>(x) * x; }

// The reference: a number in binary, one digit an element, from 2^-298 up.
class Exact {
 public:
  void Add(double x) {
    int exponent;
    double rest = std::frexp(x, &exponent);  // x = rest * 2^exponent
    for (int place = exponent - 1 - kLeast; rest != 0; --place) {
      rest *= 2;
      if (rest < 1) continue;
      rest -= 1;
      int carry = place;
      while (digits_.at(carry) == 1) digits_[carry++] = 0;
      digits_[carry] = 1;
    }
  }

  // Rounded to nearest even.
  double Total() const {
    int top = static_cast<int>(digits_.size()) - 1;
    while (top >= 0 && digits_[top] == 0) --top;
    const int last = std::max(top - 52, 0);  // of the digits kept
    double total = 0;
    for (int i = top; i >= last; --i) total = 2 * total + digits_[i];
    const bool half = last > 0 && digits_[last - 1] == 1;
    const bool more = last > 1 && std::count(digits_.begin(),
                                             digits_.begin() + last - 1, 1) > 0;
    if (half && (more || digits_[last] == 1)) total += 1;
    return std::ldexp(total, last + kLeast);
  }

 private:
  std::vector<int> digits_ = std::vector<int>(700);
};

NormSum SumOf(const std::vector<double>& values) {
  NormSum sum;
  for (double value : values) sum.Add(value);
  return sum;
}

double ExactTotal(const std::vector<double>& values) {
  Exact sum;
  for (double value : values) sum.Add(value);
  return sum.Total();
}

using Random = std::mt19937_64;

// The square of a float of any finite magnitude.
double AnySquare(Random& random) {
  const uint32_t bits = static_cast<uint32_t>(random() % 0x7f800000);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return Square(x);
}

// A leaf's sum of any magnitude: 53 digits at most, none below 2^-298.
double AnyLeafSum(Random& random) {
  const int top = static_cast<int>(random() % 587);  // below 2^289
  const int digits = static_cast<int>(random() % (std::min(top, 52) + 1)) + 1;
  uint64_t mantissa =
      (random() >> (64 - digits)) | (uint64_t{1} << (digits - 1));
  return std::ldexp(static_cast<double>(mantissa), top - digits + 1 + kLeast);
}

TEST(NormSumTest, NothingIsZero) {
  NormSum sum;
  EXPECT_EQ(Bits(sum.Total()), Bits(0.0));
  sum.Add(0.0);
  sum.Add(-0.0);
  EXPECT_EQ(Bits(sum.Total()), Bits(0.0));
  EXPECT_TRUE(sum.finite());
  EXPECT_EQ(sum, NormSum());
}

TEST(NormSumTest, ZeroedMemoryIsNothing) {
  static_assert(std::is_trivially_copyable_v<NormSum>);
  NormSum sum;
  sum.Add(kInfinity);
  sum.Add(3);
  std::memset(static_cast<void*>(&sum), 0, sizeof(sum));
  EXPECT_EQ(sum, NormSum());
  sum.Add(2);
  EXPECT_EQ(sum.Total(), 2);
}

TEST(NormSumTest, OneValueComesBack) {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const double x = i % 2 == 0 ? AnySquare(random) : AnyLeafSum(random);
    ASSERT_EQ(Bits(SumOf({x}).Total()), Bits(x)) << x;
  }
}

TEST(NormSumTest, SumsAreExactAndRoundedOnce) {
  Random random(2);
  for (int i = 0; i < 2000; ++i) {
    std::vector<double> values(1 + random() % 40);
    for (double& value : values) {
      value = i % 2 == 0 ? AnySquare(random) : AnyLeafSum(random);
    }
    if (i % 4 >= 2) {
      // Of nearly one magnitude, so that all take part in the rounding.
      for (double& value : values) {
        int exponent;
        const double fraction = std::frexp(value, &exponent);
        value = std::ldexp(fraction, 40 + static_cast<int>(random() % 70));
      }
    }
    ASSERT_EQ(Bits(SumOf(values).Total()), Bits(ExactTotal(values)));
  }
}

TEST(NormSumTest, RoundsTiesToEven) {
  for (int scale : {kLeast, -100, 0, 31, 64, 230}) {
    auto at = [scale](double x) { return std::ldexp(x, scale); };
    const double even = at(0x1p53);  // spacing 2, last digit even
    const double odd = at(0x1p53 + 2);
    const double all_ones = at(0x1p54 - 2);  // rounds into the next binade
    const double half = at(1);
    EXPECT_EQ(SumOf({even, half}).Total(), even);
    EXPECT_EQ(SumOf({odd, half}).Total(), at(0x1p53 + 4));
    EXPECT_EQ(SumOf({all_ones, half}).Total(), at(0x1p54));
    // One digit more, wherever it stands, and it is no tie.
    for (int place = scale - 1; place >= kLeast; --place) {
      const double more = std::ldexp(1, place);
      ASSERT_EQ(SumOf({even, half, more}).Total(), at(0x1p53 + 2)) << place;
      ASSERT_EQ(SumOf({even, more}).Total(), even) << place;
    }
  }
}

TEST(NormSumTest, SubnormalSquares) {
  const float least = std::numeric_limits<float>::denorm_min();
  ASSERT_EQ(Square(least), std::ldexp(1, kLeast));
  NormSum sum;
  for (int n = 1; n <= 1000; ++n) {
    sum.Add(Square(least));
    ASSERT_EQ(sum.Total(), std::ldexp(n, kLeast));
  }
  // Not lost beside the largest.
  NormSum with = sum;
  with.Add(Square(kMaxFloat));
  EXPECT_NE(with, SumOf({Square(kMaxFloat)}));
}

// `sum`, 2^doublings times.
NormSum Doubled(NormSum sum, int doublings) {
  for (int i = 0; i < doublings; ++i) sum.Merge(sum);
  return sum;
}

TEST(NormSumTest, Holds2To64OfTheLargestSquares) {
  const double largest = Square(kMaxFloat);
  for (int doublings = 0; doublings <= 64; ++doublings) {
    const NormSum sum = Doubled(SumOf({largest}), doublings);
    ASSERT_EQ(sum.Total(), std::ldexp(largest, doublings));
    ASSERT_TRUE(sum.finite());
  }
  // And every digit below.
  const std::vector<double> values = {largest, Square(1e-30f), Square(3e-45f)};
  EXPECT_EQ(Bits(Doubled(SumOf(values), 64).Total()),
            Bits(std::ldexp(ExactTotal(values), 64)));
}

TEST(NormSumTest, OrderAndCutsDoNotMatter) {
  Random random(3);
  std::vector<double> values(600);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = i % 2 == 0 ? AnySquare(random) : AnyLeafSum(random);
  }
  const NormSum expected = SumOf(values);
  for (int round = 0; round < 100; ++round) {
    std::shuffle(values.begin(), values.end(), random);
    std::vector<NormSum> parts(1 + random() % 20);
    for (double value : values) parts[random() % parts.size()].Add(value);
    // Merged in a random tree.
    while (parts.size() > 1) {
      const size_t into = random() % (parts.size() - 1);
      parts[into].Merge(parts.back());
      parts.pop_back();
    }
    ASSERT_EQ(parts[0], expected);
    ASSERT_EQ(Bits(parts[0].Total()), Bits(expected.Total()));
  }
}

TEST(NormSumTest, EqualityIsOfTheSums) {
  EXPECT_EQ(SumOf({1, 2}), SumOf({3}));
  EXPECT_EQ(Doubled(SumOf({1}), 40), SumOf({0x1p40}));  // carried or not
  EXPECT_NE(SumOf({1, std::ldexp(1, kLeast)}), SumOf({1}));
  EXPECT_NE(SumOf({1, kInfinity}), SumOf({1}));
  EXPECT_NE(SumOf({1, kInfinity}), SumOf({1, kNaN}));
}

TEST(NormSumTest, InfinityAndNaNStay) {
  for (bool merged : {false, true}) {
    auto sum_of = [merged](double a, double b) {
      if (!merged) return SumOf({a, 1, b});
      NormSum sum = SumOf({a, 1});
      sum.Merge(SumOf({b}));
      return sum;
    };
    EXPECT_EQ(sum_of(2, kInfinity).Total(), kInfinity);
    EXPECT_EQ(sum_of(kInfinity, 2).Total(), kInfinity);
    EXPECT_TRUE(std::isnan(sum_of(2, kNaN).Total()));
    EXPECT_TRUE(std::isnan(sum_of(kNaN, kInfinity).Total()));
    EXPECT_TRUE(std::isnan(sum_of(kInfinity, -kNaN).Total()));
    EXPECT_FALSE(sum_of(2, kInfinity).finite());
    EXPECT_FALSE(sum_of(kNaN, 2).finite());
    EXPECT_TRUE(sum_of(2, 2).finite());
  }
}

TEST(NormSumTest, ValuesOutsideTheRangeCountAsInfinite) {
  for (double outside :
       {-1.0, -std::ldexp(1, kLeast), std::ldexp(1, 289), 0x1p331, 0x1p1000,
        std::ldexp(1, kLeast - 1), std::ldexp(3, kLeast - 1),
        std::numeric_limits<double>::denorm_min()}) {
    EXPECT_EQ(SumOf({1, outside}).Total(), kInfinity) << outside;
    EXPECT_FALSE(SumOf({outside}).finite()) << outside;
  }
  const double last = std::nextafter(0x1p289, 0.0);
  EXPECT_EQ(SumOf({last}).Total(), last);
}

// Enough additions of all-ones digits that limbs are carried on the way.
TEST(NormSumTest, ManyAdditions) {
  constexpr int kDoublings = 24;
  const double x = std::ldexp(0x1p53 - 1, -30);
  NormSum sum;
  Exact expected;
  for (int i = 0; i < 3; ++i) {
    sum.Add(x);
    expected.Add(x);
  }
  for (int64_t i = 0; i < int64_t{1} << kDoublings; ++i) sum.Add(x);
  expected.Add(std::ldexp(x, kDoublings));
  EXPECT_EQ(Bits(sum.Total()), Bits(expected.Total()));
  NormSum merged = Doubled(SumOf({x}), kDoublings);
  for (int i = 0; i < 3; ++i) merged.Add(x);
  EXPECT_EQ(sum, merged);
}

}  // namespace
}  // namespace onepass

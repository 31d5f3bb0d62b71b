#include "tests/pairwise.h"

#include <cstddef>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace onepass {
namespace {

using Rows = std::vector<std::vector<size_t>>;

size_t Sum(const std::vector<size_t>& sizes) {
  size_t sum = 0;
  for (const size_t size : sizes) sum += size;
  return sum;
}

TEST(PairwiseTest, HasEachPairInFewRows) {
  for (const std::vector<size_t>& sizes : {std::vector<size_t>{3},
                                           {2, 2},
                                           {1, 4},
                                           {3, 4, 5},
                                           {2, 2, 2, 2, 2, 2},
                                           {3, 1, 7, 2, 4, 4, 2}}) {
    const Rows rows = Pairwise(sizes);
    size_t all = 1;
    for (const size_t size : sizes) all *= size;
    EXPECT_LE(rows.size(), all);
    EXPECT_LE(rows.size(), 50);
    EXPECT_EQ(ValuesOf(rows).size(), Sum(sizes));
    for (size_t a = 0; a < sizes.size(); ++a) {
      for (size_t b = a + 1; b < sizes.size(); ++b) {
        std::set<std::vector<size_t>> pairs;
        for (const std::vector<size_t>& row : rows) {
          ASSERT_EQ(row.size(), sizes.size());
          EXPECT_LT(row[a], sizes[a]);
          pairs.insert({row[a], row[b]});
        }
        EXPECT_EQ(pairs.size(), sizes[a] * sizes[b]);
      }
    }
    const Rows few = EachValueOnce(rows);
    EXPECT_LE(few.size(), rows.size());
    EXPECT_EQ(ValuesOf(few).size(), Sum(sizes));
  }
}

}  // namespace
}  // namespace onepass

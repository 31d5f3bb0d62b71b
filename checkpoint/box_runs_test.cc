#include "checkpoint/box_runs.h"

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

using Shape = std::vector<int64_t>;

// Where each element of a box lies in it, by its index in the whole tensor.
std::map<int64_t, int64_t> Positions(const Shape& shape, const Box& box) {
  std::map<int64_t, int64_t> positions;
  const int64_t numel = box.numel();
  for (int64_t i = 0; i < numel; ++i) {
    int64_t index = 0;
    if (box.extent.size() == shape.size()) {
      int64_t stride = 1;
      int64_t rest = i;
      for (size_t d = shape.size(); d-- > 0;) {
        index += (box.offset[d] + rest % box.extent[d]) * stride;
        rest /= box.extent[d];
        stride *= shape[d];
      }
    } else {
      index = box.offset[0] + i;
    }
    positions[index] = i;
  }
  return positions;
}

struct CommonRun {
  int64_t i;
  int64_t j;
  int64_t n;
};

std::vector<CommonRun> Runs(const Shape& shape, const Box& a, const Box& b) {
  std::vector<CommonRun> runs;
  const absl::Status status = ForEachCommonRun(
      shape, a, b, [&](int64_t i, int64_t j, int64_t n) -> absl::Status {
        runs.push_back({i, j, n});
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return runs;
}

TEST(BoxRunsTest, AreWhatTheBoxesHaveInCommon) {
  std::mt19937 random(1);
  const auto below = [&](int64_t end) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
  };
  int mixed = 0;
  for (int round = 0; round < 3000; ++round) {
    Shape shape(below(4) + 1);
    int64_t numel = 1;
    for (int64_t& size : shape) numel *= size = below(5) + 1;
    const auto box = [&] {
      Box box;
      if (below(3) == 0) {
        const int64_t begin = below(numel + 1);
        return Box{{begin}, {below(numel - begin + 1)}};
      }
      for (const int64_t size : shape) {
        // Often all of a dimension.
        const int64_t begin = below(2) == 0 ? 0 : below(size + 1);
        box.offset.push_back(begin);
        box.extent.push_back(below(2) == 0 ? size - begin
                                           : below(size - begin + 1));
      }
      return box;
    };
    const Box a = box();
    const Box b = box();
    mixed += (a.extent.size() == 1) != (b.extent.size() == 1) ? 1 : 0;

    std::map<int64_t, int64_t> expected;  // of positions in `a`, those in `b`
    const std::map<int64_t, int64_t> in_b = Positions(shape, b);
    for (const auto& [index, i] : Positions(shape, a)) {
      const auto j = in_b.find(index);
      if (j != in_b.end()) expected[i] = j->second;
    }
    std::map<int64_t, int64_t> found;
    CommonRun last = {-1, -1, 1};
    for (const CommonRun& run : Runs(shape, a, b)) {
      ASSERT_GE(run.i, last.i + last.n);
      ASSERT_GE(run.j, last.j + last.n);
      ASSERT_GE(run.n, 1);
      last = run;
      for (int64_t k = 0; k < run.n; ++k) found[run.i + k] = run.j + k;
    }
    ASSERT_EQ(found, expected) << "round " << round;
  }
  EXPECT_GT(mixed, 500);
}

TEST(BoxRunsTest, AreAsLongAsTheyCanBe) {
  // The last two dimensions are whole.
  const Shape shape = {4, 3, 5, 7};
  const Box a = {{1, 1, 0, 0}, {2, 2, 5, 7}};
  const std::vector<CommonRun> runs = Runs(shape, a, {{0}, {4 * 3 * 5 * 7}});
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].n, 70);
  EXPECT_EQ(runs[1].j, (2 * 3 + 1) * 35);
}

// By looking at each row this would not end.
TEST(BoxRunsTest, RowsThatAreNotCommonCostNothing) {
  const int64_t rows = int64_t{1} << 40;
  const Shape shape = {rows, 4};
  const Box columns = {{0, 1}, {rows, 2}};
  const int64_t middle = rows / 2;
  const std::vector<CommonRun> runs =
      Runs(shape, {{4 * middle + 2}, {4}}, columns);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].i, 0);
  EXPECT_EQ(runs[0].j, 2 * middle + 1);
  EXPECT_EQ(runs[0].n, 1);
  EXPECT_EQ(runs[1].i, 3);
  EXPECT_EQ(runs[1].j, 2 * middle + 2);
  EXPECT_EQ(runs[1].n, 1);
}

TEST(BoxRunsTest, AnErrorEndsThem) {
  int calls = 0;
  const absl::Status status =
      ForEachCommonRun({3, 2}, {{0, 0}, {3, 1}}, {{0, 0}, {3, 1}},
                       [&](int64_t, int64_t, int64_t) -> absl::Status {
                         ++calls;
                         return absl::CancelledError("enough");
                       });
  EXPECT_TRUE(absl::IsCancelled(status));
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace onepass

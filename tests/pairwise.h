// Many options at once: each value of one with each value of another, in far
// fewer cases than all of them together are.
//
//   const std::vector<Axis<Config>> axes = {
//       AxisOf<Config>("ratio", {0.0, 0.5, 1.0},
//                      [](Config& config, double ratio) { ... })};
//   for (const std::vector<size_t>& row : Pairwise(axes)) {
//     Config config;
//     const std::string name = SetRow(axes, row, config);

#ifndef ONEPASS_TESTS_PAIRWISE_H_
#define ONEPASS_TESTS_PAIRWISE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"

namespace onepass {

// What an option may be, in words and in a config.
template <typename Config>
struct Choice {
  std::string name;
  std::function<void(Config&)> set;
};
template <typename Config>
using Axis = std::vector<Choice<Config>>;

// Values are numbers, or enumerators that have a Name().
template <typename Config, typename T, typename Set>
Axis<Config> AxisOf(const char* name, std::initializer_list<T> values,
                    const Set& set) {
  Axis<Config> axis;
  for (const T value : values) {
    std::string text;
    if constexpr (std::is_enum_v<T>) {
      text = Name(value);
    } else {
      text = absl::StrCat(value);
    }
    axis.push_back({absl::StrCat(name, " ", text),
                    [set, value](Config& config) { set(config, value); }});
  }
  return axis;
}

// Rows of one index an axis, of which none is empty, so that each pair of
// values of two axes is in one of them: greedily, each row from a pair that is
// left.
inline std::vector<std::vector<size_t>> Pairwise(
    const std::vector<size_t>& sizes) {
  using Pair = std::array<size_t, 4>;  // axis, value, axis after it, value
  std::set<Pair> left;
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = a + 1; b < sizes.size(); ++b) {
      for (size_t i = 0; i < sizes[a]; ++i) {
        for (size_t j = 0; j < sizes[b]; ++j) left.insert({a, i, b, j});
      }
    }
  }
  constexpr size_t kUnset = std::numeric_limits<size_t>::max();
  std::vector<std::vector<size_t>> rows;
  // One has no pairs.
  for (size_t i = 0; sizes.size() == 1 && i < sizes[0]; ++i)
    rows.push_back({i});
  while (!left.empty()) {
    const Pair first = *left.begin();
    std::vector<size_t> row(sizes.size(), kUnset);
    row[first[0]] = first[1];
    row[first[2]] = first[3];
    const auto pair = [&row](size_t a, size_t i, size_t b) {
      return a < b ? Pair{a, i, b, row[b]} : Pair{b, row[b], a, i};
    };
    for (size_t a = 0; a < sizes.size(); ++a) {
      if (row[a] != kUnset) continue;
      size_t best = 0;
      size_t most = 0;
      for (size_t i = 0; i < sizes[a]; ++i) {
        // Begins at another one in each row, for where all are as good.
        const size_t value = (i + rows.size()) % sizes[a];
        size_t covers = 1;
        for (size_t b = 0; b < sizes.size(); ++b) {
          covers += b != a && row[b] != kUnset && left.count(pair(a, value, b));
        }
        if (covers > most) {
          most = covers;
          best = value;
        }
      }
      row[a] = best;
    }
    for (size_t a = 0; a < sizes.size(); ++a) {
      for (size_t b = a + 1; b < sizes.size(); ++b) {
        left.erase({a, row[a], b, row[b]});
      }
    }
    rows.push_back(row);
  }
  return rows;
}

template <typename Config>
std::vector<std::vector<size_t>> Pairwise(
    const std::vector<Axis<Config>>& axes) {
  std::vector<size_t> sizes;
  for (const Axis<Config>& axis : axes) sizes.push_back(axis.size());
  return Pairwise(sizes);
}

using AxisValue = std::array<size_t, 2>;  // axis, value

inline std::set<AxisValue> ValuesOf(
    const std::vector<std::vector<size_t>>& rows) {
  std::set<AxisValue> values;
  for (const std::vector<size_t>& row : rows) {
    for (size_t axis = 0; axis < row.size(); ++axis) {
      values.insert({axis, row[axis]});
    }
  }
  return values;
}

// Some of the rows, so that each value that is in all is in one of them:
// greedily, the one with most of those that are left.
inline std::vector<std::vector<size_t>> EachValueOnce(
    const std::vector<std::vector<size_t>>& rows) {
  std::set<AxisValue> left = ValuesOf(rows);
  const auto gain = [&left](const std::vector<size_t>& row) {
    size_t covers = 0;
    for (const AxisValue& value : ValuesOf({row})) covers += left.count(value);
    return covers;
  };
  std::vector<std::vector<size_t>> chosen;
  while (!left.empty()) {
    chosen.push_back(*std::max_element(
        rows.begin(), rows.end(),
        [&](const auto& a, const auto& b) { return gain(a) < gain(b); }));
    for (const AxisValue& value : ValuesOf({chosen.back()})) left.erase(value);
  }
  return chosen;
}

// Sets the choices of a row, in the order of the axes. Returns their names.
template <typename Config>
std::string SetRow(const std::vector<Axis<Config>>& axes,
                   const std::vector<size_t>& row, Config& config) {
  std::string names;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const Choice<Config>& choice = axes[axis][row[axis]];
    choice.set(config);
    absl::StrAppend(&names, axis == 0 ? "" : ", ", choice.name);
  }
  return names;
}

}  // namespace onepass

#endif  // ONEPASS_TESTS_PAIRWISE_H_

#include "tools/bench_report.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"

namespace onepass {
namespace {

constexpr size_t kLineWidth = 100;
constexpr size_t kLongestBar = 40;
constexpr double kClippedMedians = 5;

bool HasBar(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

std::string FormatBytes(int64_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / (1 << 20);
  return mebibytes < 1024 ? absl::StrFormat("%.1f MiB", mebibytes)
                          : absl::StrFormat("%.1f GiB", mebibytes / 1024);
}

nlohmann::ordered_json SpreadJson(const Spread& spread) {
  return {{"median", spread.median}, {"p10", spread.p10}, {"p90", spread.p90}};
}

void BarChart::Add(std::string text, double value, absl::string_view note) {
  lines_.push_back({std::move(text), value, std::string(note)});
}

void BarChart::Print(std::ostream& out) const {
  size_t longest = 0;
  std::vector<double> values;
  for (const Line& line : lines_) {
    longest = std::max(longest, line.text.size());
    if (HasBar(line.value)) values.push_back(line.value);
  }
  const double most = kClippedMedians * SpreadOf(values).median;
  double largest = 0;  // that is not clipped
  for (const double value : values) {
    if (value <= most) largest = std::max(largest, value);
  }
  const size_t left = longest + 2 < kLineWidth ? kLineWidth - longest - 2 : 0;
  const size_t width = std::min(left, kLongestBar);
  for (const Line& line : lines_) {
    std::string bar;
    if (HasBar(line.value) && width > 0) {
      if (line.value > most) {
        bar = std::string(width - 1, '#') + '>';
      } else {
        const double length = line.value / largest * static_cast<double>(width);
        bar = std::string(static_cast<size_t>(length + 0.5), '#');
      }
    }
    const std::string text =
        absl::StrFormat("%-*s  %s", static_cast<int>(longest), line.text, bar);
    out << absl::StripTrailingAsciiWhitespace(text) << "\n";
    if (!line.note.empty()) out << "    " << line.note << "\n";
  }
}

}  // namespace onepass

// How the subcommands of `onepass bench` say what they measured: bars, spreads
// in JSON, bytes.
//
//   BarChart chart;
//   chart.Add("fused  21.3 GB/s", 21.3);
//   chart.Add("apart  13.1 GB/s", 13.1, "a pass for each operation");
//   chart.Print(out);

#ifndef ONEPASS_TOOLS_BENCH_REPORT_H_
#define ONEPASS_TOOLS_BENCH_REPORT_H_

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "tools/bench/measure.h"

namespace onepass {

// "64.0 MiB", from 1024 MiB on "1.0 GiB".
std::string FormatBytes(int64_t bytes);

// {"median": 1.1, "p10": 1.0, "p90": 1.2}
nlohmann::ordered_json SpreadJson(const Spread& spread);

// Lines of text, each with a bar behind it, as long as its value: the largest
// fills what the longest text leaves of a line of 100, up to 40 signs. What is
// more than 5 times the median of all values is clipped, so that others stay
// readable: its bar is as long as a line has room for and ends in ">". Values
// that are not finite, or not above 0, have no bar.
class BarChart {
 public:
  // `note`, where it is not empty, stands below.
  void Add(std::string text, double value, absl::string_view note = "");

  void Print(std::ostream& out) const;

 private:
  struct Line {
    std::string text;
    double value;
    std::string note;
  };

  std::vector<Line> lines_;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_REPORT_H_

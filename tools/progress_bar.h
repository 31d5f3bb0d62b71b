// How far long work is, on a terminal.
//
//   ProgressBar bar(err);
//   options.progress = [&](int64_t done, int64_t all) {
//     bar.Update(done, all);
//   };
//
// Work of less than a second shows none; what is shown is gone when the bar
// goes.

#ifndef ONEPASS_TOOLS_PROGRESS_BAR_H_
#define ONEPASS_TOOLS_PROGRESS_BAR_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

namespace onepass {

class ProgressBar {
 public:
  // Seconds since any time.
  using Clock = std::function<double()>;

  // On `err`, if that is the standard error and a terminal. Null: a clock of
  // the system.
  explicit ProgressBar(std::ostream& err, Clock clock = nullptr);
  // On `out` in any case, but null.
  ProgressBar(std::ostream* out, Clock clock);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // `done` of `all` bytes.
  void Update(int64_t done, int64_t all);

 private:
  std::ostream* const out_;
  const Clock clock_;
  const double begin_;
  double drawn_ = 0;   // when
  std::string shown_;  // the line that is there
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_PROGRESS_BAR_H_

#include "tools/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <utility>

#include "absl/strings/str_format.h"

namespace onepass {
namespace {

constexpr double kSecondsBefore = 1;
constexpr double kSecondsBetween = 0.1;
constexpr int kWidth = 40;
constexpr double kMiB = 1 << 20;

double SteadySeconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::ostream* IfTerminal(std::ostream& err) {
  return &err == &std::cerr && isatty(STDERR_FILENO) == 1 ? &err : nullptr;
}

}  // namespace

ProgressBar::ProgressBar(std::ostream& err, Clock clock)
    : ProgressBar(IfTerminal(err), clock ? std::move(clock) : SteadySeconds) {}

ProgressBar::ProgressBar(std::ostream* out, Clock clock)
    : out_(out), clock_(std::move(clock)), begin_(clock_()) {}

ProgressBar::~ProgressBar() {
  if (shown_.empty()) return;
  *out_ << '\r' << std::string(shown_.size(), ' ') << '\r' << std::flush;
}

void ProgressBar::Update(int64_t done, int64_t all) {
  if (out_ == nullptr || all <= 0) return;
  const double now = clock_();
  if (now - begin_ < kSecondsBefore) return;
  if (!shown_.empty() && now - drawn_ < kSecondsBetween) return;
  drawn_ = now;
  const double part =
      std::clamp(static_cast<double>(done) / static_cast<double>(all), 0., 1.);
  const int filled = static_cast<int>(part * kWidth);
  const std::string line = absl::StrFormat(
      "[%s%s] %3d%% of %.0f MiB", std::string(filled, '#'),
      std::string(kWidth - filled, ' '), static_cast<int>(part * 100),
      static_cast<double>(all) / kMiB);
  // Sizes stay, so that no line is shorter than the one before.
  *out_ << '\r' << line << std::flush;
  shown_ = line;
}

}  // namespace onepass

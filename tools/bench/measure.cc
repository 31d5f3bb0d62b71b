#include "tools/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace onepass {
namespace {

absl::Status NameError(const Variant& variant, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(variant.name, ": ", status.message()));
}

// The seconds that a run takes.
absl::StatusOr<double> Measure(const Variant& variant,
                               absl::FunctionRef<double()> now) {
  if (variant.prepare != nullptr) variant.prepare();
  const double begin = now();
  const absl::Status run = variant.run();
  const double end = now();
  if (!run.ok()) return NameError(variant, run);
  return end - begin;
}

// `sorted` is not empty.
double Quantile(const std::vector<double>& sorted, double q) {
  const double place = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double part = place - static_cast<double>(below);
  // Infinities of one sign have no line between them.
  if (part == 0 || sorted[below] == sorted[above]) return sorted[below];
  return sorted[below] + part * (sorted[above] - sorted[below]);
}

}  // namespace

double MonotonicSeconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

absl::StatusOr<Timings> MeasureInterleaved(const std::vector<Variant>& variants,
                                           int64_t rounds) {
  return MeasureInterleaved(variants, rounds, MonotonicSeconds);
}

absl::StatusOr<Timings> MeasureInterleaved(const std::vector<Variant>& variants,
                                           int64_t rounds,
                                           absl::FunctionRef<double()> now) {
  if (variants.empty()) {
    return absl::InvalidArgumentError("no variants to measure");
  }
  for (const Variant& variant : variants) {
    if (variant.run == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(variant.name, ": run is null"));
    }
  }
  if (rounds < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("rounds is ", rounds, ", expected at least 1"));
  }
  for (const Variant& variant : variants) {
    const absl::StatusOr<double> warm_up = Measure(variant, now);
    if (!warm_up.ok()) return warm_up.status();
  }
  Timings seconds(variants.size());
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < variants.size(); ++i) {
      const size_t first = static_cast<size_t>(round) % variants.size();
      const size_t step = round % 2 == 0 ? i : variants.size() - i;
      const size_t which = (first + step) % variants.size();
      const absl::StatusOr<double> taken = Measure(variants[which], now);
      if (!taken.ok()) return taken.status();
      seconds[which].push_back(*taken);
    }
  }
  return seconds;
}

Spread SpreadOf(std::vector<double> values) {
  if (values.empty()) {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    return {kNone, kNone, kNone};
  }
  std::sort(values.begin(), values.end(), [](double a, double b) {
    return std::isnan(b) ? !std::isnan(a) : a < b;
  });
  return {Quantile(values, 0.5), Quantile(values, 0.1), Quantile(values, 0.9)};
}

Spread RatioOf(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios(std::min(a.size(), b.size()));
  for (size_t i = 0; i < ratios.size(); ++i) ratios[i] = a[i] / b[i];
  return SpreadOf(std::move(ratios));
}

}  // namespace onepass

#include "checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "checkpoint/meta.h"
#include "checkpoint/output_file.h"
#include "checkpoint/read_range.h"
#include "checkpoint/safetensors.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"
#include "dispatch/state.h"

namespace onepass {
namespace {

using Tensor = Checkpoint::Tensor;

std::string TypeText(const Tensor& tensor) {
  if (tensor.scales) return absl::StrCat(Name(tensor.type), " scales");
  return absl::StrCat(Name(tensor.state_type), " as ", Name(tensor.type),
                      tensor.exact ? "" : ", unscaled");
}

std::string ShapeText(const Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]");
}

bool SameType(const Tensor& a, const Tensor& b) {
  return a.type == b.type && a.scales == b.scales && a.exact == b.exact &&
         (a.scales || a.state_type == b.state_type);
}

// --- Elements ---

template <typename T>
T Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

double HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(fraction + 1024, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

double ValueAt(SafetensorsType type, const char* from) {
  switch (type) {
    case SafetensorsType::kF32:
      return Load<float>(from);
    case SafetensorsType::kF16:
      return HalfValue(Load<uint16_t>(from));
    case SafetensorsType::kBF16: {
      const uint32_t bits = uint32_t{Load<uint16_t>(from)} << 16;
      return Load<float>(reinterpret_cast<const char*>(&bits));
    }
    case SafetensorsType::kI16:
      return Load<int16_t>(from);
    default:  // a checkpoint has no others
      return Load<uint8_t>(from);
  }
}

// Adds elements [first, first + n) to what is known of a tensor.
void CompareElements(SafetensorsType type, int64_t first, int64_t n,
                     const char* a, const char* b, TensorDifference& found) {
  const int64_t element = ByteSize(type);
  if (std::memcmp(a, b, static_cast<size_t>(n * element)) == 0) return;
  for (int64_t i = 0; i < n; ++i, a += element, b += element) {
    if (std::memcmp(a, b, static_cast<size_t>(element)) == 0) continue;
    if (found.differing++ == 0) found.first = first + i;
    const double x = ValueAt(type, a);
    const double y = ValueAt(type, b);
    if (std::isnan(x) || std::isnan(y)) {
      ++found.nans;
    } else if (x != y) {  // no difference of infinities
      found.largest = std::max(found.largest, std::fabs(x - y));
    }
  }
}

// --- What is beside tensors ---

// The group of each parameter.
std::map<std::string, int> GroupOfParameter(
    const std::vector<StateGroup>& groups) {
  std::map<std::string, int> group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& name : groups[g].parameters) {
      group_of[name] = static_cast<int>(g);
    }
  }
  return group_of;
}

class MetaComparison {
 public:
  explicit MetaComparison(std::vector<std::string>& others) : others_(others) {}

  template <typename T>
  void Expect(absl::string_view what, const T& a, const T& b) {
    if (a == b) return;
    others_.push_back(absl::StrCat(what, " is ", a, " and ", b));
  }

  void Groups(const std::vector<StateGroup>& a,
              const std::vector<StateGroup>& b) {
    Expect("the number of groups", a.size(), b.size());
    const std::map<std::string, int> in_a = GroupOfParameter(a);
    const std::map<std::string, int> in_b = GroupOfParameter(b);
    std::set<std::pair<int, int>> pairs;
    for (const auto& [name, g] : in_a) {
      const auto other = in_b.find(name);
      if (other == in_b.end()) {
        Missing(name, "B");
      } else {
        pairs.emplace(g, other->second);
      }
    }
    for (const auto& [name, g] : in_b) {
      if (in_a.count(name) == 0) Missing(name, "A");
    }
    // Of groups without parameters nothing tells which it is but the place.
    for (size_t g = 0; g < std::min(a.size(), b.size()); ++g) {
      if (a[g].parameters.empty() && b[g].parameters.empty()) {
        pairs.emplace(static_cast<int>(g), static_cast<int>(g));
      }
    }
    std::map<int, int> partner_of_a;
    std::map<int, int> partner_of_b;
    for (const auto& [g, h] : pairs) {
      Partner("A", "B", g, h, partner_of_a);
      Partner("B", "A", h, g, partner_of_b);
      Options(g, a[g], b[h]);
    }
  }

 private:
  void Missing(absl::string_view parameter, absl::string_view side) {
    others_.push_back(
        absl::StrCat("parameter \"", parameter, "\" is in no group of ", side));
  }

  // That the parameters of a group are in one group of the other side.
  void Partner(absl::string_view side, absl::string_view other_side, int group,
               int other, std::map<int, int>& partner_of) {
    const auto [known, added] = partner_of.emplace(group, other);
    if (added) return;
    others_.push_back(absl::StrCat("group ", group, " of ", side, " is in ",
                                   other_side, " groups ", known->second,
                                   " and ", other));
  }

  void Options(int number, const StateGroup& a, const StateGroup& b) {
    const auto option = [&](absl::string_view name, auto x, auto y) {
      Expect(absl::StrCat(name, " of group ", number), x, y);
    };
    // With the digits that tell fp32 values apart.
    const auto digits = [&](absl::string_view name, float x, float y) {
      option(name, absl::StrFormat("%.9g", x), absl::StrFormat("%.9g", y));
    };
    option("the step", a.step, b.step);
    digits("lr", a.lr, b.lr);
    digits("beta1", a.beta1, b.beta1);
    digits("beta2", a.beta2, b.beta2);
    digits("eps", a.eps, b.eps);
    digits("weight_decay", a.weight_decay, b.weight_decay);
    const auto mode = [](WeightDecay decay) -> absl::string_view {
      return decay == WeightDecay::kL2 ? "L2" : "AdamW";
    };
    option("the mode", mode(a.mode), mode(b.mode));
    option("bias_correction", a.bias_correction, b.bias_correction);
  }

  std::vector<std::string>& others_;
};

void CompareMeta(const Checkpoint& a, const Checkpoint& b,
                 std::vector<std::string>& others) {
  const CheckpointMeta x = a.meta();
  const CheckpointMeta y = b.meta();
  MetaComparison comparison(others);
  comparison.Expect("the step", x.step, y.step);
  comparison.Expect("the leaf", a.manifest().leaf(), b.manifest().leaf());
  comparison.Groups(x.groups, y.groups);
  if (x.loss_scale.has_value() != y.loss_scale.has_value()) {
    others.push_back(absl::StrCat(
        "a loss scale is in ", x.loss_scale.has_value() ? "A" : "B", " alone"));
  } else if (x.loss_scale.has_value()) {
    comparison.Expect("the loss scale", x.loss_scale->scale,
                      y.loss_scale->scale);
    comparison.Expect("hysteresis_left of the loss scale",
                      x.loss_scale->hysteresis_left,
                      y.loss_scale->hysteresis_left);
    comparison.Expect("clean_steps of the loss scale",
                      x.loss_scale->clean_steps, y.loss_scale->clean_steps);
  }
  if (x.user != y.user) {
    others.push_back(absl::StrCat("the user bytes differ, of which there are ",
                                  x.user.size(), " and ", y.user.size()));
  }
}

// Steps of tensors, which are those of groups when the state was taken.
void CompareSteps(const Checkpoint& a, const Checkpoint& b,
                  std::vector<std::string>& others) {
  int64_t count = 0;
  std::string first;
  for (const auto& [name, tensor] : a.tensors()) {
    const auto other = b.tensors().find(name);
    if (other == b.tensors().end() || tensor.step == other->second.step) {
      continue;
    }
    if (count++ > 0) continue;
    first = absl::StrCat("\"", name, "\", is ", tensor.step, " and ",
                         other->second.step);
  }
  if (count == 0) return;
  others.push_back(absl::StrCat(
      "the step of ", count, " tensors differs; that of the first, ", first));
}

}  // namespace

const char* Name(TensorDifference::Kind kind) {
  switch (kind) {
    case TensorDifference::Kind::kOnlyInA:
      return "only_in_a";
    case TensorDifference::Kind::kOnlyInB:
      return "only_in_b";
    case TensorDifference::Kind::kType:
      return "type";
    case TensorDifference::Kind::kShape:
      return "shape";
    case TensorDifference::Kind::kElements:
      return "elements";
  }
  return "unknown";
}

absl::StatusOr<CompareReport> CompareCheckpoints(
    Checkpoint& a, Checkpoint& b, const CompareOptions& options) {
  if (options.buffer_bytes < 3 * kOutputAlignment) {
    return absl::InvalidArgumentError(
        absl::StrCat("buffer_bytes is ", options.buffer_bytes,
                     ", expected at least ", 3 * kOutputAlignment));
  }
  // A range of each side, and what chunks are read through.
  const int64_t part =
      options.buffer_bytes / 3 / kOutputAlignment * kOutputAlignment;
  std::vector<char> memory(static_cast<size_t>(3 * part));
  char* const from_a = memory.data();
  char* const from_b = from_a + part;
  const absl::Span<char> buffer(from_b + part, static_cast<size_t>(part));

  CompareReport report;
  CompareMeta(a, b, report.others);
  CompareSteps(a, b, report.others);
  std::vector<std::pair<const Tensor*, const Tensor*>> pairs;
  int64_t all = 0;
  const auto add = [&](const std::string& name, TensorDifference::Kind kind,
                       std::string what) {
    TensorDifference& found = report.tensors.emplace_back();
    found.name = name;
    found.kind = kind;
    found.what = std::move(what);
  };
  for (const auto& [name, x] : a.tensors()) {
    const auto other = b.tensors().find(name);
    if (other == b.tensors().end()) {
      add(name, TensorDifference::Kind::kOnlyInA, "");
      continue;
    }
    const Tensor& y = other->second;
    if (!SameType(x, y)) {
      add(name, TensorDifference::Kind::kType,
          absl::StrCat(TypeText(x), " and ", TypeText(y)));
    } else if (x.shape != y.shape) {
      add(name, TensorDifference::Kind::kShape,
          absl::StrCat(ShapeText(x), " and ", ShapeText(y)));
    } else {
      pairs.emplace_back(&x, &y);
      all += x.bytes();
    }
  }
  for (const auto& item : b.tensors()) {
    if (a.tensors().count(item.first) > 0) continue;
    add(item.first, TensorDifference::Kind::kOnlyInB, "");
  }

  int64_t done = 0;
  for (const auto& [x, y] : pairs) {
    TensorDifference found;
    found.name = x->name;
    found.numel = x->numel();
    found.codes = x->type == SafetensorsType::kI16 ||
                  (x->exact && !x->scales && IsScaled(x->state_type));
    const int64_t most = part / ByteSize(x->type);
    for (int64_t first = 0; first < found.numel; first += most) {
      const int64_t n = std::min(most, found.numel - first);
      ONEPASS_RETURN_IF_ERROR(ReadRange(a, *x, first, n, buffer, from_a));
      ONEPASS_RETURN_IF_ERROR(ReadRange(b, *y, first, n, buffer, from_b));
      CompareElements(x->type, first, n, from_a, from_b, found);
      done += n * ByteSize(x->type);
      if (options.progress) options.progress(done, all);
    }
    ++report.tensors_compared;
    if (found.differing > 0) report.tensors.push_back(std::move(found));
  }
  std::sort(report.tensors.begin(), report.tensors.end(),
            [](const TensorDifference& p, const TensorDifference& q) {
              return p.name < q.name;
            });
  return report;
}

}  // namespace onepass

#include "checkpoint/layout.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "dispatch/kernel.h"

namespace onepass {

std::map<std::string, OptionValue> OptionsOf(const StateGroup& group) {
  const auto number = [](float value) {
    return OptionValue(static_cast<double>(value));
  };
  return {
      {"lr", number(group.lr)},
      {"beta1", number(group.beta1)},
      {"beta2", number(group.beta2)},
      {"eps", number(group.eps)},
      {"weight_decay", number(group.weight_decay)},
      {"mode", std::string(group.mode == WeightDecay::kL2 ? "l2" : "adamw")},
      {"bias_correction", group.bias_correction},
      {"step", group.step},
  };
}

absl::StatusOr<std::map<std::string, OptionValue>> FlatGroups(
    const std::vector<StateGroup>& groups) {
  std::map<std::string, OptionValue> flat;
  for (const StateGroup& group : groups) {
    for (const std::string& parameter : group.parameters) {
      for (const auto& [option, value] : OptionsOf(group)) {
        const std::string key =
            absl::StrCat("param_groups.", parameter, ".", option);
        if (!flat.emplace(key, value).second) {
          return absl::InvalidArgumentError(
              absl::StrCat("two options have the key \"", key, "\""));
        }
      }
    }
  }
  return flat;
}

absl::StatusOr<std::map<std::string, std::map<std::string, std::string>>>
NestNames(const std::vector<std::string>& names) {
  std::map<std::string, std::map<std::string, std::string>> nested;
  for (const std::string& name : names) {
    absl::string_view rest = name;
    const bool state = absl::ConsumePrefix(&rest, "state.");
    const bool scale = absl::ConsumeSuffix(&rest, ".scale");
    const size_t dot = rest.rfind('.');
    if (!state || dot == rest.npos || dot + 1 == rest.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", name,
                       "\" is no name of state, expected "
                       "\"state.<parameter>.<kind>\""));
    }
    const std::string kind =
        absl::StrCat(rest.substr(dot + 1), scale ? ".scale" : "");
    auto& kinds = nested[std::string(rest.substr(0, dot))];
    if (!kinds.emplace(kind, name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("there are two tensors \"", name, "\""));
    }
  }
  return nested;
}

}  // namespace onepass

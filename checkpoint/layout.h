// The two ways to present the names of tensors and groups, as PyTorch's
// optimizers do. Flat: one key a tensor, "state.<parameter>.<kind>", and one an
// option of a parameter, "param_groups.<parameter>.<option>". Nested: tensors
// by parameter, groups as a list.
//
//   ASSIGN_OR_RETURN(auto options, FlatGroups(meta.groups));
//   std::get<double>(options.at("param_groups.w.lr"));
//
//   ASSIGN_OR_RETURN(auto state, NestNames(names));
//   state.at("w").at("exp_avg");                 // "state.w.exp_avg"

#ifndef ONEPASS_CHECKPOINT_LAYOUT_H_
#define ONEPASS_CHECKPOINT_LAYOUT_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "dispatch/state.h"

namespace onepass {

using OptionValue = std::variant<double, int64_t, bool, std::string>;

// The options of a group by the names that PyTorch gives them, the step among
// them: "lr", "beta1", "beta2", "eps", "weight_decay", "mode" ("adamw", "l2"),
// "bias_correction", "step". Those of fp32 are doubles of the same value.
std::map<std::string, OptionValue> OptionsOf(const StateGroup& group);

// Those of all parameters by flat key. InvalidArgument: two keys are the same,
// as when a parameter is in two groups.
absl::StatusOr<std::map<std::string, OptionValue>> FlatGroups(
    const std::vector<StateGroup>& groups);

// Flat names of tensors, by parameter and kind; scales are of kind
// "<kind>.scale". InvalidArgument: a name that is none of a state tensor, or
// that two of them have in the nested layout.
absl::StatusOr<std::map<std::string, std::map<std::string, std::string>>>
NestNames(const std::vector<std::string>& names);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_LAYOUT_H_

// How checkpoints are named and printed by the subcommands that look at them.

#ifndef ONEPASS_TOOLS_CHECKPOINT_TEXT_H_
#define ONEPASS_TOOLS_CHECKPOINT_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace onepass {

// Names come from outside: without what a terminal would obey.
inline std::string Printable(absl::string_view name) {
  return absl::Utf8SafeCEscape(name);
}

// "[3, 4]".
inline std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// "1 tensor", "2 tensors".
inline std::string Count(int64_t n, absl::string_view what) {
  return absl::StrCat(n, " ", what, n == 1 ? "" : "s");
}

// In one line. Paths need not be UTF-8, which JSON has to be.
inline std::string JsonText(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false,
                   nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace onepass

#endif  // ONEPASS_TOOLS_CHECKPOINT_TEXT_H_

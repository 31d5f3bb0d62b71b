// Values as JSON, appended to a text: as fast as headers of a hundred thousand
// tensors want it.

#ifndef ONEPASS_CHECKPOINT_JSON_TEXT_H_
#define ONEPASS_CHECKPOINT_JSON_TEXT_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "nlohmann/json.hpp"

namespace onepass {

// `value` in quotes. False: it is no UTF-8, and nothing was appended.
inline bool AppendJsonString(absl::string_view value, std::string* text) {
  const bool plain = std::all_of(value.begin(), value.end(), [](char c) {
    return c >= ' ' && c < '\x7f' && c != '"' && c != '\\';
  });
  if (plain) {
    absl::StrAppend(text, "\"", value, "\"");
    return true;
  }
  try {
    absl::StrAppend(text, nlohmann::json(std::string(value)).dump());
  } catch (const nlohmann::json::exception&) {
    return false;
  }
  return true;
}

// "[3,4]".
inline void AppendJsonIntegers(absl::Span<const int64_t> values,
                               std::string* text) {
  absl::StrAppend(text, "[", absl::StrJoin(values, ","), "]");
}

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_JSON_TEXT_H_

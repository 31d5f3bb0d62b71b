#include "tools/data_position.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace onepass {
namespace {

// Longer ones are not shown whole.
constexpr size_t kMostShown = 100;

}  // namespace

std::string EncodeDataPosition(const DataPosition& position) {
  return absl::StrCat("onepass-train-data 1 seed ", position.seed,
                      " text_bytes ", position.text_bytes, " text_xxh3 ",
                      position.text_hash, " drawn ", position.drawn);
}

absl::StatusOr<DataPosition> DecodeDataPosition(absl::string_view text) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
  DataPosition position;
  // What is read has to be what would be written.
  if (words.size() == 10 && absl::SimpleAtoi(words[3], &position.seed) &&
      absl::SimpleAtoi(words[5], &position.text_bytes) &&
      absl::SimpleAtoi(words[7], &position.text_hash) &&
      absl::SimpleAtoi(words[9], &position.drawn) && position.seed >= 0 &&
      position.text_bytes >= 0 && position.drawn >= 0 &&
      EncodeDataPosition(position) == text) {
    return position;
  }
  return absl::DataLossError(absl::StrCat(
      "the data position is \"", absl::CHexEscape(text.substr(0, kMostShown)),
      "\", expected one of this version, as \"", EncodeDataPosition({}), "\""));
}

}  // namespace onepass

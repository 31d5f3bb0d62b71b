#include "tools/data_position.h"

#include <cmath>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace onepass {
namespace {

// Longer ones are not shown whole.
constexpr size_t kMostShown = 200;

bool ParsePrecision(absl::string_view name, DType* precision) {
  for (const DType type :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (name != Name(type)) continue;
    *precision = type;
    return true;
  }
  return false;
}

}  // namespace

std::string EncodeDataPosition(const DataPosition& position) {
  // So many digits give a double back.
  return absl::StrFormat(
      "onepass-train-data 2 seed %d text_bytes %d text_xxh3 %d drawn %d "
      "batch %d micro_batches %d clip %.17g precision %s",
      position.seed, position.text_bytes, position.text_hash, position.drawn,
      position.batch, position.micro_batches, position.clip,
      Name(position.precision));
}

absl::StatusOr<DataPosition> DecodeDataPosition(absl::string_view text) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
  DataPosition position;
  // What is read has to be what would be written.
  if (words.size() == 18 && absl::SimpleAtoi(words[3], &position.seed) &&
      absl::SimpleAtoi(words[5], &position.text_bytes) &&
      absl::SimpleAtoi(words[7], &position.text_hash) &&
      absl::SimpleAtoi(words[9], &position.drawn) &&
      absl::SimpleAtoi(words[11], &position.batch) &&
      absl::SimpleAtoi(words[13], &position.micro_batches) &&
      absl::SimpleAtod(words[15], &position.clip) &&
      ParsePrecision(words[17], &position.precision) && position.seed >= 0 &&
      position.text_bytes >= 0 && position.drawn >= 0 &&
      position.drawn <= kMostDrawn && position.batch >= 1 &&
      position.micro_batches >= 1 && position.clip >= 0 &&
      std::isfinite(position.clip) && EncodeDataPosition(position) == text) {
    return position;
  }
  return absl::DataLossError(absl::StrCat(
      "the data position is \"", absl::CHexEscape(text.substr(0, kMostShown)),
      "\", expected one of this version, as \"", EncodeDataPosition({}), "\""));
}

}  // namespace onepass

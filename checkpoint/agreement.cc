#include "checkpoint/agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

// The payload of errors that all ranks have.
constexpr absl::string_view kAgreed = "onepass.checkpoint/agreed";
// A status as a text: its code in one byte, then its message.
constexpr size_t kMostMessage = 2000;

}  // namespace

absl::StatusOr<std::vector<std::string>> Exchange(Communicator& communicator,
                                                  absl::string_view mine) {
  const int64_t size = static_cast<int64_t>(mine.size());
  std::vector<int64_t> sizes(communicator.size());
  ONEPASS_RETURN_IF_ERROR(
      communicator.AllGather(&size, sizes.data(), sizeof(size)));
  const int64_t most = *std::max_element(sizes.begin(), sizes.end());
  std::string padded(mine);
  padded.resize(most);
  std::string all(most * sizes.size(), '\0');
  ONEPASS_RETURN_IF_ERROR(communicator.AllGather(padded.data(), &all[0], most));
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    texts.push_back(all.substr(rank * most, sizes[rank]));
  }
  return texts;
}

absl::StatusOr<std::vector<std::string>> ExchangeOrFail(
    Communicator& communicator, const absl::StatusOr<std::string>& mine) {
  std::string text(1, static_cast<char>(mine.status().code()));
  absl::StrAppend(&text, mine.ok()
                             ? absl::string_view(*mine)
                             : mine.status().message().substr(0, kMostMessage));
  absl::StatusOr<std::vector<std::string>> exchanged =
      Exchange(communicator, text);
  if (!exchanged.ok() && !mine.ok()) {
    return absl::Status(mine.status().code(),
                        absl::StrCat(mine.status().message(),
                                     "; the other ranks could not be told: ",
                                     exchanged.status().message()));
  }
  ONEPASS_RETURN_IF_ERROR(exchanged.status());
  std::vector<std::string>& all = *exchanged;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto code = static_cast<absl::StatusCode>(all[rank][0]);
    all[rank].erase(0, 1);
    if (code == absl::StatusCode::kOk) continue;
    absl::Status error(code, absl::StrCat("rank ", rank, ": ", all[rank]));
    error.SetPayload(kAgreed, absl::Cord());
    return error;
  }
  return exchanged;
}

absl::Status Agree(Communicator& communicator, const absl::Status& mine) {
  const absl::StatusOr<std::string> text =
      mine.ok() ? absl::StatusOr<std::string>(std::string()) : mine;
  return ExchangeOrFail(communicator, text).status();
}

bool IsAgreed(const absl::Status& error) {
  return error.GetPayload(kAgreed).has_value();
}

}  // namespace onepass

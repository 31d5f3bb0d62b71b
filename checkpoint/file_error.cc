#include "checkpoint/file_error.h"

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace onepass {

absl::Status FileError(int error, absl::string_view call,
                       absl::string_view path) {
  if (error == 0) error = EIO;
  const absl::StatusCode code = error == EIO ? absl::StatusCode::kDataLoss
                                             : absl::ErrnoToStatusCode(error);
  return absl::Status(code,
                      absl::StrCat(path, ": ", call, ": ",
                                   std::generic_category().message(error)));
}

absl::Status FileError(int error, absl::string_view call,
                       absl::string_view path, int64_t offset) {
  return FileError(error, absl::StrCat(call, " at offset ", offset), path);
}

absl::Status AsDamage(const absl::Status& status) {
  if (absl::IsNotFound(status)) {
    return absl::DataLossError(
        absl::StrCat(status.message(), ": missing in the checkpoint"));
  }
  if (absl::IsInvalidArgument(status)) {
    return absl::DataLossError(status.message());
  }
  return status;
}

}  // namespace onepass

#include "tools/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_format.h"

namespace onepass {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The number in a file of one; none where there is no such file or number, as
// in "max".
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t number;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// The number behind `name` in a file of lines "name number"; what follows the
// number on its line is not looked at.
std::optional<int64_t> ReadNumberOf(const std::string& path,
                                    const std::string& name) {
  std::ifstream file(path);
  std::string of;
  int64_t number;
  while (file >> of >> number) {
    if (of == name) return number;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> AvailableBytesOfGroup(const std::string& folder) {
  const auto most = ReadNumber(folder + "/memory.max");
  const auto taken = ReadNumber(folder + "/memory.current");
  if (!most || !taken) return std::nullopt;
  const int64_t reclaimable =
      ReadNumberOf(folder + "/memory.stat", "inactive_file").value_or(0);
  // The files are read one after another: they may not agree.
  return std::max<int64_t>(*most - std::max<int64_t>(*taken - reclaimable, 0),
                           0);
}

int64_t AvailableBytes() {
  const int64_t available =
      AvailableBytesOfGroup("/sys/fs/cgroup").value_or(kNoLimit);
  const auto kibibytes = ReadNumberOf("/proc/meminfo", "MemAvailable:");
  return kibibytes ? std::min(available, *kibibytes * 1024) : available;
}

int64_t AvailableBytesOfProcess() {
  rlimit limit;
  const auto mapped_pages = ReadNumber("/proc/self/statm");
  if (!mapped_pages || getrlimit(RLIMIT_AS, &limit) != 0 ||
      limit.rlim_cur > static_cast<rlim_t>(kNoLimit)) {
    return kNoLimit;
  }
  const int64_t mapped = *mapped_pages * sysconf(_SC_PAGESIZE);
  return std::max<int64_t>(static_cast<int64_t>(limit.rlim_cur) - mapped, 0);
}

absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         int64_t of_process, absl::string_view advice) {
  const auto check = [&](int64_t bytes, int64_t available) -> absl::Status {
    if (bytes <= available) return absl::OkStatus();
    constexpr double kMebibyte = 1 << 20;
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s needs %.0f MiB of memory%s, %.0f MiB are available; %s", what,
        bytes / kMebibyte, bytes < needed ? " in each process" : "",
        available / kMebibyte, advice));
  };
  const absl::Status of_host = check(needed, AvailableBytes());
  return of_host.ok() ? check(of_process, AvailableBytesOfProcess()) : of_host;
}

absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         absl::string_view advice) {
  return CheckMemory(what, needed, needed, advice);
}

}  // namespace onepass

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

// The number in a file of one; none where there is no such file or number, as
// in "max".
std::optional<int64_t> ReadNumber(const char* path) {
  std::ifstream file(path);
  int64_t number;
  if (!(file >> number)) return std::nullopt;
  return number;
}

}  // namespace

int64_t AvailableBytes() {
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  int64_t available = kNoLimit;
  const auto most = ReadNumber("/sys/fs/cgroup/memory.max");
  const auto taken = ReadNumber("/sys/fs/cgroup/memory.current");
  if (most && taken) available = std::max<int64_t>(*most - *taken, 0);
  rlimit limit;
  const auto mapped_pages = ReadNumber("/proc/self/statm");
  if (mapped_pages && getrlimit(RLIMIT_AS, &limit) == 0 &&
      limit.rlim_cur <= static_cast<rlim_t>(kNoLimit)) {
    const int64_t mapped = *mapped_pages * sysconf(_SC_PAGESIZE);
    available = std::min(
        available,
        std::max<int64_t>(static_cast<int64_t>(limit.rlim_cur) - mapped, 0));
  }
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  int64_t kibibytes;
  while (meminfo >> name >> kibibytes) {
    if (name == "MemAvailable:") return std::min(available, kibibytes * 1024);
    meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return available;
}

absl::Status CheckMemory(absl::string_view what, int64_t needed,
                         absl::string_view advice) {
  const int64_t available = AvailableBytes();
  if (needed <= available) return absl::OkStatus();
  constexpr double kMebibyte = 1 << 20;
  return absl::ResourceExhaustedError(
      absl::StrFormat("%s needs %.0f MiB of memory, %.0f MiB are available; %s",
                      what, needed / kMebibyte, available / kMebibyte, advice));
}

}  // namespace onepass

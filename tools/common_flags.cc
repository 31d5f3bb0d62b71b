#include "tools/common_flags.h"

#include "absl/strings/str_cat.h"
#include "dispatch/thread_pool.h"

namespace onepass {

void AddThreadsFlag(Flags& flags, int64_t* threads, absl::string_view help) {
  flags.Add("threads", threads, "threads", help);
}

absl::Status CheckThreads(int64_t threads) {
  if (threads >= 0 && threads <= ThreadPool::kMaxThreads) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--threads is ", threads, ", expected 0 to ", ThreadPool::kMaxThreads));
}

void AddKernelFlag(Flags& flags, std::string* kernel) {
  flags.Add("kernel", kernel, "name",
            "See 'onepass kernels'. [$ONEPASS_KERNEL, else the best here]");
}

}  // namespace onepass

#include "dispatch/dispatcher.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace onepass {
namespace {

constexpr char kKernelVariable[] = "ONEPASS_KERNEL";

// The name of the first operation that is null, or null.
const char* FirstNullOperation(const KernelOperations& operations) {
  if (operations.block_numel == nullptr) return "block_numel";
  if (operations.adam_step == nullptr) return "adam_step";
  if (operations.accumulate == nullptr) return "accumulate";
  if (operations.scale == nullptr) return "scale";
  if (operations.cast == nullptr) return "cast";
  if (operations.squared_norm == nullptr) return "squared_norm";
  if (operations.absmax == nullptr) return "absmax";
  if (operations.split_remainder == nullptr) return "split_remainder";
  if (operations.join_remainder == nullptr) return "join_remainder";
  if (operations.quantize == nullptr) return "quantize";
  if (operations.dequantize == nullptr) return "dequantize";
  return nullptr;
}

absl::Status Validate(const Kernel& kernel) {
  if (kernel.name == nullptr || *kernel.name == '\0') {
    return absl::InvalidArgumentError("a kernel without a name");
  }
  if (kernel.rank == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", kernel.name, ": rank is null"));
  }
  if (kernel.supported == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", kernel.name, ": supported is null"));
  }
  if (kernel.operations == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", kernel.name, ": operations is null"));
  }
  if (const char* operation = FirstNullOperation(*kernel.operations)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kernel ", kernel.name, ": operation ", operation, " is null"));
  }
  if (kernel.gradient_types.empty() || kernel.moment_types.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kernel ", kernel.name, ": takes no ",
        kernel.gradient_types.empty() ? "gradient" : "moment", " type"));
  }
  return absl::OkStatus();
}

}  // namespace

Dispatcher::Dispatcher(DispatcherOptions options)
    : options_(std::move(options)) {
  if (options_.kernel.empty()) {
    const char* forced = std::getenv(kKernelVariable);
    if (forced != nullptr) options_.kernel = forced;
  }
}

absl::Status Dispatcher::Register(const Kernel& kernel) {
  if (absl::Status status = Validate(kernel); !status.ok()) return status;
  const absl::string_view name = kernel.name;
  for (const Entry& entry : entries_) {
    if (entry.kernel->name == name) {
      return absl::AlreadyExistsError(
          absl::StrCat("a kernel named ", name, " is registered already"));
    }
  }
  const bool runs_here = kernel.supported();
  const bool supported =
      options_.supported ? options_.supported(kernel) : runs_here;
  const int64_t block_numel = runs_here ? kernel.operations->block_numel() : 0;
  if (runs_here && block_numel < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", name, ": block_numel() is ", block_numel,
                     ", expected at least 1"));
  }
  const int rank = kernel.rank();
  const auto after = std::find_if(
      entries_.begin(), entries_.end(), [rank, name](const Entry& entry) {
        return entry.rank < rank ||
               (entry.rank == rank && entry.kernel->name > name);
      });
  entries_.insert(after, Entry{&kernel, rank, supported, block_numel});
  return absl::OkStatus();
}

absl::StatusOr<const Kernel*> Dispatcher::Select() const {
  if (options_.kernel.empty()) {
    for (const Entry& entry : entries_) {
      if (entry.supported) return entry.kernel;
    }
    return absl::FailedPreconditionError(
        absl::StrCat("no kernel can run here; there are: ", ListKernels()));
  }
  for (const Entry& entry : entries_) {
    if (entry.kernel->name != options_.kernel) continue;
    if (entry.supported) return entry.kernel;
    return absl::FailedPreconditionError(
        absl::StrCat("kernel ", options_.kernel,
                     " cannot run here; there are: ", ListKernels()));
  }
  return absl::NotFoundError(absl::StrCat(
      "no kernel is named ", options_.kernel, "; there are: ", ListKernels()));
}

std::vector<KernelReport> Dispatcher::Report() const {
  const absl::StatusOr<const Kernel*> selected = Select();
  std::vector<KernelReport> report;
  report.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    report.push_back({entry.kernel, entry.supported,
                      selected.ok() && *selected == entry.kernel,
                      entry.block_numel});
  }
  return report;
}

std::string Dispatcher::ListKernels() const {
  if (entries_.empty()) return "none";
  return absl::StrJoin(
      entries_, ", ", [](std::string* out, const Entry& entry) {
        absl::StrAppend(out, entry.kernel->name,
                        entry.supported ? "" : " (not supported here)");
      });
}

}  // namespace onepass

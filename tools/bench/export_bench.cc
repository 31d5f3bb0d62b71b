#include "tools/bench/export_bench.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/export_state.h"
#include "checkpoint/output_file.h"
#include "checkpoint/state_files.h"
#include "checkpoint/state_tensors.h"
#include "checkpoint/state_transfer.h"
#include "dispatch/host_buffer.h"
#include "dispatch/host_device.h"
#include "dispatch/return_if_error.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "tools/bench/random_at.h"

namespace onepass {
namespace {

// As a save of one file has them.
constexpr int kBuffers = 3;

absl::Status CheckOptions(const ExportBenchOptions& options) {
  if (options.numel < ExportBenchOptions::kSmallNumel) {
    return absl::InvalidArgumentError(
        absl::StrCat("--numel is ", options.numel, ", expected at least ",
                     ExportBenchOptions::kSmallNumel));
  }
  if (options.numel > int64_t{1} << 40) {
    return absl::InvalidArgumentError(
        absl::StrCat("--numel is ", options.numel, ", expected at most 2^40"));
  }
  if (options.chunk_bytes < kOutputAlignment ||
      options.chunk_bytes % kOutputAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--chunk_bytes is ", options.chunk_bytes,
                     ", expected a multiple of ", kOutputAlignment));
  }
  if (options.rounds < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rounds is ", options.rounds, ", expected at least 1"));
  }
  return absl::OkStatus();
}

// A line "<name>: <n> kB" of /proc/self/status, in bytes.
absl::StatusOr<int64_t> StatusBytes(absl::string_view name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kilobytes = 0;
    if (word == absl::StrCat(name, ":") && status >> kilobytes) {
      return kilobytes << 10;
    }
  }
  return absl::UnavailableError(
      absl::StrCat("/proc/self/status has no ", name));
}

// A new directory, which goes with what is in it.
class ScratchDirectory {
 public:
  static absl::StatusOr<ScratchDirectory> Create(const std::string& parent) {
    std::string path = absl::StrCat(parent, "/onepass-bench-export.XXXXXX");
    if (mkdtemp(&path[0]) == nullptr) {
      return absl::Status(absl::ErrnoToStatusCode(errno),
                          absl::StrCat("--dir: no directory in \"", parent,
                                       "\": ", std::strerror(errno)));
    }
    return ScratchDirectory(path);
  }
  ~ScratchDirectory() {
    if (path_.empty()) return;
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchDirectory(ScratchDirectory&& other) noexcept
      : path_(std::exchange(other.path_, "")) {}
  ScratchDirectory& operator=(ScratchDirectory&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }

  const std::string& path() const { return path_; }
  // Removes what an earlier run has left.
  void Clear() const {
    std::error_code error;
    for (const auto& entry :
         std::filesystem::directory_iterator(path_, error)) {
      std::filesystem::remove_all(entry.path(), error);
    }
  }

 private:
  explicit ScratchDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

class ExportBench {
 public:
  ExportBench(const Kernel& kernel, const ExportBenchOptions& options)
      : kernel_(kernel), options_(options) {}

  absl::StatusOr<ExportReport> Run();

 private:
  absl::Status Prepare();
  std::vector<StateView> Views(int64_t numel) const;
  absl::Status Export(const StateTensors& tensors, bool checksum);
  absl::Status WriteDirect();
  // Resident memory that an export takes, at most.
  absl::StatusOr<int64_t> ExtraBytes(const StateTensors& tensors);

  Runtime runtime() const { return {kernel_, *device_, *pool_}; }
  int64_t bytes() const { return state_.bytes(); }

  const Kernel& kernel_;
  const ExportBenchOptions options_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<HostDevice> device_;
  HostBuffer state_;
  std::vector<StateView> one_views_;
  std::vector<StateView> small_views_;
  std::optional<StateTensors> one_;
  std::optional<StateTensors> small_;
  std::optional<ScratchDirectory> directory_;
  ExportReport report_;
};

absl::Status ExportBench::Prepare() {
  ONEPASS_ASSIGN_OR_RETURN(pool_, ThreadPool::Create({1}));
  ONEPASS_ASSIGN_OR_RETURN(device_, HostDevice::Create(kernel_, {}));
  const int64_t numel = options_.numel / ExportBenchOptions::kSmallNumel *
                        ExportBenchOptions::kSmallNumel;
  ONEPASS_ASSIGN_OR_RETURN(
      state_, HostBuffer::Create(*pool_, numel * int64_t{sizeof(float)}));
  for (int64_t i = 0; i < numel; ++i) state_.as<float>()[i] = RandomAt(i);
  one_views_ = Views(numel);
  small_views_ = Views(ExportBenchOptions::kSmallNumel);
  absl::StatusOr<StateTensors> one =
      StateTensors::Create(one_views_, ExportForm::kExact);
  ONEPASS_RETURN_IF_ERROR(one.status());
  one_.emplace(*std::move(one));
  absl::StatusOr<StateTensors> small =
      StateTensors::Create(small_views_, ExportForm::kExact);
  ONEPASS_RETURN_IF_ERROR(small.status());
  small_.emplace(*std::move(small));
  absl::StatusOr<ScratchDirectory> directory =
      ScratchDirectory::Create(options_.directory);
  ONEPASS_RETURN_IF_ERROR(directory.status());
  directory_.emplace(*std::move(directory));
  return absl::OkStatus();
}

std::vector<StateView> ExportBench::Views(int64_t numel) const {
  std::vector<StateView> views;
  const int64_t all = bytes() / int64_t{sizeof(float)};
  for (int64_t begin = 0; begin < all; begin += numel) {
    StateView& view = views.emplace_back();
    view.name = absl::StrCat("state.parameter.", views.size(), ".exp_avg");
    view.type = StateType::kFloat32;
    view.shape = {numel};
    view.box = {{0}, {numel}};
    view.offset = 0;
    view.numel = numel;
    view.on_device = false;
    view.data = state_.as<float>() + begin;
  }
  return views;
}

absl::Status ExportBench::Export(const StateTensors& tensors, bool checksum) {
  StateFilesOptions options;
  options.directory = directory_->path();
  options.prefix = "bench";
  options.chunk_bytes = options_.chunk_bytes;
  options.buffers = kBuffers;
  options.checksum = checksum;
  std::unique_ptr<StateFiles> files;
  ONEPASS_ASSIGN_OR_RETURN(files, StateFiles::Create(runtime(), options));
  absl::StatusOr<StateTransfer> transfer =
      StateTransfer::Create(runtime(), tensors, {});
  ONEPASS_RETURN_IF_ERROR(transfer.status());
  ONEPASS_RETURN_IF_ERROR(ExportState(tensors, *transfer, *files));
  report_.direct = files->direct();
  return absl::OkStatus();
}

absl::Status ExportBench::WriteDirect() {
  std::unique_ptr<OutputFile> file;
  ONEPASS_ASSIGN_OR_RETURN(
      file, OutputFile::Create(absl::StrCat(directory_->path(), "/direct")));
  for (int64_t done = 0; done < bytes(); done += options_.chunk_bytes) {
    const int64_t some = std::min(options_.chunk_bytes, bytes() - done);
    ONEPASS_RETURN_IF_ERROR(file->Write(absl::MakeConstSpan(
        state_.as<char>() + done, static_cast<size_t>(some))));
  }
  return file->Close();
}

absl::StatusOr<int64_t> ExportBench::ExtraBytes(const StateTensors& tensors) {
  directory_->Clear();
  // The highest is counted from here on.
  {
    std::ofstream clear("/proc/self/clear_refs");
    if (!(clear << 5 << std::flush)) {
      return absl::UnavailableError(
          "/proc/self/clear_refs takes no 5: the most memory of an export "
          "cannot be told from that of the program");
    }
  }
  int64_t before = 0;
  int64_t most = 0;
  ONEPASS_ASSIGN_OR_RETURN(before, StatusBytes("VmRSS"));
  ONEPASS_RETURN_IF_ERROR(Export(tensors, /*checksum=*/true));
  ONEPASS_ASSIGN_OR_RETURN(most, StatusBytes("VmHWM"));
  return std::max<int64_t>(0, most - before);
}

absl::StatusOr<ExportReport> ExportBench::Run() {
  ONEPASS_RETURN_IF_ERROR(Prepare());
  const auto clear = [this] { directory_->Clear(); };
  const std::vector<Variant> variants = {
      {"export", [this] { return Export(*one_, true); }, clear},
      {"unchecked", [this] { return Export(*one_, false); }, clear},
      {"direct", [this] { return WriteDirect(); }, clear},
      {"small", [this] { return Export(*small_, true); }, clear}};
  Timings seconds;
  ONEPASS_ASSIGN_OR_RETURN(seconds,
                           MeasureInterleaved(variants, options_.rounds));
  report_.direct_over_export = RatioOf(seconds[2], seconds[0]);
  report_.checksum_over_none = RatioOf(seconds[0], seconds[1]);
  report_.small_over_one = RatioOf(seconds[3], seconds[0]);
  report_.gb_per_s =
      static_cast<double>(bytes()) / 1e9 / SpreadOf(seconds[0]).median;
  ONEPASS_ASSIGN_OR_RETURN(report_.extra_rss_bytes, ExtraBytes(*one_));
  ONEPASS_ASSIGN_OR_RETURN(report_.small_extra_rss_bytes, ExtraBytes(*small_));
  report_.budget_bytes = kBuffers * options_.chunk_bytes;
  return report_;
}

}  // namespace

absl::StatusOr<int64_t> ExportBenchBytes(const ExportBenchOptions& options) {
  ONEPASS_RETURN_IF_ERROR(CheckOptions(options));
  // The state, buffers, and views, arrays, names and a header of small tensors.
  constexpr int64_t kSmallTensorBytes = 2048;
  return options.numel * int64_t{sizeof(float)} +
         kBuffers * options.chunk_bytes +
         options.numel / ExportBenchOptions::kSmallNumel * kSmallTensorBytes;
}

absl::StatusOr<ExportReport> RunExportBench(const Kernel& kernel,
                                            const ExportBenchOptions& options) {
  ONEPASS_RETURN_IF_ERROR(CheckOptions(options));
  return ExportBench(kernel, options).Run();
}

}  // namespace onepass

#include "checkpoint/output_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "checkpoint/file_error.h"
#include "checkpoint/file_handle.h"
#include "dispatch/return_if_error.h"

namespace onepass {

void OutputFile::FreeBlock::operator()(char* block) const { std::free(block); }

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Create(
    std::string path, const OutputFileOptions& options) {
  auto output = absl::WrapUnique(new OutputFile(options.bytes_per_second));
  output->block_.reset(static_cast<char*>(
      std::aligned_alloc(kOutputAlignment, kOutputAlignment)));
  if (output->block_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, ": no memory for a block of ", kOutputAlignment, " bytes"));
  }
  ONEPASS_ASSIGN_OR_RETURN(
      output->file_,
      FileHandle::Open(std::move(path), O_WRONLY | O_CREAT | O_EXCL));
  // Not a flag of open(2), which may have made the file where it refuses that.
  output->direct_ = options.direct && output->SetDirect(true);
  return output;
}

absl::Status OutputFile::Write(absl::Span<const char> data) {
  switch (state_) {
    case State::kOpen:
      return Failed(Append(data));
    case State::kClosed:
      return absl::FailedPreconditionError(
          absl::StrCat(file_.path(), ": write of a closed file"));
    case State::kFailed:
      break;
  }
  return error_;
}

absl::Status OutputFile::Close() {
  if (state_ == State::kOpen) {
    ONEPASS_RETURN_IF_ERROR(Failed(Finish()));
    state_ = State::kClosed;
  }
  return error_;
}

absl::Status OutputFile::Failed(absl::Status status) {
  if (!status.ok()) {
    state_ = State::kFailed;
    error_ = status;
  }
  return status;
}

absl::Status OutputFile::Append(absl::Span<const char> data) {
  if (data.empty()) return absl::OkStatus();
  if (reinterpret_cast<uintptr_t>(data.data()) % kOutputAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_.path(), ": write of ", data.size(), " bytes at offset ", size_,
        ": expected memory aligned to ", kOutputAlignment, " bytes"));
  }
  if (size_ != written_) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_.path(), ": write of ", data.size(), " bytes at offset ", size_,
        ": only the last write may end off a multiple of ", kOutputAlignment));
  }
  const size_t rest = data.size() % kOutputAlignment;
  ONEPASS_RETURN_IF_ERROR(WriteBlocks(data.first(data.size() - rest)));
  if (rest != 0) {
    std::memcpy(block_.get(), data.data() + data.size() - rest, rest);
    std::memset(block_.get() + rest, 0, kOutputAlignment - rest);
    ONEPASS_RETURN_IF_ERROR(WriteBlocks({block_.get(), kOutputAlignment}));
  }
  size_ += data.size();
  Throttle(static_cast<int64_t>(data.size()));
  return direct_ ? absl::OkStatus() : WriteBack();
}

void OutputFile::Throttle(int64_t bytes) {
  if (bytes_per_second_ <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> takes(
      static_cast<double>(bytes) / static_cast<double>(bytes_per_second_));
  due_ = std::max(due_, now) +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(takes);
  std::this_thread::sleep_until(due_);
}

absl::Status OutputFile::WriteBlocks(absl::Span<const char> blocks) {
  while (!blocks.empty()) {
    const absl::StatusOr<int64_t> written = file_.WriteSome(blocks, written_);
    if (written.ok()) {
      blocks.remove_prefix(*written);
      written_ += *written;
    } else if (direct_ && absl::IsInvalidArgument(written.status()) &&
               SetDirect(false)) {
      // Refused as a direct write, at this offset.
      direct_ = false;
    } else {
      return written.status();
    }
  }
  return absl::OkStatus();
}

bool OutputFile::SetDirect(bool direct) {
  const int flags = fcntl(file_.descriptor(), F_GETFL);
  return flags >= 0 &&
         fcntl(file_.descriptor(), F_SETFL,
               direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

absl::Status OutputFile::WriteBack() {
  const auto sync_range = [this](int64_t begin, int64_t end, unsigned flags) {
    if (begin == end ||
        Uninterrupted([&] {
          return sync_file_range(file_.descriptor(), begin, end - begin, flags);
        }) == 0 ||
        // Where there is no such call, Close() does it.
        errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP) {
      return absl::OkStatus();
    }
    // It will not be reported a second time.
    return FileError(errno, "sync_file_range", file_.path(), begin);
  };
  ONEPASS_RETURN_IF_ERROR(
      sync_range(end_of_writeback_, written_, SYNC_FILE_RANGE_WRITE));
  const int64_t begin = std::exchange(begin_of_writeback_, end_of_writeback_);
  const int64_t end = std::exchange(end_of_writeback_, written_);
  ONEPASS_RETURN_IF_ERROR(sync_range(begin, end,
                                     SYNC_FILE_RANGE_WAIT_BEFORE |
                                         SYNC_FILE_RANGE_WRITE |
                                         SYNC_FILE_RANGE_WAIT_AFTER));
  // Advice: whether it is taken is of no matter to what is in the file.
  if (begin != end) {
    posix_fadvise(file_.descriptor(), begin, end - begin, POSIX_FADV_DONTNEED);
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Finish() {
  if (size_ != written_) ONEPASS_RETURN_IF_ERROR(file_.Truncate(size_));
  ONEPASS_RETURN_IF_ERROR(file_.Sync());
  // Also of direct writes: the last block was cut in the cache.
  posix_fadvise(file_.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
  return file_.Close();
}

}  // namespace onepass

// A file that is written once, from its beginning to its end, in large blocks,
// and without filling the page cache: direct where the filesystem has that.
//
//   ASSIGN_OR_RETURN(auto file, OutputFile::Create(path));
//   RETURN_IF_ERROR(file->Write(chunk));     // aligned to kOutputAlignment
//   RETURN_IF_ERROR(file->Write(rest));      // the last may be of any length
//   RETURN_IF_ERROR(file->Close());          // only now it is on the disk
//
// Where direct writes are refused, as some filesystems do, when they begin or
// later, the rest is written through the page cache; once a call of Write() has
// returned, what was written before it is on the disk, and out of the cache.

#ifndef ONEPASS_CHECKPOINT_OUTPUT_FILE_H_
#define ONEPASS_CHECKPOINT_OUTPUT_FILE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/file_handle.h"

namespace onepass {

// Of memory and of lengths, in bytes: what direct writes want.
inline constexpr int64_t kOutputAlignment = 4096;

struct OutputFileOptions {
  // Whether direct writes are tried.
  bool direct = true;
  // Of a file, at most, so that a save leaves the disk to others. 0: as fast as
  // it goes.
  int64_t bytes_per_second = 0;
};

// Open, closed or failed: after an error each call returns that error, and what
// is in the file is not to be used. Nothing removes the file. By one thread at
// a time.
class OutputFile {
 public:
  // A new file. AlreadyExists: there is something of that name, a symbolic link
  // too. Others: as FileError().
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(
      std::string path, const OutputFileOptions& options = {});

  // The file is then as complete as it is.
  ~OutputFile() = default;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Appends `data`, which begins at a multiple of kOutputAlignment and has a
  // length that is one, too; only the last may be of another. It may be reused
  // after the call, which allocates nothing. InvalidArgument: memory at another
  // address, more after the last. FailedPrecondition: closed. Others: as
  // FileError(), with the offset.
  absl::Status Write(absl::Span<const char> data);

  // Cuts the file to size(), waits until it is on the disk, closes it. Nothing
  // more where that was done. The name of the file is on the disk after
  // SyncDirectory() (checkpoint/files.h) of its directory.
  absl::Status Close();

  // Whether writes are direct, so far.
  bool direct() const { return direct_; }
  // What was given to Write(), in bytes.
  int64_t size() const { return size_; }

 private:
  enum class State { kOpen, kClosed, kFailed };
  struct FreeBlock {
    void operator()(char* block) const;
  };

  explicit OutputFile(int64_t bytes_per_second)
      : bytes_per_second_(bytes_per_second) {}

  // Waits until `bytes` more may have been written.
  void Throttle(int64_t bytes);
  // Write() and Close() without the state.
  absl::Status Append(absl::Span<const char> data);
  absl::Status Finish();
  // Writes whole blocks at written_.
  absl::Status WriteBlocks(absl::Span<const char> blocks);
  bool SetDirect(bool direct);
  // Of the page cache: has what was written since end_of_writeback_ go to the
  // disk, and drops what was to go there by the call before.
  absl::Status WriteBack();
  absl::Status Failed(absl::Status status);

  const int64_t bytes_per_second_;
  // When what was written until now may have been.
  std::chrono::steady_clock::time_point due_;
  FileHandle file_;
  State state_ = State::kOpen;
  absl::Status error_;
  bool direct_ = false;
  int64_t size_ = 0;
  // In whole blocks, the last one padded.
  int64_t written_ = 0;
  // What goes to the disk meanwhile.
  int64_t begin_of_writeback_ = 0;
  int64_t end_of_writeback_ = 0;
  // The last block, padded with zeros.
  std::unique_ptr<char, FreeBlock> block_;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_OUTPUT_FILE_H_

// Exported state in safetensors files: one for each size of elements that there
// is, so that all of them are aligned. What is written goes through a few
// buffers of equal size, which a thread of its own writes while the next one is
// filled; tensors lie in them one after the other, whatever their sizes.
//
//   ASSIGN_OR_RETURN(auto files, StateFiles::Create(runtime, options));
//   RETURN_IF_ERROR(ExportState(tensors, transfer, *files));
//   for (const StoredFile& file : files->files()) ...
//
// Each array is a tensor of the extent of its box. The metadata of a file has
// DCP_SHARDING_INFO, as torch.distributed.checkpoint's reader of Hugging Face
// files wants it: where in its tensor the box of each begins.

#ifndef ONEPASS_CHECKPOINT_STATE_FILES_H_
#define ONEPASS_CHECKPOINT_STATE_FILES_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/output_file.h"
#include "checkpoint/state_sink.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/device.h"
#include "dispatch/host_buffer.h"
#include "dispatch/runtime.h"

namespace onepass {

struct StateFilesOptions {
  std::string directory;  // which is there
  // Files are named "<prefix>-<bits of elements>bit.safetensors".
  std::string prefix;
  // Of a buffer: a multiple of kOutputAlignment. A checksum is of one buffer at
  // most.
  int64_t chunk_bytes = int64_t{8} << 20;
  // At least one more than there are files, and 2.
  int buffers = 4;
  // Whether boxes are parts of tensors, and metadata says of which.
  bool sharded = true;
  // XXH3 of each chunk; without, 0.
  bool checksum = true;
  // Pinned memory for the buffers, where the device has it: what comes from
  // there arrives faster.
  bool pinned = false;
  OutputFileOptions file;
};

struct StoredFile {
  std::string name;
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint64_t header_checksum = 0;
};

// Elements [first, first + numel) of an array.
struct StoredChunk {
  int64_t offset;  // in the file
  int64_t bytes;
  int64_t first;
  int64_t numel;
  uint64_t checksum;
};

// XXH3, 64 bits, without a seed.
uint64_t Checksum(absl::Span<const char> bytes);

class StateFiles : public StateSink {
 public:
  // Files that `arrays` need, which is the number of their sizes of elements.
  static int FileCount(const std::vector<StoredArray>& arrays);

  // Takes the buffers. The device of `runtime` outlives the result.
  // InvalidArgument: sizes that make no sense. ResourceExhausted: memory.
  static absl::StatusOr<std::unique_ptr<StateFiles>> Create(
      const Runtime& runtime, StateFilesOptions options);
  // Where it was not closed, files stay as far as they are.
  ~StateFiles() override;

  absl::Status Open(const std::vector<StoredArray>& arrays) override;
  absl::StatusOr<absl::Span<char>> Next(int array, int64_t bytes) override;
  absl::Status Written(int array, int64_t bytes) override;
  // All is on the disk then, but for the names of the files.
  absl::Status Close() override;

  // After Close().
  const std::vector<StoredFile>& files() const { return files_; }
  // Index of the file of an array, and its chunks.
  int file_of(int array) const { return placements_[array].file; }
  const std::vector<StoredChunk>& chunks_of(int array) const {
    return placements_[array].chunks;
  }
  // Whether all writes went around the page cache.
  bool direct() const { return direct_; }

 private:
  struct Placement {
    int file;
    int64_t begin;  // in the file
    int64_t element_bytes;
    int64_t bytes;
    int64_t done = 0;  // of the bytes
    std::vector<StoredChunk> chunks;
  };
  // What is filled of a file.
  struct Filling {
    std::unique_ptr<OutputFile> file;
    int64_t position = 0;  // of what comes next
    int buffer = -1;       // where that goes, or none
    int64_t used = 0;      // bytes of it
  };
  struct Job {
    int file;
    int buffer;
    int64_t bytes;
  };

  explicit StateFiles(StateFilesOptions options)
      : options_(std::move(options)) {}

  char* Buffer(int index) const {
    return memory_ + index * options_.chunk_bytes;
  }
  absl::Status OpenFiles(const std::vector<StoredArray>& arrays);
  absl::Status PutHeader(int file, const std::string& header);
  // A buffer for what comes next of a file, where it has none.
  absl::Status Refill(Filling& filling);
  // Sends what is in the buffer of a file.
  void Send(int file);
  absl::Status Fail(const absl::Status& status);
  void WriteJobs();
  void Stop();

  const StateFilesOptions options_;
  PinnedBuffer pinned_;
  HostBuffer pageable_;
  char* memory_ = nullptr;
  std::vector<Placement> placements_;  // of the arrays
  std::vector<StoredFile> files_;
  std::array<Filling, 3> filling_;  // of the files
  bool direct_ = true;
  bool closed_ = false;
  absl::Status error_;  // of the caller's thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> free_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  absl::Status write_error_;
  std::thread writer_;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_STATE_FILES_H_

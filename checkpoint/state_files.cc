#include "checkpoint/state_files.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/files.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"
#include "dispatch/return_if_error.h"
#include "xxhash.h"

namespace onepass {
namespace {

// Files of elements of 4, 2 and 1 bytes.
constexpr std::array<int64_t, 3> kElementBytes = {4, 2, 1};

// Names are those of state tensors: what is no UTF-8 is found when the header
// is made, which has them too.
std::string ShardingInfo(const std::vector<const StoredArray*>& arrays) {
  std::string info = "{";
  for (const StoredArray* array : arrays) {
    if (info.size() > 1) info.push_back(',');
    AppendJsonString(array->name, &info);
    absl::StrAppend(&info, ":{\"saved_offsets\":");
    AppendJsonIntegers(array->box.offset, &info);
    info.push_back('}');
  }
  info.push_back('}');
  return info;
}

}  // namespace

uint64_t Checksum(absl::Span<const char> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

int StateFiles::FileCount(const std::vector<StoredArray>& arrays) {
  int count = 0;
  for (const int64_t bytes : kElementBytes) {
    count += std::any_of(arrays.begin(), arrays.end(),
                         [&](const StoredArray& array) {
                           return ByteSize(array.type) == bytes;
                         });
  }
  return count;
}

absl::StatusOr<std::unique_ptr<StateFiles>> StateFiles::Create(
    const Runtime& runtime, StateFilesOptions options) {
  if (options.chunk_bytes < kOutputAlignment ||
      options.chunk_bytes % kOutputAlignment != 0 || options.buffers < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk_bytes is ", options.chunk_bytes, " and buffers ",
                     options.buffers, ", expected a multiple of ",
                     kOutputAlignment, " and at least 2"));
  }
  if (!IsPlainName(options.prefix)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prefix is \"", options.prefix, "\", expected the name of a file"));
  }
  auto files = absl::WrapUnique(new StateFiles(std::move(options)));
  const int64_t bytes = files->options_.chunk_bytes * files->options_.buffers;
  HostBufferOptions memory;
  // As many bytes as were asked for, and no more; of huge pages direct writes
  // are of fewer pieces.
  constexpr int64_t kHugePage = int64_t{2} << 20;
  memory.huge_pages = bytes % kHugePage == 0;
  if (files->options_.pinned) {
    auto pinned = runtime.device.AllocatePinned(runtime.pool, bytes, memory);
    if (pinned.ok()) {
      files->pinned_ = *std::move(pinned);
      files->memory_ = files->pinned_.as<char>();
    }
  }
  if (files->memory_ == nullptr) {
    ONEPASS_ASSIGN_OR_RETURN(files->pageable_,
                             HostBuffer::Create(runtime.pool, bytes, memory));
    files->memory_ = files->pageable_.as<char>();
  }
  return files;
}

StateFiles::~StateFiles() { Stop(); }

absl::Status StateFiles::Open(const std::vector<StoredArray>& arrays) {
  ONEPASS_RETURN_IF_ERROR(error_);
  if (writer_.joinable() || closed_) {
    return absl::FailedPreconditionError("state files are open already");
  }
  const int needed = FileCount(arrays) + 1;
  if (options_.buffers < needed) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("buffers is ", options_.buffers, ", expected at least ",
                     needed, ": one for each file, and one that is written")));
  }
  for (int i = 0; i < options_.buffers; ++i) free_.push_back(i);
  try {
    writer_ = std::thread([this] { WriteJobs(); });
  } catch (const std::system_error& error) {
    return Fail(absl::ResourceExhaustedError(
        absl::StrCat("no thread to write state with: ", error.what())));
  }
  if (absl::Status status = OpenFiles(arrays); !status.ok()) {
    return Fail(status);
  }
  return absl::OkStatus();
}

absl::Status StateFiles::OpenFiles(const std::vector<StoredArray>& arrays) {
  placements_.resize(arrays.size());
  for (const int64_t element_bytes : kElementBytes) {
    SafetensorsHeader header;
    std::vector<const StoredArray*> held;
    std::vector<int> indices;
    int64_t end = 0;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const StoredArray& array = arrays[i];
      if (ByteSize(array.type) != element_bytes) continue;
      const int64_t begin = end;
      end += array.bytes();
      header.tensors.push_back(
          {array.name, array.type, array.box.extent, begin, end});
      held.push_back(&array);
      indices.push_back(static_cast<int>(i));
    }
    if (held.empty()) continue;
    if (options_.sharded) {
      header.metadata["DCP_SHARDING_INFO"] = ShardingInfo(held);
    }
    header.metadata["format"] = "pt";
    std::string bytes;
    ONEPASS_ASSIGN_OR_RETURN(bytes, SerializeSafetensorsHeader(header));
    const int file = static_cast<int>(files_.size());
    const int64_t header_bytes = static_cast<int64_t>(bytes.size());
    StoredFile& stored = files_.emplace_back();
    stored.name = absl::StrCat(options_.prefix, "-", 8 * element_bytes,
                               "bit.safetensors");
    stored.bytes = header_bytes + end;
    stored.header_bytes = header_bytes;
    stored.header_checksum = Checksum(bytes);
    for (size_t i = 0; i < indices.size(); ++i) {
      Placement& placement = placements_[indices[i]];
      placement.file = file;
      placement.begin = header_bytes + header.tensors[i].begin;
      placement.element_bytes = element_bytes;
      placement.bytes = held[i]->bytes();
    }
    ONEPASS_ASSIGN_OR_RETURN(
        filling_[file].file,
        OutputFile::Create(JoinPath(options_.directory, stored.name),
                           options_.file));
    ONEPASS_RETURN_IF_ERROR(PutHeader(file, bytes));
  }
  return absl::OkStatus();
}

absl::Status StateFiles::PutHeader(int file, const std::string& header) {
  Filling& filling = filling_[file];
  for (size_t done = 0; done < header.size();) {
    ONEPASS_RETURN_IF_ERROR(Refill(filling));
    const int64_t n = std::min(options_.chunk_bytes - filling.used,
                               static_cast<int64_t>(header.size() - done));
    std::memcpy(Buffer(filling.buffer) + filling.used, header.data() + done, n);
    filling.used += n;
    filling.position += n;
    done += n;
    if (filling.used == options_.chunk_bytes) Send(file);
  }
  return absl::OkStatus();
}

absl::Status StateFiles::Refill(Filling& filling) {
  if (filling.buffer >= 0) return absl::OkStatus();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return !free_.empty() || !write_error_.ok(); });
  ONEPASS_RETURN_IF_ERROR(write_error_);
  filling.buffer = free_.back();
  free_.pop_back();
  filling.used = 0;
  return absl::OkStatus();
}

void StateFiles::Send(int file) {
  Filling& filling = filling_[file];
  if (filling.buffer < 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back({file, filling.buffer, filling.used});
  }
  changed_.notify_all();
  filling.buffer = -1;
}

absl::StatusOr<absl::Span<char>> StateFiles::Next(int array, int64_t bytes) {
  ONEPASS_RETURN_IF_ERROR(error_);
  const Placement& placement = placements_[array];
  Filling& filling = filling_[placement.file];
  if (filling.position != placement.begin + placement.done || bytes <= 0 ||
      bytes > placement.bytes - placement.done) {
    return Fail(absl::FailedPreconditionError(absl::StrCat(
        "array ", array, " has ", placement.done, " of ", placement.bytes,
        " bytes, and ", bytes, " more are asked for, with its file at ",
        filling.position, ": each array is written whole, in order")));
  }
  if (absl::Status status = Refill(filling); !status.ok()) return Fail(status);
  // Chunks and headers are multiples of all sizes of elements.
  const int64_t room = std::min(bytes, options_.chunk_bytes - filling.used);
  return absl::MakeSpan(Buffer(filling.buffer) + filling.used,
                        static_cast<size_t>(room));
}

absl::Status StateFiles::Written(int array, int64_t bytes) {
  ONEPASS_RETURN_IF_ERROR(error_);
  Placement& placement = placements_[array];
  Filling& filling = filling_[placement.file];
  const char* const data = Buffer(filling.buffer) + filling.used;
  const int64_t first = placement.done / placement.element_bytes;
  placement.chunks.push_back(
      {filling.position, bytes, first, bytes / placement.element_bytes,
       options_.checksum
           ? Checksum(absl::MakeConstSpan(data, static_cast<size_t>(bytes)))
           : 0});
  placement.done += bytes;
  filling.position += bytes;
  filling.used += bytes;
  if (filling.used == options_.chunk_bytes) Send(placement.file);
  return absl::OkStatus();
}

absl::Status StateFiles::Close() {
  ONEPASS_RETURN_IF_ERROR(error_);
  if (closed_) return absl::OkStatus();
  for (size_t i = 0; i < files_.size(); ++i) {
    if (filling_[i].position != files_[i].bytes) {
      return Fail(absl::FailedPreconditionError(
          absl::StrCat("\"", files_[i].name, "\" has ", filling_[i].position,
                       " of ", files_[i].bytes, " bytes")));
    }
    Send(static_cast<int>(i));
  }
  Stop();
  if (!write_error_.ok()) return Fail(write_error_);
  for (size_t i = 0; i < files_.size(); ++i) {
    OutputFile& file = *filling_[i].file;
    if (absl::Status status = file.Close(); !status.ok()) return Fail(status);
    direct_ &= file.direct();
  }
  closed_ = true;
  return absl::OkStatus();
}

absl::Status StateFiles::Fail(const absl::Status& status) {
  error_ = status;
  return status;
}

void StateFiles::WriteJobs() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !jobs_.empty() || stopping_; });
    if (jobs_.empty()) return;
    const Job job = jobs_.front();
    jobs_.pop_front();
    if (write_error_.ok()) {
      lock.unlock();
      absl::Status status = filling_[job.file].file->Write(absl::MakeConstSpan(
          Buffer(job.buffer), static_cast<size_t>(job.bytes)));
      lock.lock();
      write_error_.Update(status);
    }
    free_.push_back(job.buffer);
    changed_.notify_all();
  }
}

void StateFiles::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (writer_.joinable()) writer_.join();
}

}  // namespace onepass

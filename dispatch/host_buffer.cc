#include "dispatch/host_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dispatch/kernel.h"

namespace onepass {
namespace {

int64_t PageBytes() { return sysconf(_SC_PAGESIZE); }

absl::Status Check(int64_t bytes, const HostBufferOptions& options) {
  const auto invalid = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("host buffer: ", parts...));
  };
  if (bytes < 0) return invalid("bytes is ", bytes, ", expected at least 0");
  if (options.element_bytes < 1) {
    return invalid("element_bytes is ", options.element_bytes,
                   ", expected at least 1");
  }
  if (options.piece_numel < 0) {
    return invalid("piece_numel is ", options.piece_numel,
                   ", expected at least 0");
  }
  if (bytes % options.element_bytes != 0) {
    return invalid("bytes is ", bytes, ", expected a multiple of the ",
                   options.element_bytes, " of an element");
  }
  return absl::OkStatus();
}

absl::Status Refused(int64_t bytes, int error) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "host buffer: could not map ", bytes, " bytes: ", std::strerror(error)));
}

// Writes into each page of [begin, end), never outside.
void Touch(char* begin, char* end, int64_t page) {
  for (char* at = begin; at < end;) {
    *static_cast<volatile char*>(at) = 0;
    const int64_t rest =
        page - static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % page);
    if (rest >= end - at) return;
    at += rest;
  }
}

}  // namespace

absl::Status FirstTouch(ThreadPool& pool, void* memory, int64_t bytes,
                        const HostBufferOptions& options) {
  if (absl::Status status = Check(bytes, options); !status.ok()) return status;
  if (bytes == 0) return absl::OkStatus();
  if (memory == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("host buffer: memory is null, bytes is ", bytes));
  }
  const int64_t page = PageBytes();
  const int64_t element = options.element_bytes;
  const int64_t numel = bytes / element;
  const int64_t piece = options.piece_numel == 0 ? numel : options.piece_numel;
  for (int64_t offset = 0; offset < numel;) {
    const int64_t part = std::min(piece, numel - offset);
    char* const first = static_cast<char*>(memory) + offset * element;
    // The cut of dispatch/operations.cc.
    pool.ParallelFor(part, kLeafNumel, [&](int64_t begin, int64_t end) {
      Touch(first + begin * element, first + end * element, page);
    });
    offset += part;
  }
  return absl::OkStatus();
}

absl::StatusOr<HostBuffer> HostBuffer::Create(
    ThreadPool& pool, int64_t bytes, const HostBufferOptions& options) {
  if (absl::Status status = Check(bytes, options); !status.ok()) return status;
  HostBuffer buffer;
  if (bytes == 0) return buffer;
  const int64_t page = PageBytes();
  const bool large = bytes >= kHugePageBytes;
  // Room to begin at a multiple of a huge page.
  int64_t mapped;
  if (__builtin_add_overflow(bytes, page - 1, &mapped) ||
      __builtin_add_overflow(mapped, large ? kHugePageBytes : 0, &mapped)) {
    return Refused(bytes, ENOMEM);
  }
  mapped = mapped / page * page;
  void* const mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return Refused(bytes, errno);
  buffer.data_ = mapping;
  buffer.bytes_ = bytes;
  buffer.mapping_ = mapping;
  buffer.mapped_bytes_ = mapped;
  if (large) {
    const int64_t past = static_cast<int64_t>(
        reinterpret_cast<uintptr_t>(mapping) % kHugePageBytes);
    const int64_t head = past == 0 ? 0 : kHugePageBytes - past;
    buffer.data_ = static_cast<char*>(mapping) + head;
    // Only where the system has no further mapping to give does it refuse to
    // cut one.
    if (head > 0 && munmap(mapping, head) == 0) {
      buffer.mapping_ = buffer.data_;
      buffer.mapped_bytes_ -= head;
    }
    const int64_t tail = kHugePageBytes - head;
    char* const end = static_cast<char*>(mapping) + mapped - tail;
    if (tail > 0 && munmap(end, tail) == 0) buffer.mapped_bytes_ -= tail;
  }
  const bool wanted = options.huge_pages && large;
  const bool taken = madvise(buffer.mapping_, buffer.mapped_bytes_,
                             wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0;
  buffer.huge_pages_ = wanted && taken;
  if (absl::Status status = FirstTouch(pool, buffer.data_, bytes, options);
      !status.ok()) {
    return status;
  }
  return buffer;
}

HostBuffer::~HostBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      huge_pages_(std::exchange(other.huge_pages_, false)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_bytes_(std::exchange(other.mapped_bytes_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  // What `other` holds now goes with `taken` where it is this very buffer, too.
  HostBuffer taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(huge_pages_, taken.huge_pages_);
  std::swap(mapping_, taken.mapping_);
  std::swap(mapped_bytes_, taken.mapped_bytes_);
  return *this;
}

}  // namespace onepass

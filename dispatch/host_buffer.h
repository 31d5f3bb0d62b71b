// Host memory for large arrays of state (masters, moments, gradients, copies):
// zeros, on huge pages where the system has them, each page touched first by
// the worker that will update it, so that it lies in that worker's memory and
// no step takes a page fault.
//
//   HostBufferOptions options;
//   options.element_bytes = sizeof(float);
//   ASSIGN_OR_RETURN(HostBuffer master,
//                    HostBuffer::Create(*pool, numel * sizeof(float),
//                    options));
//   span.param = master.as<float>();
//
// A small array is as well in a std::vector: a buffer takes whole pages, and a
// system call when it comes and when it goes. Whether as much memory is there
// is for the caller to ask first: the system promises more than it has.

#ifndef ONEPASS_DISPATCH_HOST_BUFFER_H_
#define ONEPASS_DISPATCH_HOST_BUFFER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/thread_pool.h"

namespace onepass {

struct HostBufferOptions {
  // Asks for huge pages where the buffer holds one; false: for pages of the
  // usual size, whatever the system's own choice is.
  bool huge_pages = true;
  // Bytes of one element of the array; workers take ranges of elements.
  int64_t element_bytes = 4;
  // Elements that one call updates, which the workers share: of
  // CpuAdam::StepPieces its piece_numel, a multiple of block_numel(). 0: all.
  int64_t piece_numel = 0;
};

// Writes a zero into each page of [memory, memory + bytes), on the worker of
// `pool` whose range it is in the operations of dispatch/operations.h over this
// array; a page that two ranges share, on either. For memory that is mapped by
// others and still untouched. InvalidArgument: bytes below 0 or no multiple of
// element_bytes, element_bytes below 1, piece_numel below 0, a null memory with
// bytes.
absl::Status FirstTouch(ThreadPool& pool, void* memory, int64_t bytes,
                        const HostBufferOptions& options = {});

class HostBuffer {
 public:
  // Where a buffer of at least as many bytes begins, in bytes: a huge page.
  static constexpr int64_t kHugePageBytes = int64_t{2} << 20;

  // Without memory.
  HostBuffer() = default;

  // `bytes` zeros, touched by the workers of `pool`, which need not outlive the
  // buffer. Aligned to a page, and to kHugePageBytes where it has as many; data
  // of 0 bytes is null. InvalidArgument: as FirstTouch(). ResourceExhausted:
  // the system refuses the memory; that of huge pages is no error.
  static absl::StatusOr<HostBuffer> Create(
      ThreadPool& pool, int64_t bytes, const HostBufferOptions& options = {});

  ~HostBuffer();

  // The source is left without memory.
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Whether the system took the advice to use huge pages. It may still find
  // none free, or have them switched off.
  bool huge_pages() const { return huge_pages_; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // As many as fit.
  template <typename T>
  absl::Span<T> span() const {
    return {as<T>(), static_cast<size_t>(bytes_) / sizeof(T)};
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool huge_pages_ = false;
  // What to give back: `data_` and what could not be trimmed around it.
  void* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_HOST_BUFFER_H_

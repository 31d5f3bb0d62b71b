// Memory in which a byte touched outside a span shows: an unreadable page after
// it, and a pattern around it.
//
//   GuardedBuffer buffer(64 << 10);
//   float* x = buffer.Place<float>(n);          // ends at the unreadable page
//   float* y = buffer.Place<float>(n, /*gap=*/3);  // three elements before it
//   ...
//   EXPECT_TRUE(buffer.Intact());

#ifndef ONEPASS_TESTS_GUARDED_BUFFER_H_
#define ONEPASS_TESTS_GUARDED_BUFFER_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace onepass {

class GuardedBuffer {
 public:
  explicit GuardedBuffer(int64_t capacity_bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    bytes_ = (capacity_bytes + page - 1) / page * page + page;
    mapped_ = bytes_ + page;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    base_ = static_cast<unsigned char*>(memory);
    if (mprotect(base_ + bytes_, page, PROT_NONE) != 0) std::abort();
  }
  ~GuardedBuffer() { munmap(base_, mapped_); }

  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  // `numel` elements whose last lies `gap` elements before the unreadable page.
  // The contents are not set; what was placed before is gone.
  template <typename T>
  T* Place(int64_t numel, int64_t gap = 0) {
    end_ = bytes_ - gap * static_cast<int64_t>(sizeof(T));
    begin_ = end_ - numel * static_cast<int64_t>(sizeof(T));
    if (begin_ < 0) std::abort();
    std::memset(base_ + MarginBegin(), kPattern, begin_ - MarginBegin());
    std::memset(base_ + end_, kPattern, bytes_ - end_);
    return reinterpret_cast<T*>(base_ + begin_);
  }

  // Whether the bytes around what was placed are as they were.
  bool Intact() const {
    return AllPattern(MarginBegin(), begin_) && AllPattern(end_, bytes_);
  }

 private:
  static constexpr unsigned char kPattern = 0xa5;
  static constexpr int64_t kMargin = 256;

  int64_t MarginBegin() const { return std::max(begin_ - kMargin, int64_t{0}); }
  bool AllPattern(int64_t from, int64_t to) const {
    return std::all_of(base_ + from, base_ + to,
                       [](unsigned char byte) { return byte == kPattern; });
  }

  unsigned char* base_;
  int64_t bytes_;   // readable
  int64_t mapped_;  // and the unreadable page
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace onepass

#endif  // ONEPASS_TESTS_GUARDED_BUFFER_H_

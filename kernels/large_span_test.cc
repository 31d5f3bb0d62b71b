// Spans of more than 2^31 elements: a length cut to 32 bits anywhere shows. A
// few megabytes of memory are mapped over and over; only the last page is
// another.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/types/span.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/operations.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr int64_t kWindow = 4 << 20;  // bytes that are mapped repeatedly
constexpr int64_t kPage = 64 << 10;   // the last one; of any page size

// `bytes` (a multiple of kPage) of address space over kWindow + kPage bytes of
// memory: windows, a part of a window, and the last page.
class RepeatedMemory {
 public:
  explicit RepeatedMemory(int64_t bytes) : bytes_(bytes) {
    const int file = memfd_create("large_span_test", 0);
    if (file < 0 || ftruncate(file, kWindow + kPage) != 0) std::abort();
    base_ = static_cast<char*>(mmap(nullptr, bytes, PROT_NONE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                    -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    const int64_t last = bytes - kPage;
    for (int64_t at = 0; at < last; at += kWindow) {
      Map(file, at, std::min(kWindow, last - at), 0);
    }
    Map(file, last, kPage, kWindow);
    close(file);
  }
  ~RepeatedMemory() { munmap(base_, bytes_); }

  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;

  char* begin() const { return base_; }
  char* last_page() const { return base_ + bytes_ - kPage; }

 private:
  void Map(int file, int64_t at, int64_t length, int64_t offset) {
    if (mmap(base_ + at, length, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED | MAP_POPULATE, file,
             offset) == MAP_FAILED) {
      std::abort();
    }
  }

  int64_t bytes_;
  char* base_;
};

class LargeSpanTest : public testing::TestWithParam<const Kernel*> {
 public:
  // Beyond 2^31 elements by some leaves and a tail.
  static constexpr int64_t kBytes =
      (int64_t{1} << 31) * sizeof(float) + kWindow + 4 * kPage;
  static constexpr int64_t kNumel = kBytes / sizeof(float) - 3;

 protected:
  void SetUp() override {
    if (UnderSanitizer()) {
      GTEST_SKIP() << "maps tens of gigabytes of addresses, which sanitizers "
                      "shadow";
    }
  }
};

// The bits of 1 and of 2 in a type: both are exact in all of them.
struct Pattern {
  DType type;
  uint32_t one;
  uint32_t two;
};
constexpr Pattern kPatterns[] = {
    {DType::kFloat32, 0x3f800000, 0x40000000},
    {DType::kBFloat16, 0x3f80, 0x4000},
    {DType::kFloat16, 0x3c00, 0x4000},
    {DType::kFloat8E4M3, 0x38, 0x40},
};

void SetElements(char* at, int64_t numel, int64_t bytes, uint32_t bits) {
  // Little endian, as all that onepass runs on.
  for (int64_t i = 0; i < numel; ++i) std::memcpy(at + i * bytes, &bits, bytes);
}

uint32_t ElementAt(const char* at, int64_t i, int64_t bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, at + i * bytes, bytes);
  return bits;
}

// Ones, and twos in the last page of the wider of the two spans.
void CheckCast(const Kernel& kernel, const Pattern& from, const Pattern& to) {
  SCOPED_TRACE(testing::Message()
               << Name(from.type) << " to " << Name(to.type));
  const int64_t in_bytes = ByteSize(from.type);
  const int64_t out_bytes = ByteSize(to.type);
  const int64_t numel = LargeSpanTest::kNumel;
  // From the first fp32 element of its last page on.
  const int64_t page = kPage / 4 - 3;
  RepeatedMemory in(LargeSpanTest::kBytes / 4 * in_bytes);
  RepeatedMemory out(LargeSpanTest::kBytes / 4 * out_bytes);
  SetElements(in.begin(), kWindow / in_bytes, in_bytes, from.one);
  SetElements(in.last_page(), kPage / in_bytes, in_bytes, from.one);
  SetElements(in.begin() + (numel - page) * in_bytes, page, in_bytes, from.two);
  // One worker: the kernel itself is to see the whole length.
  const auto pool = MakePool(1);
  ASSERT_TRUE(
      Cast(kernel, *pool, {numel, in.begin(), out.begin(), from.type, to.type})
          .ok());
  for (int64_t i = numel - page; i < numel; ++i) {
    ASSERT_EQ(to.two, ElementAt(out.begin(), i, out_bytes)) << i;
  }
  for (int64_t i = 0; i < page; ++i) {
    ASSERT_EQ(to.one, ElementAt(out.begin(), i, out_bytes)) << i;
  }
  // Nothing beyond the last element.
  EXPECT_EQ(0u, ElementAt(out.begin(), numel, out_bytes));
}

// Of the narrow types, or in reduced tests one.
absl::Span<const Pattern> NarrowPatterns() {
  const auto narrow = absl::MakeConstSpan(kPatterns).subspan(1);
  return LongTestStride() == 1 ? narrow : narrow.first(1);
}

// Under an emulator one has to do: what a kernel has of its own, loads and
// stores at an index, is in CastToFloat32.
constexpr char kTakesLong[] = "takes a minute under an emulator";

TEST_P(LargeSpanTest, CastToNarrow) {
  if (UnderEmulator()) GTEST_SKIP() << kTakesLong;
  for (const Pattern& narrow : NarrowPatterns()) {
    CheckCast(*GetParam(), kPatterns[0], narrow);
  }
}

TEST_P(LargeSpanTest, CastToFloat32) {
  for (const Pattern& narrow : NarrowPatterns()) {
    CheckCast(*GetParam(), narrow, kPatterns[0]);
  }
}

TEST_P(LargeSpanTest, SquaredNorm) {
  if (UnderEmulator()) GTEST_SKIP() << kTakesLong;
  RepeatedMemory in(kBytes);
  auto* x = reinterpret_cast<float*>(in.begin());
  for (int64_t i = 0; i < kWindow / 4; ++i) x[i] = 0.5f;
  auto* last_x = reinterpret_cast<float*>(in.last_page());
  for (int64_t i = 0; i < kPage / 4; ++i) last_x[i] = 3.0f;

  const int64_t last = kPage / 4 - 3;
  // All terms are small multiples of 1/4: exact in any order.
  const double expected = 0.25 * (kNumel - last) + 9.0 * last;

  // One call of the kernel for all.
  std::vector<double> leaves(LeafCount(kNumel));
  GetParam()->operations->squared_norm(
      {kNumel, x, leaves.data(), DType::kFloat32});
  NormSum of_leaves;
  for (double leaf : leaves) of_leaves.Add(leaf);
  EXPECT_EQ(expected, of_leaves.Total());

  // And cut for threads.
  if (LongTestStride() != 1) return;
  const auto pool = MakePool(2);
  NormSum sum;
  ASSERT_TRUE(
      SquaredNorm(*GetParam(), *pool, kNumel, x, DType::kFloat32, sum).ok());
  EXPECT_EQ(sum, of_leaves);
}

INSTANTIATE_TEST_SUITE_P(Kernels, LargeSpanTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

}  // namespace
}  // namespace onepass

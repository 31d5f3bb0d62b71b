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

#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
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
    if (mmap(base_ + at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             file, offset) == MAP_FAILED) {
      std::abort();
    }
  }

  int64_t bytes_;
  char* base_;
};

class LargeSpanTest : public testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (UnderSanitizer()) {
      GTEST_SKIP() << "maps tens of gigabytes of addresses, which sanitizers "
                      "shadow";
    }
  }
  // Beyond 2^31 elements by some leaves and a tail.
  static constexpr int64_t kBytes =
      (int64_t{1} << 31) * sizeof(float) + kWindow + kPage;
  static constexpr int64_t kNumel = kBytes / sizeof(float) - 3;
};

TEST_P(LargeSpanTest, CastToBFloat16) {
  RepeatedMemory in(kBytes);
  RepeatedMemory out(kBytes / 2);
  auto* x = reinterpret_cast<float*>(in.begin());
  for (int64_t i = 0; i < kWindow / 4; ++i) x[i] = 1.0f;
  auto* last_x = reinterpret_cast<float*>(in.last_page());
  for (int64_t i = 0; i < kPage / 4; ++i) last_x[i] = 2.0f + (i % 64);
  GetParam()->operations->cast(
      {kNumel, in.begin(), out.begin(), DType::kFloat32, DType::kBFloat16});
  const auto* y = reinterpret_cast<const uint16_t*>(out.begin());
  for (int64_t i = kNumel - kPage / 4 + 3; i < kNumel; ++i) {
    const float value = x[i];
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    ASSERT_EQ(bits >> 16, y[i]) << i;  // all are exact in bf16
  }
  EXPECT_EQ(0, y[kNumel]);
  for (int64_t i = 0; i < 2 * kPage; ++i) ASSERT_EQ(0x3f80, y[i]);
}

TEST_P(LargeSpanTest, SquaredNorm) {
  RepeatedMemory in(kBytes);
  auto* x = reinterpret_cast<float*>(in.begin());
  for (int64_t i = 0; i < kWindow / 4; ++i) x[i] = 0.5f;
  auto* last_x = reinterpret_cast<float*>(in.last_page());
  for (int64_t i = 0; i < kPage / 4; ++i) last_x[i] = 3.0f;

  auto pool = ThreadPool::Create({});
  ASSERT_TRUE(pool.ok()) << pool.status();
  NormSum sum;
  ASSERT_TRUE(
      SquaredNorm(*GetParam(), **pool, kNumel, x, DType::kFloat32, sum).ok());
  const int64_t last = kPage / 4 - 3;
  // All terms are small multiples of 1/4: exact in any order.
  EXPECT_EQ(0.25 * (kNumel - last) + 9.0 * last, sum.Total());

  // One call of the kernel for all, too.
  std::vector<double> leaves(LeafCount(kNumel));
  GetParam()->operations->squared_norm(
      {kNumel, x, leaves.data(), DType::kFloat32});
  NormSum of_leaves;
  for (double leaf : leaves) of_leaves.Add(leaf);
  EXPECT_EQ(sum, of_leaves);
}

INSTANTIATE_TEST_SUITE_P(Kernels, LargeSpanTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

}  // namespace
}  // namespace onepass

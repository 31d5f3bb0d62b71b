#include "tools/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

TEST(MemoryTest, WhatIsThereIsFine) {
  EXPECT_GT(AvailableBytes(), 0);
  EXPECT_GT(AvailableBytesOfProcess(), 0);
  EXPECT_TRUE(CheckMemory("nothing", 0, "").ok());
  EXPECT_TRUE(CheckMemory("little", 4096, "").ok());
}

TEST(MemoryTest, MoreIsAnErrorThatSaysWhatToDo) {
  const absl::Status status = CheckMemory(
      "training", std::numeric_limits<int64_t>::max(), "lower --layers");
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(absl::StartsWith(status.message(),
                               "training needs 8796093022208 MiB of memory, "))
      << status;
  EXPECT_TRUE(
      absl::EndsWith(status.message(), " MiB are available; lower --layers"))
      << status;
}

TEST(MemoryTest, TheLimitOfTheGroupCounts) {
  const std::string folder = testing::TempDir();
  const auto available = [&](const char* most, const char* taken,
                             const char* stat) {
    std::ofstream(folder + "/memory.max") << most << "\n";
    std::ofstream(folder + "/memory.current") << taken << "\n";
    std::ofstream(folder + "/memory.stat") << stat;
    return AvailableBytesOfGroup(folder);
  };
  constexpr char kStat[] =
      "anon 300\nfile 250\ninactive_anon 7\ninactive_file 200\n"
      "active_file 50\n";
  // Pages of files that give way are not taken.
  EXPECT_EQ(available("1000", "600", kStat), 600);
  EXPECT_EQ(available("1000", "600", ""), 400);
  EXPECT_EQ(available("500", "600", ""), 0);
  EXPECT_EQ(available("1000", "150", kStat), 1000);
  EXPECT_EQ(available("max", "600", kStat), std::nullopt);
  EXPECT_EQ(available("1000", "", kStat), std::nullopt);
  EXPECT_EQ(AvailableBytesOfGroup(folder + "/none"), std::nullopt);
}

TEST(MemoryTest, TheLimitOfTheProcessCounts) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "memory of a sanitizer or emulator breaks the limit here";
  }
  rlimit saved;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &saved), 0);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  constexpr int64_t kRoom = int64_t{64} << 20;
  rlimit limited = saved;
  limited.rlim_cur = pages * sysconf(_SC_PAGESIZE) + kRoom;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limited), 0);
  constexpr int64_t kMore = kRoom + (1 << 20);
  const int64_t available = AvailableBytesOfProcess();
  const absl::Status alone = CheckMemory("a run", kMore, "less");
  // Of several processes each has the limit for itself.
  const absl::Status of_two = CheckMemory("a run", kMore, kMore / 2, "less");
  const absl::Status too_much = CheckMemory("a run", 2 * kMore, kMore, "less");
  ASSERT_EQ(setrlimit(RLIMIT_AS, &saved), 0);
  EXPECT_LE(available, kRoom);
  EXPECT_TRUE(
      absl::StartsWith(alone.message(), "a run needs 65 MiB of memory, "))
      << alone;
  EXPECT_TRUE(of_two.ok()) << of_two;
  EXPECT_TRUE(absl::StartsWith(
      too_much.message(), "a run needs 65 MiB of memory in each process, "))
      << too_much;
}

}  // namespace
}  // namespace onepass

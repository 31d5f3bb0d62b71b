// What this process holds, as Linux counts it: to see that nothing is left
// behind. Of no meaning under sanitizers and emulators.

#ifndef ONEPASS_TESTS_PROCESS_USE_H_
#define ONEPASS_TESTS_PROCESS_USE_H_

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace onepass {

inline constexpr char kDescriptors[] = "/proc/self/fd";
inline constexpr char kThreads[] = "/proc/self/task";

inline int64_t Entries(const char* folder) {
  int64_t entries = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(folder)) {
    ++entries;
  }
  return entries;
}

inline int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t all = 0;
  int64_t resident = 0;
  statm >> all >> resident;
  EXPECT_GT(resident, 0);
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace onepass

#endif  // ONEPASS_TESTS_PROCESS_USE_H_

// What this process holds, as Linux counts it: to see that nothing is left
// behind. Of no meaning under sanitizers and emulators.

#ifndef ONEPASS_TESTS_PROCESS_USE_H_
#define ONEPASS_TESTS_PROCESS_USE_H_

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

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

// The most that was resident since the start, or since the last call of
// ForgetMostResident(). That returns false where the system refuses it.
inline int64_t MostResidentBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int64_t kilobytes = 0;
  while (status >> word && word != "VmHWM:") {
  }
  status >> kilobytes;
  EXPECT_GT(kilobytes, 0);
  return kilobytes << 10;
}

inline bool ForgetMostResident() {
  std::ofstream clear("/proc/self/clear_refs");
  return static_cast<bool>(clear << 5 << std::flush);
}

}  // namespace onepass

#endif  // ONEPASS_TESTS_PROCESS_USE_H_

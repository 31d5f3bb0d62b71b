#include "dispatch/cpu_features.h"

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace onepass {
namespace {

TEST(CpuFeaturesTest, Avx512ImpliesAvx2) {
  const CpuFeatures features = DetectCpu();
  EXPECT_TRUE(features.avx2 || !features.avx512);
}

// Linux lists a flag only where it saves the registers too.
TEST(CpuFeaturesTest, AgreesWithTheOperatingSystem) {
  std::set<std::string> flags;
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; flags.empty() && std::getline(cpuinfo, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
  }
  const CpuFeatures features = DetectCpu();
#ifdef __x86_64__
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no flags";
  auto has = [&flags](const char* flag) { return flags.count(flag) != 0; };
  const bool avx2 = has("avx2") && has("fma") && has("f16c");
  EXPECT_EQ(features.avx2, avx2);
  EXPECT_EQ(features.avx512, avx2 && has("avx512f") && has("avx512bw") &&
                                 has("avx512dq") && has("avx512vl"));
#else
  EXPECT_FALSE(features.avx2);
  EXPECT_FALSE(features.avx512);
#endif
}

}  // namespace
}  // namespace onepass

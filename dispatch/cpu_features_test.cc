// Has a main of its own: that of the other tests skips what this processor
// cannot run, by asking the very code that is tested here, so that a broken
// probe would be reported as a skip.

#include "dispatch/cpu_features.h"

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace onepass {
namespace {

// The words after the colon of the first line of /proc/cpuinfo that begins with
// `key`.
std::set<std::string> CpuInfo(const std::string& key) {
  std::set<std::string> words;
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; words.empty() && std::getline(cpuinfo, line);) {
    if (line.rfind(key, 0) != 0) continue;
    std::istringstream rest(line.substr(line.find(':') + 1));
    for (std::string word; rest >> word;) words.insert(word);
  }
  return words;
}

// What qemu was told to imitate; empty where nothing is emulated. Under its
// user emulation /proc/cpuinfo is the host's.
[[maybe_unused]] std::string EmulatedCpu() {
  const char* cpu = std::getenv("QEMU_CPU");
  const bool emulated = std::getenv("ONEPASS_EMULATED") != nullptr;
  return emulated && cpu != nullptr ? cpu : "";
}

bool IsPowerOfTwo(int n) { return n > 0 && (n & (n - 1)) == 0; }

TEST(CpuFeaturesTest, Avx512ImpliesAvx2) {
  const CpuFeatures features = DetectCpu();
  EXPECT_TRUE(features.avx2 || !features.avx512);
}

TEST(CpuFeaturesTest, LengthsAreThoseTheArchitecturesAllow) {
  const CpuFeatures features = DetectCpu();
  EXPECT_EQ(features.sve_bits % 128, 0);
  EXPECT_LE(features.sve_bits, 2048);
  if (features.rvv_bits != 0) {
    EXPECT_TRUE(IsPowerOfTwo(features.rvv_bits)) << features.rvv_bits;
    EXPECT_LE(features.rvv_bits, 65536);
  }
}

TEST(CpuFeaturesTest, OtherArchitecturesHaveNothing) {
  const CpuFeatures features = DetectCpu();
#ifndef __x86_64__
  EXPECT_FALSE(features.avx2);
  EXPECT_FALSE(features.avx512);
#endif
#ifndef __aarch64__
  EXPECT_EQ(features.sve_bits, 0);
#endif
#ifndef __riscv
  EXPECT_EQ(features.rvv_bits, 0);
#endif
}

// Linux lists a feature only where it saves the registers too.
TEST(CpuFeaturesTest, AgreesWithTheOperatingSystem) {
  const CpuFeatures features = DetectCpu();
#if defined(__x86_64__)
  const std::set<std::string> flags = CpuInfo("flags");
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no flags";
  auto has = [&flags](const char* flag) { return flags.count(flag) != 0; };
  const bool avx2 = has("avx2") && has("fma") && has("f16c");
  EXPECT_EQ(features.avx2, avx2);
  EXPECT_EQ(features.avx512, avx2 && has("avx512f") && has("avx512bw") &&
                                 has("avx512dq") && has("avx512vl"));
#elif defined(__aarch64__)
  if (const std::string cpu = EmulatedCpu(); !cpu.empty()) {
    int expected = 0;
    for (int bits = 128; bits <= 2048; bits += 128) {
      const std::string option = "sve" + std::to_string(bits) + "=on";
      if (cpu.find(option) != std::string::npos) expected = bits;
    }
    EXPECT_EQ(features.sve_bits, expected) << cpu;
    return;
  }
  const std::set<std::string> flags = CpuInfo("Features");
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no features";
  EXPECT_EQ(features.sve_bits != 0, flags.count("sve") != 0);
#elif defined(__riscv)
  if (const std::string cpu = EmulatedCpu(); !cpu.empty()) {
    const std::string option = ",vlen=";
    const size_t vlen = cpu.find(option);
    const bool vectors = cpu.find(",v=true") != std::string::npos;
    ASSERT_EQ(vectors, vlen != std::string::npos) << cpu;
    EXPECT_EQ(features.rvv_bits,
              vectors ? std::atoi(&cpu[vlen + option.size()]) : 0)
        << cpu;
    return;
  }
  // rv64imafdcv_zicsr_...: one letter an extension up to the first underscore.
  const std::set<std::string> isa = CpuInfo("isa");
  if (isa.empty()) GTEST_SKIP() << "/proc/cpuinfo has no isa line";
  const std::string letters = isa.begin()->substr(0, isa.begin()->find('_'));
  ASSERT_EQ(letters.rfind("rv64", 0), 0u) << letters;
  // Not the other way round: a vendor's kernel may mean an older version by it,
  // and vectors can be turned off for a thread.
  if (features.rvv_bits != 0) {
    EXPECT_NE(letters.find('v', 4), std::string::npos) << letters;
  }
#endif
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

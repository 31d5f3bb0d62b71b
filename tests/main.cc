// The main of every test. Where the environment pins a kernel that this
// processor cannot run, or names a length of vectors in bits
// (ONEPASS_VECTOR_BITS) that is not that of this processor, all tests are
// skipped, and say so.

#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/cpu_features.h"
#include "dispatch/dispatcher.h"
#include "gtest/gtest.h"
#include "kernels/default.h"

namespace onepass {
namespace {

// Why this processor cannot run the pinned kernel, or OK.
absl::Status PinnedKernelStatus() {
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  if (!dispatcher.ok()) return dispatcher.status();
  return dispatcher->Select().status();
}

// Why this processor is not the one that the environment names, or OK.
absl::Status VectorBitsStatus() {
  const char* expected = std::getenv("ONEPASS_VECTOR_BITS");
  if (expected == nullptr || *expected == '\0') return absl::OkStatus();
  const CpuFeatures cpu = DetectCpu();
  const std::string bits =
      std::to_string(cpu.sve_bits != 0 ? cpu.sve_bits : cpu.rvv_bits);
  if (bits == expected) return absl::OkStatus();
  return absl::FailedPreconditionError("vectors have " + bits +
                                       " bits here, not " + expected);
}

// Skips each test as it starts. (A skip in an Environment is reported as
// passed.)
class SkipAll : public testing::EmptyTestEventListener {
 public:
  explicit SkipAll(const absl::Status& reason) : reason_(reason.message()) {}

  void OnTestStart(const testing::TestInfo&) override {
    GTEST_SKIP() << reason_;
  }

 private:
  const std::string reason_;
};

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  absl::Status status = onepass::PinnedKernelStatus();
  if (status.ok()) status = onepass::VectorBitsStatus();
  if (absl::IsFailedPrecondition(status)) {
    testing::UnitTest::GetInstance()->listeners().Append(
        new onepass::SkipAll(status));
  } else if (!status.ok()) {
    std::cerr << status << "\n";
    return 1;
  }
  return RUN_ALL_TESTS();
}

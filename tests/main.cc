// The main of every test. Where the environment pins a kernel that this
// processor cannot run, or names a length of vectors in bits
// (ONEPASS_VECTOR_BITS) that is not that of this processor, all tests are
// skipped, and say so.

#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/runnable_kernels.h"

namespace onepass {
namespace {

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
  const absl::Status status = onepass::PinnedStatus();
  if (absl::IsFailedPrecondition(status)) {
    testing::UnitTest::GetInstance()->listeners().Append(
        new onepass::SkipAll(status));
  } else if (!status.ok()) {
    std::cerr << status << "\n";
    return 1;
  }
  return RUN_ALL_TESTS();
}

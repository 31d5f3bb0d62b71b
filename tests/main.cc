// The main of every test. Where the environment pins a kernel that this
// processor cannot run, all tests are skipped, and say so.

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/dispatcher.h"
#include "gtest/gtest.h"
#include "kernels/default.h"

namespace onepass {
namespace {

class PinnedKernelEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
    ASSERT_TRUE(dispatcher.ok()) << dispatcher.status();
    const absl::Status status = dispatcher->Select().status();
    if (absl::IsFailedPrecondition(status)) {
      GTEST_SKIP() << status.message();
    }
    ASSERT_TRUE(status.ok()) << status;
  }
};

}  // namespace
}  // namespace onepass

#ifdef __SANITIZE_THREAD__
// absl::Mutex wakes a sleeper through memory that the sleeper mapped, in an
// order that the runtime does not see. No code of others runs inside Post().
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:absl::*::synchronization_internal::Waiter::Post\n";
}
#endif

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new onepass::PinnedKernelEnvironment);
  return RUN_ALL_TESTS();
}

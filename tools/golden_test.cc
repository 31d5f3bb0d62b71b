#include "tools/golden.h"

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

class GoldenTest : public testing::TestWithParam<const Kernel*> {};

TEST_P(GoldenTest, ThreadsAndPiecesGiveTheDigest) {
  // A step that shares no factor with the number of pieces still meets each of
  // them.
  const int step = LongTestStride() == 1 ? 1 : 4;
  int run = 0;
  for (int threads : {1, 2, 3, 7}) {
    const auto pool = MakePool(threads);
    for (int64_t piece_numel : {0, 1, 1000, 4096, 100000}) {
      if (run++ % step != 0) continue;
      SCOPED_TRACE(testing::Message()
                   << threads << " threads, piece_numel " << piece_numel);
      absl::StatusOr<std::string> digest =
          RunGoldenWorkload(*GetParam(), *pool, piece_numel);
      ASSERT_TRUE(digest.ok()) << digest.status();
      EXPECT_EQ(*digest, kGoldenDigest);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GoldenTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

// The digest is of no worth if it does not depend on what is computed: a kernel
// with one operation changed gives another one.
class BrokenKernelTest : public testing::Test {
 protected:
  // The digest of the scalar kernel with these operations.
  static std::string DigestWith(const KernelOperations& operations) {
    Kernel kernel = ScalarKernel();
    kernel.operations = &operations;
    const auto pool = MakePool(1);
    absl::StatusOr<std::string> digest = RunGoldenWorkload(kernel, *pool, 0);
    return digest.ok() ? *digest : digest.status().ToString();
  }
};

TEST_F(BrokenKernelTest, IsFound) {
  if (UnderEmulator() || UnderSanitizer()) {
    GTEST_SKIP() << "takes long there, and says the same: the scalar kernel "
                    "has the same bits everywhere";
  }
  const KernelOperations& good = *ScalarKernel().operations;
  EXPECT_EQ(DigestWith(good), kGoldenDigest);

  KernelOperations broken = good;
  broken.adam_step = [](const AdamStepArgs& args) {
    AdamStepArgs unscaled = args;
    unscaled.grad_scale = 1;
    ScalarKernel().operations->adam_step(unscaled);
  };
  EXPECT_NE(DigestWith(broken), kGoldenDigest) << "gradient scale left out";

  broken = good;
  broken.accumulate = [](const AccumulateArgs& args) {
    AccumulateArgs undivided = args;
    undivided.divisor = 1;
    ScalarKernel().operations->accumulate(undivided);
  };
  EXPECT_NE(DigestWith(broken), kGoldenDigest) << "divisor left out";

  broken = good;
  broken.absmax = [](const AbsMaxArgs& args) {
    AbsMaxArgs shorter = args;
    --shorter.numel;
    ScalarKernel().operations->absmax(shorter);
  };
  EXPECT_NE(DigestWith(broken), kGoldenDigest) << "last element left out";
}

}  // namespace
}  // namespace onepass

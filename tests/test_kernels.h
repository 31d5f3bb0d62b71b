// The kernels that a test runs over, and how much of a long test it runs.
//
//   class CastTest : public testing::TestWithParam<const Kernel*> {};
//   INSTANTIATE_TEST_SUITE_P(Kernels, CastTest,
//                            testing::ValuesIn(RunnableKernels()), KernelName);

#ifndef ONEPASS_TESTS_TEST_KERNELS_H_
#define ONEPASS_TESTS_TEST_KERNELS_H_

#include <cstdint>
#include <string>

#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/runnable_kernels.h"  // for its users

namespace onepass {

// The kernel that the others are compared with.
const Kernel& ScalarKernel();

// The kernel's name as a test's.
std::string KernelName(const testing::TestParamInfo<const Kernel*>& info);

// Long tests try every LongTestStride()-th case: 1, or kReducedStride where the
// environment has ONEPASS_LONG_TESTS=reduced, as all but the default
// configuration do: they try the same cases again, or under an emulator.
inline constexpr int64_t kReducedStride = 257;
int64_t LongTestStride();

// Whether the program is instrumented: memory and time are then not its own.
bool UnderSanitizer();

// Whether tools/foreign.sh runs the program under an emulator, whose memory,
// threads and time are not its own either.
bool UnderEmulator();

}  // namespace onepass

#endif  // ONEPASS_TESTS_TEST_KERNELS_H_

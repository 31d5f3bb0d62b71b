// Counts what `new` allocates in a test that links it.
//
//   const int64_t before = AllocationCount();
//   ... steady state ...
//   EXPECT_EQ(AllocationCount(), before);

#ifndef ONEPASS_TESTS_ALLOCATION_COUNTER_H_
#define ONEPASS_TESTS_ALLOCATION_COUNTER_H_

#include <cstdint>

namespace onepass {

// Calls of operator new so far, from all threads.
int64_t AllocationCount();

}  // namespace onepass

#endif  // ONEPASS_TESTS_ALLOCATION_COUNTER_H_

// For fuzzers (fuzz_test.bzl).

#ifndef ONEPASS_TESTS_FUZZ_REQUIRE_H_
#define ONEPASS_TESTS_FUZZ_REQUIRE_H_

#include <cstdio>
#include <cstdlib>

// Ends the program where `condition` does not hold: that is a finding.
#define ONEPASS_FUZZ_REQUIRE(condition)                               \
  do {                                                                \
    if (!(condition)) {                                               \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, \
                   #condition);                                       \
      std::abort();                                                   \
    }                                                                 \
  } while (false)

#endif  // ONEPASS_TESTS_FUZZ_REQUIRE_H_

// A caller's floating-point environment at its worst: rounding toward zero and,
// where the architecture has it, subnormals flushed and read as zero.
//
//   {
//     HostileFpEnvironment hostile;
//     ... call what must give the same bits all the same ...
//     EXPECT_TRUE(hostile.Intact());
//   }

#ifndef ONEPASS_TESTS_HOSTILE_FP_ENVIRONMENT_H_
#define ONEPASS_TESTS_HOSTILE_FP_ENVIRONMENT_H_

#include <cstdint>

namespace onepass {

class HostileFpEnvironment {
 public:
  HostileFpEnvironment() : saved_(Read()) { Write(kHostile); }
  ~HostileFpEnvironment() { Write(saved_); }

  HostileFpEnvironment(const HostileFpEnvironment&) = delete;
  HostileFpEnvironment& operator=(const HostileFpEnvironment&) = delete;

  // Whether this environment is still the one that is set.
  bool Intact() const { return ((Read() ^ kHostile) & ~kFlags) == 0; }

 private:
#if defined(__x86_64__)
  using Word = uint32_t;  // MXCSR
  static constexpr Word kHostile = 0x1f80 | 0x8040 | 0x6000;
  static constexpr Word kFlags = 0x3f;  // of exceptions that occurred
  static Word Read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word)::"memory");
    return word;
  }
  static void Write(Word word) {
    asm volatile("ldmxcsr %0" ::"m"(word) : "memory");
  }
#elif defined(__aarch64__)
  using Word = uint64_t;  // FPCR: AHP, FZ, FZ16, toward zero
  static constexpr Word kHostile =
      (1u << 26) | (1u << 24) | (1u << 19) | (3u << 22);
  static constexpr Word kFlags = 0;
  static Word Read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
    return word;
  }
  static void Write(Word word) {
    asm volatile("msr fpcr, %0" ::"r"(word) : "memory");
  }
#elif defined(__riscv)
  using Word = uint64_t;  // frm: toward zero
  static constexpr Word kHostile = 1;
  static constexpr Word kFlags = 0;
  static Word Read() {
    Word word;
    asm volatile("frrm %0" : "=r"(word)::"memory");
    return word;
  }
  static void Write(Word word) {
    asm volatile("fsrm %0" ::"r"(word) : "memory");
  }
#endif

  Word saved_;
};

}  // namespace onepass

#endif  // ONEPASS_TESTS_HOSTILE_FP_ENVIRONMENT_H_

// The floating-point environment that every computation of onepass runs in:
// round to nearest even, subnormals neither flushed nor read as zero, no
// alternative half precision, no traps.
//
//   ScopedFpEnvironment fp;
//   ... compute on memory ...
//
// One library built with fast-math sets flush-to-zero for a whole process, and
// threads inherit it; without this guard such a process would get other bits.
//
// The compiler does not know that arithmetic depends on the environment. The
// guard keeps memory accesses in place, so operands must be loaded and results
// stored between its two ends: values that live in registers across an end may
// be computed on the wrong side of it.

#ifndef ONEPASS_DISPATCH_FP_ENVIRONMENT_H_
#define ONEPASS_DISPATCH_FP_ENVIRONMENT_H_

#include <cstdint>

#ifdef __FAST_MATH__
#error "onepass promises bits: targets that compute are built without fast-math"
#endif

namespace onepass {

class ScopedFpEnvironment {
 public:
  // Inlined always: kernel objects, built for one instruction set, may hold no
  // function that the linker could pick for the whole program.
  [[gnu::always_inline]] ScopedFpEnvironment() : saved_(Read()) {
    Write(kDefault);
  }
  [[gnu::always_inline]] ~ScopedFpEnvironment() { Write(saved_); }

  ScopedFpEnvironment(const ScopedFpEnvironment&) = delete;
  ScopedFpEnvironment& operator=(const ScopedFpEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;  // MXCSR
  // All exceptions masked, nearest even, FTZ and DAZ off.
  static constexpr Word kDefault = 0x1f80;

  [[gnu::always_inline]] static Word Read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word)::"memory");
    return word;
  }
  [[gnu::always_inline]] static void Write(Word word) {
    asm volatile("ldmxcsr %0" ::"m"(word) : "memory");
  }
#elif defined(__aarch64__)
  using Word = uint64_t;  // FPCR
  // Nearest even, FZ, FZ16, FIZ, AH and AHP off, no traps.
  static constexpr Word kDefault = 0;

  [[gnu::always_inline]] static Word Read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
    return word;
  }
  [[gnu::always_inline]] static void Write(Word word) {
    asm volatile("msr fpcr, %0" ::"r"(word) : "memory");
  }
#elif defined(__riscv)
  using Word = uint64_t;  // frm
  // Nearest even. RISC-V has no flush-to-zero and no traps.
  static constexpr Word kDefault = 0;

  [[gnu::always_inline]] static Word Read() {
    Word word;
    asm volatile("frrm %0" : "=r"(word)::"memory");
    return word;
  }
  [[gnu::always_inline]] static void Write(Word word) {
    asm volatile("fsrm %0" ::"r"(word) : "memory");
  }
#else
#error "dispatch/fp_environment.h does not know this architecture"
#endif

  Word saved_;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_FP_ENVIRONMENT_H_

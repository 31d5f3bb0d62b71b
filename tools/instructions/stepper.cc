// Counts the instructions that a program executes between its two SIGSTOPs, one
// step of the processor at a time:
//
//   stepper PROGRAM ARGUMENT...
//
// prints the count. Exact, on whatever instructions this processor has (which
// emulators may lack), without hardware counters (which virtual machines may
// lack), at some 50,000 steps a second.
//
// Exit status: 0; 1 where the program did not do what it should; 3 where this
// machine cannot step: a sandbox may forbid tracing, and Linux on RISC-V has no
// single step.

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kCannotStep = 3;

[[noreturn]] void Die(int status, const char* what, const char* why) {
  std::fprintf(stderr, "stepper: %s: %s\n", what, why);
  std::exit(status);
}

// Goes on by `request`, past signals that are passed on, to the next stop that
// is a SIGSTOP or (a step's, an exec's) a SIGTRAP, and returns which.
int Continue(__ptrace_request request, pid_t child, const char* program) {
  intptr_t signal = 0;
  while (true) {
    if (ptrace(request, child, nullptr, signal) != 0) {
      Die(kCannotStep, request == PTRACE_SINGLESTEP ? "single step" : "trace",
          std::strerror(errno));
    }
    int status;
    if (waitpid(child, &status, 0) != child) {
      Die(1, "waitpid", std::strerror(errno));
    }
    if (!WIFSTOPPED(status)) {
      Die(1, program, "ended before its second SIGSTOP");
    }
    signal = WSTOPSIG(status);
    if (signal == SIGSTOP || signal == SIGTRAP) return static_cast<int>(signal);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) Die(1, "usage", "stepper PROGRAM ARGUMENT...");
  const char* program = argv[1];
  const pid_t child = fork();
  if (child < 0) Die(1, "fork", std::strerror(errno));
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
      std::fprintf(stderr, "stepper: trace: %s\n", std::strerror(errno));
      _exit(kCannotStep);
    }
    execv(program, argv + 1);
    std::fprintf(stderr, "stepper: %s: %s\n", program, std::strerror(errno));
    _exit(1);
  }

  // The child stops at its exec, or has said why there is none.
  int status;
  if (waitpid(child, &status, 0) != child) {
    Die(1, "waitpid", std::strerror(errno));
  }
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  if (!WIFSTOPPED(status)) Die(1, program, "was killed");
  // Dies with this process.
  if (ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_EXITKILL) != 0) {
    Die(kCannotStep, "trace", std::strerror(errno));
  }

  while (Continue(PTRACE_CONT, child, program) != SIGSTOP) {
  }
  int64_t count = 0;
  while (Continue(PTRACE_SINGLESTEP, child, program) != SIGSTOP) ++count;
  std::printf("%" PRId64 "\n", count);

  // What is left to do has no bearing on the count, but it is to end well.
  if (ptrace(PTRACE_DETACH, child, nullptr, nullptr) != 0 ||
      waitpid(child, &status, 0) != child || !WIFEXITED(status) ||
      WEXITSTATUS(status) != 0) {
    Die(1, program, "failed after its second SIGSTOP");
  }
  return std::fflush(stdout) == 0 ? 0 : 1;
}

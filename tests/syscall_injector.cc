#include "tests/syscall_injector.h"

#include <elf.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__riscv)
#include <asm/ptrace.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

// --- The calls. ---

constexpr int kNone = -1;

// Which arguments of a call say what it touches: a path, relative to the
// directory that a descriptor is open on (kNone: to the working directory); or
// without a path, the descriptor.
struct Subject {
  int descriptor = kNone;
  int path = kNone;
};

struct FileCallKind {
  int64_t number;
  const char* name;
  Subject subject;
  Subject target = {};
};

constexpr FileCallKind kFileCalls[] = {
    {SYS_openat, "openat", {0, 1}},
    {SYS_close, "close", {0}},
    {SYS_read, "read", {0}},
    {SYS_readv, "readv", {0}},
    {SYS_pread64, "pread64", {0}},
    {SYS_preadv, "preadv", {0}},
    {SYS_write, "write", {0}},
    {SYS_writev, "writev", {0}},
    {SYS_pwrite64, "pwrite64", {0}},
    {SYS_pwritev, "pwritev", {0}},
    {SYS_pwritev2, "pwritev2", {0}},
    {SYS_sendfile, "sendfile", {0}},
    {SYS_copy_file_range, "copy_file_range", {2}},
    {SYS_fsync, "fsync", {0}},
    {SYS_fdatasync, "fdatasync", {0}},
    {SYS_sync_file_range, "sync_file_range", {0}},
    {SYS_fadvise64, "fadvise64", {0}},
    {SYS_fcntl, "fcntl", {0}},
    {SYS_flock, "flock", {0}},
    {SYS_truncate, "truncate", {kNone, 0}},
    {SYS_ftruncate, "ftruncate", {0}},
    {SYS_fallocate, "fallocate", {0}},
    {SYS_renameat2, "renameat2", {0, 1}, {2, 3}},
    {SYS_linkat, "linkat", {0, 1}, {2, 3}},
    {SYS_symlinkat, "symlinkat", {1, 2}},
    {SYS_unlinkat, "unlinkat", {0, 1}},
    {SYS_mkdirat, "mkdirat", {0, 1}},
    {SYS_fchmodat, "fchmodat", {0, 1}},
    {SYS_getdents64, "getdents64", {0}},
    {SYS_fstat, "fstat", {0}},
    {SYS_newfstatat, "newfstatat", {0, 1}},
    {SYS_statx, "statx", {0, 1}},
    {SYS_faccessat, "faccessat", {0, 1}},
    {SYS_readlinkat, "readlinkat", {0, 1}},
// Newer architectures have only the more general ones, and older systems do
// not have the newest.
#if defined(SYS_open)
    {SYS_open, "open", {kNone, 0}},
    {SYS_creat, "creat", {kNone, 0}},
    {SYS_rename, "rename", {kNone, 0}, {kNone, 1}},
    {SYS_link, "link", {kNone, 0}, {kNone, 1}},
    {SYS_symlink, "symlink", {kNone, 1}},
    {SYS_unlink, "unlink", {kNone, 0}},
    {SYS_rmdir, "rmdir", {kNone, 0}},
    {SYS_mkdir, "mkdir", {kNone, 0}},
    {SYS_chmod, "chmod", {kNone, 0}},
    {SYS_stat, "stat", {kNone, 0}},
    {SYS_lstat, "lstat", {kNone, 0}},
    {SYS_access, "access", {kNone, 0}},
    {SYS_readlink, "readlink", {kNone, 0}},
#endif
#if defined(SYS_renameat)
    {SYS_renameat, "renameat", {0, 1}, {2, 3}},
#endif
#if defined(SYS_openat2)
    {SYS_openat2, "openat2", {0, 1}},
#endif
#if defined(SYS_faccessat2)
    {SYS_faccessat2, "faccessat2", {0, 1}},
#endif
};

// --- The registers of a stopped thread. ---

template <typename Registers>
bool GetRegisters(pid_t thread, int set, Registers* registers) {
  iovec place = {registers, sizeof(*registers)};
  return ptrace(PTRACE_GETREGSET, thread, set, &place) == 0;
}

template <typename Registers>
bool SetRegisters(pid_t thread, int set, Registers registers) {
  iovec place = {&registers, sizeof(registers)};
  return ptrace(PTRACE_SETREGSET, thread, set, &place) == 0;
}

// SkipCall: where a call begins, has it do nothing. SetResult: where it ends.
#if defined(__x86_64__)

constexpr bool kHasRegisters = true;

bool SkipCall(pid_t thread) {
  user_regs_struct registers;
  if (!GetRegisters(thread, NT_PRSTATUS, &registers)) return false;
  registers.orig_rax = -1;
  return SetRegisters(thread, NT_PRSTATUS, registers);
}

bool SetResult(pid_t thread, int64_t /*number*/, int64_t result) {
  user_regs_struct registers;
  if (!GetRegisters(thread, NT_PRSTATUS, &registers)) return false;
  registers.rax = result;
  return SetRegisters(thread, NT_PRSTATUS, registers);
}

#elif defined(__aarch64__)

constexpr bool kHasRegisters = true;

bool SkipCall(pid_t thread) {
  return SetRegisters(thread, NT_ARM_SYSTEM_CALL, int{-1});
}

bool SetResult(pid_t thread, int64_t /*number*/, int64_t result) {
  user_regs_struct registers;
  if (!GetRegisters(thread, NT_PRSTATUS, &registers)) return false;
  registers.regs[0] = result;
  return SetRegisters(thread, NT_PRSTATUS, registers);
}

#elif defined(__riscv) && __riscv_xlen == 64

constexpr bool kHasRegisters = true;

bool SkipCall(pid_t thread) {
  user_regs_struct registers;
  if (!GetRegisters(thread, NT_PRSTATUS, &registers)) return false;
  registers.a7 = -1;
  return SetRegisters(thread, NT_PRSTATUS, registers);
}

// The number is in a register that a call leaves as it was.
bool SetResult(pid_t thread, int64_t number, int64_t result) {
  user_regs_struct registers;
  if (!GetRegisters(thread, NT_PRSTATUS, &registers)) return false;
  registers.a7 = number;
  registers.a0 = result;
  return SetRegisters(thread, NT_PRSTATUS, registers);
}

#else

constexpr bool kHasRegisters = false;

bool SkipCall(pid_t) { return false; }
bool SetResult(pid_t, int64_t, int64_t) { return false; }

#endif

// --- What a call touches. ---

// The text at an address of a stopped thread; empty where there is none.
std::string TextAt(pid_t thread, uint64_t address) {
  constexpr uint64_t kPage = 4096;
  constexpr size_t kMostBytes = 4096;
  std::string text;
  char piece[kPage];
  while (text.size() < kMostBytes) {
    // To the end of the page: the next one may not be there.
    const size_t bytes = kPage - address % kPage;
    const iovec here = {piece, bytes};
    const iovec there = {reinterpret_cast<void*>(address), bytes};
    if (process_vm_readv(thread, &here, 1, &there, 1, 0) !=
        static_cast<ssize_t>(bytes)) {
      return "";
    }
    const char* end = std::find(piece, piece + bytes, '\0');
    text.append(piece, end - piece);
    if (end != piece + bytes) break;
    address += bytes;
  }
  return text;
}

// What a link below /proc/THREAD leads to; empty where there is none.
fs::path LinkOf(pid_t thread, absl::string_view link) {
  std::error_code error;
  return fs::read_symlink(absl::StrCat("/proc/", thread, "/", link), error);
}

// As FileCall::path.
fs::path SubjectPath(pid_t thread, const uint64_t* arguments,
                     const Subject& subject) {
  const int descriptor = subject.descriptor == kNone
                             ? AT_FDCWD
                             : static_cast<int>(arguments[subject.descriptor]);
  const fs::path base = descriptor == AT_FDCWD
                            ? LinkOf(thread, "cwd")
                            : LinkOf(thread, absl::StrCat("fd/", descriptor));
  if (subject.path == kNone) return base;
  std::string text = TextAt(thread, arguments[subject.path]);
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  if (text.empty()) return base;
  const fs::path path = base / text;
  const fs::path name = path.filename();
  std::error_code error;
  if (name.empty() || name == "." || name == "..") {
    return fs::weakly_canonical(path, error);
  }
  return fs::weakly_canonical(path.parent_path(), error) / name;
}

bool IsBelow(const fs::path& path, const fs::path& directory) {
  return std::mismatch(directory.begin(), directory.end(), path.begin(),
                       path.end())
             .first == directory.end();
}

// --- The child. ---

struct Injection {
  // Which call, from 0; kNone: none.
  int call = kNone;
  // Its errno; 0: the child is killed.
  int error = 0;
};

absl::Status SystemError(absl::string_view call) {
  return absl::InternalError(
      absl::StrCat(call, ": ", std::generic_category().message(errno)));
}

// Runs a function in a traced child.
class Tracer {
 public:
  Tracer(fs::path directory, Injection injection)
      : directory_(std::move(directory)), injection_(injection) {}
  // Ends the child where an error left it.
  ~Tracer();

  absl::StatusOr<InjectionOutcome> Run(absl::FunctionRef<int()> function);
  const std::vector<FileCall>& calls() const { return calls_; }

 private:
  static constexpr unsigned kMostSeconds = 60;

  absl::Status Start(absl::FunctionRef<int()> function);
  // Where a thread is about to make a call, or has made one.
  absl::Status AtCall(pid_t thread);
  // The wait status of the next thread that stops or ends.
  absl::StatusOr<int> Wait(pid_t* thread);
  bool Ended(pid_t thread, int status);

  const fs::path directory_;
  const Injection injection_;
  std::vector<FileCall> calls_;
  InjectionOutcome outcome_;
  pid_t child_ = 0;
  // The thread whose call is to fail, while it is in that, and the call.
  pid_t failing_ = 0;
  int64_t failing_number_ = 0;
};

Tracer::~Tracer() {
  if (child_ == 0) return;
  kill(child_, SIGKILL);
  while (child_ != 0) {
    pid_t thread;
    const auto status = Wait(&thread);
    if (!status.ok() || Ended(thread, *status)) break;
  }
}

absl::Status Tracer::Start(absl::FunctionRef<int()> function) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return SystemError("pipe");
  child_ = fork();
  if (child_ == 0) {
    close(pipe_ends[1]);
    char go;
    const bool traced = read(pipe_ends[0], &go, 1) == 1;
    close(pipe_ends[0]);
    if (!traced) _exit(255);
    alarm(kMostSeconds);
    _exit(function());
  }
  close(pipe_ends[0]);
  absl::Status status;
  if (child_ < 0) {
    child_ = 0;
    status = SystemError("fork");
  } else if (ptrace(PTRACE_SEIZE, child_, nullptr,
                    PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE |
                        PTRACE_O_EXITKILL) != 0 ||
             ptrace(PTRACE_INTERRUPT, child_, nullptr, nullptr) != 0) {
    status = SystemError("ptrace");
  } else if (write(pipe_ends[1], "", 1) != 1) {
    // The child stops before it does anything with it.
    status = SystemError("write to a child");
  }
  close(pipe_ends[1]);
  return status;
}

absl::StatusOr<int> Tracer::Wait(pid_t* thread) {
  int status;
  do {
    *thread = waitpid(-1, &status, __WALL);
  } while (*thread < 0 && errno == EINTR);
  if (*thread < 0) return SystemError("waitpid");
  return status;
}

bool Tracer::Ended(pid_t thread, int status) {
  // Of the first thread, this comes after the ends of all others.
  if (thread != child_ || WIFSTOPPED(status)) return false;
  child_ = 0;
  if (WIFEXITED(status)) outcome_.exit_status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome_.signal = WTERMSIG(status);
  return true;
}

absl::Status Tracer::AtCall(pid_t thread) {
  __ptrace_syscall_info info;
  if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof(info), &info) <= 0) {
    // A thread may be killed while it is stopped.
    return errno == ESRCH ? absl::OkStatus() : SystemError("ptrace: call");
  }
  if (info.op == PTRACE_SYSCALL_INFO_EXIT && thread == failing_) {
    failing_ = 0;
    return SetResult(thread, failing_number_, -injection_.error)
               ? absl::OkStatus()
               : SystemError("ptrace: result");
  }
  if (info.op != PTRACE_SYSCALL_INFO_ENTRY) return absl::OkStatus();
  const auto* kind = std::find_if(
      std::begin(kFileCalls), std::end(kFileCalls), [&](const auto& kind) {
        return kind.number == static_cast<int64_t>(info.entry.nr);
      });
  if (kind == std::end(kFileCalls)) return absl::OkStatus();
  const fs::path path = SubjectPath(thread, info.entry.args, kind->subject);
  fs::path target;
  if (kind->target.path != kNone) {
    target = SubjectPath(thread, info.entry.args, kind->target);
  }
  if (!IsBelow(path, directory_) && !IsBelow(target, directory_)) {
    return absl::OkStatus();
  }
  const int index = calls_.size();
  calls_.push_back({kind->name, path.string(), target.string()});
  if (index != injection_.call) return absl::OkStatus();
  if (!SkipCall(thread)) return SystemError("ptrace: number of a call");
  outcome_.injected = true;
  outcome_.call = calls_.back();
  if (injection_.error == 0) {
    kill(child_, SIGKILL);
  } else {
    failing_ = thread;
    failing_number_ = info.entry.nr;
  }
  return absl::OkStatus();
}

absl::StatusOr<InjectionOutcome> Tracer::Run(
    absl::FunctionRef<int()> function) {
  if (absl::Status status = Start(function); !status.ok()) return status;
  for (;;) {
    pid_t thread;
    const auto status = Wait(&thread);
    if (!status.ok()) return status.status();
    if (Ended(thread, *status)) return outcome_;
    if (!WIFSTOPPED(*status)) continue;
    int signal = 0;
    if (WSTOPSIG(*status) == (SIGTRAP | 0x80)) {
      absl::Status at_call = AtCall(thread);
      if (!at_call.ok()) return at_call;
    } else if (*status >> 16 == 0) {
      signal = WSTOPSIG(*status);
    }  // Else the thread is new.
    if (ptrace(PTRACE_SYSCALL, thread, nullptr, signal) != 0 &&
        errno != ESRCH) {
      return SystemError("ptrace: go on");
    }
  }
}

absl::StatusOr<fs::path> Canonical(const std::string& directory) {
  std::error_code error;
  fs::path path = fs::canonical(directory, error);
  if (error) {
    return absl::NotFoundError(absl::StrCat(directory, ": ", error.message()));
  }
  return path;
}

absl::StatusOr<InjectionOutcome> RunInjected(
    const std::string& dir, Injection injection,
    absl::FunctionRef<int()> function) {
  const auto directory = Canonical(dir);
  if (!directory.ok()) return directory.status();
  return Tracer(*directory, injection).Run(function);
}

}  // namespace

absl::Status CanInject() {
  if (!kHasRegisters) {
    return absl::FailedPreconditionError(
        "system calls are not traced on this architecture");
  }
  if (UnderSanitizer() || UnderEmulator()) {
    return absl::FailedPreconditionError(
        "system calls of a sanitizer or emulator count here");
  }
  const auto outcome = RunFailingAt("/proc", 0, ENOSPC, [] {
    return access("/proc", F_OK) == 0 ? 0 : errno;
  });
  if (!outcome.ok() || outcome->exit_status != ENOSPC) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the system does not let a process trace its child: ",
        outcome.ok() ? "a call was made" : outcome.status().message()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FileCall>> TraceFileCalls(
    const std::string& dir, absl::FunctionRef<int()> function) {
  const auto directory = Canonical(dir);
  if (!directory.ok()) return directory.status();
  Tracer tracer(*directory, {});
  const auto outcome = tracer.Run(function);
  if (!outcome.ok()) return outcome.status();
  if (outcome->exit_status != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("expected the traced function to return 0, it returned ",
                     outcome->exit_status, ", signal ", outcome->signal));
  }
  return tracer.calls();
}

absl::StatusOr<InjectionOutcome> RunKilledAt(
    const std::string& dir, int k, absl::FunctionRef<int()> function) {
  return RunInjected(dir, {k, 0}, function);
}

absl::StatusOr<InjectionOutcome> RunFailingAt(
    const std::string& dir, int k, int error,
    absl::FunctionRef<int()> function) {
  if (error <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("errno ", error, ": expected one above 0"));
  }
  return RunInjected(dir, {k, error}, function);
}

}  // namespace onepass

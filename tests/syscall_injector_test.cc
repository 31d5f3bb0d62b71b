#include "tests/syscall_injector.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/process_use.h"
#include "tests/temp_directory.h"

namespace onepass {
namespace {

class SyscallInjectorTest : public testing::Test {
 protected:
  void SetUp() override {
    const absl::Status status = CanInject();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }

  std::string Path(const std::string& name) const {
    return directory_.path() + "/" + name;
  }

  // Calls that are the same on all architectures: makes the file a, renames it
  // to b.
  int MakeAndRename() const {
    const int file = syscall(SYS_openat, AT_FDCWD, Path("a").c_str(),
                             O_WRONLY | O_CREAT, 0600);
    if (file < 0) return errno;
    if (syscall(SYS_write, file, "text", 4) != 4) return errno;
    if (syscall(SYS_fsync, file) != 0) return errno;
    if (syscall(SYS_close, file) != 0) return errno;
    if (syscall(SYS_renameat2, AT_FDCWD, Path("a").c_str(), AT_FDCWD,
                Path("b").c_str(), 0) != 0) {
      return errno;
    }
    return 0;
  }

  const TempDirectory directory_;
};

// As "name path" or "name path target", below a directory.
std::vector<std::string> Texts(const std::vector<FileCall>& calls,
                               const std::string& directory) {
  std::vector<std::string> texts;
  for (const FileCall& call : calls) {
    std::string text = absl::StrCat(call.name, " ", call.path);
    if (!call.target.empty()) absl::StrAppend(&text, " ", call.target);
    for (size_t at; (at = text.find(directory)) != std::string::npos;) {
      text.replace(at, directory.size(), "D");
    }
    texts.push_back(text);
  }
  return texts;
}

using StringList = std::vector<std::string>;

TEST_F(SyscallInjectorTest, ListsCallsBelowTheDirectory) {
  const auto calls = TraceFileCalls(directory_.path(), [this] {
    // Neither of these is there, or near enough.
    close(open("/dev/null", O_RDWR));
    close(open((directory_.path() + "-other").c_str(), O_RDONLY));
    return MakeAndRename();
  });
  ASSERT_TRUE(calls.ok()) << calls.status();
  EXPECT_EQ(Texts(*calls, directory_.path()),
            (StringList{"openat D/a", "write D/a", "fsync D/a", "close D/a",
                        "renameat2 D/a D/b"}));
  EXPECT_TRUE(std::filesystem::exists(Path("b")));
}

TEST_F(SyscallInjectorTest, PathsAreResolved) {
  std::filesystem::create_directory(Path("real"));
  std::filesystem::create_symlink("real", Path("link"));
  const TempDirectory other_directory;
  const std::string other_file = other_directory.path() + "/out";
  const auto calls = TraceFileCalls(directory_.path() + "/.", [&] {
    const std::string other = Path("link") + "/../real//x";
    int file = syscall(SYS_openat, AT_FDCWD, other.c_str(), O_CREAT, 0600);
    const int copy = dup(file);
    close(file);
    syscall(SYS_ftruncate, copy, 0);
    if (chdir(Path("link").c_str()) != 0) return errno;
    syscall(SYS_openat, AT_FDCWD, "nothing/y", O_RDONLY);
    const int here = syscall(SYS_openat, AT_FDCWD, ".", O_RDONLY);
    syscall(SYS_mkdirat, here, "z/", 0700);
    syscall(SYS_fsync, here);
    syscall(SYS_unlinkat, AT_FDCWD, Path("link").c_str(), 0);
    struct stat status;
    syscall(SYS_newfstatat, copy, "", &status, AT_EMPTY_PATH);
    // From elsewhere.
    syscall(SYS_renameat2, AT_FDCWD, other_file.c_str(), here, "in", 0);
    // What fails is listed, too.
    syscall(SYS_openat, AT_FDCWD, nullptr, O_RDONLY);
    syscall(SYS_unlinkat, here, "/dev/null/none", 0);
    return 0;
  });
  ASSERT_TRUE(calls.ok()) << calls.status();
  EXPECT_EQ(Texts(*calls, directory_.path()),
            (StringList{
                "openat D/real/x", "close D/real/x", "ftruncate D/real/x",
                "openat D/real/nothing/y", "openat D/real", "mkdirat D/real/z",
                "fsync D/real", "unlinkat D/link", "newfstatat D/real/x",
                "renameat2 " + other_file + " D/real/in", "openat D/real"}));
}

TEST_F(SyscallInjectorTest, KillsAtEachCall) {
  for (int k = 0; k < 5; ++k) {
    std::filesystem::remove(Path("a"));
    const auto outcome =
        RunKilledAt(directory_.path(), k, [this] { return MakeAndRename(); });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->injected) << k;
    EXPECT_EQ(outcome->signal, SIGKILL) << k;
    EXPECT_EQ(outcome->exit_status, -1) << k;
    EXPECT_EQ(outcome->call.name, (StringList{"openat", "write", "fsync",
                                              "close", "renameat2"}[k]));
    EXPECT_EQ(outcome->call.path, Path("a"));
    // The call was not made.
    EXPECT_EQ(std::filesystem::exists(Path("a")), k > 0) << k;
    if (k > 0) {
      EXPECT_EQ(std::filesystem::file_size(Path("a")), k > 1 ? 4u : 0u);
    }
    EXPECT_FALSE(std::filesystem::exists(Path("b"))) << k;
  }
}

TEST_F(SyscallInjectorTest, FailsEachCall) {
  for (int k = 0; k < 5; ++k) {
    std::filesystem::remove(Path("a"));
    const auto outcome = RunFailingAt(directory_.path(), k, EDQUOT,
                                      [this] { return MakeAndRename(); });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->injected) << k;
    EXPECT_EQ(outcome->signal, 0) << k;
    EXPECT_EQ(outcome->exit_status, EDQUOT) << k;
    EXPECT_EQ(std::filesystem::exists(Path("a")), k > 0) << k;
    EXPECT_FALSE(std::filesystem::exists(Path("b"))) << k;
  }
}

TEST_F(SyscallInjectorTest, OnlyOneCallFails) {
  const auto outcome = RunFailingAt(directory_.path(), 1, EINTR, [this] {
    const int file = open(Path("a").c_str(), O_WRONLY | O_CREAT, 0600);
    if (write(file, "x", 1) != -1 || errno != EINTR) return 1;
    if (write(file, "x", 1) != 1) return 2;
    if (close(file) != 0) return 3;
    return 42;
  });
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->injected);
  EXPECT_EQ(outcome->exit_status, 42);
  EXPECT_EQ(std::filesystem::file_size(Path("a")), 1u);
}

TEST_F(SyscallInjectorTest, SaysWhereThereIsNoSuchCall) {
  const auto killed =
      RunKilledAt(directory_.path(), 5, [this] { return MakeAndRename(); });
  ASSERT_TRUE(killed.ok()) << killed.status();
  EXPECT_FALSE(killed->injected);
  EXPECT_EQ(killed->exit_status, 0);
  EXPECT_EQ(killed->signal, 0);
  EXPECT_TRUE(std::filesystem::exists(Path("b")));
  const auto failed = RunFailingAt(directory_.path(), 5, EIO, [] { return 7; });
  ASSERT_TRUE(failed.ok()) << failed.status();
  EXPECT_FALSE(failed->injected);
  EXPECT_EQ(failed->exit_status, 7);
}

// Each of four threads makes a file and writes it; what returns is how many of
// them failed.
TEST_F(SyscallInjectorTest, FollowsThreads) {
  constexpr int kThreads = 4;
  const auto function = [this] {
    std::vector<int> failures(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([this, i, &failures] {
        const int file =
            open(Path(absl::StrCat(i)).c_str(), O_WRONLY | O_CREAT, 0600);
        failures[i] = file < 0 || write(file, "x", 1) != 1;
        close(file);
      });
    }
    int failed = 0;
    for (int i = 0; i < kThreads; ++i) {
      threads[i].join();
      failed += failures[i];
    }
    return failed;
  };
  const auto calls = TraceFileCalls(directory_.path(), function);
  ASSERT_TRUE(calls.ok()) << calls.status();
  EXPECT_EQ(calls->size(), size_t{3 * kThreads});
  // All but the last, which may be the end of any thread.
  for (int k = 0; k < 3 * kThreads - 1; ++k) {
    const auto failed = RunFailingAt(directory_.path(), k, EIO, function);
    ASSERT_TRUE(failed.ok()) << failed.status();
    EXPECT_TRUE(failed->injected) << k;
    EXPECT_EQ(failed->exit_status, failed->call.name == "close" ? 0 : 1) << k;
    const auto killed = RunKilledAt(directory_.path(), k, function);
    ASSERT_TRUE(killed.ok()) << killed.status();
    EXPECT_TRUE(killed->injected) << k;
    EXPECT_EQ(killed->signal, SIGKILL) << k;
  }
}

TEST_F(SyscallInjectorTest, OtherEndsAreTold) {
  const auto outcome = RunFailingAt(directory_.path(), 0, EIO, [] {
    raise(SIGTERM);
    return 0;
  });
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_FALSE(outcome->injected);
  EXPECT_EQ(outcome->signal, SIGTERM);
  EXPECT_EQ(outcome->exit_status, -1);
  const absl::Status status =
      TraceFileCalls(directory_.path(), [] { return 3; }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(status.message(), "returned 3")) << status;
}

// A signal that the child handles reaches it, and interrupts it where it waits.
TEST_F(SyscallInjectorTest, SignalsAreDelivered) {
  const auto calls = TraceFileCalls(directory_.path(), [] {
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    sigaction(SIGUSR1, &action, nullptr);
    std::thread sender([thread = pthread_self()] {
      for (int i = 0; i < 20; ++i) {
        usleep(1000);
        pthread_kill(thread, SIGUSR1);
      }
    });
    const int result = pause();
    const int error = errno;
    sender.join();
    return result == -1 && error == EINTR ? 0 : 1;
  });
  EXPECT_TRUE(calls.ok()) << calls.status();
}

TEST_F(SyscallInjectorTest, WhatIsNoDirectoryOrErrorIsRefused) {
  const auto nothing = [] { return 0; };
  EXPECT_EQ(TraceFileCalls(Path("none"), nothing).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(RunKilledAt(Path("none"), 0, nothing).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(RunFailingAt(directory_.path(), 0, 0, nothing).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SyscallInjectorTest, LeavesNothingBehind) {
  const int64_t descriptors = Entries(kDescriptors);
  for (int k = 0; k < 6; ++k) {
    EXPECT_TRUE(RunKilledAt(directory_.path(), k, [this] {
                  return MakeAndRename();
                }).ok());
  }
  EXPECT_EQ(Entries(kDescriptors), descriptors);
  EXPECT_EQ(waitpid(-1, nullptr, __WALL), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace
}  // namespace onepass

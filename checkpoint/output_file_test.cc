#include "checkpoint/output_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/files.h"
#include "gtest/gtest.h"
#include "tests/allocation_counter.h"
#include "tests/process_use.h"
#include "tests/syscall_injector.h"
#include "tests/temp_directory.h"

namespace onepass {
namespace {

constexpr int64_t kBlock = kOutputAlignment;

// Aligned memory in which each block is another.
class Pattern {
 public:
  explicit Pattern(int64_t blocks)
      : memory_(static_cast<char*>(
            std::aligned_alloc(kOutputAlignment, blocks * kBlock))),
        bytes_(blocks * kBlock) {
    for (int64_t i = 0; i < bytes_; ++i) {
      memory_.get()[i] = static_cast<char>(i * 7 + i / kBlock + 1);
    }
  }

  absl::Span<const char> span(int64_t offset, int64_t bytes) const {
    return {memory_.get() + offset, static_cast<size_t>(bytes)};
  }
  std::string text(int64_t bytes) const { return {memory_.get(), bytes + 0ul}; }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t bytes_;
};

// Direct or not, as the parameter says; where the filesystem of the test has no
// direct writes, both are not.
class OutputFileTest : public testing::TestWithParam<bool> {
 protected:
  std::string Path(absl::string_view name) const {
    return JoinPath(directory_.path(), name);
  }

  std::unique_ptr<OutputFile> Create(absl::string_view name) const {
    OutputFileOptions options;
    options.direct = GetParam();
    auto file = OutputFile::Create(Path(name), options);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  std::string Read(absl::string_view name) const {
    const auto text = ReadWholeFile(Path(name), 1 << 20);
    EXPECT_TRUE(text.ok()) << text.status();
    return text.value_or("");
  }

  const TempDirectory directory_;
  const Pattern pattern_{16};
};

INSTANTIATE_TEST_SUITE_P(Ways, OutputFileTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Direct" : "Cached";
                         });

TEST_P(OutputFileTest, HoldsWhatIsWritten) {
  int count = 0;
  for (const int64_t bytes : std::vector<int64_t>{
           0, 1, 511, 512, 4095, 4096, 4097, 8192, 3 * 4096 + 5, 16 * 4096}) {
    // At once, by one block, by three.
    for (const int64_t step : {16 * kBlock, kBlock, 3 * kBlock}) {
      const std::string name = absl::StrCat(count++);
      const auto file = Create(name);
      for (int64_t offset = 0; offset < bytes; offset += step) {
        EXPECT_EQ(file->size(), offset);
        const absl::Status status =
            file->Write(pattern_.span(offset, std::min(step, bytes - offset)));
        ASSERT_TRUE(status.ok()) << status;
      }
      EXPECT_TRUE(file->Write({}).ok());
      EXPECT_EQ(file->size(), bytes);
      const absl::Status status = file->Close();
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(Read(name) == pattern_.text(bytes)) << bytes << " " << step;
    }
  }
}

TEST_P(OutputFileTest, IsDirectWhereThatIsWanted) {
  const auto file = Create("a");
  // On some filesystems a file is direct, on others not; that Linux and the
  // accessor agree holds on all.
  int flags = -1;
  for (int descriptor = 0; descriptor < 100; ++descriptor) {
    std::error_code error;
    if (std::filesystem::read_symlink(
            absl::StrCat("/proc/self/fd/", descriptor), error) == Path("a")) {
      flags = fcntl(descriptor, F_GETFL);
    }
  }
  ASSERT_NE(flags, -1);
  EXPECT_EQ((flags & O_DIRECT) != 0, file->direct());
  if (!GetParam()) {
    EXPECT_FALSE(file->direct());
  }
}

TEST_P(OutputFileTest, NothingIsOverwritten) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "old").ok());
  const absl::Status status = OutputFile::Create(Path("a")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(absl::StrContains(status.message(), Path("a"))) << status;
  EXPECT_EQ(Read("a"), "old");
  std::filesystem::create_symlink(Path("b"), Path("link"));
  EXPECT_EQ(OutputFile::Create(Path("link")).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(OutputFile::Create(Path("none/a")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_P(OutputFileTest, AfterAnErrorThereIsOnlyThatError) {
  const auto unaligned = Create("a");
  ASSERT_TRUE(unaligned->Write(pattern_.span(0, kBlock)).ok());
  const absl::Status first = unaligned->Write(pattern_.span(512, kBlock));
  EXPECT_EQ(first.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(first.message(), "at offset 4096")) << first;
  EXPECT_EQ(unaligned->Write(pattern_.span(0, kBlock)), first);
  EXPECT_EQ(unaligned->Close(), first);
  EXPECT_EQ(unaligned->Close(), first);

  const auto after_the_last = Create("b");
  ASSERT_TRUE(after_the_last->Write(pattern_.span(0, kBlock + 1)).ok());
  const absl::Status second = after_the_last->Write(pattern_.span(0, kBlock));
  EXPECT_EQ(second.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(second.message(), "at offset 4097")) << second;
  EXPECT_EQ(after_the_last->Close(), second);
}

TEST_P(OutputFileTest, AClosedFileStaysWhole) {
  const auto file = Create("a");
  ASSERT_TRUE(file->Write(pattern_.span(0, 100)).ok());
  ASSERT_TRUE(file->Close().ok());
  EXPECT_EQ(file->Write(pattern_.span(0, kBlock)).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(file->Close().ok());
  EXPECT_TRUE(Read("a") == pattern_.text(100));
}

// The system writes less than it was given, and then says why.
TEST_P(OutputFileTest, AFileThatMayNotGrowIsAnError) {
  const auto file = Create("a");
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit = {kBlock + 1000, old_limit.rlim_max};
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const absl::Status status = file->Write(pattern_.span(0, 3 * kBlock));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  signal(SIGXFSZ, old_handler);
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(absl::StrContains(status.message(), Path("a"))) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "at offset 5096")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "File too large")) << status;
  // What did not end with a block cannot go on directly.
  EXPECT_FALSE(file->direct());
  // Also now that it might grow.
  EXPECT_EQ(file->Close(), status);
  EXPECT_TRUE(Read("a") == pattern_.text(kBlock + 1000));
}

TEST_P(OutputFileTest, LeavesNothingBehind) {
  const int64_t descriptors = Entries(kDescriptors);
  Create("unused");
  {
    const auto file = Create("failed");
    EXPECT_FALSE(file->Write(pattern_.span(1, kBlock)).ok());
  }
  {
    const auto file = Create("closed");
    const int64_t allocations = AllocationCount();
    bool written = true;
    for (int64_t i = 0; i < 16; ++i) {
      written = written && file->Write(pattern_.span(i * kBlock, kBlock)).ok();
    }
    written = written && file->Write(pattern_.span(0, 10)).ok();
    EXPECT_EQ(AllocationCount(), allocations);
    EXPECT_TRUE(written && file->Close().ok());
    EXPECT_EQ(Entries(kDescriptors), descriptors);
  }
  EXPECT_EQ(Entries(kDescriptors), descriptors);
}

// Pages of a file that are in the page cache; -1 where the system does not say.
int64_t CachedPages(const std::string& path) {
  const auto bytes = std::filesystem::file_size(path);
  if (bytes == 0) return 0;
  const int descriptor = open(path.c_str(), O_RDONLY);
  void* memory = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (memory == MAP_FAILED) return -1;
  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  const bool known = mincore(memory, bytes, resident.data()) == 0;
  munmap(memory, bytes);
  if (!known) return -1;
  return std::count_if(resident.begin(), resident.end(),
                       [](unsigned char flags) { return flags & 1; });
}

TEST_P(OutputFileTest, DoesNotStayInThePageCache) {
  constexpr int64_t kTmpfs = 0x01021994;
  struct statfs filesystem;
  ASSERT_EQ(statfs(directory_.path().c_str(), &filesystem), 0);
  if (filesystem.f_type == kTmpfs) {
    GTEST_SKIP() << "the test's directory has no disk below it";
  }
  const auto file = Create("a");
  constexpr int64_t kStep = 4 * kBlock;
  int64_t most = 0;
  for (int i = 0; i < 32; ++i) {
    ASSERT_TRUE(file->Write(pattern_.span((i % 4) * kStep, kStep)).ok());
    most = std::max(most, CachedPages(Path("a")));
  }
  ASSERT_TRUE(file->Write(pattern_.span(0, kStep + 1)).ok());
  ASSERT_TRUE(file->Close().ok());
  // One call, and some pages that Linux itself is busy with; not 128.
  const int64_t page = sysconf(_SC_PAGESIZE);
  EXPECT_LE(most * page, 4 * std::max(kStep, page));
  EXPECT_LE(CachedPages(Path("a")), 2);
  if (file->direct()) {
    EXPECT_LE(most, 1);
  }
}

class OutputFileInjectionTest : public OutputFileTest {
 protected:
  void SetUp() override {
    const absl::Status status = CanInject();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }

  // Writes five blocks and a bit, and returns 0 or the code of the error, to
  // which `expected` is the text that it has to have; 255: it has not.
  int WriteAll(absl::string_view expected) const {
    OutputFileOptions options;
    options.direct = GetParam();
    const auto file = OutputFile::Create(Path("a"), options);
    absl::Status status = file.status();
    if (status.ok()) {
      const bool written = (*file)->Write(pattern_.span(0, 2 * kBlock)).ok() &&
                           (*file)->Write(pattern_.span(0, 2 * kBlock)).ok() &&
                           (*file)->Write(pattern_.span(0, kBlock + 7)).ok();
      status = (*file)->Close();
      if (!written && status.ok()) return 255;
    }
    const bool complete = absl::StrContains(status.message(), Path("a")) &&
                          absl::StrContains(status.message(), expected);
    return status.ok() || complete ? static_cast<int>(status.code()) : 255;
  }

  std::string Expected() const {
    const std::string twice = pattern_.text(2 * kBlock);
    return twice + twice + pattern_.text(kBlock + 7);
  }
};

INSTANTIATE_TEST_SUITE_P(Ways, OutputFileInjectionTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Direct" : "Cached";
                         });

TEST_P(OutputFileInjectionTest, EachFailedCallIsReported) {
  const auto calls =
      TraceFileCalls(directory_.path(), [this] { return WriteAll(""); });
  ASSERT_TRUE(calls.ok()) << calls.status();
  EXPECT_EQ(Read("a"), Expected());
  const std::vector<std::pair<int, absl::StatusCode>> codes = {
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EDQUOT, absl::StatusCode::kResourceExhausted},
      {EIO, absl::StatusCode::kDataLoss},
      {EINTR, absl::StatusCode::kOk}};
  for (const auto& [error, code] : codes) {
    const std::string text = std::generic_category().message(error);
    for (size_t k = 0; k < calls->size(); ++k) {
      const std::string& name = (*calls)[k].name;
      // Whether there is direct writing, and advice, decide over no bytes.
      const bool fatal = code != absl::StatusCode::kOk && name != "fcntl" &&
                         name != "fadvise64";
      std::filesystem::remove(Path("a"));
      const auto outcome =
          RunFailingAt(directory_.path(), k, error,
                       [this, text = text] { return WriteAll(text); });
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_TRUE(outcome->injected);
      EXPECT_EQ(outcome->exit_status, fatal ? static_cast<int>(code) : 0)
          << name << " " << k << " " << text;
      if (!fatal) {
        EXPECT_TRUE(Read("a") == Expected()) << name << " " << k;
      }
    }
  }
}

// Until the file is closed, and only then, it is on the disk.
TEST_P(OutputFileInjectionTest, TheEndIsCutSyncedAndClosed) {
  const auto calls =
      TraceFileCalls(directory_.path(), [this] { return WriteAll(""); });
  ASSERT_TRUE(calls.ok()) << calls.status();
  std::vector<std::string> names;
  for (const FileCall& call : *calls) {
    EXPECT_EQ(call.path, Path("a"));
    if (call.name != "fcntl" && call.name != "fadvise64" &&
        call.name != "sync_file_range") {
      names.push_back(call.name);
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"openat", "pwrite64", "pwrite64",
                                             "pwrite64", "pwrite64",
                                             "ftruncate", "fsync", "close"}));
}

// As some filesystems do: where the flag is set, at the first write, later.
TEST_P(OutputFileInjectionTest, RefusedDirectWritesGoThroughTheCache) {
  const auto calls =
      TraceFileCalls(directory_.path(), [this] { return WriteAll(""); });
  ASSERT_TRUE(calls.ok()) << calls.status();
  const auto is_write_back = [](const FileCall& call) {
    return call.name == "sync_file_range";
  };
  const bool direct = std::none_of(calls->begin(), calls->end(), is_write_back);
  if (!GetParam()) {
    EXPECT_FALSE(direct);
  }
  for (size_t k = 0; k < calls->size(); ++k) {
    const std::string& name = (*calls)[k].name;
    if (name != "fcntl" && name != "pwrite64") continue;
    std::filesystem::remove(Path("a"));
    const auto outcome = RunFailingAt(directory_.path(), k, EINVAL, [this] {
      return WriteAll("Invalid argument");
    });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->injected);
    if (direct) {
      EXPECT_EQ(outcome->exit_status, 0) << name << " " << k;
      EXPECT_TRUE(Read("a") == Expected()) << name << " " << k;
    } else if (name == "pwrite64") {
      EXPECT_EQ(outcome->exit_status,
                static_cast<int>(absl::StatusCode::kInvalidArgument));
    }
  }
}

// A system without sync_file_range().
TEST_P(OutputFileInjectionTest, WriteBackMayBeImpossible) {
  const auto calls =
      TraceFileCalls(directory_.path(), [this] { return WriteAll(""); });
  ASSERT_TRUE(calls.ok()) << calls.status();
  for (size_t k = 0; k < calls->size(); ++k) {
    if ((*calls)[k].name != "sync_file_range") continue;
    std::filesystem::remove(Path("a"));
    const auto outcome = RunFailingAt(directory_.path(), k, ENOSYS,
                                      [this] { return WriteAll(""); });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->exit_status, 0);
    EXPECT_TRUE(Read("a") == Expected());
  }
}

}  // namespace
}  // namespace onepass

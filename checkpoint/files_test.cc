#include "checkpoint/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/file_error.h"
#include "gtest/gtest.h"
#include "tests/process_use.h"
#include "tests/syscall_injector.h"
#include "tests/temp_directory.h"

namespace onepass {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// That `status` has this code, and each of these texts in its message.
void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::vector<std::string>& texts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& text : texts) {
    EXPECT_TRUE(absl::StrContains(status.message(), text))
        << status << "\nexpected: " << text;
  }
}

TEST(FileErrorTest, NamesTheFileTheCallAndTheCause) {
  const std::vector<std::pair<int, absl::StatusCode>> codes = {
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EDQUOT, absl::StatusCode::kResourceExhausted},
      {EEXIST, absl::StatusCode::kAlreadyExists},
      {ENOENT, absl::StatusCode::kNotFound},
      {EACCES, absl::StatusCode::kPermissionDenied},
      {EINVAL, absl::StatusCode::kInvalidArgument},
      {EIO, absl::StatusCode::kDataLoss},
      {0, absl::StatusCode::kDataLoss}};
  for (const auto& [error, code] : codes) {
    EXPECT_EQ(FileError(error, "call", "path").code(), code) << error;
  }
  EXPECT_EQ(FileError(ENOSPC, "pwrite", "/a/b", 4096).message(),
            "/a/b: pwrite at offset 4096: No space left on device");
  EXPECT_EQ(FileError(EIO, "fsync", "/a/b").message(),
            "/a/b: fsync: Input/output error");
}

TEST(IsPlainNameTest, NoPathAndNothingOdd) {
  for (const absl::string_view name :
       {"a", "...", ".a", "a b", "\xff", "a.b-c_d"}) {
    EXPECT_TRUE(IsPlainName(name)) << name;
  }
  for (const absl::string_view name :
       {"", ".", "..", "/", "a/b", "/a", "a/", "../a"}) {
    EXPECT_FALSE(IsPlainName(name)) << name;
  }
  EXPECT_FALSE(IsPlainName(absl::string_view("a\0b", 3)));
  EXPECT_FALSE(IsPlainName(absl::string_view("\0", 1)));
  EXPECT_TRUE(IsPlainName(std::string(255, 'a')));
  EXPECT_FALSE(IsPlainName(std::string(256, 'a')));
}

TEST(JoinPathTest, HasOneSlash) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("/", "b"), "/b");
}

class FilesTest : public testing::Test {
 protected:
  std::string Path(absl::string_view name) const {
    return JoinPath(directory_.path(), name);
  }

  const TempDirectory directory_;
};

TEST_F(FilesTest, WhatIsWrittenIsRead) {
  std::string long_text;
  for (int i = 0; long_text.size() < 100'000; ++i) {
    absl::StrAppend(&long_text, i, ",");
  }
  int count = 0;
  for (const std::string& text : {std::string(), std::string("text"),
                                  std::string("a\0b", 3), long_text}) {
    const std::string path = Path(absl::StrCat(count++));
    ASSERT_TRUE(WriteSmallFile(path, text).ok());
    const auto read = ReadWholeFile(path, text.size());
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, text);
  }
}

TEST_F(FilesTest, NothingIsOverwritten) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "old").ok());
  ExpectError(WriteSmallFile(Path("a"), "new"),
              absl::StatusCode::kAlreadyExists, {Path("a"), "open"});
  EXPECT_EQ(*ReadWholeFile(Path("a"), 100), "old");
  // Nor is what a link leads to made.
  std::filesystem::create_symlink(Path("b"), Path("link"));
  ExpectError(WriteSmallFile(Path("link"), "new"),
              absl::StatusCode::kAlreadyExists, {Path("link")});
  EXPECT_FALSE(std::filesystem::exists(Path("b")));
  ExpectError(WriteSmallFile(Path("none/a"), "new"),
              absl::StatusCode::kNotFound,
              {Path("none/a"), "No such file or directory"});
}

TEST_F(FilesTest, OnlyRegularFilesAreRead) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "text").ok());
  std::filesystem::create_symlink("a", Path("link"));
  // Opening one waits for a writer.
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  const absl::StatusCode refused = absl::StatusCode::kInvalidArgument;
  ExpectError(InputFile::Open(Path("link")).status(), refused,
              {Path("link"), "a symbolic link"});
  ExpectError(InputFile::Open(Path("pipe")).status(), refused,
              {Path("pipe"), "something else"});
  ExpectError(InputFile::Open(directory_.path()).status(), refused,
              {directory_.path(), "a directory"});
  ExpectError(InputFile::Open(Path("none")).status(),
              absl::StatusCode::kNotFound, {Path("none"), "open"});
  EXPECT_TRUE(InputFile::Open(Path("a")).ok());
}

TEST_F(FilesTest, ReadsExactly) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "0123456789").ok());
  const auto file = InputFile::Open(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size(), 10);
  EXPECT_EQ(file->path(), Path("a"));
  for (int64_t begin = 0; begin <= 10; ++begin) {
    for (int64_t end = begin; end <= 10; ++end) {
      std::string bytes(end - begin, '?');
      ASSERT_TRUE(file->ReadAt(begin, absl::MakeSpan(bytes)).ok());
      EXPECT_EQ(bytes, std::string("0123456789").substr(begin, end - begin));
    }
  }
  std::string bytes(4, '?');
  ExpectError(file->ReadAt(-1, absl::MakeSpan(bytes)),
              absl::StatusCode::kInvalidArgument, {Path("a"), "-1"});
  const absl::StatusCode loss = absl::StatusCode::kDataLoss;
  for (const int64_t offset : {int64_t{7}, int64_t{10}, int64_t{11}, kMost}) {
    ExpectError(file->ReadAt(offset, absl::MakeSpan(bytes)), loss,
                {Path("a"), "ends at offset 10, expected 4 bytes at offset ",
                 absl::StrCat(offset)});
  }
  // Also where it became shorter meanwhile.
  ASSERT_EQ(truncate(Path("a").c_str(), 6), 0);
  ExpectError(file->ReadAt(3, absl::MakeSpan(bytes)), loss,
              {Path("a"), "ends at offset 6, expected 1 bytes more"});
}

TEST_F(FilesTest, AFileThatIsTooLargeIsNotRead) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "12345").ok());
  ExpectError(ReadWholeFile(Path("a"), 4).status(),
              absl::StatusCode::kInvalidArgument,
              {Path("a"), "5 bytes, expected at most 4"});
  // Whose bytes would not fit in memory.
  if (truncate(Path("a").c_str(), int64_t{1} << 43) == 0) {
    ExpectError(ReadWholeFile(Path("a"), 1 << 20).status(),
                absl::StatusCode::kInvalidArgument, {Path("a")});
  }
}

TEST_F(FilesTest, OnlyDirectoriesAreSynced) {
  EXPECT_TRUE(SyncDirectory(directory_.path()).ok());
  ASSERT_TRUE(WriteSmallFile(Path("a"), "text").ok());
  EXPECT_FALSE(SyncDirectory(Path("a")).ok());
  ExpectError(SyncDirectory(Path("none")), absl::StatusCode::kNotFound,
              {Path("none")});
}

TEST_F(FilesTest, DescriptorsAreClosed) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "text").ok());
  const int64_t descriptors = Entries(kDescriptors);
  EXPECT_FALSE(WriteSmallFile(Path("a"), "text").ok());
  EXPECT_TRUE(WriteSmallFile(Path("b"), "text").ok());
  EXPECT_TRUE(SyncDirectory(directory_.path()).ok());
  EXPECT_FALSE(ReadWholeFile(directory_.path(), 100).ok());
  {
    auto file = InputFile::Open(Path("a"));
    ASSERT_TRUE(file.ok());
    InputFile moved = *std::move(file);
    InputFile assigned;
    assigned = std::move(moved);
    char byte;
    EXPECT_TRUE(assigned.ReadAt(1, {&byte, 1}).ok());
    EXPECT_EQ(byte, 'e');
    EXPECT_EQ(Entries(kDescriptors), descriptors + 1);
    auto other = InputFile::Open(Path("b"));
    ASSERT_TRUE(other.ok());
    assigned = *std::move(other);
    EXPECT_EQ(Entries(kDescriptors), descriptors + 1);
    EXPECT_EQ(assigned.path(), Path("b"));
  }
  EXPECT_EQ(Entries(kDescriptors), descriptors);
}

class FilesInjectionTest : public FilesTest {
 protected:
  void SetUp() override {
    const absl::Status status = CanInject();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }
};

// As the status that a child exits with.
int Code(const absl::Status& status) { return static_cast<int>(status.code()); }

TEST_F(FilesInjectionTest, EachFailedCallIsReported) {
  const auto write = [this] {
    const absl::Status status = WriteSmallFile(Path("a"), "text");
    // A message without the name would be none.
    return status.ok() || absl::StrContains(status.message(), Path("a"))
               ? Code(status)
               : 255;
  };
  const auto calls = TraceFileCalls(directory_.path(), write);
  ASSERT_TRUE(calls.ok()) << calls.status();
  std::vector<std::string> names;
  for (const FileCall& call : *calls) {
    names.push_back(call.name);
    EXPECT_EQ(call.path, Path("a"));
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"openat", "pwrite64", "fsync", "close"}));
  for (int k = 0; k < 4; ++k) {
    const std::vector<std::pair<int, absl::StatusCode>> codes = {
        {ENOSPC, absl::StatusCode::kResourceExhausted},
        {EIO, absl::StatusCode::kDataLoss},
        // Tried again, but for closing.
        {EINTR, absl::StatusCode::kOk}};
    for (const auto& [error, code] : codes) {
      std::filesystem::remove(Path("a"));
      const auto outcome = RunFailingAt(directory_.path(), k, error, write);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_TRUE(outcome->injected);
      EXPECT_EQ(outcome->exit_status, static_cast<int>(code))
          << names[k] << " " << error;
      if (code == absl::StatusCode::kOk) {
        EXPECT_EQ(*ReadWholeFile(Path("a"), 100), "text");
      }
    }
  }
}

TEST_F(FilesInjectionTest, DirectoriesAreSyncedWhereThatIsPossible) {
  const auto sync = [this] { return Code(SyncDirectory(directory_.path())); };
  const std::vector<std::pair<int, absl::StatusCode>> codes = {
      {EIO, absl::StatusCode::kDataLoss}, {EINVAL, absl::StatusCode::kOk}};
  for (const auto& [error, code] : codes) {
    const auto outcome = RunFailingAt(directory_.path(), 1, error, sync);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->call.name, "fsync");
    EXPECT_EQ(outcome->exit_status, static_cast<int>(code));
  }
}

TEST_F(FilesInjectionTest, FailedReadsAreReported) {
  ASSERT_TRUE(WriteSmallFile(Path("a"), "text").ok());
  const auto read = [this] {
    return Code(ReadWholeFile(Path("a"), 100).status());
  };
  const auto calls = TraceFileCalls(directory_.path(), read);
  ASSERT_TRUE(calls.ok()) << calls.status();
  for (size_t k = 0; k < calls->size(); ++k) {
    const auto outcome = RunFailingAt(directory_.path(), k, EIO, read);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->exit_status,
              outcome->call.name == "close"
                  ? 0
                  : static_cast<int>(absl::StatusCode::kDataLoss))
        << outcome->call.name;
  }
}

}  // namespace
}  // namespace onepass

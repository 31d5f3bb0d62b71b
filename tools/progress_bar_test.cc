#include "tools/progress_bar.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace onepass {
namespace {

class ProgressBarTest : public testing::Test {
 protected:
  ProgressBarTest()
      : bar_(std::make_unique<ProgressBar>(&out_, [this] { return now_; })) {}

  // What was written since the last call.
  std::string Written() {
    std::string text = out_.str();
    out_.str("");
    return text;
  }

  std::ostringstream out_;
  double now_ = 100;
  std::unique_ptr<ProgressBar> bar_;
};

constexpr int64_t kMiB = 1 << 20;

TEST_F(ProgressBarTest, ShortWorkShowsNone) {
  bar_->Update(1, 10);
  now_ += 0.9;
  bar_->Update(9, 10);
  bar_.reset();
  EXPECT_EQ(Written(), "");
}

TEST_F(ProgressBarTest, LongWorkShowsHowFarItIsAndIsGoneAfterwards) {
  now_ += 1.5;
  bar_->Update(kMiB, 4 * kMiB);
  const std::string quarter =
      "[" + std::string(10, '#') + std::string(30, ' ') + "]  25% of 4 MiB";
  EXPECT_EQ(Written(), "\r" + quarter);
  // Not at every call.
  now_ += 0.05;
  bar_->Update(2 * kMiB, 4 * kMiB);
  EXPECT_EQ(Written(), "");
  now_ += 0.1;
  bar_->Update(5 * kMiB, 4 * kMiB);
  EXPECT_EQ(Written(), "\r[" + std::string(40, '#') + "] 100% of 4 MiB");
  bar_.reset();
  EXPECT_EQ(Written(), "\r" + std::string(quarter.size(), ' ') + "\r");
}

TEST_F(ProgressBarTest, NothingToDoAndNoTerminalShowNone) {
  now_ += 2;
  bar_->Update(0, 0);
  EXPECT_EQ(Written(), "");
  ProgressBar none(nullptr, [this] { return now_; });
  now_ += 2;
  none.Update(1, 2);
  // A stream that is not the standard error.
  ProgressBar other(out_, [this] { return now_; });
  now_ += 2;
  other.Update(1, 2);
  EXPECT_EQ(Written(), "");
}

// Another end of a terminal takes the place of the standard error.
class TerminalTest : public testing::Test {
 protected:
  void SetUp() override {
    terminal_ = posix_openpt(O_RDWR | O_NOCTTY);
    ASSERT_GE(terminal_, 0);
    ASSERT_EQ(grantpt(terminal_), 0);
    ASSERT_EQ(unlockpt(terminal_), 0);
    const int end = open(ptsname(terminal_), O_RDWR | O_NOCTTY);
    ASSERT_GE(end, 0);
    standard_error_ = dup(STDERR_FILENO);
    ASSERT_GE(dup2(end, STDERR_FILENO), 0);
    close(end);
  }
  void TearDown() override {
    PutBack();
    if (terminal_ >= 0) close(terminal_);
  }
  void PutBack() {
    if (standard_error_ < 0) return;
    dup2(standard_error_, STDERR_FILENO);
    close(standard_error_);
    standard_error_ = -1;
  }

  int terminal_ = -1;
  int standard_error_ = -1;
};

TEST_F(TerminalTest, OnlyATerminalShowsIt) {
  double now = 0;
  {
    ProgressBar bar(std::cerr, [&now] { return now; });
    now = 2;
    bar.Update(1, 2);
  }
  // It arrives in pieces.
  std::string shown;
  while (shown.find(" 50% of 0 MiB") == std::string::npos) {
    pollfd there = {terminal_, POLLIN, 0};
    ASSERT_EQ(poll(&there, 1, /*ms=*/60000), 1) << shown;
    char some[200];
    const ssize_t bytes = read(terminal_, some, sizeof(some));
    ASSERT_GT(bytes, 0) << shown;
    shown.append(some, static_cast<size_t>(bytes));
  }

  // A file is none.
  PutBack();
  std::FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  standard_error_ = dup(STDERR_FILENO);
  ASSERT_GE(dup2(fileno(file), STDERR_FILENO), 0);
  {
    ProgressBar bar(std::cerr, [&now] { return now; });
    now = 4;
    bar.Update(1, 2);
  }
  EXPECT_EQ(lseek(STDERR_FILENO, 0, SEEK_END), 0);
  PutBack();
  std::fclose(file);
}

}  // namespace
}  // namespace onepass

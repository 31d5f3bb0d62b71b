#include "tools/progress_bar.h"

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

}  // namespace
}  // namespace onepass

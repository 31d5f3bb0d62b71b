// The conformance tests on threads, and what only these have.

#include "dispatch/thread_communicator.h"

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/communicator.h"
#include "dispatch/communicator_conformance.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

std::vector<std::unique_ptr<Communicator>> MakeCommunicators(
    int ranks, std::chrono::milliseconds timeout) {
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> communicators =
      CreateThreadCommunicators(ranks, {timeout});
  EXPECT_TRUE(communicators.ok()) << communicators.status();
  return *std::move(communicators);
}

void OnThreads(int ranks, const CommunicatorOptions& options, RankBody body) {
  auto tested = MakeCommunicators(ranks, options.timeout);
  const auto control = MakeCommunicators(ranks, kLong);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", ranks));
      body(std::move(tested[rank]), *control[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void OnRanks(const CommunicatorOptions& options, RankBody body) {
  for (int ranks : {1, 2, 4}) OnThreads(ranks, options, body);
}

namespace {

TEST(ThreadCommunicatorTest, ManyRanks) {
  OnThreads(13, {kLong},
            [](std::unique_ptr<Communicator> tested, Communicator&) {
              for (int round = 0; round < 20; ++round) {
                ExpectAllGather(*tested, 100 + round, round);
                ExpectAllToAll(*tested, 100 + round, round);
                ExpectBroadcast(*tested, 100 + round, round, round % 13);
              }
            });
}

TEST(ThreadCommunicatorTest, ElementsAreInTheOrderOfRanks) {
  const auto communicators = MakeCommunicators(3, kLong);
  ASSERT_EQ(communicators.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(communicators[rank]->rank(), rank);
    EXPECT_EQ(communicators[rank]->size(), 3);
  }
}

TEST(ThreadCommunicatorTest, RefusesBadOptions) {
  for (int ranks : {0, -1, std::numeric_limits<int>::min()}) {
    const absl::Status status = CreateThreadCommunicators(ranks, {}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(status.message().find(absl::StrCat("ranks is ", ranks)),
              absl::string_view::npos)
        << status;
  }
  for (int64_t timeout : {0, -5}) {
    const absl::Status status =
        CreateThreadCommunicators(2, {std::chrono::milliseconds(timeout)})
            .status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(status.message().find(absl::StrCat("timeout is ", timeout)),
              absl::string_view::npos)
        << status;
  }
}

}  // namespace
}  // namespace onepass

#include "dispatch/collective.h"

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

using Function = Collective::Function;

Collective MakeCall(Function function, int64_t bytes, int root = 0) {
  Collective call;
  call.function = function;
  call.bytes = bytes;
  call.root = root;
  return call;
}

TEST(RollCallTest, IsCompleteWhenAllHaveCalled) {
  RollCall roll(3);
  for (int round = 0; round < 2; ++round) {
    for (int rank : {1, 0, 2}) {
      EXPECT_FALSE(roll.complete());
      EXPECT_FALSE(roll.Has(rank));
      roll.Enter(rank, MakeCall(Function::kAllGather, 10 * round + rank));
      EXPECT_TRUE(roll.Has(rank));
      EXPECT_EQ(roll[rank].bytes, 10 * round + rank);
    }
    EXPECT_TRUE(roll.complete());
    roll.Clear();
  }
}

TEST(RollCallTest, GroupsRanksByWhatTheyCalled) {
  RollCall roll(6);
  roll.Enter(0, MakeCall(Function::kBroadcast, 8, 1));
  roll.Enter(1, MakeCall(Function::kAllToAll, 8));
  roll.Enter(2, MakeCall(Function::kBroadcast, 8, 1));
  roll.Enter(3, MakeCall(Function::kBroadcast, 8, 0));
  roll.Enter(4, MakeCall(Function::kDuplicate, 0));
  roll.Enter(5, MakeCall(Function::kBroadcast, 8, 1));
  EXPECT_EQ(roll.Agreement(),
            absl::FailedPreconditionError(
                "ranks did not call the same: ranks 0, 2, 5 called broadcast "
                "of 8 bytes from rank 1; rank 1 called all_to_all of 8 bytes; "
                "rank 3 called broadcast of 8 bytes from rank 0; rank 4 called "
                "duplicate"));
}

TEST(RollCallTest, AgreesWhereMemoryAloneDiffers) {
  RollCall roll(2);
  Collective call = MakeCall(Function::kAllGather, 1);
  roll.Enter(0, call);
  char byte = 0;
  call.send = &byte;
  call.receive = &byte;
  roll.Enter(1, call);
  EXPECT_TRUE(roll.Agreement().ok());
}

TEST(RollCallTest, NamesTheSilent) {
  const Collective call = MakeCall(Function::kAllToAll, 1);
  RollCall roll(4);
  roll.Enter(2, call);
  EXPECT_EQ(roll.Silence(call, std::chrono::milliseconds(200)),
            absl::DeadlineExceededError(
                "ranks 0, 1, 3 did not call all_to_all within 200 ms"));
  roll.Enter(0, call);
  roll.Enter(3, call);
  EXPECT_EQ(roll.Silence(call, std::chrono::seconds(3)),
            absl::DeadlineExceededError(
                "rank 1 did not call all_to_all within 3000 ms"));
}

TEST(CollectiveTest, SaysWhereTheBytesOfARankLie) {
  char given[30] = {};
  char taken[30] = {};
  Collective call = MakeCall(Function::kAllGather, 10);
  call.send = given;
  call.receive = taken;
  EXPECT_EQ(call.SendTo(2), given);
  EXPECT_EQ(call.ReceiveFrom(2), taken + 20);
  call.function = Function::kAllToAll;
  EXPECT_EQ(call.SendTo(2), given + 20);
  EXPECT_EQ(call.ReceiveFrom(2), taken + 20);
  call.bytes = 0;
  EXPECT_EQ(call.SendTo(2), nullptr);
  EXPECT_EQ(call.ReceiveFrom(2), nullptr);

  Collective root = MakeCall(Function::kBroadcast, 10, 1);
  root.send = given;
  EXPECT_EQ(root.SendTo(0), given);
  EXPECT_EQ(root.ReceiveFrom(1), nullptr);
  Collective other = MakeCall(Function::kBroadcast, 10, 1);
  other.receive = taken;
  EXPECT_EQ(other.SendTo(0), nullptr);
  EXPECT_EQ(other.ReceiveFrom(1), taken);
  EXPECT_EQ(other.ReceiveFrom(2), nullptr);
}

TEST(DeadlineTest, IsAheadForEveryTimeout) {
  const auto now = std::chrono::steady_clock::now();
  EXPECT_GE(DeadlineAfter(std::chrono::milliseconds(5)),
            now + std::chrono::milliseconds(5));
  EXPECT_GT(DeadlineAfter(std::chrono::milliseconds::max()),
            now + std::chrono::hours(24));
}

}  // namespace
}  // namespace onepass

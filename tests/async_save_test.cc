// Saves that go on while an optimizer steps: what is saved is the state at the
// call, whenever steps are taken; the steps are those of any other run.

#include "checkpoint/async_save.h"

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/meta.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "checkpoint/verify.h"
#include "dispatch/communicator.h"
#include "dispatch/kernel.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "dispatch/thread_communicator.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "offload/shard_optimizer.h"
#include "offload/shard_optimizer_rig.h"
#include "tests/make_pool.h"
#include "tests/process_use.h"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using std::chrono::milliseconds;

constexpr MemoryBudget::Bytes kBudget = {64 << 10, 64 << 10};

class AsyncSaveTest : public testing::Test {
 protected:
  AsyncSaveTest() {
    config_.options.sub_group_numel = 2 * kLeafNumel;
    auto budget = MemoryBudget::Create(kBudget);
    EXPECT_TRUE(budget.ok());
    budget_ = *std::move(budget);
  }

  // After two steps.
  std::unique_ptr<Rig> MakeRig() {
    auto rig = std::make_unique<Rig>(config_);
    EXPECT_TRUE(rig->Create().ok());
    EXPECT_TRUE(rig->Step(1).ok());
    EXPECT_TRUE(rig->Step(2).ok());
    return rig;
  }

  std::unique_ptr<AsyncSaver> MakeSaver(Rig& rig) {
    const Runtime runtime = {*config_.kernel, rig.device(), *pool_};
    return std::make_unique<AsyncSaver>(
        runtime, std::move(CreateThreadCommunicators(1, {})->front()));
  }

  // Goes through the budget a page at a time.
  absl::Status Start(AsyncSaver& saver, Rig& rig, const std::string& name,
                     int64_t bytes_per_second = 0, bool full = false,
                     CheckpointLayout layout = CheckpointLayout::kFlat) {
    auto lease = rig.optimizer().LeaseStateBehindFences();
    EXPECT_TRUE(lease.ok()) << lease.status();
    CheckpointMeta meta;
    meta.step = 2;
    meta.groups = rig.optimizer().StateGroups();
    SaveOptions options;
    options.chunk_bytes = 4096;
    options.budget = budget_.get();
    options.file.bytes_per_second = bytes_per_second;
    options.full = full;
    options.layout = layout;
    return saver.Start(directory_.path(), name, *std::move(lease), meta,
                       options);
  }

  // That the checkpoint holds `expected`: states and weights.
  void ExpectSaved(const std::string& name, const Snapshot& expected) {
    Rig rig(config_);
    ASSERT_TRUE(rig.Create().ok());
    const Runtime runtime = {*config_.kernel, rig.device(), *pool_};
    const auto communicators = CreateThreadCommunicators(1, {});
    auto checkpoint = Checkpoint::Open(directory_.path() + "/" + name);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto target = rig.optimizer().RestoreState();
    ASSERT_TRUE(target.ok()) << target.status();
    RestoreOptions options;
    options.groups = rig.optimizer().StateGroups();
    for (size_t g = 0; g < options.groups.size(); ++g) {
      // The rig changes options between steps.
      options.groups[g] = checkpoint->meta().groups[g];
    }
    const auto meta =
        RestoreCheckpoint(runtime, *communicators->front(), *checkpoint,
                          *std::move(target), options);
    ASSERT_TRUE(meta.ok()) << meta.status();
    ExpectSame(rig.Take(), expected);
  }

  RigConfig config_;
  const std::unique_ptr<ThreadPool> pool_ = MakePool(1);
  std::unique_ptr<MemoryBudget> budget_;
  const TempDirectory directory_;
};

TEST_F(AsyncSaveTest, SavesWhatWasAtTheCallWheneverStepsAreTaken) {
  const auto plain = MakeRig();
  ASSERT_TRUE(plain->Step(3).ok());
  ASSERT_TRUE(plain->Step(4).ok());
  const Snapshot after = plain->Take();
  int64_t fence_waits = 0;
  const int most = LongTestStride() == 1 ? 40 : 8;
  for (int delay = 0; delay < most; delay += 4) {
    SCOPED_TRACE(delay);
    // The same bits; the device waits for all of its shards at once.
    config_.options.cpu_ratio = delay % 8 == 0 ? 1 : 0.7;
    const auto rig = MakeRig();
    const Snapshot before = rig->Take();
    const auto saver = MakeSaver(*rig);
    const std::string name = absl::StrCat("after-", delay);
    // Some 300 kB in some 40 ms.
    ASSERT_TRUE(Start(*saver, *rig, name, 8 << 20).ok());
    std::this_thread::sleep_for(milliseconds(delay));
    const auto third = rig->Step(3);
    ASSERT_TRUE(third.ok()) << third.status();
    fence_waits += third->fence_waits;
    ASSERT_TRUE(rig->Step(4).ok());
    const auto report = saver->Wait();
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_LE(report->peak.host, kBudget.host);
    ExpectSaved(name, before);
    // Nor did it do anything to the steps.
    ExpectSame(rig->Take(), after);
  }
  EXPECT_GT(fence_waits, 0);
}

TEST_F(AsyncSaveTest, WaitsWhileTheSinkIsBlockedAndNoLonger) {
  const auto rig = MakeRig();
  const Snapshot before = rig->Take();
  const auto saver = MakeSaver(*rig);
  // All of the budget is somebody else's.
  absl::StatusOr<MemoryBudget::Share> share = budget_->Take(kBudget);
  ASSERT_TRUE(share.ok());
  ASSERT_TRUE(Start(*saver, *rig, "c").ok());
  EXPECT_TRUE(saver->busy());
  auto step = std::async(std::launch::async, [&] {
    const auto report = rig->Step(3);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? report->fence_waits : 0;
  });
  EXPECT_EQ(step.wait_for(milliseconds(100)), std::future_status::timeout);
  EXPECT_TRUE(saver->busy());
  *share = {};
  EXPECT_GT(step.get(), 0);
  const auto report = saver->Wait();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(saver->busy());
  ExpectSaved("c", before);
  const auto next = rig->Step(4);
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(next->fence_waits, 0);
}

TEST_F(AsyncSaveTest, AFenceNeverFailsAStep) {
  config_.options.fence_timeout = milliseconds(50);
  const auto rig = MakeRig();
  const auto saver = MakeSaver(*rig);
  absl::StatusOr<MemoryBudget::Share> share = budget_->Take(kBudget);
  ASSERT_TRUE(share.ok());
  ASSERT_TRUE(Start(*saver, *rig, "c").ok());
  const auto step = rig->Step(3);
  ASSERT_TRUE(step.ok()) << step.status();
  *share = {};
  const absl::Status status = saver->Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(
      absl::StrContains(status.message(), "was not read by when its owner"))
      << status;
  EXPECT_FALSE(Checkpoint::Open(directory_.path() + "/c").ok());
  // And the next one is as any.
  const Snapshot before = rig->Take();
  ASSERT_TRUE(Start(*saver, *rig, "d").ok());
  ASSERT_TRUE(saver->Wait().ok());
  ExpectSaved("d", before);
}

TEST_F(AsyncSaveTest, CancelLetsTheOptimizerGoOn) {
  const auto rig = MakeRig();
  const auto saver = MakeSaver(*rig);
  absl::StatusOr<MemoryBudget::Share> share = budget_->Take(kBudget);
  ASSERT_TRUE(share.ok());
  ASSERT_TRUE(Start(*saver, *rig, "c").ok());
  saver->Cancel();
  const auto step = rig->Step(3);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->fence_waits, 0);
  *share = {};
  EXPECT_EQ(saver->Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(saver->Wait().status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AsyncSaveTest, AnErrorThatNobodySawIsThatOfTheNextCall) {
  const auto rig = MakeRig();
  const auto saver = MakeSaver(*rig);
  ASSERT_TRUE(Start(*saver, *rig, "c").ok());
  // Waits for the one before, which went well.
  ASSERT_TRUE(Start(*saver, *rig, "c").ok());
  const absl::Status status = Start(*saver, *rig, "d");
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "the save before failed"));
  // Nothing was started.
  ASSERT_TRUE(rig->Step(3).ok());
  ASSERT_TRUE(Start(*saver, *rig, "d").ok());
  EXPECT_TRUE(saver->Wait().ok());
}

TEST_F(AsyncSaveTest, FullAndNestedOnesGoOnAsWell) {
  for (const bool full : {false, true}) {
    for (const CheckpointLayout layout :
         {CheckpointLayout::kFlat, CheckpointLayout::kNested}) {
      const std::string name =
          absl::StrCat("c-", full, "-", static_cast<int>(layout));
      SCOPED_TRACE(name);
      const auto rig = MakeRig();
      const Snapshot before = rig->Take();
      const auto saver = MakeSaver(*rig);
      ASSERT_TRUE(Start(*saver, *rig, name, 8 << 20, full, layout).ok());
      ASSERT_TRUE(rig->Step(3).ok());
      ASSERT_TRUE(rig->Step(4).ok());
      const auto report = saver->Wait();
      ASSERT_TRUE(report.ok()) << report.status();
      ExpectSaved(name, before);
    }
  }
}

TEST_F(AsyncSaveTest, FiftySavesLeaveNothingBehind) {
  const auto rig = MakeRig();
  const auto saver = MakeSaver(*rig);
  const int saves = LongTestStride() == 1 ? 50 : 5;
  int64_t descriptors = 0;
  int64_t resident = 0;
  for (int i = 0; i < saves; ++i) {
    ASSERT_TRUE(Start(*saver, *rig, absl::StrCat("c", i)).ok());
    ASSERT_TRUE(rig->Step(3 + i).ok());
    const auto report = saver->Wait();
    ASSERT_TRUE(report.ok()) << report.status();
    if (i == saves / 5) {
      descriptors = Entries(kDescriptors);
      resident = ResidentBytes();
    }
  }
  EXPECT_EQ(Entries(kDescriptors), descriptors);
  EXPECT_EQ(budget_->in_use().host, 0);
  if (!UnderSanitizer() && !UnderEmulator()) {
    EXPECT_LE(ResidentBytes(), resident + (2 << 20));
  }
}

TEST_F(AsyncSaveTest, StateIsNotSetUnderAReader) {
  const auto rig = MakeRig();
  const Snapshot before = rig->Take();
  const auto saver = MakeSaver(*rig);
  ASSERT_TRUE(Start(*saver, *rig, "c", 8 << 20).ok());
  const std::vector<float> ones(config_.numels[1], 1.0f);
  ASSERT_TRUE(rig->optimizer()
                  .SetState(Rig::ShardName(1), StateKind::kMaster, ones)
                  .ok());
  ASSERT_TRUE(saver->Wait().ok());
  ExpectSaved("c", before);
}

}  // namespace
}  // namespace onepass

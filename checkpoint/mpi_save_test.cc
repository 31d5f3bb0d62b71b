// Checkpoints of ranks that are MPI processes: every kind of save, and restored
// by other ranks than those that wrote it. Every rank runs this program.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/fake_state.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/meta.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "checkpoint/save_fake_state.h"
#include "checkpoint/verify.h"
#include "dispatch/communicator.h"
#include "dispatch/host_device.h"
#include "dispatch/mpi_communicator.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

class MpiSaveTest : public testing::Test {
 protected:
  MpiSaveTest()
      : model_({{"w", StateKind::kMaster, StateType::kFloat32, {7, 3000}},
                {"w", StateKind::kExpAvg, StateType::kBFloat16, {7, 3000}},
                {"w",
                 StateKind::kExpAvgSq,
                 StateType::kScaledFloat8E4M3,
                 {7, 3000}},
                {"none", StateKind::kMaster, StateType::kFloat32, {0}, 1},
                {"one", StateKind::kMaster, StateType::kFloat32, {}, 1}},
               7) {}

  void SetUp() override {
    auto communicator = CreateMpiCommunicator({{std::chrono::minutes(1)}});
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    communicator_ = *std::move(communicator);
    auto device = HostDevice::Create(*RunnableKernels().front(), {});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    // Rank 0's, which all see.
    std::string path(200, '\0');
    if (communicator_->rank() == 0) {
      own_directory_.emplace();
      const std::string& made = own_directory_->path();
      ASSERT_LT(made.size(), path.size());
      made.copy(&path[0], made.size());
    }
    ASSERT_TRUE(
        communicator_->Broadcast(&path[0], static_cast<int64_t>(path.size()), 0)
            .ok());
    directory_ = path.c_str();
    // The same on all.
    boxes_ = FlatBoxes(model_, communicator_->size(), random_);
  }

  // Rank 0's directory goes after this.
  void TearDown() override { ASSERT_TRUE(communicator_->Barrier().ok()); }

  Runtime runtime() { return {*RunnableKernels().front(), *device_, *pool_}; }
  const std::vector<Box>& mine() const { return boxes_[communicator_->rank()]; }
  std::string path(const std::string& name) const {
    return directory_ + "/" + name;
  }

  // Into what another number of ranks would have of it, here: boxes cut anew.
  void ExpectRestored(const std::string& name) {
    const FakeBoxes boxes = FlatBoxes(model_, communicator_->size(), random_);
    FakeState state(model_, boxes[communicator_->rank()], runtime(), true);
    auto checkpoint = Checkpoint::Open(path(name));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    RestoreOptions options;
    options.groups = model_.Meta(3).groups;
    const auto meta = RestoreCheckpoint(runtime(), *communicator_, *checkpoint,
                                        state.Restore(), options);
    ASSERT_TRUE(meta.ok()) << meta.status();
    EXPECT_EQ(meta->step, 5);
    state.ExpectFilled();
  }

  const FakeModel model_;
  const std::unique_ptr<ThreadPool> pool_ = MakePool(1);
  std::mt19937 random_{11};
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<HostDevice> device_;
  std::optional<TempDirectory> own_directory_;  // of rank 0
  std::string directory_;
  FakeBoxes boxes_;
};

TEST_F(MpiSaveTest, AllKindsAreSavedAndRestored) {
  auto own = communicator_->Duplicate();
  ASSERT_TRUE(own.ok()) << own.status();
  AsyncSaver saver(runtime(), *std::move(own));
  for (const bool full : {false, true}) {
    for (const CheckpointLayout layout :
         {CheckpointLayout::kFlat, CheckpointLayout::kNested}) {
      for (const bool async : {false, true}) {
        const std::string name = absl::StrCat(
            "c-", full, "-", layout == CheckpointLayout::kNested, "-", async);
        SCOPED_TRACE(name);
        FakeState state(model_, mine(), runtime(), true);
        state.Fill();
        SaveOptions options = SmallChunks();
        options.full = full;
        options.layout = layout;
        absl::StatusOr<SaveReport> report;
        if (async) {
          const StateLease plain = state.Lease();
          ASSERT_TRUE(saver
                          .Start(directory_, name,
                                 StateLease(plain.views(), nullptr,
                                            std::make_shared<StateFences>(1)),
                                 model_.Meta(5), options)
                          .ok());
          report = saver.Wait();
        } else {
          report = SaveCheckpoint(runtime(), *communicator_, directory_, name,
                                  state.Lease(), model_.Meta(5), options);
        }
        ASSERT_TRUE(report.ok()) << report.status();
        state.ExpectFilled();
        const auto verified = VerifyCheckpoint(path(name), {});
        ASSERT_TRUE(verified.ok()) << verified.status();
        EXPECT_TRUE(verified->problems.empty());
        auto opened = Checkpoint::Open(path(name));
        ASSERT_TRUE(opened.ok()) << opened.status();
        EXPECT_EQ(opened->manifest().world(), communicator_->size());
        EXPECT_EQ(
            opened->manifest().distribution() == checkpoint::DISTRIBUTION_FULL,
            full);
        EXPECT_EQ(opened->manifest().layout() == checkpoint::LAYOUT_NESTED,
                  layout == CheckpointLayout::kNested);
        ExpectRestored(name);
      }
    }
  }
}

TEST_F(MpiSaveTest, AFailureOfOneRankIsThatOfAll) {
  const int last = communicator_->size() - 1;
  FakeState state(model_, mine(), runtime(), false);
  state.Fill();
  const auto none = MemoryBudget::Create({0, 0});
  SaveOptions options = SmallChunks();
  if (communicator_->rank() == last) options.budget = none->get();
  const absl::Status status =
      SaveCheckpoint(runtime(), *communicator_, directory_, "c", state.Lease(),
                     model_.Meta(5), options)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(),
                                absl::StrCat("rank ", last, ": the budget")))
      << status;
  // It is rank 0 that removes what was written.
  if (communicator_->rank() == 0) {
    EXPECT_TRUE(fs::is_empty(directory_));
  }
}

}  // namespace
}  // namespace onepass

// A save that is ended, or made to fail, at each of its system calls on files:
// the newest complete checkpoint is then the old one or the new one, whole.

#include <errno.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/fake_state.h"
#include "checkpoint/find.h"
#include "checkpoint/publish.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "checkpoint/verify.h"
#include "dispatch/communicator.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "dispatch/thread_communicator.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/syscall_injector.h"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

// What a rank of a world of one needs; made where it is used, since threads do
// not come along into a child.
struct Alone {
  Alone() : pool(MakePool(1)) {
    device = *HostDevice::Create(ScalarKernel(), {});
    communicator = std::move(CreateThreadCommunicators(1, {})->front());
  }
  Runtime runtime() const { return {ScalarKernel(), *device, *pool}; }

  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Communicator> communicator;
};

FakeModel Model() {
  return FakeModel(
      {{"w", StateKind::kMaster, StateType::kFloat32, {3 * kLeafNumel + 5}},
       {"w", StateKind::kExpAvg, StateType::kBFloat16, {3 * kLeafNumel + 5}}},
      5);
}

class SaveCrashInjectTest : public testing::Test {
 protected:
  SaveCrashInjectTest() : model_(Model()) {
    std::mt19937 random(1);
    boxes_ = FlatBoxes(model_, 1, random)[0];
  }

  void SetUp() override {
    if (absl::Status status = CanInject(); !status.ok()) {
      GTEST_SKIP() << status.message();
    }
    ASSERT_EQ(Save("old", 1), 0);
  }

  // 0, or 1 where it fails.
  int Save(const std::string& name, int64_t step) const {
    Alone alone;
    FakeState state(model_, boxes_, alone.runtime(), false);
    state.Fill();
    SaveOptions options;
    options.chunk_bytes = 16 << 10;
    const auto report =
        SaveCheckpoint(alone.runtime(), *alone.communicator, directory_.path(),
                       name, state.Lease(), model_.Meta(step), options);
    return report.ok() ? 0 : 1;
  }

  // That the newest complete checkpoint is one of the two, and whole; then all
  // but the old one goes. Whether it is the new one.
  bool ExpectOneIsWhole() {
    const auto found = FindCheckpoints(directory_.path());
    EXPECT_TRUE(found.ok() && !found->empty());
    if (!found.ok() || found->empty()) return false;
    const FoundCheckpoint& newest = found->front();
    EXPECT_TRUE(newest.status.ok()) << newest.status;
    const auto report = VerifyCheckpoint(newest.path, {});
    EXPECT_TRUE(report.ok() && report->problems.empty()) << newest.path;
    Alone alone;
    FakeState state(model_, boxes_, alone.runtime(), false);
    auto checkpoint = Checkpoint::Open(newest.path);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    if (!checkpoint.ok()) return false;
    RestoreOptions options;
    options.groups = model_.Meta(1).groups;
    const auto meta = RestoreCheckpoint(alone.runtime(), *alone.communicator,
                                        *checkpoint, state.Restore(), options);
    EXPECT_TRUE(meta.ok()) << meta.status();
    state.ExpectFilled();
    EXPECT_TRUE(fs::exists(directory_.path() + "/old/manifest"));
    for (const auto& entry : fs::directory_iterator(directory_.path())) {
      if (entry.path().filename() != "old") fs::remove_all(entry.path());
    }
    return newest.name == "new";
  }

  std::vector<FileCall> Trace() {
    auto calls =
        TraceFileCalls(directory_.path(), [&] { return Save("new", 2); });
    EXPECT_TRUE(calls.ok()) << calls.status();
    EXPECT_TRUE(ExpectOneIsWhole());
    return *calls;
  }

  const TempDirectory directory_;
  const FakeModel model_;
  std::vector<Box> boxes_;
};

TEST_F(SaveCrashInjectTest, KilledAnywhereOneIsWhole) {
  const std::vector<FileCall> calls = Trace();
  ASSERT_GE(calls.size(), 30u);
  const size_t stride = LongTestStride() == 1 ? 1 : 7;
  size_t injected = 0;
  size_t new_ones = 0;
  for (size_t k = 0; k < calls.size(); k += stride) {
    SCOPED_TRACE(absl::StrCat(k, ": ", calls[k].name, " ", calls[k].path));
    const auto outcome = RunKilledAt(directory_.path(), static_cast<int>(k),
                                     [&] { return Save("new", 2); });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_NE(outcome->signal, 0);
    injected += outcome->injected;
    new_ones += ExpectOneIsWhole();
  }
  EXPECT_EQ(injected, (calls.size() + stride - 1) / stride);
  EXPECT_LT(new_ones, injected);
}

TEST_F(SaveCrashInjectTest, FailingAnywhereOneIsWhole) {
  const std::vector<FileCall> calls = Trace();
  const size_t stride = LongTestStride() == 1 ? 1 : 11;
  for (const int error : {ENOSPC, EDQUOT, EIO}) {
    size_t injected = 0;
    size_t runs = 0;
    for (size_t k = 0; k < calls.size(); k += stride) {
      SCOPED_TRACE(absl::StrCat(k, ": ", calls[k].name, " ", calls[k].path,
                                ", error ", error));
      const auto outcome = RunFailingAt(directory_.path(), static_cast<int>(k),
                                        error, [&] { return Save("new", 2); });
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ++runs;
      injected += outcome->injected;
      EXPECT_EQ(outcome->signal, 0);
      // A save that says that it went well has left a checkpoint.
      const bool there = ExpectOneIsWhole();
      if (outcome->exit_status == 0) {
        EXPECT_TRUE(there);
      }
    }
    EXPECT_EQ(injected, runs);
  }
}

// Write, fsync, rename, fsync of the directory.
TEST_F(SaveCrashInjectTest, NothingIsNamedBeforeItIsOnTheDisk) {
  const std::vector<FileCall> calls = Trace();
  const auto is = [](const FileCall& call, const char* name) {
    return absl::StartsWith(call.name, name);
  };
  size_t renamed = calls.size();
  for (size_t i = 0; i < calls.size(); ++i) {
    if (is(calls[i], "rename")) {
      EXPECT_EQ(renamed, calls.size()) << "renamed twice";
      renamed = i;
    }
  }
  ASSERT_LT(renamed, calls.size());
  const std::string partial = calls[renamed].path;
  EXPECT_EQ(calls[renamed].target, directory_.path() + "/new");
  size_t files = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (!is(calls[i], "write") && !is(calls[i], "pwrite")) continue;
    EXPECT_LT(i, renamed);
    if (absl::EndsWith(calls[i].path, kNonceName)) continue;
    const bool synced = std::any_of(
        calls.begin() + i, calls.begin() + renamed, [&](const FileCall& call) {
          return is(call, "fsync") && call.path == calls[i].path;
        });
    EXPECT_TRUE(synced) << calls[i].path;
    ++files;
  }
  EXPECT_GE(files, 4u);
  const auto last_before = [&](const char* name, const std::string& path) {
    size_t last = 0;
    for (size_t i = 0; i < renamed; ++i) {
      if (is(calls[i], name) && (path.empty() || calls[i].path == path)) {
        last = i;
      }
    }
    return last;
  };
  // The manifest is the last that is written, and its name is synced after it.
  const size_t manifest =
      last_before("fsync", absl::StrCat(partial, "/", kManifestName));
  EXPECT_GT(manifest, last_before("fsync", partial + "/rank-00000-of-00001."
                                                     "index"));
  EXPECT_GT(last_before("fsync", partial), manifest);
  EXPECT_TRUE(std::any_of(
      calls.begin() + renamed, calls.end(), [&](const FileCall& call) {
        return is(call, "fsync") && call.path == directory_.path();
      }));
}

}  // namespace
}  // namespace onepass

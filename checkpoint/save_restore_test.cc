// Checkpoints of ranks on threads: saved, verified, restored at any number of
// ranks, refused where they are damaged or of another trainer.

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/edit_index.h"
#include "checkpoint/fake_state.h"
#include "checkpoint/find.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/meta.h"
#include "checkpoint/publish.h"
#include "checkpoint/restore.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/save.h"
#include "checkpoint/save_fake_state.h"
#include "checkpoint/state_tensors.h"
#include "checkpoint/verify.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "tests/process_use.h"
#include "tests/rank_threads.h"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

// Every stored type; tensors of several leaves, of one element, of none.
FakeModel EveryType() {
  std::vector<FakeTensor> tensors;
  const auto add = [&](const char* parameter, StateKind kind, StateType type,
                       std::vector<int64_t> shape, int group) {
    tensors.push_back({parameter, kind, type, std::move(shape), group});
  };
  const std::vector<int64_t> large = {7, 3000};
  add("w", StateKind::kMaster, StateType::kFloat32, large, 0);
  add("w", StateKind::kExpAvg, StateType::kBFloat16, large, 0);
  add("w", StateKind::kExpAvgSq, StateType::kScaledFloat8E4M3, large, 0);
  add("half", StateKind::kMaster, StateType::kScaledFloat16, {9001}, 1);
  add("half", StateKind::kExpAvg, StateType::kFloat32, {9001}, 1);
  add("rest", StateKind::kParam, StateType::kBFloat16, {3, 5, 700}, 1);
  add("rest", StateKind::kMaster, StateType::kInt16Remainder, {3, 5, 700}, 1);
  add("scalar", StateKind::kMaster, StateType::kFloat32, {}, 0);
  add("scalar", StateKind::kExpAvg, StateType::kFloat16, {}, 0);
  add("none", StateKind::kMaster, StateType::kFloat32, {4, 0}, 0);
  add("one", StateKind::kMaster, StateType::kBFloat16, {1, 1}, 1);
  return FakeModel(std::move(tensors), 7);
}

RankOptions World(int world) {
  RankOptions options;
  options.world = world;
  return options;
}

// What a test does to the options of a save.
using Change = std::function<void(int rank, SaveOptions& options)>;

class SaveRestoreTest : public testing::Test {
 protected:
  SaveRestoreTest() : model_(EveryType()) {}

  std::string path(const std::string& name) const {
    return directory_.path() + "/" + name;
  }

  std::vector<absl::Status> Save(const std::string& name,
                                 const FakeBoxes& boxes,
                                 const CheckpointMeta& meta,
                                 const Change& change = {}) {
    std::vector<absl::Status> results(boxes.size());
    RunRanks(World(static_cast<int>(boxes.size())), [&](Rank& rank) {
      FakeState state(model_, boxes[rank.rank()], rank.runtime(), true);
      state.Fill();
      SaveOptions options = SmallChunks();
      if (change) change(rank.rank(), options);
      const int64_t before = rank.device->memory().in_use;
      rank.device->ResetPeaks();
      const absl::StatusOr<SaveReport> report =
          SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                         name, state.Lease(), meta, options);
      results[rank.rank()] = report.status();
      // Exact export converts nothing.
      EXPECT_EQ(rank.device->memory().peak, before);
      state.ExpectFilled();
    });
    return results;
  }

  void SaveOk(const std::string& name, const FakeBoxes& boxes, int64_t step) {
    for (const absl::Status& status : Save(name, boxes, model_.Meta(step))) {
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // Restores into fresh state of `boxes`, and compares where that is OK.
  std::vector<absl::Status> Restore(const std::string& name,
                                    const FakeModel& model,
                                    const FakeBoxes& boxes,
                                    const RestoreOptions& options) {
    std::vector<absl::Status> results(boxes.size());
    RunRanks(World(static_cast<int>(boxes.size())), [&](Rank& rank) {
      FakeState state(model, boxes[rank.rank()], rank.runtime(),
                      rank.rank() % 2 == 0);
      absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path(name));
      if (!checkpoint.ok()) {
        results[rank.rank()] = checkpoint.status();
        return;
      }
      const absl::StatusOr<CheckpointMeta> meta =
          RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                            state.Restore(), options);
      results[rank.rank()] = meta.status();
      EXPECT_EQ(state.committed(), meta.ok());
      if (!meta.ok()) return;
      state.ExpectFilled();
      if (rank.rank() == 0) meta_ = *meta;
    });
    return results;
  }

  RestoreOptions Wanted(const FakeModel& model, int64_t step = 3) const {
    RestoreOptions options;
    options.groups = model.Meta(step).groups;
    return options;
  }

  const TempDirectory directory_;
  const FakeModel model_;
  std::mt19937 random_{11};
  // Of the last restore.
  CheckpointMeta meta_;
};

TEST_F(SaveRestoreTest, AnyNumberOfRanksToAnyOther) {
  const int stride = LongTestStride() == 1 ? 1 : 4;
  for (int from = 1; from <= 8; from += stride) {
    const std::string name = absl::StrCat("from-", from);
    const FakeBoxes boxes = from % 2 == 0 ? GridBoxes(model_, from, random_)
                                          : FlatBoxes(model_, from, random_);
    SaveOk(name, boxes, 5);
    // From each number to three others, in all to each.
    for (const int to : {from % 8 + 1, (from + 3) % 8 + 1, 9 - from}) {
      SCOPED_TRACE(absl::StrCat(from, " to ", to));
      const FakeBoxes wanted = to % 3 == 0 ? GridBoxes(model_, to, random_)
                                           : FlatBoxes(model_, to, random_);
      // That the checkpoint is of another step than the trainer is no matter.
      for (const absl::Status& status :
           Restore(name, model_, wanted, Wanted(model_))) {
        EXPECT_TRUE(status.ok()) << status;
      }
      const CheckpointMeta meta = model_.Meta(5);
      EXPECT_EQ(meta_.step, 5);
      EXPECT_EQ(meta_.user, meta.user);
      ASSERT_TRUE(meta_.loss_scale.has_value());
      EXPECT_EQ(meta_.loss_scale->scale, 1024);
      EXPECT_EQ(meta_.loss_scale->hysteresis_left, 2);
      EXPECT_EQ(meta_.loss_scale->clean_steps, 17);
      ASSERT_EQ(meta_.groups.size(), 2u);
      EXPECT_EQ(meta_.groups[1].step, 6);
      EXPECT_EQ(meta_.groups[0].lr, meta.groups[0].lr);
    }
  }
}

// The same target with its tensors in the opposite order.
StateRestore Reversed(StateRestore target) {
  std::vector<StateTarget> targets;
  for (auto end = target.targets().end(); end != target.targets().begin();) {
    auto begin = std::prev(end);
    while (begin != target.targets().begin() &&
           std::prev(begin)->name == begin->name) {
      --begin;
    }
    targets.insert(targets.end(), begin, end);
    end = begin;
  }
  const auto shared = std::make_shared<StateRestore>(std::move(target));
  StateRestore::Owner owner;
  owner.commit = [shared] {
    shared->BeginWriting();
    return shared->Commit();
  };
  owner.end = [shared](bool, bool committed) {
    if (!committed) shared->Abandon();
  };
  return StateRestore(std::move(targets), std::move(owner));
}

// Random shapes, types, cuts and numbers of ranks, parameters in any order.
TEST_F(SaveRestoreTest, AnyShapesAndBoxes) {
  constexpr StateType kTypes[] = {
      StateType::kFloat32, StateType::kBFloat16, StateType::kFloat16,
      StateType::kScaledFloat16, StateType::kScaledFloat8E4M3};
  constexpr MemoryBudget::Bytes kBudget = {64 << 10, 64 << 10};
  const auto below = [&](int end) { return static_cast<int>(random_() % end); };
  const int rounds = LongTestStride() == 1 ? 60 : 4;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    std::vector<FakeTensor> tensors;
    for (int i = below(4) + 1; i > 0; --i) {
      FakeTensor& tensor = tensors.emplace_back();
      tensor.parameter = absl::StrCat("p", i);
      tensor.type = kTypes[below(5)];
      for (int d = below(5); d > 0; --d) tensor.shape.push_back(below(8));
      // Of several leaves.
      if (!tensor.shape.empty()) {
        tensor.shape[below(static_cast<int>(tensor.shape.size()))] *= 137;
      }
    }
    const FakeModel model(tensors, round);
    const int from = below(8) + 1;
    const int to = below(8) + 1;
    SCOPED_TRACE(absl::StrCat(from, " to ", to));
    const std::string name = absl::StrCat("any-", round);
    SaveFakeState(model, GridBoxes(model, from, random_), directory_.path(),
                  name, model.Meta(5));
    const FakeBoxes boxes = GridBoxes(model, to, random_);
    RunRanks(World(to), [&](Rank& rank) {
      FakeState state(model, boxes[rank.rank()], rank.runtime(),
                      rank.rank() % 2 == 0);
      auto checkpoint = Checkpoint::Open(path(name));
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      const auto budget = MemoryBudget::Create(kBudget);
      RestoreOptions options = Wanted(model);
      options.budget = budget->get();
      const auto meta = RestoreCheckpoint(
          rank.runtime(), *rank.communicator, *checkpoint,
          round % 2 == 0 ? state.Restore() : Reversed(state.Restore()),
          options);
      ASSERT_TRUE(meta.ok()) << meta.status();
      EXPECT_TRUE(state.committed());
      state.ExpectFilled();
      EXPECT_LE((*budget)->peak().host, kBudget.host);
      // Nothing is read twice.
      int64_t all = 0;
      for (const auto& [tensor, saved] : checkpoint->tensors()) {
        all += saved.bytes();
      }
      EXPECT_LE(checkpoint->bytes_read(), all);
    });
    fs::remove_all(path(name));
  }
}

TEST_F(SaveRestoreTest, ReadsWhatItNeedsAndAChunkASide) {
  std::vector<FakeTensor> tensors = {
      {"w", StateKind::kMaster, StateType::kFloat32, {40 * kLeafNumel}}};
  const FakeModel model(tensors, 3);
  const FakeBoxes whole = {{Box{{0}, {40 * kLeafNumel}}}};
  RunRanks(World(1), [&](Rank& rank) {
    FakeState state(model, whole[0], rank.runtime(), false);
    state.Fill();
    ASSERT_TRUE(SaveCheckpoint(rank.runtime(), *rank.communicator,
                               directory_.path(), "c", state.Lease(),
                               model.Meta(3), SmallChunks())
                    .ok());
  });
  constexpr int64_t kChunk = 4096;
  for (const int64_t begin : {int64_t{0}, int64_t{3}, int64_t{39}}) {
    Box box = {{begin * kLeafNumel}, {kLeafNumel}};
    RunRanks(World(1), [&](Rank& rank) {
      FakeState state(model, {box}, rank.runtime(), false);
      absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path("c"));
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      ASSERT_TRUE(RestoreCheckpoint(rank.runtime(), *rank.communicator,
                                    *checkpoint, state.Restore(), Wanted(model))
                      .ok());
      state.ExpectFilled();
      EXPECT_LE(checkpoint->bytes_read(), 4 * kLeafNumel + 2 * kChunk);
    });
  }
}

TEST_F(SaveRestoreTest, ATensorOfTenTimesTheBudgetGoesThroughIt) {
  constexpr MemoryBudget::Bytes kBudget = {64 << 10, 64 << 10};
  std::vector<FakeTensor> tensors = {
      {"w", StateKind::kExpAvg, StateType::kBFloat16, {320 << 10}}};
  const FakeModel model(tensors, 3);
  RunRanks(World(1), [&](Rank& rank) {
    FakeState state(model, {Box{{0}, {320 << 10}}}, rank.runtime(), true);
    state.Fill();
    for (const ExportForm form : {ExportForm::kExact, ExportForm::kUnscaled}) {
      const auto budget = MemoryBudget::Create(kBudget);
      ASSERT_TRUE(budget.ok());
      SaveOptions options;
      options.form = form;
      options.budget = budget->get();
      const int64_t before = rank.device->memory().in_use;
      const int64_t pinned = rank.device->pinned_memory().in_use;
      rank.device->ResetPeaks();
      const absl::StatusOr<SaveReport> report =
          SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                         Name(form), state.Lease(), model.Meta(3), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_LE(report->peak.host, kBudget.host);
      EXPECT_LE(report->peak.device, kBudget.device);
      EXPECT_EQ((*budget)->in_use().host, 0);
      // What was taken is what the budget says.
      EXPECT_EQ(rank.device->memory().peak - before, report->peak.device);
      EXPECT_EQ(rank.device->pinned_memory().peak - pinned, report->peak.host);
      EXPECT_EQ(rank.device->memory().in_use, before);
      EXPECT_EQ(rank.device->pinned_memory().in_use, pinned);
      EXPECT_EQ(report->peak.device > 0, form == ExportForm::kUnscaled);
    }
    state.Clear();
    const auto budget = MemoryBudget::Create({0, 16 << 10});
    RestoreOptions options = Wanted(model);
    options.budget = budget->get();
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path("exact"));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    // Its chunks are larger than what may be had now.
    const auto meta = RestoreCheckpoint(rank.runtime(), *rank.communicator,
                                        *checkpoint, state.Restore(), options);
    ASSERT_TRUE(meta.ok()) << meta.status();
    state.ExpectFilled();
    EXPECT_LE((*budget)->peak().host, 16 << 10);

    const auto none = MemoryBudget::Create({0, 8000});
    SaveOptions small;
    small.budget = none->get();
    EXPECT_EQ(
        SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                       "small", state.Lease(), model.Meta(3), small)
            .status()
            .code(),
        absl::StatusCode::kInvalidArgument);
    EXPECT_FALSE(fs::exists(path("small")));
    const auto partials = ListPartials(directory_.path());
    ASSERT_TRUE(partials.ok());
    EXPECT_TRUE(partials->empty());
  });
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void WriteAll(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// What this process takes beside the state, at most, while `work` runs.
template <typename Work>
int64_t MostExtraBytes(const Work& work) {
  EXPECT_TRUE(ForgetMostResident());
  const int64_t before = ResidentBytes();
  work();
  return MostResidentBytes() - before;
}

// In a child, whose memory is its own.
TEST_F(SaveRestoreTest, NoMoreIsResidentThanTheBudget) {
  // Where it is not measured, less of it.
  const bool measured = !UnderSanitizer() && !UnderEmulator();
  const int64_t budget_bytes = measured ? 16 << 20 : 1 << 20;
  const auto run = [&] {
    const int64_t numel = 10 * budget_bytes / 4;
    const FakeModel model(
        {{"w", StateKind::kMaster, StateType::kFloat32, {numel}}}, 7);
    const auto budget = MemoryBudget::Create({0, budget_bytes});
    RunRanks(World(1), [&](Rank& rank) {
      FakeState state(model, {{{0}, {numel}}}, rank.runtime(), false);
      state.Fill();
      const int64_t saving = MostExtraBytes([&] {
        SaveOptions options;
        options.budget = budget->get();
        const auto report = SaveCheckpoint(
            rank.runtime(), *rank.communicator, directory_.path(), "c",
            state.Lease(), model.Meta(5), options);
        EXPECT_TRUE(report.ok()) << report.status();
      });
      state.Clear();
      const int64_t restoring = MostExtraBytes([&] {
        auto checkpoint = Checkpoint::Open(path("c"));
        ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
        RestoreOptions options = Wanted(model);
        options.budget = budget->get();
        const auto meta =
            RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                              state.Restore(), options);
        EXPECT_TRUE(meta.ok()) << meta.status();
      });
      state.ExpectFilled();
      if (!measured) return;
      // A thread, and what the allocator keeps.
      constexpr int64_t kMore = 4 << 20;
      EXPECT_LE(saving, budget_bytes + kMore);
      EXPECT_GE(saving, budget_bytes / 2);
      EXPECT_LE(restoring, budget_bytes + kMore);
      EXPECT_GE(restoring, budget_bytes / 4);
    });
  };
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    run();
    std::fflush(nullptr);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(SaveRestoreTest, TheSameStateGivesTheSameFiles) {
  const FakeBoxes boxes = FlatBoxes(model_, 3, random_);
  SaveOk("a", boxes, 5);
  SaveOk("b", boxes, 5);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(path("a"))) {
    const std::string name = entry.path().filename();
    EXPECT_EQ(ReadAll(path("a/" + name)), ReadAll(path("b/" + name))) << name;
    ++files;
  }
  EXPECT_GE(files, 1 + 2 * 3);
}

// The layout is how names are presented: the tensors are the same.
TEST_F(SaveRestoreTest, EachLayoutIsSavedShardedAndFull) {
  const FakeBoxes boxes = FlatBoxes(model_, 3, random_);
  for (const bool full : {false, true}) {
    SCOPED_TRACE(full);
    const auto save = [&](const std::string& name, CheckpointLayout layout) {
      for (const absl::Status& status :
           Save(name, boxes, model_.Meta(5), [&](int, SaveOptions& options) {
             options.full = full;
             options.layout = layout;
           })) {
        ASSERT_TRUE(status.ok()) << status;
      }
    };
    const std::string flat = absl::StrCat("flat-", full);
    const std::string nested = absl::StrCat("nested-", full);
    save(flat, CheckpointLayout::kFlat);
    save(nested, CheckpointLayout::kNested);
    const auto opened = Checkpoint::Open(path(nested));
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->manifest().layout(), checkpoint::LAYOUT_NESTED);
    EXPECT_EQ(opened->manifest().distribution(),
              full ? checkpoint::DISTRIBUTION_FULL
                   : checkpoint::DISTRIBUTION_SHARDED);
    for (const auto& file : opened->files()) {
      const std::string name = fs::path(file.path).filename();
      EXPECT_EQ(ReadAll(file.path), ReadAll(path(flat + "/" + name)));
    }
    for (const absl::Status& status : Restore(
             nested, model_, FlatBoxes(model_, 2, random_), Wanted(model_))) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// --- Whole tensors ---

TEST_F(SaveRestoreTest, FullIsWholeTensorsOfRankZero) {
  for (const int world : {1, 3, 4}) {
    SCOPED_TRACE(world);
    const std::string name = absl::StrCat("full-", world);
    const FakeBoxes boxes = world == 3 ? GridBoxes(model_, world, random_)
                                       : FlatBoxes(model_, world, random_);
    const auto results =
        Save(name, boxes, model_.Meta(5),
             [](int, SaveOptions& options) { options.full = true; });
    for (const absl::Status& status : results) {
      ASSERT_TRUE(status.ok()) << status;
    }
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path(name));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->manifest().distribution(),
              checkpoint::DISTRIBUTION_FULL);
    for (size_t i = 0; i < model_.tensors().size(); ++i) {
      const FakeTensor& tensor = model_.tensors()[i];
      SCOPED_TRACE(tensor.name());
      const Checkpoint::Tensor& saved = checkpoint->tensors().at(tensor.name());
      ASSERT_EQ(saved.pieces.size(), 1u);
      EXPECT_EQ(saved.pieces[0].box.extent, tensor.shape);
      std::vector<char> buffer(4096);
      std::vector<char> whole(static_cast<size_t>(saved.bytes()));
      const int64_t element = ByteSize(saved.type);
      ASSERT_TRUE(checkpoint
                      ->Read(saved, saved.pieces[0].box, absl::MakeSpan(buffer),
                             [&](int64_t first, int64_t n, const char* data) {
                               std::copy(data, data + n * element,
                                         whole.begin() + first * element);
                               return absl::OkStatus();
                             })
                      .ok());
      EXPECT_TRUE(whole == model_.bytes(static_cast<int>(i)));
    }
    for (const absl::Status& status :
         Restore(name, model_, FlatBoxes(model_, 2, random_), Wanted(model_))) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST_F(SaveRestoreTest, FullTakesChunksOfEachRank) {
  const FakeBoxes boxes = FlatBoxes(model_, 3, random_);
  RunRanks(World(3), [&](Rank& rank) {
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), true);
    state.Fill();
    const auto budget = MemoryBudget::Create({0, 64 << 10});
    SaveOptions options;
    options.full = true;
    options.budget = budget->get();
    const auto report =
        SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                       "c", state.Lease(), model_.Meta(5), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_LE(report->peak.host, 64 << 10);
    EXPECT_EQ(report->bytes > 0, rank.rank() == 0);
  });
  const auto report = VerifyCheckpoint(path("c"), {});
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->problems.empty()) << report->problems[0];
}

// Nothing is published that could not be opened.
TEST_F(SaveRestoreTest, RanksThatDoNotFitTogetherAreRefused) {
  FakeBoxes boxes = FlatBoxes(model_, 2, random_);
  // The first parameter of rank 1 is that of rank 0.
  const Box all = {{0}, {21000}};
  for (int i = 0; i < 3; ++i) boxes[0][i] = boxes[1][i] = all;
  for (const bool full : {false, true}) {
    const auto results =
        Save("c", boxes, model_.Meta(5),
             [&](int, SaveOptions& options) { options.full = full; });
    for (const absl::Status& status : results) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "state.w.")) << status;
    }
    EXPECT_TRUE(fs::is_empty(directory_.path()));
  }
}

TEST_F(SaveRestoreTest, ChunksOfAFullSaveAreThoseOfTheOptions) {
  std::vector<FakeTensor> tensors = {
      {"w", StateKind::kMaster, StateType::kFloat32, {40 * kLeafNumel}}};
  const FakeModel model(tensors, 3);
  for (const int world : {1, 2}) {
    const std::string name = absl::StrCat("full", world);
    const FakeBoxes boxes = FlatBoxes(model, world, random_);
    RunRanks(World(world), [&](Rank& rank) {
      FakeState state(model, boxes[rank.rank()], rank.runtime(), false);
      state.Fill();
      const auto budget = MemoryBudget::Create({0, 200 << 10});
      SaveOptions options;
      options.full = true;
      options.budget = budget->get();
      const auto report =
          SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                         name, state.Lease(), model.Meta(3), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_LE(report->peak.host, 200 << 10);
    });
    const auto checkpoint = Checkpoint::Open(path(name));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const auto& entry = *checkpoint->tensors().begin()->second.pieces[0].entry;
    // 640 KiB through five buffers, of which each takes what is gathered at a
    // time in two parts, behind its header.
    EXPECT_LE(entry.chunks_size(), 2 * (640 / 40) + 2) << world;
  }
}

TEST_F(SaveRestoreTest, RanksThatOpenDifferentCheckpointsAreNamed) {
  const FakeBoxes boxes = FlatBoxes(model_, 2, random_);
  SaveOk("a", boxes, 5);
  SaveOk("b", boxes, 6);
  RunRanks(World(2), [&](Rank& rank) {
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
    auto checkpoint = Checkpoint::Open(path(rank.rank() == 0 ? "a" : "b"));
    ASSERT_TRUE(checkpoint.ok());
    const absl::Status status =
        RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                          state.Restore(), Wanted(model_))
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(
        absl::StrContains(status.message(), "rank 1 has opened another"))
        << status;
    EXPECT_FALSE(state.written());
  });
}

TEST_F(SaveRestoreTest, NothingIsWrittenWhereAFileIsMissing) {
  const FakeBoxes boxes = FlatBoxes(model_, 2, random_);
  SaveOk("c", boxes, 5);
  fs::remove(path("c/rank-00001-of-00002-32bit.safetensors"));
  RunRanks(World(2), [&](Rank& rank) {
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
    auto checkpoint = Checkpoint::Open(path("c"));
    ASSERT_TRUE(checkpoint.ok());
    const absl::Status status =
        RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                          state.Restore(), Wanted(model_))
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(
        absl::StrContains(status.message(), "missing in the checkpoint"))
        << status;
    EXPECT_FALSE(state.written());
  });
}

// What fails on one rank at the end leaves nobody with a part of it.
TEST_F(SaveRestoreTest, ACommitThatFailsElsewhereCountsForNone) {
  const FakeBoxes boxes = FlatBoxes(model_, 2, random_);
  SaveOk("c", boxes, 5);
  RunRanks(World(2), [&](Rank& rank) {
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
    if (rank.rank() == 1) {
      state.FailCommit(absl::InternalError("no weights"));
    }
    auto checkpoint = Checkpoint::Open(path("c"));
    ASSERT_TRUE(checkpoint.ok());
    const absl::Status status =
        RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                          state.Restore(), Wanted(model_))
            .status();
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1: no weights"))
        << status;
    EXPECT_TRUE(state.written());
    EXPECT_FALSE(state.committed());
  });
}

TEST_F(SaveRestoreTest, AFailureWhileGatheringIsThatOfAll) {
  const FakeBoxes boxes = FlatBoxes(model_, 4, random_);
  const auto none = MemoryBudget::Create({0, 0});
  for (const int failing : {0, 2}) {
    const auto results =
        Save("c", boxes, model_.Meta(5), [&](int rank, SaveOptions& options) {
          options.full = true;
          if (rank == failing) options.budget = none->get();
        });
    for (const absl::Status& status : results) {
      EXPECT_TRUE(absl::StrContains(
          status.message(), absl::StrCat("rank ", failing, ": the budget")))
          << status;
    }
    EXPECT_TRUE(fs::is_empty(directory_.path()));
  }
}

// --- Damage ---

// Of a safetensors file.
size_t HeaderBytes(const std::string& file) {
  const auto length =
      SafetensorsHeaderLength(file.substr(0, kSafetensorsLengthBytes),
                              static_cast<int64_t>(file.size()));
  EXPECT_TRUE(length.ok()) << length.status();
  return static_cast<size_t>(kSafetensorsLengthBytes + *length);
}

TEST_F(SaveRestoreTest, DamageIsFoundAndNamed) {
  const FakeBoxes boxes = GridBoxes(model_, 2, random_);
  SaveOk("c", boxes, 5);
  const auto problems = [&] {
    VerifyOptions options;
    options.buffer_bytes = 4096;
    const absl::StatusOr<VerifyReport> report =
        VerifyCheckpoint(path("c"), options);
    EXPECT_TRUE(report.ok()) << report.status();
    std::string all;
    for (const absl::Status& problem : report->problems) {
      absl::StrAppend(&all, problem.message(), "\n");
    }
    return all;
  };
  ASSERT_EQ(problems(), "");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("c"))) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  const RestoreOptions wanted = Wanted(model_);
  const int flips = LongTestStride() == 1 ? 40 : 4;
  // Loading all of it finds it, too.
  const auto expect_refused = [&](const std::string& name) {
    for (const absl::Status& status :
         Restore("c", model_, FlatBoxes(model_, 1, random_), wanted)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    }
  };
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const std::string file = path("c/" + name);
    const std::string good = ReadAll(file);
    for (int i = 0; i < flips; ++i) {
      std::string bad = good;
      const size_t at = random_() % bad.size();
      bad[at] ^= static_cast<char>(1 << random_() % 8);
      WriteAll(file, bad);
      EXPECT_TRUE(absl::StrContains(problems(), name));
      // It reads no headers of data: the index says where that is.
      const bool data = absl::EndsWith(name, ".safetensors");
      if (!data || at >= HeaderBytes(good)) expect_refused(name);
    }
    for (const size_t size : {size_t{0}, good.size() / 2, good.size() - 1}) {
      WriteAll(file, good.substr(0, size));
      EXPECT_TRUE(absl::StrContains(problems(), name));
      expect_refused(name);
    }
    WriteAll(file, good + "x");
    EXPECT_TRUE(absl::StrContains(problems(), name));
    fs::remove(file);
    if (name == "manifest") {
      EXPECT_NE(problems(), "");
    } else {
      EXPECT_TRUE(absl::StrContains(problems(), name));
    }
    expect_refused(name);
    WriteAll(file, good);
  }
  ASSERT_EQ(problems(), "");
  const std::string stray = "rank-00000-of-00009.index";
  WriteAll(path("c/" + stray), "");
  EXPECT_TRUE(absl::StrContains(problems(), stray));
}

TEST_F(SaveRestoreTest, AllThatIsDamagedIsNamed) {
  SaveOk("c", GridBoxes(model_, 4, random_), 5);
  const std::vector<std::string> damaged = {
      "rank-00000-of-00004.index", "rank-00001-of-00004-32bit.safetensors",
      "rank-00003-of-00004.index"};
  for (const std::string& name : damaged) {
    std::string bytes = ReadAll(path("c/" + name));
    bytes[bytes.size() - 3] ^= 1;
    WriteAll(path("c/" + name), bytes);
  }
  fs::remove(path("c/rank-00002-of-00004-32bit.safetensors"));
  const auto report = VerifyCheckpoint(path("c"), {});
  ASSERT_TRUE(report.ok()) << report.status();
  std::vector<std::string> found;
  for (const absl::Status& problem : report->problems) {
    EXPECT_EQ(problem.code(), absl::StatusCode::kDataLoss) << problem;
    found.emplace_back(problem.message());
  }
  ASSERT_EQ(found.size(), 4u);
  EXPECT_TRUE(absl::StrContains(found[0], damaged[0])) << found[0];
  EXPECT_TRUE(absl::StrContains(found[1], damaged[2])) << found[1];
  EXPECT_TRUE(absl::StrContains(found[2], damaged[1])) << found[2];
  EXPECT_TRUE(absl::StrContains(found[3], "rank-00002")) << found[3];
}

// Load finds damage in what it reads: here in everything.
TEST_F(SaveRestoreTest, DamagedDataIsNotRestored) {
  SaveOk("c", FlatBoxes(model_, 2, random_), 5);
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path("c"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const Checkpoint::DataFile& file : checkpoint->files()) {
    const std::string good = ReadAll(file.path);
    std::string bad = good;
    bad[bad.size() - 1] ^= 1;
    WriteAll(file.path, bad);
    const auto statuses =
        Restore("c", model_, FlatBoxes(model_, 3, random_), Wanted(model_));
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), file.path)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "rank ")) << status;
    }
    WriteAll(file.path, good);
  }
}

// Ranks need not have them in one order, nor all of them.
TEST_F(SaveRestoreTest, ParametersOfGroupsAreThoseOfAllRanks) {
  const FakeBoxes boxes = FlatBoxes(model_, 3, random_);
  const auto more = [](int rank) { return absl::StrCat("more", rank); };
  RunRanks(World(3), [&](Rank& rank) {
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
    state.Fill();
    CheckpointMeta meta = model_.Meta(5);
    std::vector<std::string>& names = meta.groups[1].parameters;
    if (rank.rank() == 1) std::reverse(names.begin(), names.end());
    names.push_back(more(rank.rank()));
    const auto report =
        SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                       "c", state.Lease(), meta, SmallChunks());
    ASSERT_TRUE(report.ok()) << report.status();
  });
  const auto checkpoint = Checkpoint::Open(path("c"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<std::string> expected = model_.Meta(5).groups[1].parameters;
  for (int rank = 0; rank < 3; ++rank) expected.push_back(more(rank));
  EXPECT_EQ(checkpoint->meta().groups[1].parameters, expected);
}

// --- Other trainers ---

TEST_F(SaveRestoreTest, WhatDiffersIsNamedAndNothingWritten) {
  SaveOk("flat", FlatBoxes(model_, 2, random_), 5);
  for (const absl::Status& status :
       Save("nested", FlatBoxes(model_, 2, random_), model_.Meta(5),
            [](int, SaveOptions& options) {
              options.layout = CheckpointLayout::kNested;
            })) {
    ASSERT_TRUE(status.ok()) << status;
  }
  const auto expect =
      [&](const char* message,
          const std::function<void(std::vector<FakeTensor>&)>& change_model,
          const std::function<void(RestoreOptions&)>& change_options) {
        SCOPED_TRACE(message);
        std::vector<FakeTensor> tensors = model_.tensors();
        if (change_model) change_model(tensors);
        const FakeModel model(tensors, 7);
        RestoreOptions options = Wanted(model);
        if (change_options) change_options(options);
        const FakeBoxes boxes = FlatBoxes(model, 2, random_);
        for (const char* layout : {"flat", "nested"}) {
          RunRanks(World(2), [&](Rank& rank) {
            FakeState state(model, boxes[rank.rank()], rank.runtime(), false);
            absl::StatusOr<Checkpoint> checkpoint =
                Checkpoint::Open(path(layout));
            ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
            const absl::Status status =
                RestoreCheckpoint(rank.runtime(), *rank.communicator,
                                  *checkpoint, state.Restore(), options)
                    .status();
            EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition)
                << status;
            EXPECT_TRUE(absl::StrContains(status.message(), message)) << status;
            EXPECT_FALSE(state.written());
          });
        }
      };
  using Tensors = std::vector<FakeTensor>;
  expect("lacks the parameter \"more\"",
         [](Tensors& t) {
           t.push_back({"more", StateKind::kMaster, StateType::kFloat32, {3}});
         },
         {});
  expect("has a parameter \"one\", which the trainer has not",
         [](Tensors& t) { t.pop_back(); }, {});
  expect("has \"state.w.exp_avg_sq\", which the trainer has not",
         [](Tensors& t) { t.erase(t.begin() + 2); }, {});
  expect("lacks \"state.half.exp_avg_sq\"",
         [](Tensors& t) {
           t.insert(
               t.begin() + 5,
               {"half", StateKind::kExpAvgSq, StateType::kFloat32, {9001}, 1});
         },
         {});
  expect(
      "has \"state.w.master_param\" of shape [7, 3000], the trainer has "
      "[3000, 7]",
      [](Tensors& t) {
        for (int i = 0; i < 3; ++i) t[i].shape = {3000, 7};
      },
      {});
  expect("has \"state.w.exp_avg\" of type bf16, the trainer has fp32",
         [](Tensors& t) { t[1].type = StateType::kFloat32; }, {});
  expect(
      "has \"state.half.master_param\" of type scaled fp16, the trainer "
      "has fp32",
      [](Tensors& t) { t[3].type = StateType::kFloat32; }, {});
  expect("has the parameter \"one\" in group 1, the trainer has it in group 0",
         [](Tensors& t) { t.back().group = 0; }, {});
  expect(
      "has weight_decay 0.25 in group 0, the trainer has 0.5", {},
      [](RestoreOptions& options) { options.groups[0].weight_decay = 0.5f; });
  expect("has beta1 0.899999976 in group 1", {},
         [](RestoreOptions& options) { options.groups[1].beta1 = 0.8f; });
  expect("has mode L2 in group 1, the trainer has AdamW", {},
         [](RestoreOptions& options) {
           options.groups[1].mode = WeightDecay::kAdamW;
         });
  expect("has beta2 0.99000001 in group 0, the trainer has 0.990000129", {},
         [](RestoreOptions& options) {
           options.groups[0].beta2 = std::nextafter(
               std::nextafter(options.groups[0].beta2, 1.0f), 1.0f);
         });
  expect("has eps ", {},
         [](RestoreOptions& options) { options.groups[1].eps = 1e-6f; });
  expect("has bias_correction ", {}, [](RestoreOptions& options) {
    options.groups[0].bias_correction = !options.groups[0].bias_correction;
  });
  expect("the scale 1024 is not ours", {}, [](RestoreOptions& options) {
    options.check = [](const CheckpointMeta& meta) {
      return absl::FailedPreconditionError(
          absl::StrCat("the scale ", meta.loss_scale->scale, " is not ours"));
    };
  });
  expect("has 2 parameter groups, the trainer has 3", {},
         [](RestoreOptions& options) { options.groups.emplace_back(); });
}

// What no save of ours writes.
TEST_F(SaveRestoreTest, ARemainderOfAnotherStepIsRefused) {
  SaveOk("c", FlatBoxes(model_, 1, random_), 5);
  EditIndex(path("c"), [](checkpoint::Manifest&, checkpoint::Index& index) {
    for (checkpoint::Tensor& tensor : *index.mutable_tensors()) {
      if (tensor.name() == "state.rest.master_param") tensor.set_step(9);
    }
  });
  for (const absl::Status& status :
       Restore("c", model_, FlatBoxes(model_, 2, random_), Wanted(model_))) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(
        status.message(),
        "has \"state.rest.master_param\" of step 9 and \"state.rest.param\" "
        "of step 6: they are one number only together"))
        << status;
  }
}

TEST_F(SaveRestoreTest, AnotherLeafIsRefused) {
  const FakeModel model(
      {{"w", StateKind::kMaster, StateType::kFloat32, {30, 7}}}, 7);
  SaveFakeState(model, FlatBoxes(model, 1, random_), directory_.path(), "c",
                model.Meta(5));
  EditIndex(path("c"),
            [](checkpoint::Manifest& manifest, checkpoint::Index& index) {
              manifest.set_leaf(kLeafNumel / 2);
              index.set_leaf(kLeafNumel / 2);
            });
  for (const absl::Status& status :
       Restore("c", model, FlatBoxes(model, 2, random_), Wanted(model))) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(
        status.message(), absl::StrCat("has leaves of ", kLeafNumel / 2,
                                       " elements, expected ", kLeafNumel)))
        << status;
  }
}

TEST_F(SaveRestoreTest, CastRoundsToTheTypesOfTheTrainer) {
  const auto model_of = [](StateType master, StateType exp_avg) {
    return FakeModel({{"w", StateKind::kMaster, master, {30, 7001}},
                      {"w", StateKind::kExpAvg, exp_avg, {30, 7001}}},
                     7);
  };
  const FakeModel saved = model_of(StateType::kFloat32, StateType::kBFloat16);
  const FakeModel wanted = model_of(StateType::kFloat16, StateType::kFloat32);
  SaveFakeState(saved, FlatBoxes(saved, 3, random_), directory_.path(), "c",
                saved.Meta(5));
  RestoreOptions options = Wanted(wanted);
  for (const absl::Status& status :
       Restore("c", wanted, FlatBoxes(wanted, 2, random_), options)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  }
  options.cast = true;
  const auto budget = MemoryBudget::Create({0, 64 << 10});
  options.budget = budget->get();
  RunRanks(World(1), [&](Rank& rank) {
    const Box whole = {{0}, {30 * 7001}};
    FakeState state(wanted, {whole, whole}, rank.runtime(), false);
    auto checkpoint = Checkpoint::Open(path("c"));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const auto meta = RestoreCheckpoint(rank.runtime(), *rank.communicator,
                                        *checkpoint, state.Restore(), options);
    ASSERT_TRUE(meta.ok()) << meta.status();
    int views = 0;
    const StateLease lease = state.Lease();
    for (const StateView& view : lease.views()) {
      ++views;
      const bool master = view.type == StateType::kFloat16;
      const char* from = saved.bytes(master ? 0 : 1).data();
      std::vector<char> expected(view.numel * ByteSize(view.type));
      CastArgs args = {view.numel, from, expected.data(), DType::kFloat32,
                       DType::kFloat16};
      if (!master) {
        args.in_type = DType::kBFloat16;
        args.out_type = DType::kFloat32;
      }
      args.in = from + view.offset * (master ? 4 : 2);
      ASSERT_TRUE(Cast(rank.runtime().kernel, rank.runtime().pool, args).ok());
      EXPECT_EQ(std::memcmp(view.data, expected.data(), expected.size()), 0)
          << view.name;
    }
    EXPECT_GE(views, 2);
  });
  EXPECT_LE((*budget)->peak().host, 64 << 10);
}

TEST_F(SaveRestoreTest, ReorderedParametersAndAnotherLrAreTaken) {
  SaveOk("c", FlatBoxes(model_, 2, random_), 5);
  RestoreOptions options = Wanted(model_);
  for (StateGroup& group : options.groups) {
    std::reverse(group.parameters.begin(), group.parameters.end());
    group.lr = 17;
  }
  for (const absl::Status& status :
       Restore("c", model_, FlatBoxes(model_, 3, random_), options)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(meta_.groups[0].lr, model_.Meta(5).groups[0].lr);
  EXPECT_EQ(meta_.groups[0].parameters, options.groups[0].parameters);
}

// --- Failures ---

TEST_F(SaveRestoreTest, AFailureOfOneRankIsThatOfAll) {
  const FakeBoxes boxes = FlatBoxes(model_, 4, random_);
  const auto none = MemoryBudget::Create({0, 0});
  const auto results =
      Save("c", boxes, model_.Meta(5), [&](int rank, SaveOptions& options) {
        if (rank == 2) options.budget = none->get();
      });
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 2: the budget of 0"))
        << status;
  }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

// Which has begun to write by then.
TEST_F(SaveRestoreTest, AFailureToReadOnOneRankIsThatOfAll) {
  const FakeBoxes boxes = FlatBoxes(model_, 4, random_);
  for (const bool full : {false, true}) {
    SCOPED_TRACE(full);
    std::vector<absl::Status> results(4);
    RunRanks(World(4), [&](Rank& rank) {
      FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
      state.Fill();
      const auto fences = std::make_shared<StateFences>(1);
      if (rank.rank() == 2) {
        fences->Cancel(absl::DataLossError("a page is gone"));
      }
      const StateLease plain = state.Lease();
      const StateLease lease(plain.views(), nullptr, fences);
      SaveOptions options = SmallChunks();
      options.full = full;
      results[rank.rank()] =
          SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                         "c", lease, model_.Meta(5), options)
              .status();
    });
    for (const absl::Status& status : results) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "rank 2: a page is gone"))
          << status;
    }
    EXPECT_TRUE(fs::is_empty(directory_.path()));
  }
}

TEST_F(SaveRestoreTest, FencesThatDoNotFitAreRefused) {
  RunRanks(World(1), [&](Rank& rank) {
    std::vector<Box> whole;
    for (const FakeTensor& tensor : model_.tensors()) {
      whole.push_back({{0}, {tensor.numel()}});
    }
    FakeState state(model_, whole, rank.runtime(), false);
    const auto save = [&](const std::function<void(StateView&)>& change) {
      std::vector<StateView> views = state.Lease().views();
      for (StateView& view : views) change(view);
      const StateLease lease(std::move(views), nullptr,
                             std::make_shared<StateFences>(2));
      return SaveCheckpoint(rank.runtime(), *rank.communicator,
                            directory_.path(), "c", lease, model_.Meta(5),
                            SmallChunks())
          .status();
    };
    const auto expect = [&](const std::function<void(StateView&)>& change) {
      const absl::Status status = save(change);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(absl::StrContains(status.message(),
                                    "does not lie behind one fence of 2"))
          << status;
    };
    expect([](StateView& view) { view.fence = 2; });
    expect([](StateView& view) { view.fence = -1; });
    // The second view of a tensor.
    expect([](StateView& view) { view.fence = view.offset > 0 ? 1 : 0; });
    // A remainder, and not its weight.
    expect([](StateView& view) {
      view.fence = view.name == "state.rest.master_param" ? 1 : 0;
    });
    EXPECT_TRUE(save([](StateView&) {}).ok());
  });
}

TEST_F(SaveRestoreTest, RanksThatSaveAnotherStepAreNamed) {
  const FakeBoxes boxes = FlatBoxes(model_, 3, random_);
  std::vector<absl::Status> results(3);
  RunRanks(World(3), [&](Rank& rank) {
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
    results[rank.rank()] =
        SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                       "c", state.Lease(),
                       model_.Meta(rank.rank() == 1 ? 6 : 5), SmallChunks())
            .status();
  });
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 saves another"))
        << status;
  }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

TEST_F(SaveRestoreTest, ARankThatIsGoneFailsTheOthersInTime) {
  const FakeBoxes boxes = FlatBoxes(model_, 4, random_);
  std::vector<absl::Status> results(4);
  RankOptions options = World(4);
  options.timeout = std::chrono::seconds(20);
  RunRanks(options, [&](Rank& rank) {
    if (rank.rank() == 3) return;
    FakeState state(model_, boxes[rank.rank()], rank.runtime(), false);
    results[rank.rank()] =
        SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                       "c", state.Lease(), model_.Meta(5), SmallChunks())
            .status();
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(absl::StrContains(results[rank].message(), "rank 3"))
        << results[rank];
  }
  EXPECT_FALSE(fs::exists(path("c")));
}

TEST_F(SaveRestoreTest, AnExistingTargetStays) {
  const FakeBoxes boxes = FlatBoxes(model_, 2, random_);
  SaveOk("c", boxes, 5);
  const std::string manifest = ReadAll(path("c/manifest"));
  for (const absl::Status& status : Save("c", boxes, model_.Meta(6))) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  }
  EXPECT_EQ(ReadAll(path("c/manifest")), manifest);
  for (const char* name : {"", ".", "a/b", ".."}) {
    for (const absl::Status& status : Save(name, boxes, model_.Meta(6))) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
  }
}

TEST_F(SaveRestoreTest, TheNewestAreFoundAndKept) {
  const FakeBoxes boxes = FlatBoxes(model_, 1, random_);
  for (const int64_t step : {9, 100, 20, 3}) {
    SaveOk(absl::StrCat("step-", step), boxes, step);
  }
  std::string damaged = ReadAll(path("step-20/manifest"));
  damaged[damaged.size() / 2] ^= 4;
  WriteAll(path("step-20/manifest"), damaged);
  const auto found = FindCheckpoints(directory_.path());
  ASSERT_TRUE(found.ok()) << found.status();
  std::string names;
  for (const FoundCheckpoint& checkpoint : *found) {
    absl::StrAppend(&names, checkpoint.name, checkpoint.status.ok() ? "" : "!",
                    " ");
  }
  EXPECT_EQ(names, "step-100 step-9 step-3 step-20! ");
  EXPECT_EQ(KeepLast(directory_.path(), 0).code(),
            absl::StatusCode::kInvalidArgument);
  // What lacks a file counts for nothing, too.
  SaveOk("step-200", boxes, 200);
  fs::remove(path("step-200/rank-00000-of-00001-32bit.safetensors"));
  ASSERT_TRUE(KeepLast(directory_.path(), 2).ok());
  EXPECT_TRUE(fs::exists(path("step-200")));
  EXPECT_FALSE(fs::exists(path("step-3")));
  EXPECT_TRUE(fs::exists(path("step-9")));
  EXPECT_TRUE(fs::exists(path("step-20")));
  EXPECT_TRUE(fs::exists(path("step-100")));
}

}  // namespace
}  // namespace onepass

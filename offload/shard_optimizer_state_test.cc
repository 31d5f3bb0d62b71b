// State of ShardOptimizer by name, leased, saved and restored.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/loss_scaler.h"
#include "offload/shard_optimizer.h"
#include "offload/shard_optimizer_rig.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;

// `values` rounded to a type, and their bytes in it.
struct Rounded {
  Rounded(const std::vector<float>& from, DType type)
      : values(from), bytes(from.size() * ByteSize(type)) {
    const int64_t numel = static_cast<int64_t>(from.size());
    if (type == kF32) {
      if (numel > 0) std::memcpy(bytes.data(), from.data(), bytes.size());
      return;
    }
    const auto pool = MakePool(1);
    EXPECT_TRUE(Cast(ScalarKernel(), *pool,
                     {numel, from.data(), bytes.data(), kF32, type})
                    .ok());
    EXPECT_TRUE(Cast(ScalarKernel(), *pool,
                     {numel, bytes.data(), values.data(), type, kF32})
                    .ok());
  }

  std::vector<float> values;
  Bytes bytes;
};

// Of either sign, but for second moments.
std::vector<float> ValuesFor(int shard, StateKind kind, int64_t numel) {
  std::vector<float> values =
      AllGradients(shard, numel, 50 + static_cast<int>(kind), 0).values;
  if (kind == StateKind::kExpAvgSq) {
    for (float& value : values) value *= value;
  }
  return values;
}

class StateTest : public testing::Test {
 protected:
  StateTest() {
    config_.options.cpu_ratio = kCutRatio;
    config_.options.sub_group_numel = 2 * kLeafNumel;
  }

  std::vector<float> Get(ShardOptimizer& optimizer, int shard, StateKind kind) {
    std::vector<float> values(config_.numels[shard]);
    const absl::Status status =
        optimizer.GetState(Rig::ShardName(shard), kind, absl::MakeSpan(values));
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

  int shards() const { return static_cast<int>(config_.numels.size()); }

  RigConfig config_;
};

TEST_F(StateTest, IsSetAndReadByName) {
  for (const DType weights : {kBF16, kF16, kF32}) {
    for (const DType moments : {kF32, kBF16}) {
      for (const double ratio : {0.0, kCutRatio, 1.0}) {
        SCOPED_TRACE(testing::Message() << Name(weights) << ", moments "
                                        << Name(moments) << ", " << ratio);
        config_.options.weights_type = weights;
        config_.options.exp_avg_type = moments;
        config_.options.exp_avg_sq_type = moments;
        config_.options.cpu_ratio = ratio;
        Rig rig(config_);
        ASSERT_TRUE(rig.Create().ok());
        for (int shard = 0; shard < shards(); ++shard) {
          for (const StateKind kind : kStateKinds) {
            const Bytes weights_before = rig.Weights(shard);
            const std::vector<float> values =
                ValuesFor(shard, kind, config_.numels[shard]);
            const absl::Status status =
                rig.optimizer().SetState(Rig::ShardName(shard), kind, values);
            ASSERT_TRUE(status.ok()) << status;
            // Masters set the weights on the device as well.
            const bool master = kind == StateKind::kMaster;
            EXPECT_EQ(Get(rig.optimizer(), shard, kind),
                      Rounded(values, master ? kF32 : moments).values);
            EXPECT_EQ(rig.Weights(shard),
                      master ? Rounded(values, weights).bytes : weights_before);
          }
        }
        // Nothing of one went to another.
        for (int shard = 0; shard < shards(); ++shard) {
          EXPECT_EQ(
              Get(rig.optimizer(), shard, StateKind::kMaster),
              ValuesFor(shard, StateKind::kMaster, config_.numels[shard]));
        }
      }
    }
  }
}

TEST_F(StateTest, OfALargeShardIsSetAndReadToo) {
  // More than goes through a buffer at a time, on both sides.
  config_.numels = {700'000, 500'001};
  config_.options.exp_avg_type = kBF16;
  config_.options.sub_group_numel = 1 << 28;
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  for (const StateKind kind : kStateKinds) {
    for (int shard = 0; shard < shards(); ++shard) {
      const std::vector<float> values =
          ValuesFor(shard, kind, config_.numels[shard]);
      ASSERT_TRUE(
          rig.optimizer().SetState(Rig::ShardName(shard), kind, values).ok());
      const DType type = kind == StateKind::kExpAvg ? kBF16 : kF32;
      EXPECT_TRUE(Get(rig.optimizer(), shard, kind) ==
                  Rounded(values, type).values);
      if (kind == StateKind::kMaster) {
        EXPECT_TRUE(rig.Weights(shard) == Rounded(values, kBF16).bytes);
      }
    }
  }
}

TEST_F(StateTest, AnotherNameOrSizeIsRefused) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  const Snapshot before = rig.Take();
  const auto expect = [&](const std::string& name, int64_t numel, bool found,
                          const std::string& message) {
    std::vector<float> values(numel);
    for (const absl::Status& status :
         {rig.optimizer().GetState(name, StateKind::kExpAvg,
                                   absl::MakeSpan(values)),
          rig.optimizer().SetState(name, StateKind::kMaster, values)}) {
      EXPECT_EQ(status.code(), found ? absl::StatusCode::kInvalidArgument
                                     : absl::StatusCode::kNotFound)
          << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    }
  };
  expect("bias", 31, false, "there is no shard \"bias\"");
  expect("", 31, false, "there is no shard \"\"");
  for (const int64_t numel : {0, 30, 32}) {
    expect(Rig::ShardName(3), numel, true,
           absl::StrCat("\"", Rig::ShardName(3),
                        "\" has 31 elements, and the span ", numel));
  }
  EXPECT_TRUE(rig.optimizer().status().ok());
  ExpectSame(rig.Take(), before);
}

// --- Saved and restored. ---

// What a checkpoint holds.
struct Saved {
  std::vector<std::vector<float>> states;  // of shard i and kind k at 3 * i + k
  std::vector<int64_t> steps;
  LossScaleState loss_scale;
};

Saved Save(Rig& rig) {
  const ShardOptimizer& optimizer = rig.optimizer();
  return {rig.Take().states,
          {optimizer.step(0), optimizer.step(1)},
          optimizer.loss_scale_state()};
}

void Restore(const Saved& saved, Rig& rig) {
  ShardOptimizer& optimizer = rig.optimizer();
  for (size_t i = 0; i < saved.states.size(); ++i) {
    ASSERT_TRUE(optimizer
                    .SetState(Rig::ShardName(static_cast<int>(i / 3)),
                              kStateKinds[i % 3], saved.states[i])
                    .ok());
  }
  for (int group : {0, 1}) {
    ASSERT_TRUE(optimizer.SetStep(group, saved.steps[group]).ok());
  }
  ASSERT_TRUE(optimizer.SetLossScaleState(saved.loss_scale).ok());
}

TEST_F(StateTest, ARestoredRunGoesOnBitForBit) {
  config_.options.loss_scale =
      LossScale(LossScaleOptions::Mode::kDynamic, 1024);
  config_.options.loss_scale.hysteresis = 1;
  config_.options.loss_scale.growth_interval = 2;
  config_.options.max_norm = 1e-2;
  config_.options.exp_avg_type = kBF16;
  // Steps of which the second overflows.
  const GradientSource gradients = [](int shard, int64_t numel, int64_t step,
                                      int64_t micro) {
    TestGradient gradient = MostGradients(shard, numel, step, micro);
    if (step == 2 && shard == 1)
      gradient.values[9] = std::numeric_limits<float>::infinity();
    return gradient;
  };
  Rig uninterrupted(config_);
  ASSERT_TRUE(uninterrupted.Create().ok());
  std::vector<Saved> saved = {Save(uninterrupted)};
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(uninterrupted.Step(step, gradients).ok());
    saved.push_back(Save(uninterrupted));
  }
  EXPECT_EQ(uninterrupted.optimizer().step(0), 5);
  EXPECT_NE(saved[2].loss_scale.scale, saved[1].loss_scale.scale);
  EXPECT_NE(saved[6].loss_scale.scale, saved[2].loss_scale.scale);
  for (const int64_t at : {0, 1, 2, 3}) {
    for (const double ratio : {0.0, 0.3, 1.0}) {
      SCOPED_TRACE(testing::Message() << "at " << at << ", ratio " << ratio);
      RigConfig other = config_;
      other.options.cpu_ratio = ratio;
      other.options.piece_numel = 5000;
      other.options.sub_group_numel = 3 * kLeafNumel;
      other.options.path = StepPath::kSeparate;
      Rig restored(other);
      ASSERT_TRUE(restored.Create().ok());
      ASSERT_TRUE(restored.Step(40, AllGradients).ok());  // another history
      Restore(saved[at], restored);
      for (int64_t step = at + 1; step <= 6; ++step) {
        ASSERT_TRUE(restored.Step(step, gradients).ok());
      }
      ExpectSame(restored.Take(), uninterrupted.Take());
      EXPECT_EQ(restored.optimizer().step(1), 5);
      const LossScaleState& scale = restored.optimizer().loss_scale_state();
      EXPECT_EQ(scale.scale, saved[6].loss_scale.scale);
      EXPECT_EQ(scale.clean_steps, saved[6].loss_scale.clean_steps);
      EXPECT_EQ(scale.hysteresis_left, saved[6].loss_scale.hysteresis_left);
    }
  }
}

// --- Leased. ---

TEST_F(StateTest, ALeaseShowsEverythingOnceInOrder) {
  for (const DType moments : {kF32, kBF16}) {
    for (const double ratio : {0.0, kCutRatio, 1.0}) {
      config_.options.exp_avg_type = moments;
      config_.options.cpu_ratio = ratio;
      Rig rig(config_);
      ASSERT_TRUE(rig.Create().ok());
      const std::vector<Shard> shards = rig.MakeShards();
      ASSERT_TRUE(rig.Step(1).ok());
      absl::StatusOr<StateLease> lease = rig.optimizer().LeaseState();
      ASSERT_TRUE(lease.ok()) << lease.status();
      auto view = lease->views().begin();
      int64_t on_device = 0;
      for (size_t i = 0; i < shards.size(); ++i) {
        for (const StateKind kind : kStateKinds) {
          const std::vector<float> expected =
              Get(rig.optimizer(), static_cast<int>(i), kind);
          const int64_t numel = static_cast<int64_t>(expected.size());
          const DType type = kind == StateKind::kExpAvg ? moments : kF32;
          const StateType state_type =
              type == kF32 ? StateType::kFloat32 : StateType::kBFloat16;
          const std::string name =
              absl::StrCat("state.", shards[i].name, ".", Name(kind));
          SCOPED_TRACE(name);
          int64_t offset = 0;
          if (numel == 0) {
            // It has a name, a type and a shape all the same.
            ASSERT_NE(view, lease->views().end());
            EXPECT_EQ(view->name, name);
            EXPECT_EQ(view->type, state_type);
            EXPECT_EQ(view->shape, shards[i].shape);
            EXPECT_EQ((view++)->numel, 0);
          }
          for (; offset < numel; offset += (view++)->numel) {
            ASSERT_NE(view, lease->views().end());
            EXPECT_EQ(view->name, name);
            EXPECT_EQ(view->type, state_type);
            EXPECT_EQ(view->shape, shards[i].shape);
            EXPECT_EQ(view->box.offset, shards[i].box.offset);
            EXPECT_EQ(view->box.extent, shards[i].box.extent);
            EXPECT_EQ(view->offset, offset);
            ASSERT_GE(view->numel, 1);
            on_device += view->on_device ? view->numel : 0;
            // Device memory is the host's here.
            const Bytes bytes =
                Rounded(
                    std::vector<float>(expected.begin() + offset,
                                       expected.begin() + offset + view->numel),
                    type)
                    .bytes;
            EXPECT_EQ(std::memcmp(view->data, bytes.data(), bytes.size()), 0);
          }
          EXPECT_EQ(offset, numel);
        }
      }
      EXPECT_EQ(view, lease->views().end());
      EXPECT_EQ(on_device == 0, ratio == 1);
    }
  }
}

TEST_F(StateTest, StaysAsItIsWhileItIsLeased) {
  Reference reference(config_);
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  const Snapshot before = rig.Take();
  EXPECT_FALSE(rig.optimizer().leased());
  absl::StatusOr<StateLease> first = rig.optimizer().LeaseState();
  absl::StatusOr<StateLease> second = rig.optimizer().LeaseState();
  ASSERT_TRUE(first.ok() && second.ok());
  // The next gradients may come meanwhile.
  rig.Fill(1);
  ASSERT_TRUE(rig.Add().ok());
  ASSERT_TRUE(rig.optimizer().LocalNorm().ok());
  const std::vector<float> values(31, 1.0f);
  const auto expect_refused = [&](const std::string& message) {
    for (const absl::Status& status :
         {rig.Finish().status(),
          rig.optimizer().SetState(Rig::ShardName(3), StateKind::kExpAvg,
                                   values)}) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    }
    EXPECT_TRUE(rig.optimizer().leased());
    ExpectSame(rig.Take(), before);
  };
  expect_refused("state is leased, leases: 2");
  { const StateLease gone = *std::move(first); }
  expect_refused("state is leased, leases: 1");
  { const StateLease gone = *std::move(second); }
  EXPECT_FALSE(rig.optimizer().leased());
  const absl::StatusOr<StepReport> report = rig.Finish();
  ASSERT_TRUE(report.ok()) << report.status();
  reference.Step(1);
  ExpectSame(rig.Take(), reference.Take());
}

// All waits of a step have one deadline: other ranks wait for it meanwhile.
TEST_F(StateTest, AStepWaitsForAllFencesNoLongerThanItsTimeout) {
  config_.options.fence_timeout = std::chrono::milliseconds(300);
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  absl::StatusOr<StateLease> lease = rig.optimizer().LeaseStateBehindFences();
  ASSERT_TRUE(lease.ok()) << lease.status();
  StateFences* const fences = lease->fences();
  // Each is opened in time, but all of them are not.
  std::thread reader([&] {
    for (int i = 0; i < fences->count(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      fences->Open(i);
    }
  });
  ASSERT_TRUE(rig.Step(1).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(fences->BeginReading()));
  reader.join();
}

TEST_F(StateTest, ALeaseBeforeTheFirstStepShowsZeros) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  absl::StatusOr<StateLease> lease = rig.optimizer().LeaseState();
  ASSERT_TRUE(lease.ok()) << lease.status();
  for (const StateView& view : lease->views()) {
    if (view.name.find(".exp_avg") == std::string::npos) continue;
    if (view.numel == 0) continue;
    const Bytes zeros(view.numel * ByteSize(view.type));
    EXPECT_EQ(std::memcmp(view.data, zeros.data(), zeros.size()), 0)
        << view.name;
  }
}

// --- Restored. ---

// Copies what is in one place to the other; device memory is the host's here.
void CopyState(ShardOptimizer& from, ShardOptimizer& to) {
  absl::StatusOr<StateLease> lease = from.LeaseState();
  ASSERT_TRUE(lease.ok()) << lease.status();
  absl::StatusOr<StateRestore> restore = to.RestoreState();
  ASSERT_TRUE(restore.ok()) << restore.status();
  ASSERT_EQ(restore->targets().size(), lease->views().size());
  restore->BeginWriting();
  for (size_t i = 0; i < lease->views().size(); ++i) {
    const StateView& view = lease->views()[i];
    const StateTarget& target = restore->targets()[i];
    ASSERT_EQ(target.name, view.name);
    ASSERT_EQ(target.offset, view.offset);
    ASSERT_EQ(target.numel, view.numel);
    ASSERT_EQ(target.type, view.type);
    EXPECT_EQ(target.out_data, target.data);
    std::memcpy(target.out_data, view.data, view.numel * ByteSize(view.type));
  }
  const absl::Status status = restore->Commit();
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(StateTest, ARestoredOptimizerGoesOnWithTheSameBits) {
  for (const DType weights : {kBF16, kF16, kF32}) {
    for (const double ratio : {0.0, kCutRatio, 1.0}) {
      SCOPED_TRACE(testing::Message() << Name(weights) << ", " << ratio);
      config_.options.weights_type = weights;
      config_.options.exp_avg_type = kBF16;
      config_.options.cpu_ratio = ratio;
      Rig rig(config_);
      ASSERT_TRUE(rig.Create().ok());
      ASSERT_TRUE(rig.Step(1).ok());
      ASSERT_TRUE(rig.Step(2).ok());
      Rig other(config_);
      ASSERT_TRUE(other.Create().ok());
      CopyState(rig.optimizer(), other.optimizer());
      const std::vector<StateGroup> groups = rig.optimizer().StateGroups();
      ASSERT_TRUE(other.optimizer().SetStateGroups(groups).ok());
      EXPECT_FALSE(other.optimizer().leased());
      ExpectSame(other.Take(), rig.Take());
      ASSERT_TRUE(rig.Step(3).ok());
      ASSERT_TRUE(other.Step(3).ok());
      ExpectSame(other.Take(), rig.Take());
    }
  }
}

TEST_F(StateTest, HalfARestoreLeavesNothingToGoOnWith) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.Step(1).ok());
  const auto before = rig.Take();
  {
    const auto restore = rig.optimizer().RestoreState();
    ASSERT_TRUE(restore.ok()) << restore.status();
    const std::string message(rig.optimizer().LeaseState().status().message());
    EXPECT_THAT(message, HasSubstr("being restored"));
    EXPECT_EQ(rig.optimizer().RestoreState().status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
  // Nothing was written.
  ExpectSame(rig.Take(), before);
  ASSERT_TRUE(rig.Step(2).ok());
  {
    auto restore = rig.optimizer().RestoreState();
    ASSERT_TRUE(restore.ok()) << restore.status();
    restore->BeginWriting();
  }
  EXPECT_FALSE(rig.optimizer().leased());
  EXPECT_EQ(rig.optimizer().status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(rig.optimizer().LeaseState().status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(StateTest, IsNotRestoredAmongGradients) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  rig.Fill(1);
  ASSERT_TRUE(rig.Add().ok());
  const absl::Status status = rig.optimizer().RestoreState().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gradients"));
  ASSERT_TRUE(rig.optimizer().DropGradients().ok());
  EXPECT_TRUE(rig.optimizer().RestoreState().ok());
}

TEST_F(StateTest, GroupsAreReadAndSetWhole) {
  Rig rig(config_);
  ASSERT_TRUE(rig.Create().ok());
  ASSERT_TRUE(rig.Step(1).ok());
  std::vector<StateGroup> groups = rig.optimizer().StateGroups();
  ASSERT_EQ(groups.size(), rig.optimizer().groups().size());
  for (size_t i = 0; i < groups.size(); ++i) {
    EXPECT_EQ(groups[i].step, 1);
    EXPECT_EQ(groups[i].lr, static_cast<float>(rig.optimizer().groups()[i].lr));
    std::vector<std::string> names;
    for (const Shard& shard : rig.optimizer().shards()) {
      if (shard.group == static_cast<int>(i)) names.push_back(shard.name);
    }
    EXPECT_EQ(groups[i].parameters, names);
  }
  groups.back().step = -1;
  groups.front().step = 5;
  EXPECT_EQ(rig.optimizer().SetStateGroups(groups).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rig.optimizer().step(0), 1);
  groups.back().step = 7;
  groups.front().lr = 0.25f;
  ASSERT_TRUE(rig.optimizer().SetStateGroups(groups).ok());
  EXPECT_EQ(rig.optimizer().step(0), 5);
  EXPECT_EQ(rig.optimizer().step(1), 7);
  EXPECT_EQ(rig.optimizer().groups()[0].lr, 0.25);
  groups.emplace_back();
  EXPECT_EQ(rig.optimizer().SetStateGroups(groups).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace onepass

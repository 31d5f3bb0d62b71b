// Optimizers that are saved by some ranks and go on as others: their next steps
// are bitwise those of the run that was not interrupted.

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/meta.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "offload/zero_optimizer.h"
#include "tests/rank_threads.h"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using Bytes = std::vector<char>;
// Of whole tensors, by name.
using WholeState = std::map<std::string, Bytes>;

constexpr int kStepsBefore = 3;
constexpr int kStepsAfter = 2;

struct Parameter {
  const char* name;
  std::vector<int64_t> shape;
  int group;
};
// By unit. Of several leaves, of a few elements, of one, of none.
const std::vector<std::vector<Parameter>>& Units() {
  static const auto* const units = new std::vector<std::vector<Parameter>>{
      {{"w", {7, 3001}, 0}, {"b", {7}, 1}},
      {{"none", {0, 4}, 0}},
      {{"scalar", {}, 1}, {"v", {4099}, 0}}};
  return *units;
}

// Multiples of 1/64 in [-1, 1): sums over ranks, and means of equal ones, are
// exact.
float Number(int64_t seed, int64_t i) {
  return static_cast<float>((i * 37 + seed * 11 + i / 64) % 128 - 64) / 64;
}

class ReshardTest : public testing::TestWithParam<DType> {
 protected:
  absl::StatusOr<std::unique_ptr<ZeroOptimizer>> Create(Rank& rank) const {
    ZeroOptions options;
    options.shard.groups.resize(2);
    options.shard.groups[1].lr = 0.25;
    options.shard.groups[1].weight_decay = 0.1;
    options.shard.exp_avg_type = GetParam();
    options.shard.max_norm = 10;
    // Of each rank some on its device.
    options.shard.cpu_ratio = 0.6;
    options.shard.piece_numel = 4096;
    options.local_grad_type = DType::kFloat32;
    options.shard.grad_type = DType::kFloat32;
    std::vector<ZeroUnit> units;
    for (const auto& parameters : Units()) {
      ZeroUnit& unit = units.emplace_back();
      unit.name = absl::StrCat("unit", units.size());
      for (const Parameter& parameter : parameters) {
        unit.parameters.push_back(
            {parameter.name, parameter.shape, parameter.group,
             [](int64_t offset, absl::Span<float> values) {
               for (size_t i = 0; i < values.size(); ++i) {
                 values[i] = Number(5, offset + static_cast<int64_t>(i));
               }
               return absl::OkStatus();
             }});
      }
    }
    return ZeroOptimizer::Create(rank.runtime(), *rank.communicator, options,
                                 std::move(units));
  }

  // The same gradients on each rank.
  static void Step(Rank& rank, ZeroOptimizer& optimizer, int step) {
    for (size_t u = 0; u < Units().size(); ++u) {
      std::vector<DeviceBuffer> buffers;
      std::vector<const void*> gradients;
      std::vector<std::vector<float>> values;
      for (const Parameter& parameter : Units()[u]) {
        const int64_t numel = NumelOf(parameter.shape);
        std::vector<float>& gradient = values.emplace_back(numel);
        for (int64_t i = 0; i < numel; ++i) gradient[i] = Number(step, i);
        absl::StatusOr<DeviceBuffer> buffer =
            rank.device->Allocate(numel * int64_t{sizeof(float)});
        ASSERT_TRUE(buffer.ok()) << buffer.status();
        ASSERT_TRUE(rank.stream
                        ->CopyToDevice(buffer->data(), gradient.data(),
                                       numel * int64_t{sizeof(float)})
                        .ok());
        gradients.push_back(buffer->data());
        buffers.push_back(*std::move(buffer));
      }
      const absl::Status status = optimizer.ReduceGradients(
          static_cast<int>(u), gradients, *rank.stream);
      ASSERT_TRUE(status.ok()) << status;
    }
    const absl::StatusOr<StepReport> report = optimizer.Step({});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_FALSE(report->skipped);
  }

  // Adds what this rank has; memory of its device is the host's.
  static void Collect(ZeroOptimizer& optimizer, WholeState& whole) {
    absl::StatusOr<StateLease> lease = optimizer.shards().LeaseState();
    ASSERT_TRUE(lease.ok()) << lease.status();
    for (const StateView& view : lease->views()) {
      const int64_t element = ByteSize(view.type);
      Bytes& bytes = whole[view.name];
      bytes.resize(NumelOf(view.shape) * element);
      if (view.numel == 0) continue;
      ASSERT_EQ(view.box.offset.size(), 1u);
      std::memcpy(&bytes[(view.box.offset[0] + view.offset) * element],
                  view.data, view.numel * element);
    }
  }

  const TempDirectory directory_;
};

TEST_P(ReshardTest, TheNextStepsAreThoseOfTheRunThatWentOn) {
  const std::vector<int> worlds = LongTestStride() == 1
                                      ? std::vector<int>{1, 2, 3, 4, 8}
                                      : std::vector<int>{1, 3};
  for (const int from : worlds) {
    const std::string name = absl::StrCat("c", from);
    std::vector<WholeState> parts(from);
    RankOptions ranks;
    ranks.world = from;
    RunRanks(ranks, [&](Rank& rank) {
      auto optimizer = Create(rank);
      ASSERT_TRUE(optimizer.ok()) << optimizer.status();
      int step = 1;
      for (; step <= kStepsBefore; ++step) Step(rank, **optimizer, step);
      {
        absl::StatusOr<StateLease> lease = (*optimizer)->shards().LeaseState();
        ASSERT_TRUE(lease.ok()) << lease.status();
        CheckpointMeta meta;
        meta.step = kStepsBefore;
        meta.groups = (*optimizer)->StateGroups();
        const auto saved =
            SaveCheckpoint(rank.runtime(), *rank.communicator,
                           directory_.path(), name, *lease, meta, {});
        ASSERT_TRUE(saved.ok()) << saved.status();
      }
      for (; step <= kStepsBefore + kStepsAfter; ++step) {
        Step(rank, **optimizer, step);
      }
      Collect(**optimizer, parts[rank.rank()]);
    });
    const auto joined = [](const std::vector<WholeState>& some) {
      // Elements that a rank has not are zeros.
      WholeState whole;
      for (const WholeState& part : some) {
        for (const auto& [tensor, bytes] : part) {
          Bytes& all = whole[tensor];
          all.resize(bytes.size());
          for (size_t i = 0; i < bytes.size(); ++i) all[i] |= bytes[i];
        }
      }
      return whole;
    };
    const WholeState expected = joined(parts);
    // A parameter without elements has no owner.
    ASSERT_EQ(expected.size(), 3u * 4);
    for (const int to : worlds) {
      SCOPED_TRACE(absl::StrCat(from, " to ", to));
      std::vector<WholeState> restored(to);
      ranks.world = to;
      RunRanks(ranks, [&](Rank& rank) {
        auto optimizer = Create(rank);
        ASSERT_TRUE(optimizer.ok()) << optimizer.status();
        auto checkpoint =
            Checkpoint::Open(absl::StrCat(directory_.path(), "/", name));
        ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
        auto target = (*optimizer)->shards().RestoreState();
        ASSERT_TRUE(target.ok()) << target.status();
        RestoreOptions options;
        options.groups = (*optimizer)->StateGroups();
        const auto meta =
            RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                              *std::move(target), options);
        ASSERT_TRUE(meta.ok()) << meta.status();
        ASSERT_TRUE((*optimizer)->shards().SetStateGroups(meta->groups).ok());
        for (int i = 1; i <= kStepsAfter; ++i) {
          Step(rank, **optimizer, kStepsBefore + i);
        }
        Collect(**optimizer, restored[rank.rank()]);
      });
      EXPECT_TRUE(joined(restored) == expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, ReshardTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const testing::TestParamInfo<DType>& info) {
                           return std::string(Name(info.param));
                         });

}  // namespace
}  // namespace onepass

// State of every type through its life: steps, an export that changes nothing,
// a second one that is equal, a restore into an optimizer that never stepped,
// and further steps with the bits of the uninterrupted run.

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/meta.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "offload/device_adam.h"
#include "tests/rank_threads.h"
#include "tests/temp_directory.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

constexpr StateType kFp32 = StateType::kFloat32;
constexpr StateType kBf16 = StateType::kBFloat16;
constexpr StateType kScaled16 = StateType::kScaledFloat16;
constexpr StateType kScaled8 = StateType::kScaledFloat8E4M3;
constexpr StateType kRemainder = StateType::kInt16Remainder;

struct Combination {
  const char* name;
  std::optional<StateType> master;
  StateType exp_avg;
  StateType exp_avg_sq;
  bool on_device = false;  // step and lr
};

const Combination kCombinations[] = {
    {"fp32_fp32", kFp32, kFp32, kFp32},
    {"fp16_fp16", kFp32, kScaled16, kScaled16},
    {"bf16_bf16", kFp32, kBf16, kBf16},
    {"e4m3_e4m3", kFp32, kScaled8, kScaled8},
    {"fp32_bf16", kFp32, kFp32, kBf16},
    {"bf16_fp32", kFp32, kBf16, kFp32},
    {"e4m3_fp16", kFp32, kScaled8, kScaled16},
    {"fp16_e4m3", kFp32, kScaled16, kScaled8},
    {"fp16_masters_fp32", kScaled16, kFp32, kFp32},
    {"fp16_masters_fp16", kScaled16, kScaled16, kScaled16},
    {"no_masters", std::nullopt, kFp32, kFp32},
    {"remainders_fp32", kRemainder, kFp32, kFp32},
    {"remainders_bf16", kRemainder, kBf16, kBf16},
    {"on_device_fp32", kFp32, kFp32, kFp32, true},
    {"on_device_bf16", kFp32, kBf16, kBf16, true},
};

// Leaves and a tail, a scalar, nothing, and a leaf whose gradients are so small
// that absmax has no reciprocal.
const std::vector<std::vector<int64_t>> kShapes = {
    {2, 4100}, {}, {3, 0}, {64, 64}};
const char* const kNames[] = {"long", "scalar", "nothing", "tiny"};
constexpr size_t kTiny = 3;

int64_t NumelOf(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

AdamOptions Options(int64_t step) {
  AdamOptions options;
  options.lr = 0.01 / static_cast<double>(step);
  options.weight_decay = 0.1;
  return options;
}

// An optimizer on the device, as a trainer has it.
class Trainer {
 public:
  Trainer(const Combination& combination, Rank& rank)
      : combination_(combination), rank_(rank) {
    DeviceAdamOptions options;
    options.master_type = combination.master;
    options.exp_avg_type = combination.exp_avg;
    options.exp_avg_sq_type = combination.exp_avg_sq;
    options.step_and_lr_on_device = combination.on_device;
    options.chunk_numel = kLeafNumel;
    std::vector<DeviceAdamParameter> parameters;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const int64_t numel = NumelOf(kShapes[i]);
      weights_.push_back(Take(rank.device->Allocate(2 * numel)));
      gradients_.push_back(Take(rank.device->Allocate(4 * numel)));
      // Memory of this device is the host's.
      std::mt19937 random(17);
      for (int64_t j = 0; j < numel; ++j) {
        weights_[i].as<uint16_t>()[j] =
            static_cast<uint16_t>(0x3f00 + random() % 256);
      }
      parameters.push_back(
          {numel,
           0,
           weights_[i].data(),
           kNames[i],
           kShapes[i],
           {std::vector<int64_t>(kShapes[i].size()), kShapes[i]}});
    }
    adam_ = std::make_unique<DeviceAdam>(
        Take(DeviceAdam::Create(*rank.device, options, parameters)));
    Expect(adam_->Clear(*rank.stream));
    if (combination.master.has_value()) {
      Expect(adam_->SetMastersFromWeights(*rank.stream));
    }
    Expect(rank.stream->Synchronize());
  }

  DeviceAdam& adam() { return *adam_; }
  int64_t step() const { return step_; }

  void Step() {
    ++step_;
    std::vector<const void*> gradients;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      std::mt19937 random(static_cast<uint32_t>(100 * step_ + i));
      const float scale = i == kTiny ? 1e-39f : 1.0f;
      for (int64_t j = 0; j < NumelOf(kShapes[i]); ++j) {
        gradients_[i].as<float>()[j] =
            scale * (static_cast<float>(random() % 2001) / 1000 - 1);
      }
      gradients.push_back(gradients_[i].data());
    }
    if (combination_.on_device) {
      Expect(adam_->SetLr(*rank_.stream, 0,
                          static_cast<float>(Options(step_).lr)));
      Expect(adam_->CapturableStep(*rank_.stream, gradients, DType::kFloat32,
                                   {Options(step_)}, 0.5f));
    } else {
      Expect(adam_->Step(*rank_.stream, gradients, DType::kFloat32,
                         {Take(ComputeAdamConstants(Options(step_), step_))},
                         0.5f));
    }
    Expect(rank_.stream->Synchronize());
  }

  CheckpointMeta Meta() {
    CheckpointMeta meta;
    meta.step = step_;
    StateGroup group = ToStateGroup(Options(step_ == 0 ? 1 : step_), step_);
    if (combination_.on_device) {
      group.step = Take(adam_->GetStep(*rank_.stream, 0));
      group.lr = Take(adam_->GetLr(*rank_.stream, 0));
    }
    group.parameters.assign(std::begin(kNames), std::end(kNames));
    meta.groups.push_back(group);
    return meta;
  }

  void SetMeta(const CheckpointMeta& meta) {
    step_ = meta.groups[0].step;
    if (!combination_.on_device) return;
    Expect(adam_->SetStep(*rank_.stream, 0, meta.groups[0].step));
    Expect(adam_->SetLr(*rank_.stream, 0, meta.groups[0].lr));
  }

  // All bytes of state and weights, and where they are.
  std::vector<std::string> Bytes() {
    std::vector<std::string> all;
    {
      const StateLease lease = Take(adam_->LeaseState(*rank_.stream));
      for (const StateView& view : lease.views()) {
        std::string& bytes =
            all.emplace_back(absl::StrCat(view.name, " ", Name(view.type)));
        Append(view.data, view.numel * ByteSize(view.type), bytes);
        if (view.scales != nullptr) {
          Append(view.scales, 4 * LeafCount(view.numel), bytes);
        }
      }
    }
    for (size_t i = 0; i < kShapes.size(); ++i) {
      Append(weights_[i].data(), weights_[i].bytes(), all.emplace_back());
    }
    return all;
  }

  std::vector<const void*> Pointers() {
    std::vector<const void*> all;
    const StateLease lease = Take(adam_->LeaseState(*rank_.stream));
    for (const StateView& view : lease.views()) {
      all.push_back(view.data);
      all.push_back(view.scales);
    }
    return all;
  }

 private:
  static void Expect(const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
  }
  template <typename T>
  static T Take(absl::StatusOr<T> value) {
    Expect(value.status());
    return *std::move(value);
  }
  static void Append(const void* data, int64_t bytes, std::string& to) {
    if (bytes > 0) to.append(static_cast<const char*>(data), bytes);
  }

  const Combination combination_;
  Rank& rank_;
  std::vector<DeviceBuffer> weights_;
  std::vector<DeviceBuffer> gradients_;
  std::unique_ptr<DeviceAdam> adam_;
  int64_t step_ = 0;
};

std::string ReadAll(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class StateLifecycleTest : public testing::TestWithParam<Combination> {
 protected:
  void Save(Trainer& trainer, Rank& rank, const std::string& name) {
    const std::vector<std::string> bytes = trainer.Bytes();
    const std::vector<const void*> pointers = trainer.Pointers();
    const int64_t before = rank.device->memory().in_use;
    rank.device->ResetPeaks();
    {
      absl::StatusOr<StateLease> lease =
          trainer.adam().LeaseState(*rank.stream);
      ASSERT_TRUE(lease.ok()) << lease.status();
      SaveOptions options;
      options.chunk_bytes = 4096;
      const auto report =
          SaveCheckpoint(rank.runtime(), *rank.communicator, directory_.path(),
                         name, *lease, trainer.Meta(), options);
      ASSERT_TRUE(report.ok()) << report.status();
    }
    EXPECT_EQ(rank.device->memory().peak, before);
    EXPECT_TRUE(trainer.Bytes() == bytes);
    EXPECT_EQ(trainer.Pointers(), pointers);
  }

  void Restore(Trainer& trainer, Rank& rank, const std::string& name) {
    auto checkpoint = Checkpoint::Open(directory_.path() + "/" + name);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto target = trainer.adam().RestoreState(*rank.stream);
    ASSERT_TRUE(target.ok()) << target.status();
    RestoreOptions options;
    options.groups = trainer.Meta().groups;
    const auto meta =
        RestoreCheckpoint(rank.runtime(), *rank.communicator, *checkpoint,
                          *std::move(target), options);
    ASSERT_TRUE(meta.ok()) << meta.status();
    trainer.SetMeta(*meta);
  }

  const TempDirectory directory_;
};

TEST_P(StateLifecycleTest, GoesOnWithTheSameBits) {
  RankOptions options;
  RunRanks(options, [&](Rank& rank) {
    Trainer trainer(GetParam(), rank);
    // Before the first step there is something to save, too.
    Save(trainer, rank, "zero");
    const std::vector<std::string> at_first = trainer.Bytes();
    for (int i = 0; i < 3; ++i) trainer.Step();
    EXPECT_FALSE(trainer.Bytes() == at_first);
    Save(trainer, rank, "a");
    Save(trainer, rank, "b");
    int files = 0;
    for (const auto& entry : fs::directory_iterator(directory_.path() + "/a")) {
      EXPECT_EQ(ReadAll(entry.path()), ReadAll(fs::path(directory_.path()) /
                                               "b" / entry.path().filename()))
          << entry.path();
      ++files;
    }
    EXPECT_GE(files, 3);

    Trainer fresh(GetParam(), rank);
    Restore(fresh, rank, "a");
    EXPECT_EQ(fresh.step(), 3);
    EXPECT_TRUE(fresh.Bytes() == trainer.Bytes());
    for (int i = 0; i < 3; ++i) {
      trainer.Step();
      fresh.Step();
      EXPECT_TRUE(fresh.Bytes() == trainer.Bytes()) << i;
    }
    // And back to where nothing had been done.
    Restore(fresh, rank, "zero");
    EXPECT_EQ(fresh.step(), 0);
    EXPECT_TRUE(fresh.Bytes() == at_first);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, StateLifecycleTest,
                         testing::ValuesIn(kCombinations),
                         [](const testing::TestParamInfo<Combination>& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace onepass

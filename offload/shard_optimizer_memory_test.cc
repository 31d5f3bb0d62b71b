// What ShardOptimizer takes: memory, as its header says, at creation; nothing
// in a step, and nothing that it does not give back.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "gtest/gtest.h"
#include "offload/shard_optimizer.h"
#include "offload/shard_optimizer_rig.h"
#include "tests/allocation_counter.h"
#include "tests/process_use.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;

constexpr int64_t kNormBytes = sizeof(NormSum);

// --- Memory. ---

struct Memory {
  int64_t pinned, pageable, device;
};

// By the header, where no shard and no piece is rounded up.
Memory Formula(const ShardOptimizerOptions& options, int64_t cpu_numel,
               int64_t device_numel, int64_t largest_shard) {
  const int64_t wire = ByteSize(options.grad_type);
  const int64_t moments =
      ByteSize(options.exp_avg_type) + ByteSize(options.exp_avg_sq_type);
  const bool sums =
      options.micro_batches > 1 ||
      (options.path == StepPath::kSeparate && options.grad_type != kF32);
  const int64_t staging =
      options.weights_type == kF32
          ? 0
          : std::min<int64_t>(options.staging_buffers,
                              cpu_numel / options.piece_numel) *
                options.piece_numel * 2;
  const int64_t transfer = cpu_numel * wire + staging + kNormBytes;
  const int64_t device_wire = options.micro_batches > 1 ? 4 : wire;
  Memory memory;
  memory.pinned = options.pin_memory ? transfer : 0;
  memory.pageable = cpu_numel * (4 + moments + (sums ? 4 : 0)) +
                    (options.pin_memory ? 0 : transfer);
  memory.device = device_numel * (4 + moments + device_wire) +
                  8 * LeafCount(largest_shard) + kNormBytes;
  return memory;
}

class MemoryTest : public testing::Test {
 protected:
  // What the optimizer says, and what the device holds for it.
  void Compare() {
    Rig rig(config_);
    const int64_t device_before = rig.device().memory().in_use;
    ASSERT_TRUE(rig.Create().ok());
    const int64_t held = rig.device().memory().in_use - device_before;
    const auto report = rig.Step(1, AllGradients);
    ASSERT_TRUE(report.ok()) << report.status();
    const Memory expected = Formula(
        config_.options, report->cpu_numel, report->device_numel,
        *std::max_element(config_.numels.begin(), config_.numels.end()));
    EXPECT_EQ(rig.optimizer().pinned_bytes(), expected.pinned);
    EXPECT_EQ(rig.optimizer().pageable_bytes(), expected.pageable);
    EXPECT_EQ(rig.device().pinned_memory().in_use, expected.pinned);
    EXPECT_EQ(held, expected.device);
    all_bytes_ = expected.pinned + expected.pageable + expected.device;
  }

  RigConfig config_;
  int64_t all_bytes_ = 0;
};

TEST_F(MemoryTest, IsWhatTheHeaderSays) {
  config_.numels = {2 * kLeafNumel, 5 * kLeafNumel, kLeafNumel};
  config_.options.piece_numel = kLeafNumel;
  config_.options.sub_group_numel = 3 * kLeafNumel;
  // Some of the cases where others run them all.
  const int64_t stride = LongTestStride() == 1 ? 1 : 5;
  int64_t number = 0;
  for (const DType grad_type : {kBF16, kF32}) {
    for (const DType weights_type : {kBF16, kF32}) {
      for (const DType exp_avg_type : {kBF16, kF32}) {
        for (const int64_t micro_batches : {1, 2}) {
          for (const double ratio : {0.0, 0.6, 1.0}) {
            for (const bool pin_memory : {true, false}) {
              if (number++ % stride != 0) continue;
              SCOPED_TRACE(testing::Message()
                           << Name(grad_type) << ", " << Name(weights_type)
                           << ", " << Name(exp_avg_type) << ", "
                           << micro_batches << " micro-batches, ratio " << ratio
                           << ", pinned " << pin_memory);
              ShardOptimizerOptions& options = config_.options;
              options.grad_type = grad_type;
              options.weights_type = weights_type;
              options.exp_avg_type = exp_avg_type;
              options.micro_batches = micro_batches;
              options.cpu_ratio = ratio;
              options.pin_memory = pin_memory;
              options.path = StepPath::kFused;
              Compare();
              const int64_t fused = all_bytes_;
              options.path = StepPath::kSeparate;
              Compare();
              EXPECT_LE(fused, all_bytes_);
            }
          }
        }
      }
    }
  }
}

TEST_F(MemoryTest, OfOddShardsIsRoundedUp) {
  for (const double ratio : {0.0, kCutRatio, 1.0}) {
    config_.options.cpu_ratio = ratio;
    Rig rig(config_);
    const int64_t before = rig.device().memory().in_use;
    ASSERT_TRUE(rig.Create().ok());
    const int64_t held = rig.device().memory().in_use - before;
    const auto report = rig.Step(1, AllGradients);
    ASSERT_TRUE(report.ok()) << report.status();
    const int64_t shards = static_cast<int64_t>(config_.numels.size());
    const auto bound = [&](int64_t alignment, int64_t numel) {
      return numel + shards * (alignment - 1);
    };
    const Memory least = Formula(config_.options, report->cpu_numel,
                                 report->device_numel, 3 * kLeafNumel + 37);
    const Memory most =
        Formula(config_.options, bound(32, report->cpu_numel),
                bound(256, report->device_numel), 3 * kLeafNumel + 37);
    // Pieces are rounded down, and so are buffers.
    EXPECT_GE(rig.optimizer().pinned_bytes(), 2 * report->cpu_numel);
    EXPECT_LE(rig.optimizer().pinned_bytes(), most.pinned);
    EXPECT_GE(rig.optimizer().pageable_bytes(), least.pageable);
    EXPECT_LE(rig.optimizer().pageable_bytes(), most.pageable);
    EXPECT_GE(held, least.device);
    EXPECT_LE(held, most.device);
  }
}

TEST_F(MemoryTest, RefusedPinningMakesItPageable) {
  for (const int64_t refused : {0, 1, 2}) {  // gradients, staging, norm
    Rig rig(config_);
    rig.device().RefuseCall(HostDeviceCall::kPin, refused,
                            absl::ResourceExhaustedError("locked pages"));
    ASSERT_TRUE(rig.Create().ok());
    Rig pinned(config_);
    ASSERT_TRUE(pinned.Create().ok());
    EXPECT_EQ(rig.device().pinned_memory().in_use,
              rig.optimizer().pinned_bytes());
    EXPECT_EQ(rig.optimizer().pinned_bytes() == 0, refused == 0);
    EXPECT_LT(rig.optimizer().pinned_bytes(),
              pinned.optimizer().pinned_bytes());
    EXPECT_EQ(rig.optimizer().pinned_bytes() + rig.optimizer().pageable_bytes(),
              pinned.optimizer().pinned_bytes() +
                  pinned.optimizer().pageable_bytes());
  }
}

TEST_F(MemoryTest, ADeviceThatIsFullIsAnError) {
  config_.options.cpu_ratio = 0;
  const int64_t state = Sum(config_.numels) * 12;
  const int64_t of_rig = Sum(config_.numels) * 4 +
                         static_cast<int64_t>(config_.numels.size()) * 128;
  config_.device.memory_bytes = of_rig + state / 2;
  Rig rig(config_);
  const int64_t held = rig.device().memory().in_use;
  const absl::Status status = rig.Create();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(rig.device().memory().in_use, held);
}

// --- A steady step. ---

class SteadyStepTest : public testing::Test {
 protected:
  // Of ten steps, after three, those in which `count` grew.
  template <typename Count>
  int64_t StepsThatTake(const RigConfig& config, const Count& count) {
    Rig rig(config);
    EXPECT_TRUE(rig.Create().ok());
    int64_t steps = 0;
    for (int64_t step = 1; step <= 13; ++step) {
      rig.Fill(step);
      const int64_t before = count(rig);
      const absl::Status added = rig.Add();
      const absl::StatusOr<StepReport> report = rig.Finish();
      const int64_t after = count(rig);
      EXPECT_TRUE(added.ok()) << added;
      EXPECT_TRUE(report.ok()) << report.status();
      steps += step > 3 && after > before;
    }
    return steps;
  }

  template <typename Count>
  void ExpectNone(const Count& count) {
    // Half of the cases, with all pairs, where others run them all.
    const bool whole = LongTestStride() == 1;
    // What others take comes seldom: the system's balancing of memory, queues
    // of the device that are longer than ever all the same. A slow host may
    // meet longer ones for many steps.
    const int64_t most = UnderSanitizer() || UnderEmulator() ? 9 : 2;
    for (const StepPath path : kStepPaths) {
      for (const int64_t micro_batches : {1, 3}) {
        for (const DType weights_type : {kBF16, kF32}) {
          if (!whole && ((path == StepPath::kFused) ^ (micro_batches == 1) ^
                         (weights_type == kBF16)) == 0) {
            continue;
          }
          RigConfig config;
          config.numels.push_back((whole ? 50 : 5) * kLeafNumel);
          // The host is ahead of it, so that the queues of the device are as
          // long as they get in the first steps already.
          config.device.link_bytes_per_s = 100e9;
          config.device.link_latency_s = 1e-4;
          config.options.cpu_ratio = kCutRatio;
          config.options.max_norm = 1;
          config.options.path = path;
          config.options.micro_batches = micro_batches;
          config.options.weights_type = weights_type;
          SCOPED_TRACE(testing::Message()
                       << Name(path) << ", " << micro_batches
                       << " micro-batches, " << Name(weights_type));
          // What a step itself takes is taken in each run; what a busy machine
          // adds is not.
          int64_t steps = StepsThatTake(config, count);
          for (int i = 0; i < 3 && steps > most; ++i) {
            steps = std::min(steps, StepsThatTake(config, count));
          }
          EXPECT_LE(steps, most);
        }
      }
    }
  }
};

TEST_F(SteadyStepTest, AllocatesNothing) {
  ExpectNone([](Rig&) { return AllocationCount(); });
}

TEST_F(SteadyStepTest, TakesNoDeviceMemory) {
  ExpectNone([](Rig& rig) {
    return rig.device().memory().allocations +
           rig.device().pinned_memory().allocations;
  });
}

TEST_F(SteadyStepTest, TakesNoPageFault) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "faults of a sanitizer or emulator count here";
  }
  ExpectNone([](Rig&) {
    rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0) std::abort();
    return int64_t{usage.ru_minflt} + usage.ru_majflt;
  });
}

// --- Created and destroyed many times. ---

TEST(ShardOptimizerLifetimeTest, LeavesNothingBehind) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "memory of a sanitizer or emulator counts here";
  }
  RigConfig config;
  config.options.cpu_ratio = kCutRatio;
  // State of two megabytes.
  config.numels.push_back(40 * kLeafNumel);
  Rig rig(config);
  rig.Fill(1, AllGradients);
  const auto run = [&rig](int times) {
    for (int i = 0; i < times; ++i) {
      ASSERT_TRUE(rig.Create().ok());
      ASSERT_TRUE(rig.Add().ok());
      // Every other one with gradients under way.
      if (i % 2 == 0) {
        ASSERT_TRUE(rig.Finish().ok());
      }
      rig.Destroy();
    }
  };
  run(20);
  const int64_t resident = ResidentBytes();
  const int64_t descriptors = Entries(kDescriptors);
  const int64_t threads = Entries(kThreads);
  const MemoryUse device = rig.device().memory();
  run(100);
  EXPECT_LE(ResidentBytes() - resident, int64_t{2} << 20);
  EXPECT_EQ(Entries(kDescriptors), descriptors);
  // One that was joined may be listed for a moment.
  for (int i = 0; i < 1000 && Entries(kThreads) > threads; ++i) usleep(1000);
  EXPECT_LE(Entries(kThreads), threads);
  EXPECT_EQ(rig.device().memory().in_use, device.in_use);
  EXPECT_EQ(rig.device().memory().peak, device.peak);
  EXPECT_EQ(rig.device().pinned_memory().in_use, 0);
}

}  // namespace
}  // namespace onepass

// What tests of ShardOptimizer share: gradients, an optimizer on a host device
// that is fed with them, and a plain reference for its bits.
//
//   const RigConfig config;
//   Rig rig(config);
//   ASSERT_TRUE(rig.Create().ok());
//   Reference reference(config);
//   ASSERT_TRUE(rig.Step(1).ok());
//   reference.Step(1);
//   ExpectSame(rig.Take(), reference.Take());

#ifndef ONEPASS_OFFLOAD_SHARD_OPTIMIZER_RIG_H_
#define ONEPASS_OFFLOAD_SHARD_OPTIMIZER_RIG_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "offload/loss_scaler.h"
#include "offload/shard_optimizer.h"

namespace onepass {

using Bytes = std::vector<char>;

inline constexpr StateKind kStateKinds[] = {
    StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

inline constexpr StepPath kStepPaths[] = {StepPath::kFused,
                                          StepPath::kSeparate};
// "fused", "separate".
const char* Name(StepPath path);

// With the shards of RigConfig: 0 to 3 on the CPU, 4 cut after a leaf, 5 and 6
// on the device.
inline constexpr double kCutRatio = 0.6;

// The best kernel of this machine.
const Kernel& BestKernel();

LossScaleOptions LossScale(LossScaleOptions::Mode mode, double initial_scale);

int64_t Sum(const std::vector<int64_t>& numels);

// Calls until now in which the host waits.
int64_t HostWaits(const HostDevice& device);

// Options of two groups, AdamW and L2; lr depends on the step.
AdamOptions GroupOptions(int group, int64_t step);

struct RigConfig {
  RigConfig();

  const Kernel* kernel;                   // of the optimizer
  const Kernel* device_kernel = nullptr;  // null: the same
  int threads = 2;
  // Of the shards. Number i is of group i % groups.size().
  std::vector<int64_t> numels = {1,    3 * kLeafNumel + 37, 0, 31,
                                 5000, 2 * kLeafNumel,      33};
  ShardOptimizerOptions options;  // two groups; pieces of 1000
  HostDeviceOptions device;
};

// --- Gradients ---

struct TestGradient {
  enum class Kind {
    kMissing,  // never added
    kNull,     // added as null
    kValues,
  };

  Kind kind = Kind::kMissing;
  std::vector<float> values;
};

using GradientSource = std::function<TestGradient(
    int shard, int64_t numel, int64_t step, int64_t micro_batch)>;

// Random numbers for all.
TestGradient AllGradients(int shard, int64_t numel, int64_t step,
                          int64_t micro_batch);
// For most: in each step some shards get none, and some null.
TestGradient MostGradients(int shard, int64_t numel, int64_t step,
                           int64_t micro_batch);

// --- Results ---

// All that a step changes.
struct Snapshot {
  // Of shard i and kind k at 3 * i + k.
  std::vector<std::vector<float>> states;
  std::vector<Bytes> weights;
};

// Bit by bit.
bool Same(const Snapshot& a, const Snapshot& b);
// Names what differs.
void ExpectSame(const Snapshot& a, const Snapshot& b);

// --- An optimizer on a host device ---

class Rig {
 public:
  explicit Rig(const RigConfig& config);
  ~Rig();

  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  absl::Status Create();
  void Destroy() { optimizer_.reset(); }
  ShardOptimizer& optimizer() { return *optimizer_; }

  HostDevice& device() { return *device_; }
  ThreadPool& pool() { return *pool_; }
  Stream& stream() { return *stream_; }
  // As they are given to Create().
  std::vector<Shard> MakeShards() const;
  static std::string ShardName(int shard);
  // Where the gradient of a micro-batch lies on the device.
  void* gradient(int shard, int64_t micro_batch) const {
    return gradients_[micro_batch][shard].data();
  }

  // Puts the gradients of a step onto the device; the optimizer must be done
  // with those before.
  void Fill(int64_t step, const GradientSource& source = MostGradients);
  // Adds what Fill() put there, and allocates nothing.
  absl::Status Add();
  // Step() with the norm of LocalNorm().
  absl::StatusOr<StepReport> Finish(StepInput input = {});
  // All of these.
  absl::StatusOr<StepReport> Step(int64_t step,
                                  const GradientSource& source = MostGradients,
                                  const StepInput& input = {});

  // Fails the test where state cannot be read, or something beside the weights
  // was written.
  Snapshot Take();
  Bytes Weights(int shard);

 private:
  // Bytes around the weights of a shard, for others to be found.
  static constexpr int64_t kGuardBytes = 64;

  const RigConfig config_;
  const std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<HostDevice> device_;
  std::vector<std::vector<float>> initial_;
  std::vector<DeviceBuffer> weights_;
  std::vector<std::vector<DeviceBuffer>> gradients_;
  std::vector<std::vector<TestGradient::Kind>> kinds_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ShardOptimizer> optimizer_;
};

// --- The reference ---

// The same by whole arrays, one operation after the other, on the scalar kernel
// and one thread.
class Reference {
 public:
  explicit Reference(const RigConfig& config);

  void Step(int64_t step, const GradientSource& source = MostGradients);
  void SetGroupOptions(int group, const AdamOptions& options);

  Snapshot Take() const;
  // Of the last step.
  const NormSum& norm() const { return norm_; }
  bool skipped() const { return skipped_; }
  float factor() const { return factor_; }
  // Of the next step.
  double loss_scale() const { return scaler_.scale(); }

 private:
  struct State {
    std::vector<float> master;
    Bytes exp_avg;
    Bytes exp_avg_sq;
  };

  std::vector<float> SumGradients(int shard, int64_t step,
                                  const GradientSource& source);

  const RigConfig config_;
  const std::unique_ptr<ThreadPool> pool_;
  CpuAdam adam_;
  LossScaler scaler_;
  std::vector<State> states_;
  int64_t steps_ = 0;
  NormSum norm_;
  bool skipped_ = false;
  float factor_ = 0;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_SHARD_OPTIMIZER_RIG_H_

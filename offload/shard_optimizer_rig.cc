#include "offload/shard_optimizer_rig.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dispatch/operations.h"
#include "dispatch/runtime.h"
#include "gtest/gtest.h"
#include "offload/gradient_clip.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using Kind = TestGradient::Kind;

constexpr char kGuard = 0x5a;

void Expect(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

template <typename T>
T Value(absl::StatusOr<T> value) {
  Expect(value.status());
  return *std::move(value);
}

// Random numbers of [-1, 1), a pure function of the seed (splitmix64).
std::vector<float> RandomValues(uint64_t seed, int64_t numel) {
  std::vector<float> values(numel);
  uint64_t state = seed * 0x2545f4914f6cdd1d;
  for (float& value : values) {
    state += 0x9e3779b97f4a7c15;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    value = static_cast<float>(z >> 40) * 0x1p-23f - 1;
  }
  return values;
}

std::vector<float> InitialValues(int shard, int64_t numel) {
  return RandomValues(1000 + shard, numel);
}

// `numel` elements as another type, of which one is fp32.
Bytes Convert(const void* from, DType from_type, DType to_type, int64_t numel) {
  Bytes to(numel * ByteSize(to_type));
  if (from_type == to_type) {
    if (numel > 0) std::memcpy(to.data(), from, to.size());
  } else {
    Expect(Cast(ScalarKernel(), *MakePool(1),
                {numel, from, to.data(), from_type, to_type}));
  }
  return to;
}

std::vector<float> ToFloats(const Bytes& from, DType type) {
  const int64_t numel = static_cast<int64_t>(from.size()) / ByteSize(type);
  const Bytes bytes = Convert(from.data(), type, DType::kFloat32, numel);
  std::vector<float> floats(numel);
  if (numel > 0) std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() ||
          std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

CpuAdam MakeReferenceAdam(const RigConfig& config, ThreadPool& pool) {
  return Value(CpuAdam::Create(ScalarKernel(), pool, config.options.groups));
}

}  // namespace

const char* Name(StepPath path) {
  return path == StepPath::kFused ? "fused" : "separate";
}

LossScaleOptions LossScale(LossScaleOptions::Mode mode, double initial_scale) {
  LossScaleOptions options;
  options.mode = mode;
  options.initial_scale = initial_scale;
  return options;
}

int64_t Sum(const std::vector<int64_t>& numels) {
  return std::accumulate(numels.begin(), numels.end(), int64_t{0});
}

int64_t HostWaits(const HostDevice& device) {
  return device.Calls(HostDeviceCall::kEventWait) +
         device.Calls(HostDeviceCall::kSynchronize);
}

const Kernel& BestKernel() {
  const std::vector<const Kernel*> kernels = RunnableKernels();
  // Where none of those wanted runs, all tests are skipped.
  return kernels.empty() ? ScalarKernel() : *kernels.front();
}

AdamOptions GroupOptions(int group, int64_t step) {
  AdamOptions options;
  options.weight_decay = 0.1;
  if (group == 1) {
    options.mode = AdamOptions::Mode::kL2;
    options.beta1 = 0.8;
    options.beta2 = 0.99;
    options.weight_decay = 0.02;
  }
  options.lr = 0.01 / static_cast<double>(step + group);
  return options;
}

RigConfig::RigConfig() : kernel(&BestKernel()) {
  options.groups = {GroupOptions(0, 1), GroupOptions(1, 1)};
  options.piece_numel = 1000;
}

TestGradient AllGradients(int shard, int64_t numel, int64_t step,
                          int64_t micro_batch) {
  return {Kind::kValues,
          RandomValues(100 * step + 10 * micro_batch + shard, numel)};
}

TestGradient MostGradients(int shard, int64_t numel, int64_t step,
                           int64_t micro_batch) {
  if ((shard + step) % 5 == 0) return {Kind::kMissing, {}};
  if ((shard + step + 2 * micro_batch) % 4 == 1) return {Kind::kNull, {}};
  return AllGradients(shard, numel, step, micro_batch);
}

bool Same(const Snapshot& a, const Snapshot& b) {
  return a.weights == b.weights &&
         std::equal(a.states.begin(), a.states.end(), b.states.begin(),
                    b.states.end(), SameBits);
}

void ExpectSame(const Snapshot& a, const Snapshot& b) {
  ASSERT_EQ(a.weights.size(), b.weights.size());
  ASSERT_EQ(a.states.size(), b.states.size());
  for (size_t i = 0; i < a.states.size(); ++i) {
    const std::vector<float>& x = a.states[i];
    const std::vector<float>& y = b.states[i];
    if (SameBits(x, y)) continue;
    size_t first = 0;
    while (first < std::min(x.size(), y.size()) &&
           std::memcmp(&x[first], &y[first], sizeof(float)) == 0) {
      ++first;
    }
    ADD_FAILURE() << Name(kStateKinds[i % 3]) << " of shard " << i / 3
                  << " differs from element " << first << " of " << x.size()
                  << " on";
  }
  for (size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_TRUE(a.weights[i] == b.weights[i]) << "weights of shard " << i;
  }
}

// --- Rig ---

Rig::Rig(const RigConfig& config)
    : config_(config), pool_(MakePool(config.threads)) {
  const Kernel& device_kernel = config_.device_kernel != nullptr
                                    ? *config_.device_kernel
                                    : *config_.kernel;
  device_ = Value(HostDevice::Create(device_kernel, config_.device));
  stream_ = Value(device_->CreateStream("test"));
  gradients_.resize(config_.options.micro_batches);
  kinds_.resize(config_.options.micro_batches);
  for (size_t i = 0; i < config_.numels.size(); ++i) {
    const int64_t numel = config_.numels[i];
    initial_.push_back(InitialValues(static_cast<int>(i), numel));
    const int64_t bytes =
        2 * kGuardBytes + numel * ByteSize(config_.options.weights_type);
    weights_.push_back(Value(device_->Allocate(bytes)));
    std::memset(weights_.back().data(), kGuard, bytes);
    for (std::vector<DeviceBuffer>& of_micro_batch : gradients_) {
      of_micro_batch.push_back(Value(
          device_->Allocate(numel * ByteSize(config_.options.grad_type))));
    }
  }
}

Rig::~Rig() {
  optimizer_.reset();
  stream_->Synchronize().IgnoreError();
}

std::string Rig::ShardName(int shard) {
  // Longer than strings that allocate nothing.
  return absl::StrCat("transformer.layer.", shard, ".weight");
}

std::vector<Shard> Rig::MakeShards() const {
  std::vector<Shard> shards;
  for (size_t i = 0; i < config_.numels.size(); ++i) {
    const int64_t numel = config_.numels[i];
    Shard& shard = shards.emplace_back();
    shard.name = ShardName(static_cast<int>(i));
    shard.shape = {numel};
    shard.box = {{0}, {numel}};
    shard.group = static_cast<int>(i % config_.options.groups.size());
    if (numel == 0) continue;
    shard.values = ValuesOf(initial_[i]);
    shard.weights = weights_[i].as<char>() + kGuardBytes;
  }
  return shards;
}

absl::Status Rig::Create() {
  absl::StatusOr<std::unique_ptr<ShardOptimizer>> optimizer =
      ShardOptimizer::Create({*config_.kernel, *device_, *pool_},
                             config_.options, MakeShards());
  if (!optimizer.ok()) return optimizer.status();
  optimizer_ = *std::move(optimizer);
  return absl::OkStatus();
}

void Rig::Fill(int64_t step, const GradientSource& source) {
  const DType type = config_.options.grad_type;
  for (size_t micro = 0; micro < gradients_.size(); ++micro) {
    kinds_[micro].clear();
    for (size_t i = 0; i < config_.numels.size(); ++i) {
      const TestGradient gradient =
          source(static_cast<int>(i), config_.numels[i], step, micro);
      kinds_[micro].push_back(gradient.kind);
      if (gradient.values.empty()) continue;
      const Bytes bytes = Convert(gradient.values.data(), DType::kFloat32, type,
                                  config_.numels[i]);
      std::memcpy(gradients_[micro][i].data(), bytes.data(), bytes.size());
    }
  }
}

absl::Status Rig::Add() {
  for (size_t micro = 0; micro < kinds_.size(); ++micro) {
    const size_t shards = kinds_[micro].size();
    for (size_t i = 0; i < shards; ++i) {
      // In either order.
      const size_t shard = micro % 2 == 0 ? i : shards - 1 - i;
      const Kind kind = kinds_[micro][shard];
      if (kind == Kind::kMissing) continue;
      const absl::StatusOr<Event*> copied = optimizer_->AddGradient(
          static_cast<int>(shard),
          kind == Kind::kNull ? nullptr : gradients_[micro][shard].data(),
          *stream_);
      if (!copied.ok()) return copied.status();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Rig::Finish(StepInput input) {
  const absl::StatusOr<NormSum> norm = optimizer_->LocalNorm();
  if (!norm.ok()) return norm.status();
  input.norm = *norm;
  return optimizer_->Step(input);
}

absl::StatusOr<StepReport> Rig::Step(int64_t step, const GradientSource& source,
                                     const StepInput& input) {
  Fill(step, source);
  if (absl::Status status = Add(); !status.ok()) return status;
  return Finish(input);
}

Bytes Rig::Weights(int shard) {
  const char* const begin = weights_[shard].as<const char>();
  const char* const end = begin + weights_[shard].bytes();
  const auto guard = [](char byte) { return byte == kGuard; };
  EXPECT_TRUE(std::all_of(begin, begin + kGuardBytes, guard) &&
              std::all_of(end - kGuardBytes, end, guard))
      << "memory around the weights of shard " << shard << " was written";
  return Bytes(begin + kGuardBytes, end - kGuardBytes);
}

Snapshot Rig::Take() {
  Snapshot snapshot;
  for (size_t i = 0; i < config_.numels.size(); ++i) {
    const int shard = static_cast<int>(i);
    for (const StateKind kind : kStateKinds) {
      std::vector<float>& state =
          snapshot.states.emplace_back(config_.numels[i]);
      Expect(
          optimizer_->GetState(ShardName(shard), kind, absl::MakeSpan(state)));
    }
    snapshot.weights.push_back(Weights(shard));
  }
  return snapshot;
}

// --- Reference ---

Reference::Reference(const RigConfig& config)
    : config_(config),
      pool_(MakePool(1)),
      adam_(MakeReferenceAdam(config, *pool_)),
      scaler_(Value(LossScaler::Create(config.options.loss_scale))) {
  for (size_t i = 0; i < config_.numels.size(); ++i) {
    const int64_t numel = config_.numels[i];
    states_.push_back(
        {InitialValues(static_cast<int>(i), numel),
         Bytes(numel * ByteSize(config_.options.exp_avg_type)),
         Bytes(numel * ByteSize(config_.options.exp_avg_sq_type))});
  }
}

void Reference::SetGroupOptions(int group, const AdamOptions& options) {
  Expect(adam_.SetOptions(group, options));
}

// The gradient of a shard in fp32; adds its norm.
std::vector<float> Reference::SumGradients(int shard, int64_t step,
                                           const GradientSource& source) {
  const int64_t numel = config_.numels[shard];
  const DType type = config_.options.grad_type;
  const int64_t micro_batches = config_.options.micro_batches;
  std::vector<float> sum(numel, 0.0f);
  bool given = false;
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    const TestGradient gradient = source(shard, numel, step, micro);
    if (gradient.kind != Kind::kValues) continue;
    const Bytes bytes =
        Convert(gradient.values.data(), DType::kFloat32, type, numel);
    if (micro_batches == 1) {
      Expect(SquaredNorm(ScalarKernel(), *pool_, numel, bytes.data(), type,
                         norm_));
      return ToFloats(bytes, type);
    }
    AccumulateArgs args;
    args.numel = numel;
    args.sum = given ? sum.data() : nullptr;
    args.term = bytes.data();
    args.out = sum.data();
    args.term_type = type;
    Expect(Accumulate(ScalarKernel(), *pool_, args));
    given = true;
  }
  Expect(SquaredNorm(ScalarKernel(), *pool_, numel, sum.data(), DType::kFloat32,
                     norm_));
  return sum;
}

void Reference::Step(int64_t step, const GradientSource& source) {
  const Kernel& kernel = ScalarKernel();
  const ShardOptimizerOptions& options = config_.options;
  norm_ = NormSum();
  std::vector<std::vector<float>> gradients;
  for (size_t i = 0; i < states_.size(); ++i) {
    gradients.push_back(SumGradients(static_cast<int>(i), step, source));
  }
  skipped_ = !norm_.finite();
  factor_ = skipped_ ? 0
                     : Value(ClipFactor(GradientNorm(norm_), options.max_norm,
                                        scaler_.scale()));
  scaler_.Update(skipped_);
  if (skipped_) return;
  ++steps_;
  for (size_t i = 0; i < states_.size(); ++i) {
    State& state = states_[i];
    std::vector<float>& gradient = gradients[i];
    AdamSpan span;
    span.numel = config_.numels[i];
    span.group = static_cast<int>(i % options.groups.size());
    span.param = state.master.data();
    span.grad = gradient.data();
    span.exp_avg = state.exp_avg.data();
    span.exp_avg_sq = state.exp_avg_sq.data();
    span.exp_avg_type = options.exp_avg_type;
    span.exp_avg_sq_type = options.exp_avg_sq_type;
    Expect(Scale(kernel, *pool_,
                 {span.numel, gradient.data(), gradient.data(), factor_}));
    Expect(adam_.Step(span, steps_, 1));
  }
}

Snapshot Reference::Take() const {
  Snapshot snapshot;
  for (const State& state : states_) {
    snapshot.states.push_back(state.master);
    snapshot.states.push_back(
        ToFloats(state.exp_avg, config_.options.exp_avg_type));
    snapshot.states.push_back(
        ToFloats(state.exp_avg_sq, config_.options.exp_avg_sq_type));
    snapshot.weights.push_back(Convert(
        state.master.data(), DType::kFloat32, config_.options.weights_type,
        static_cast<int64_t>(state.master.size())));
  }
  return snapshot;
}

}  // namespace onepass

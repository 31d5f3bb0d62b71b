// DeviceAdam in all the types that it stores state as, against the same steps
// written down with the checked operations of the CPU; what it leases, and what
// of it is restored.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "offload/device_adam.h"
#include "tests/allocation_counter.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using Bytes = std::vector<char>;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr StateType kFp32 = StateType::kFloat32;
constexpr StateType kBf16 = StateType::kBFloat16;
constexpr StateType kScaled16 = StateType::kScaledFloat16;
constexpr StateType kScaled8 = StateType::kScaledFloat8E4M3;
constexpr StateType kRemainder = StateType::kInt16Remainder;
constexpr float kScale = 0.37f;
constexpr StateKind kArrays[] = {StateKind::kMaster, StateKind::kExpAvg,
                                 StateKind::kExpAvgSq};

void Expect(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

template <typename T>
T Value(absl::StatusOr<T> value) {
  Expect(value.status());
  return *std::move(value);
}

// What a combination of types is, and what is to be of its parameters.
struct Combination {
  std::string name;
  DeviceAdamOptions options;
};

Combination Of(const std::string& name, DType weights,
               std::optional<StateType> master, StateType exp_avg,
               StateType exp_avg_sq, bool on_device = false) {
  Combination combination = {name, {}};
  combination.options.weights_type = weights;
  combination.options.master_type = master;
  combination.options.exp_avg_type = exp_avg;
  combination.options.exp_avg_sq_type = exp_avg_sq;
  combination.options.step_and_lr_on_device = on_device;
  // The first parameter is three chunks.
  combination.options.chunk_numel = kLeafNumel + 1;
  return combination;
}

// Those of Transformer Engine's FusedAdam, and some that it has not.
std::vector<Combination> Combinations() {
  return {
      Of("fp32", kBF16, kFp32, kFp32, kFp32),
      Of("fp16", kBF16, kFp32, kScaled16, kScaled16),
      Of("bf16", kF16, kFp32, kBf16, kBf16),
      Of("e4m3", kF16, kFp32, kScaled8, kScaled8),
      Of("fp32_bf16", kF32, kFp32, kFp32, kBf16),
      Of("bf16_fp32", kBF16, kFp32, kBf16, kFp32),
      Of("e4m3_fp16", kF32, kFp32, kScaled8, kScaled16),
      Of("fp16_e4m3", kBF16, kFp32, kScaled16, kScaled8),
      Of("fp16_masters_fp32", kF16, kScaled16, kFp32, kFp32),
      Of("fp16_masters_fp16", kBF16, kScaled16, kScaled16, kScaled16),
      Of("fp16_masters_fp32_weights", kF32, kScaled16, kBf16, kScaled8),
      Of("no_masters_bf16", kBF16, std::nullopt, kFp32, kFp32),
      Of("no_masters_fp16", kF16, std::nullopt, kBf16, kScaled8),
      Of("no_masters_fp32", kF32, std::nullopt, kFp32, kFp32),
      Of("no_masters_fp32_e4m3", kF32, std::nullopt, kScaled8, kFp32),
      Of("remainders_fp32", kBF16, kRemainder, kFp32, kFp32),
      Of("remainders_bf16", kBF16, kRemainder, kBf16, kBf16),
      Of("remainders_fp16", kBF16, kRemainder, kScaled16, kFp32),
      Of("on_device_fp32", kBF16, kFp32, kFp32, kFp32, true),
      Of("on_device_bf16", kF32, kFp32, kBf16, kBf16, true),
  };
}

// Parameters: three chunks and a tail; nothing; a scalar; one leaf, of
// gradients so small that no scale is for their moments; one without gradients.
const std::vector<std::vector<int64_t>> kShapes = {
    {2, 4097}, {3, 0}, {}, {64, 64}, {31}};
const std::vector<int64_t> kNumels = {2 * 4097, 0, 1, kLeafNumel, 31};
const std::vector<int> kGroups = {0, 1, 1, 0, 1};
constexpr size_t kTiny = 3;
constexpr size_t kWithoutGradient = 4;
const std::vector<std::string> kNames = {"long", "nothing", "scalar", "tiny",
                                         "zero"};

std::vector<AdamOptions> Groups() {
  AdamOptions decoupled;
  decoupled.lr = 0.01;
  decoupled.weight_decay = 0.1;
  AdamOptions l2;
  l2.lr = 0.003;
  l2.beta1 = 0.8;
  l2.mode = AdamOptions::Mode::kL2;
  return {decoupled, l2};
}

std::vector<AdamConstants> Constants(int64_t t) {
  std::vector<AdamConstants> constants;
  for (const AdamOptions& options : Groups()) {
    constants.push_back(Value(ComputeAdamConstants(options, t)));
  }
  return constants;
}

std::vector<float> Normal(std::mt19937& random, int64_t numel, float scale) {
  std::vector<float> values(numel);
  if (scale == 0) return values;
  std::normal_distribution<float> normal(0, scale);
  for (float& value : values) value = normal(random);
  return values;
}

Bytes RawBytes(const void* data, int64_t bytes) {
  Bytes copy(bytes);
  if (bytes > 0) std::memcpy(copy.data(), data, bytes);
  return copy;
}

// Gradients in bf16, of a step.
std::vector<Bytes> Gradients(int64_t step);

// The operations on arrays of their own.
class Cpu {
 public:
  Bytes Narrow(const std::vector<float>& values, DType type) {
    if (type == kF32) return RawBytes(values.data(), 4 * values.size());
    Bytes bytes(values.size() * ByteSize(type));
    Expect(Cast(kernel_, *pool_,
                {Size(values), values.data(), bytes.data(), kF32, type}));
    return bytes;
  }
  std::vector<float> Widen(const Bytes& bytes, DType type) {
    std::vector<float> values(bytes.size() / ByteSize(type));
    if (type == kF32) {
      if (!values.empty()) {
        std::memcpy(values.data(), bytes.data(), bytes.size());
      }
      return values;
    }
    Expect(Cast(kernel_, *pool_,
                {Size(values), bytes.data(), values.data(), type, kF32}));
    return values;
  }

  const Kernel& kernel() const { return kernel_; }
  ThreadPool& pool() { return *pool_; }
  static int64_t Size(const std::vector<float>& values) {
    return static_cast<int64_t>(values.size());
  }

 private:
  const Kernel& kernel_ = ScalarKernel();
  const std::unique_ptr<ThreadPool> pool_ = MakePool(1);
};

std::vector<Bytes> Gradients(int64_t step) {
  std::mt19937 random(static_cast<uint32_t>(100 + step));
  Cpu cpu;
  std::vector<Bytes> gradients;
  for (size_t i = 0; i < kNumels.size(); ++i) {
    const float scale = i == kTiny ? 1e-36f : i == kWithoutGradient ? 0 : 1;
    gradients.push_back(cpu.Narrow(Normal(random, kNumels[i], scale), kBF16));
  }
  return gradients;
}

std::vector<Bytes> InitialWeights(DType type) {
  std::mt19937 random(9);
  Cpu cpu;
  std::vector<Bytes> weights;
  for (size_t i = 0; i < kNumels.size(); ++i) {
    // The last are zeros, and stay so.
    const float scale = i == kWithoutGradient ? 0 : 0.7f;
    weights.push_back(cpu.Narrow(Normal(random, kNumels[i], scale), type));
  }
  return weights;
}

// All state and the weights of one parameter.
struct Parameter {
  struct Array {
    Bytes data;
    Bytes scales;
  };
  Array arrays[3];
  Bytes weights;
};

void ExpectSame(const std::vector<Parameter>& actual,
                const std::vector<Parameter>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    for (const int array : {0, 1, 2}) {
      SCOPED_TRACE(absl::StrCat(kNames[i], ", ", Name(kArrays[array])));
      EXPECT_EQ(actual[i].arrays[array].data, expected[i].arrays[array].data);
      EXPECT_EQ(actual[i].arrays[array].scales,
                expected[i].arrays[array].scales);
    }
    EXPECT_EQ(actual[i].weights, expected[i].weights) << kNames[i];
  }
}

// The steps, one operation after the other over whole parameters.
class Reference {
 public:
  explicit Reference(const DeviceAdamOptions& options) : options_(options) {
    for (Bytes& weights : InitialWeights(options.weights_type)) {
      Parameter& parameter = parameters_.emplace_back();
      parameter.weights = std::move(weights);
      const std::vector<float> values =
          cpu_.Widen(parameter.weights, options.weights_type);
      const std::vector<float> zeros(values.size());
      Store(parameter.arrays[1], options.exp_avg_type, zeros);
      Store(parameter.arrays[2], options.exp_avg_sq_type, zeros);
      if (options.master_type == kRemainder) {
        parameter.arrays[0].data.resize(2 * values.size());
      } else {
        StoreMaster(parameter, values);
      }
    }
  }

  void Step(const std::vector<Bytes>& gradients,
            const std::vector<AdamConstants>& constants) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& parameter = parameters_[i];
      std::vector<float> master = LoadMaster(parameter);
      std::vector<float> exp_avg =
          Load(parameter.arrays[1], options_.exp_avg_type);
      std::vector<float> exp_avg_sq =
          Load(parameter.arrays[2], options_.exp_avg_sq_type);
      AdamStepArgs args;
      args.numel = Cpu::Size(master);
      args.param = master.data();
      args.grad = gradients[i].data();
      args.grad_type = kBF16;
      args.exp_avg = exp_avg.data();
      args.exp_avg_sq = exp_avg_sq.data();
      args.grad_scale = kScale;
      args.constants = constants[kGroups[i]];
      Expect(AdamStep(cpu_.kernel(), cpu_.pool(), args));
      Store(parameter.arrays[1], options_.exp_avg_type, exp_avg);
      Store(parameter.arrays[2], options_.exp_avg_sq_type, exp_avg_sq);
      StoreMaster(parameter, master);
    }
  }

  const std::vector<Parameter>& parameters() const { return parameters_; }

  // That no value is NaN or infinite.
  bool Finite() {
    for (const Parameter& parameter : parameters_) {
      for (const std::vector<float>& values :
           {LoadMaster(parameter),
            Load(parameter.arrays[1], options_.exp_avg_type),
            Load(parameter.arrays[2], options_.exp_avg_sq_type)}) {
        for (const float value : values) {
          if (!std::isfinite(value)) return false;
        }
      }
    }
    return true;
  }

 private:
  std::vector<float> Load(const Parameter::Array& array, StateType type) {
    if (!IsScaled(type)) {
      return cpu_.Widen(array.data, type == kFp32 ? kF32 : kBF16);
    }
    std::vector<float> values(array.data.size() / ByteSize(type));
    Expect(Dequantize(
        cpu_.kernel(), cpu_.pool(),
        {Cpu::Size(values), array.data.data(),
         reinterpret_cast<const float*>(array.scales.data()), values.data(),
         type == kScaled16 ? kF16 : DType::kFloat8E4M3}));
    return values;
  }

  void Store(Parameter::Array& array, StateType type,
             const std::vector<float>& values) {
    if (!IsScaled(type)) {
      array.data = cpu_.Narrow(values, type == kFp32 ? kF32 : kBF16);
      return;
    }
    array.data.resize(values.size() * ByteSize(type));
    array.scales.resize(4 * LeafCount(Cpu::Size(values)));
    Expect(Quantize(cpu_.kernel(), cpu_.pool(),
                    {Cpu::Size(values), values.data(), array.data.data(),
                     reinterpret_cast<float*>(array.scales.data()),
                     type == kScaled16 ? kF16 : DType::kFloat8E4M3}));
  }

  std::vector<float> LoadMaster(const Parameter& parameter) {
    if (!options_.master_type.has_value()) {
      return cpu_.Widen(parameter.weights, options_.weights_type);
    }
    if (*options_.master_type != kRemainder) {
      return Load(parameter.arrays[0], *options_.master_type);
    }
    std::vector<float> values(parameter.weights.size() / 2);
    Expect(JoinRemainder(
        cpu_.kernel(), cpu_.pool(),
        {Cpu::Size(values),
         reinterpret_cast<const uint16_t*>(parameter.weights.data()),
         reinterpret_cast<const int16_t*>(parameter.arrays[0].data.data()),
         values.data()}));
    return values;
  }

  // And what follows from it.
  void StoreMaster(Parameter& parameter, const std::vector<float>& values) {
    if (!options_.master_type.has_value()) {
      parameter.weights = cpu_.Narrow(values, options_.weights_type);
    } else if (*options_.master_type == kRemainder) {
      Expect(SplitRemainder(
          cpu_.kernel(), cpu_.pool(),
          {Cpu::Size(values), values.data(),
           reinterpret_cast<uint16_t*>(parameter.weights.data()),
           reinterpret_cast<int16_t*>(parameter.arrays[0].data.data())}));
    } else {
      Store(parameter.arrays[0], *options_.master_type, values);
      parameter.weights =
          cpu_.Narrow(Load(parameter.arrays[0], *options_.master_type),
                      options_.weights_type);
    }
  }

  const DeviceAdamOptions options_;
  Cpu cpu_;
  std::vector<Parameter> parameters_;
};

// Weights and gradients on a device, and an optimizer over them.
class OnDevice {
 public:
  OnDevice(HostDevice& device, const DeviceAdamOptions& options)
      : device_(device), options_(options) {
    stream_ = Value(device.CreateStream("test"));
    std::vector<DeviceAdamParameter> parameters;
    const std::vector<Bytes> initial = InitialWeights(options.weights_type);
    for (size_t i = 0; i < kNumels.size(); ++i) {
      weights_.push_back(Value(device.Allocate(initial[i].size())));
      Write(weights_[i].data(), initial[i]);
      gradients_.push_back(
          Value(device.Allocate(kNumels[i] * ByteSize(kBF16))));
      pointers_.push_back(gradients_.back().data());
      parameters.push_back(
          {kNumels[i], kGroups[i], weights_[i].data(), kNames[i], kShapes[i],
           Box{std::vector<int64_t>(kShapes[i].size()), kShapes[i]}});
    }
    const int64_t before = device.memory().in_use;
    adam_ = Value(DeviceAdam::Create(device, options, std::move(parameters)));
    bytes_ = device.memory().in_use - before;
  }

  // As the reference begins.
  void Initialize() {
    Expect(adam_->Clear(*stream_));
    Expect(adam_->SetMastersFromWeights(*stream_));
    SetStep(0);
  }
  // Where it is on the device.
  void SetStep(int64_t step) {
    if (!options_.step_and_lr_on_device) return;
    for (const int group : {0, 1}) {
      Expect(adam_->SetStep(*stream_, group, step));
      Expect(adam_->SetLr(*stream_, group,
                          static_cast<float>(Groups()[group].lr)));
    }
  }

  void SetGradients(const std::vector<Bytes>& gradients) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      Write(gradients_[i].data(), gradients[i]);
    }
  }
  // `constants` are of no meaning where the device has its own.
  absl::Status Step(const std::vector<AdamConstants>& constants,
                    const std::vector<AdamOptions>& groups) {
    if (options_.step_and_lr_on_device) {
      return adam_->CapturableStep(*stream_, pointers_, kBF16, groups, kScale);
    }
    return adam_->Step(*stream_, pointers_, kBF16, constants, kScale);
  }
  absl::Status Step(int64_t t) {
    std::vector<AdamOptions> groups = Groups();
    for (AdamOptions& options : groups) options.lr = -1;  // of no meaning
    return Step(Constants(t), groups);
  }

  std::vector<Parameter> Read() {
    Expect(stream_->Synchronize());
    std::vector<Parameter> parameters;
    for (size_t i = 0; i < kNumels.size(); ++i) {
      Parameter& parameter = parameters.emplace_back();
      const int index = static_cast<int>(i);
      for (const int array : {0, 1, 2}) {
        const StateKind kind = kArrays[array];
        if (adam_->state(index, kind) == nullptr) continue;
        parameter.arrays[array].data =
            RawBytes(adam_->state(index, kind),
                     kNumels[i] * ByteSize(adam_->state_type(kind)));
        if (!IsScaled(adam_->state_type(kind))) continue;
        parameter.arrays[array].scales =
            RawBytes(adam_->scales(index, kind), 4 * LeafCount(kNumels[i]));
      }
      parameter.weights = RawBytes(weights_[i].data(), weights_[i].bytes());
    }
    return parameters;
  }

  // All that is not of numbers that anybody set: a pattern.
  void Scribble() {
    for (size_t i = 0; i < kNumels.size(); ++i) {
      Write(weights_[i].data(), Bytes(weights_[i].bytes(), 0x5e));
      for (const StateKind kind : kArrays) {
        const int index = static_cast<int>(i);
        void* const state = adam_->state(index, kind);
        if (state == nullptr) continue;
        const int64_t bytes = ByteSize(adam_->state_type(kind)) * kNumels[i];
        Write(state, Bytes(bytes, 0x5e));
      }
    }
  }

  void Write(void* to, const Bytes& bytes) {
    Expect(stream_->CopyToDevice(to, bytes.data(), bytes.size()));
    Expect(stream_->Synchronize());
  }

  DeviceAdam& adam() { return *adam_; }
  Stream& stream() { return *stream_; }
  HostDevice& device() { return device_; }
  int64_t bytes() const { return bytes_; }  // that it took
  std::vector<const void*>& pointers() { return pointers_; }

 private:
  HostDevice& device_;
  const DeviceAdamOptions options_;
  std::vector<DeviceBuffer> weights_;
  std::vector<DeviceBuffer> gradients_;
  std::vector<const void*> pointers_;
  std::optional<DeviceAdam> adam_;
  int64_t bytes_ = 0;
  std::unique_ptr<Stream> stream_;  // the first to go
};

// What the header of DeviceAdam promises, for chunks of a leaf.
int64_t PromisedBytes(const DeviceAdamOptions& options) {
  int64_t numel = 0;
  int64_t leaves = 0;
  for (const int64_t one : kNumels) {
    numel += (one + 255) / 256 * 256;
    leaves += (one + 4095) / 4096;
  }
  int64_t bytes = options.step_and_lr_on_device ? 2 * 64 : 0;
  for (const StateType moment :
       {options.exp_avg_type, options.exp_avg_sq_type}) {
    switch (moment) {
      case kFp32:
        bytes += 4 * numel;
        break;
      case kBf16:
        bytes += 2 * numel;
        break;
      case kScaled16:
        bytes += 2 * numel + 4 * leaves + 4 * 4096;
        break;
      default:
        bytes += numel + 4 * leaves + 4 * 4096;
    }
  }
  if (!options.master_type.has_value()) {
    return bytes + (options.weights_type == kF32 ? 0 : 4 * 4096);
  }
  if (*options.master_type == kFp32) return bytes + 4 * numel;
  return bytes + 2 * numel + 4 * 4096 +
         (*options.master_type == kScaled16 ? 4 * leaves : 0);
}

// Copies the bytes of all state, by name.
void CopyState(const StateLease& from, StateRestore& to) {
  ASSERT_EQ(from.views().size(), to.targets().size());
  to.BeginWriting();
  for (size_t i = 0; i < from.views().size(); ++i) {
    const StateView& view = from.views()[i];
    const StateTarget& target = to.targets()[i];
    ASSERT_EQ(view.name, target.name);
    ASSERT_EQ(view.numel, target.numel);
    ASSERT_EQ(view.type, target.type);
    if (view.numel == 0) continue;
    std::memcpy(target.out_data, view.data, view.numel * ByteSize(view.type));
    if (!IsScaled(view.type)) continue;
    std::memcpy(target.out_scales, view.scales, 4 * LeafCount(view.numel));
  }
}

class DeviceAdamTypesTest : public testing::TestWithParam<const Kernel*> {
 protected:
  std::unique_ptr<HostDevice> device_ =
      Value(HostDevice::Create(*GetParam(), {}));
};

INSTANTIATE_TEST_SUITE_P(Kernels, DeviceAdamTypesTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

TEST_P(DeviceAdamTypesTest, LifeOfEachCombination) {
  for (const Combination& combination : Combinations()) {
    SCOPED_TRACE(combination.name);
    const DeviceAdamOptions& options = combination.options;
    Reference reference(options);
    OnDevice running(*device_, options);
    EXPECT_EQ(running.bytes(), PromisedBytes(options));
    running.Initialize();
    ExpectSame(running.Read(), reference.parameters());
    int64_t t = 0;
    const auto step = [&] {
      ++t;
      const std::vector<Bytes> gradients = Gradients(t);
      reference.Step(gradients, Constants(t));
      running.SetGradients(gradients);
      Expect(running.Step(t));
      ExpectSame(running.Read(), reference.parameters());
    };
    for (int i = 0; i < 3; ++i) step();
    EXPECT_TRUE(reference.Finite());

    // Into one that never stepped, whose weights and state are others.
    OnDevice restored(*device_, options);
    restored.Scribble();
    {
      const MemoryUse before = device_->memory();
      const StateLease lease =
          Value(running.adam().LeaseState(running.stream()));
      StateRestore restore =
          Value(restored.adam().RestoreState(restored.stream()));
      CopyState(lease, restore);
      Expect(restore.Commit());
      EXPECT_EQ(device_->memory().in_use, before.in_use);
    }
    restored.SetStep(t);
    ExpectSame(running.Read(), reference.parameters());
    ExpectSame(restored.Read(), reference.parameters());
    for (int i = 0; i < 2; ++i) {
      step();
      restored.SetGradients(Gradients(t));
      Expect(restored.Step(t));
      ExpectSame(restored.Read(), reference.parameters());
    }
  }
}

TEST_P(DeviceAdamTypesTest, AStepAllocatesNothing) {
  for (const Combination& combination : Combinations()) {
    SCOPED_TRACE(combination.name);
    OnDevice on_device(*device_, combination.options);
    on_device.Initialize();
    on_device.SetGradients(Gradients(1));
    const std::vector<AdamConstants> constants = Constants(1);
    const std::vector<AdamOptions> groups = Groups();
    Expect(on_device.Step(constants, groups));
    Expect(on_device.stream().Synchronize());
    const MemoryUse before = device_->memory();
    const int64_t allocations = AllocationCount();
    const absl::Status status = on_device.Step(constants, groups);
    const absl::Status done = on_device.stream().Synchronize();
    EXPECT_EQ(AllocationCount(), allocations);
    EXPECT_TRUE(status.ok() && done.ok()) << status << done;
    EXPECT_EQ(device_->memory().allocations, before.allocations);
  }
}

TEST_P(DeviceAdamTypesTest, ChunksOfAnyLengthGiveTheSameBits) {
  // Of three combinations one: all steps are of chunks above.
  const int stride = LongTestStride() == 1 ? 1 : 3;
  int number = 0;
  for (Combination combination : Combinations()) {
    if (number++ % stride != 0) continue;
    SCOPED_TRACE(combination.name);
    std::vector<Parameter> expected;
    for (const int64_t chunk_numel :
         {int64_t{1}, 2 * kLeafNumel + 7, int64_t{1} << 40}) {
      combination.options.chunk_numel = chunk_numel;
      OnDevice on_device(*device_, combination.options);
      on_device.Initialize();
      for (const int64_t t : {1, 2}) {
        on_device.SetGradients(Gradients(t));
        Expect(on_device.Step(t));
      }
      if (expected.empty()) expected = on_device.Read();
      ExpectSame(on_device.Read(), expected);
    }
  }
}

TEST_P(DeviceAdamTypesTest, MastersOfWeightsForgetWhatWeightsHaveNot) {
  for (const Combination& combination : Combinations()) {
    SCOPED_TRACE(combination.name);
    OnDevice on_device(*device_, combination.options);
    on_device.Initialize();
    on_device.SetGradients(Gradients(1));
    Expect(on_device.Step(1));
    const std::vector<Parameter> before = on_device.Read();
    Expect(on_device.adam().SetMastersFromWeights(on_device.stream()));
    const std::vector<Parameter> after = on_device.Read();
    const std::optional<StateType> master = combination.options.master_type;
    const DType weights_type = combination.options.weights_type;
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_EQ(after[i].arrays[1].data, before[i].arrays[1].data);
      EXPECT_EQ(after[i].arrays[2].data, before[i].arrays[2].data);
      if (master == kScaled16) continue;  // weights may change, too
      EXPECT_EQ(after[i].weights, before[i].weights);
      if (master == kFp32) {
        Cpu cpu;
        EXPECT_EQ(after[i].arrays[0].data,
                  cpu.Narrow(cpu.Widen(after[i].weights, weights_type), kF32));
      } else if (master == kRemainder) {
        EXPECT_EQ(after[i].arrays[0].data, Bytes(2 * kNumels[i]));
        if (i == 0) {
          EXPECT_NE(before[i].arrays[0].data, after[i].arrays[0].data);
        }
      }
    }
  }
}

class DeviceAdamLifeTest : public testing::Test {
 protected:
  static void ExpectError(const absl::Status& status, absl::StatusCode code,
                          const std::string& message) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.message().find(message), absl::string_view::npos)
        << status << ", expected " << message;
  }
  static void ExpectInvalid(const absl::Status& status,
                            const std::string& message) {
    ExpectError(status, absl::StatusCode::kInvalidArgument, message);
  }
  static void ExpectFailed(const absl::Status& status,
                           const std::string& message) {
    ExpectError(status, absl::StatusCode::kFailedPrecondition, message);
  }

  absl::Status Create(const DeviceAdamOptions& options,
                      std::vector<DeviceAdamParameter> parameters = {}) {
    return DeviceAdam::Create(*device_, options, std::move(parameters))
        .status();
  }

  std::unique_ptr<HostDevice> device_ =
      Value(HostDevice::Create(ScalarKernel(), {}));
};

TEST_F(DeviceAdamLifeTest, IllegalCombinationsAreRefusedByName) {
  const auto refused = [&](const Combination& combination) {
    ExpectInvalid(Create(combination.options), combination.name);
  };
  refused(
      Of("exp_avg_type is fp16, expected fp32, bf16, scaled fp16 or scaled "
         "e4m3",
         kBF16, kFp32, StateType::kFloat16, kFp32));
  refused(Of("exp_avg_sq_type is int16 remainder, expected", kBF16, kFp32,
             kFp32, kRemainder));
  refused(Of("weights_type is e4m3", DType::kFloat8E4M3, kFp32, kFp32, kFp32));
  refused(
      Of("weights_type is e4m3", DType::kFloat8E4M3, kScaled16, kFp32, kFp32));
  refused(Of("weights_type is e4m3", DType::kFloat8E4M3, std::nullopt, kFp32,
             kFp32));
  for (const StateType type : {kBf16, StateType::kFloat16, kScaled8}) {
    refused(Of(absl::StrCat("master_type is ", Name(type),
                            ", expected fp32, scaled fp16, int16 remainder or "
                            "none"),
               kBF16, type, kFp32, kFp32));
  }
  for (const DType type : {kF16, kF32}) {
    refused(Of(absl::StrCat("master_type is int16 remainder, which needs bf16 "
                            "weights: weights_type is ",
                            Name(type)),
               type, kRemainder, kFp32, kFp32));
  }
  refused(
      Of("step_and_lr_on_device needs fp32 masters: master_type is scaled "
         "fp16",
         kBF16, kScaled16, kFp32, kFp32, true));
  refused(Of("step_and_lr_on_device needs fp32 masters: master_type is none",
             kBF16, std::nullopt, kFp32, kFp32, true));
  refused(
      Of("step_and_lr_on_device needs fp32 masters: master_type is int16 "
         "remainder",
         kBF16, kRemainder, kFp32, kFp32, true));
  const std::pair<StateType, StateType> moments[] = {{kFp32, kBf16},
                                                     {kBf16, kFp32},
                                                     {kScaled16, kScaled16},
                                                     {kScaled8, kScaled8}};
  for (const auto& [exp_avg, exp_avg_sq] : moments) {
    refused(Of(
        absl::StrCat("step_and_lr_on_device needs moments that are both "
                     "fp32 or both bf16: exp_avg_type is ",
                     Name(exp_avg), ", exp_avg_sq_type is ", Name(exp_avg_sq)),
        kBF16, kFp32, exp_avg, exp_avg_sq, true));
  }
  DeviceAdamOptions options;
  options.chunk_numel = 0;
  ExpectInvalid(Create(options), "chunk_numel is 0, expected at least 1");
  for (const Combination& combination : Combinations()) {
    Expect(Create(combination.options));
  }
}

TEST_F(DeviceAdamLifeTest, WritesNoCopiesWhereWeightsAreCast) {
  Kernel kernel = ScalarKernel();
  kernel.copy_types = {kF16};
  device_ = Value(HostDevice::Create(kernel, {}));
  ExpectInvalid(Create(Of("", kBF16, kFp32, kFp32, kFp32).options),
                "weights_type is bf16");
  ExpectInvalid(Create(Of("", kBF16, std::nullopt, kFp32, kFp32).options),
                "weights_type is bf16");
  Expect(Create(Of("", kBF16, kScaled16, kFp32, kFp32).options));
  Expect(Create(Of("", kBF16, kRemainder, kFp32, kFp32).options));
  device_.reset();  // before its kernel
}

TEST_F(DeviceAdamLifeTest, NamesAndBoxesThatMakeNoSense) {
  char weights[16];
  const DeviceAdamParameter good = {12, 0, weights, "w", {3, 4}, {{0}, {12}}};
  const auto with = [&](const Box& box, int64_t numel) {
    DeviceAdamParameter parameter = good;
    parameter.box = box;
    parameter.numel = numel;
    return parameter;
  };
  Expect(Create({}, {good}));
  ExpectInvalid(Create({}, {good, good}),
                "parameter 1, \"w\": another has this name");
  ExpectInvalid(Create({}, {with({{1}, {12}}, 12)}),
                "parameter 0, \"w\": box has [1, 1 + 12) in dimension 0 of 12");
  ExpectInvalid(Create({}, {with({{0}, {11}}, 12)}),
                "parameter 0, \"w\": box has 11 elements, numel is 12");
  // Leaves that are none of the tensor: only without scales.
  Expect(Create({}, {with({{0, 1}, {3, 3}}, 9)}));
  const std::pair<Combination, std::string> scaled[] = {
      {Of("", kBF16, kFp32, kScaled16, kFp32), "exp_avg cannot be scaled fp16"},
      {Of("", kBF16, kFp32, kFp32, kScaled8),
       "exp_avg_sq cannot be scaled e4m3"},
      {Of("", kBF16, kScaled16, kFp32, kFp32),
       "master_param cannot be scaled fp16"}};
  for (const auto& [combination, problem] : scaled) {
    for (const Box& box : {Box{{0, 1}, {3, 3}}, Box{{3}, {9}}}) {
      ExpectInvalid(Create(combination.options, {with(box, 9)}),
                    "state.w." + problem);
    }
    Expect(Create(combination.options, {good}));
    Expect(Create(combination.options, {with({{0, 0}, {3, 4}}, 12)}));
    Expect(Create(combination.options, {with({{12}, {0}}, 0)}));
  }
}

std::string Describe(const StateView& view) {
  return absl::StrCat(view.name, " ", Name(view.type), " of ", view.numel);
}

TEST_F(DeviceAdamLifeTest, LeasesAllStateInItsPlaceAndOrder) {
  char weights[4 * 12];
  const auto views = [&](std::optional<StateType> master, StateType exp_avg,
                         StateType exp_avg_sq) {
    DeviceAdam adam = Value(DeviceAdam::Create(
        *device_, Of("", kBF16, master, exp_avg, exp_avg_sq).options,
        {{12, 0, weights, "w", {4108}, {{kLeafNumel}, {12}}},
         {0, 0, nullptr, "v", {2, 0}, {{0, 0}, {2, 0}}}}));
    const auto stream = Value(device_->CreateStream());
    Expect(adam.Clear(*stream));
    const StateLease lease = Value(adam.LeaseState(*stream));
    std::string names;
    for (const StateView& view : lease.views()) {
      absl::StrAppend(&names, Describe(view), "\n");
      const bool first = view.name.substr(0, 8) == "state.w.";
      EXPECT_EQ(view.shape, first ? std::vector<int64_t>({4108})
                                  : std::vector<int64_t>({2, 0}));
      EXPECT_EQ(view.box.offset, first ? std::vector<int64_t>({kLeafNumel})
                                       : std::vector<int64_t>({0, 0}));
      EXPECT_EQ(view.box.numel(), view.numel);
      EXPECT_EQ(view.offset, 0);
      EXPECT_TRUE(view.on_device);
      if (!first) continue;
      StateKind found = StateKind::kParam;
      for (const StateKind kind : kArrays) {
        if (view.name == std::string("state.w.") + Name(kind)) found = kind;
      }
      EXPECT_NE(view.data, nullptr);
      EXPECT_EQ(view.data, adam.state(0, found));
      EXPECT_EQ(view.scales, adam.scales(0, found));
      EXPECT_EQ(view.scales != nullptr, IsScaled(view.type));
    }
    EXPECT_EQ(adam.state(0, StateKind::kParam), weights);
    return names;
  };
  EXPECT_EQ(views(kFp32, kBf16, kScaled8),
            "state.w.master_param fp32 of 12\n"
            "state.w.exp_avg bf16 of 12\n"
            "state.w.exp_avg_sq scaled e4m3 of 12\n"
            "state.v.master_param fp32 of 0\n"
            "state.v.exp_avg bf16 of 0\n"
            "state.v.exp_avg_sq scaled e4m3 of 0\n");
  EXPECT_EQ(views(kRemainder, kFp32, kFp32),
            "state.w.param bf16 of 12\n"
            "state.w.master_param int16 remainder of 12\n"
            "state.w.exp_avg fp32 of 12\n"
            "state.w.exp_avg_sq fp32 of 12\n"
            "state.v.param bf16 of 0\n"
            "state.v.master_param int16 remainder of 0\n"
            "state.v.exp_avg fp32 of 0\n"
            "state.v.exp_avg_sq fp32 of 0\n");
  EXPECT_EQ(views(std::nullopt, kScaled16, kFp32),
            "state.w.param bf16 of 12\n"
            "state.w.exp_avg scaled fp16 of 12\n"
            "state.w.exp_avg_sq fp32 of 12\n"
            "state.v.param bf16 of 0\n"
            "state.v.exp_avg scaled fp16 of 0\n"
            "state.v.exp_avg_sq fp32 of 0\n");
}

TEST_F(DeviceAdamLifeTest, NothingChangesWhatIsLeased) {
  OnDevice on_device(*device_, Of("", kBF16, kFp32, kScaled8, kFp32).options);
  on_device.Initialize();
  DeviceAdam& adam = on_device.adam();
  Stream& stream = on_device.stream();
  on_device.SetGradients(Gradients(1));
  {
    StateLease first = Value(adam.LeaseState(stream));
    const StateLease second = Value(adam.LeaseState(stream));
    EXPECT_TRUE(adam.leased());
    ExpectFailed(on_device.Step(1), "state is leased, leases: 2");
    ExpectFailed(adam.Clear(stream), "state is leased");
    ExpectFailed(adam.SetMastersFromWeights(stream), "state is leased");
    ExpectFailed(adam.RestoreState(stream).status(), "state is leased");
  }
  EXPECT_FALSE(adam.leased());
  {
    const StateRestore restore = Value(adam.RestoreState(stream));
    ExpectFailed(on_device.Step(1), "state is leased, leases: 1");
    ExpectFailed(adam.LeaseState(stream).status(), "state is being restored");
  }
  // It was not written to.
  Expect(on_device.Step(1));
  Expect(adam.status());
}

TEST_F(DeviceAdamLifeTest, HalfARestoreMakesItUnusable) {
  OnDevice on_device(*device_, Of("", kBF16, kFp32, kScaled8, kFp32).options);
  on_device.Initialize();
  DeviceAdam& adam = on_device.adam();
  Stream& stream = on_device.stream();
  Value(adam.RestoreState(stream)).BeginWriting();
  EXPECT_TRUE(absl::IsAborted(adam.status())) << adam.status();
  const std::string message =
      "the optimizer is unusable: a restore ended before all state was there";
  for (const absl::Status& status :
       {on_device.Step(1), adam.Clear(stream),
        adam.SetMastersFromWeights(stream), adam.LeaseState(stream).status(),
        adam.RestoreState(stream).status()}) {
    ExpectError(status, absl::StatusCode::kAborted, message);
  }
}

TEST_F(DeviceAdamLifeTest, StateThatIsNotFiniteIsRefusedByName) {
  OnDevice on_device(*device_, Of("", kBF16, kFp32, kFp32, kScaled16).options);
  on_device.Initialize();
  DeviceAdam& adam = on_device.adam();
  std::vector<Bytes> gradients = Gradients(1);
  const uint16_t infinity = 0x7f80;
  std::memcpy(gradients[0].data() + 2 * 5000, &infinity, 2);
  on_device.SetGradients(gradients);
  Expect(on_device.Step(1));
  ExpectFailed(
      adam.LeaseState(on_device.stream()).status(),
      "state.long.exp_avg_sq is not finite: leaf 1 of 4096 elements has the "
      "scale inf");
  EXPECT_FALSE(adam.leased());
  // Nor is it taken.
  {
    StateRestore restore = Value(adam.RestoreState(on_device.stream()));
    restore.BeginWriting();
    ExpectFailed(restore.Commit(), "state.long.exp_avg_sq is not finite");
  }
  ExpectFailed(on_device.Step(1),
               "the optimizer is unusable: state.long.exp_avg_sq");
}

TEST_F(DeviceAdamLifeTest, StateWithoutNamesIsNotLeased) {
  char weights[4];
  DeviceAdam adam = Value(DeviceAdam::Create(*device_, {}, {{1, 0, weights}}));
  const auto stream = Value(device_->CreateStream());
  ExpectFailed(adam.LeaseState(*stream).status(),
               "parameter 0 has no name for its state");
  ExpectFailed(adam.RestoreState(*stream).status(),
               "parameter 0 has no name for its state");
  EXPECT_FALSE(adam.leased());
}

TEST_F(DeviceAdamLifeTest, ARefusedStepInChunksChangesNothing) {
  OnDevice on_device(*device_,
                     Of("", kBF16, kScaled16, kScaled8, kScaled8).options);
  on_device.Initialize();
  on_device.SetGradients(Gradients(1));
  const std::vector<Parameter> before = on_device.Read();
  const int64_t runs = device_->Calls(HostDeviceCall::kRun);
  const void* const last = std::exchange(on_device.pointers().back(), nullptr);
  ExpectInvalid(on_device.Step(1), "grad is null");
  EXPECT_EQ(device_->Calls(HostDeviceCall::kRun), runs);
  ExpectSame(on_device.Read(), before);
  on_device.pointers().back() = last;
  Expect(on_device.Step(1));
  EXPECT_EQ(device_->Calls(HostDeviceCall::kRun), runs + 2);
}

TEST_F(DeviceAdamLifeTest, HalfAStepMakesItUnusable) {
  const absl::Status error = absl::UnavailableError("injected");
  const DeviceAdamOptions options =
      Of("", kBF16, kScaled16, kScaled8, kScaled8).options;
  for (const int64_t skip : {0, 1}) {
    OnDevice on_device(*device_, options);
    on_device.Initialize();
    device_->RefuseCall(HostDeviceCall::kRun, skip, error);
    EXPECT_EQ(on_device.Step(1), error);
    EXPECT_EQ(on_device.adam().status(), skip == 0 ? absl::OkStatus() : error);
    if (skip == 0) {
      Expect(on_device.Step(1));
    } else {
      ExpectError(on_device.Step(1), absl::StatusCode::kUnavailable,
                  "the optimizer is unusable: injected");
    }
  }
}

TEST_F(DeviceAdamLifeTest, StepAndLearningRateAreTheGroups) {
  OnDevice on_device(*device_,
                     Of("", kBF16, kFp32, kFp32, kFp32, true).options);
  on_device.Initialize();
  DeviceAdam& adam = on_device.adam();
  Stream& stream = on_device.stream();
  on_device.SetGradients(Gradients(1));
  Expect(adam.SetStep(stream, 1, 10));
  for (int i = 0; i < 3; ++i) Expect(on_device.Step(1));
  EXPECT_EQ(Value(adam.GetStep(stream, 0)), 3);
  EXPECT_EQ(Value(adam.GetStep(stream, 1)), 13);
  EXPECT_EQ(*adam.device_step(1), 13);
  EXPECT_EQ(Value(adam.GetLr(stream, 0)), 0.01f);
  *adam.device_lr(1) = 0.5f;  // as a scheduler on the device does
  EXPECT_EQ(Value(adam.GetLr(stream, 1)), 0.5f);

  ExpectInvalid(adam.SetStep(stream, 2, 0), "group is 2, expected 0 to 1");
  ExpectInvalid(adam.GetStep(stream, -1).status(), "group is -1");
  ExpectInvalid(adam.SetStep(stream, 0, -1), "step is -1");
  ExpectInvalid(adam.SetLr(stream, 0, -1), "lr is -1");
  ExpectInvalid(adam.SetLr(stream, 0, std::nanf("")), "lr is nan");
  ExpectFailed(adam.Step(stream, on_device.pointers(), kBF16, Constants(1), 1),
               "CapturableStep() takes this step");
  std::vector<AdamOptions> groups = Groups();
  ExpectInvalid(
      adam.CapturableStep(stream, on_device.pointers(), kBF16, {groups[0]}, 1),
      "parameter 2 is of group 1, and there are options of 1");
  groups[1].beta1 = 1;
  ExpectInvalid(
      adam.CapturableStep(stream, on_device.pointers(), kBF16, groups, 1),
      "group 1: beta1 is 1");
  EXPECT_EQ(Value(adam.GetStep(stream, 0)), 3);

  OnDevice other(*device_, {});
  EXPECT_EQ(other.adam().device_step(0), nullptr);
  EXPECT_EQ(other.adam().device_lr(0), nullptr);
  ExpectFailed(other.adam().GetLr(stream, 0).status(),
               "step_and_lr_on_device is off");
  ExpectFailed(
      other.adam().CapturableStep(stream, other.pointers(), kBF16, Groups(), 1),
      "Step() takes this step");
}

}  // namespace
}  // namespace onepass

#include "offload/device_adam.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "tests/allocation_counter.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<char>;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;
constexpr float kScale = 0.37f;

constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kExpAvg,
                                StateKind::kExpAvgSq};

const std::vector<int64_t> kNumels = {5000, 0, 1, kLeafNumel, 31};
const std::vector<int> kGroups = {0, 1, 1, 0, 1};

std::vector<AdamOptions> Options() {
  AdamOptions decoupled;
  decoupled.lr = 0.01;
  decoupled.weight_decay = 0.1;
  AdamOptions l2;
  l2.lr = 0.003;
  l2.beta1 = 0.8;
  l2.weight_decay = 0.02;
  l2.mode = AdamOptions::Mode::kL2;
  return {decoupled, l2};
}

std::unique_ptr<HostDevice> MakeDevice(const Kernel& kernel,
                                       int64_t memory_bytes = 0) {
  HostDeviceOptions options;
  options.memory_bytes = memory_bytes;
  absl::StatusOr<std::unique_ptr<HostDevice>> device =
      HostDevice::Create(kernel, options);
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

StateType ToStateType(DType type) {
  return type == kF32 ? StateType::kFloat32 : StateType::kBFloat16;
}
DType ToDType(StateType type) {
  return type == StateType::kFloat32 ? kF32 : kBF16;
}

// Normal numbers in a type.
Bytes Random(std::mt19937& random, int64_t numel, DType type) {
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  Bytes bytes(numel * ByteSize(type));
  if (numel == 0) return bytes;
  if (type == kF32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else {
    const absl::Status status =
        Cast(ScalarKernel(), *MakePool(1),
             {numel, values.data(), bytes.data(), kF32, type});
    EXPECT_TRUE(status.ok()) << status;
  }
  return bytes;
}

// Weights and gradients on a device, and an optimizer over them.
class OnDevice {
 public:
  OnDevice(HostDevice& device, const DeviceAdamOptions& options,
           DType grad_type)
      : grad_type_(grad_type) {
    stream_ = Value(device.CreateStream("test"));
    std::vector<DeviceAdamParameter> parameters;
    for (size_t i = 0; i < kNumels.size(); ++i) {
      weights_.push_back(
          Value(device.Allocate(kNumels[i] * ByteSize(options.weights_type))));
      gradients_.push_back(
          Value(device.Allocate(kNumels[i] * ByteSize(grad_type))));
      pointers_.push_back(gradients_.back().data());
      parameters.push_back({kNumels[i], kGroups[i], weights_.back().data()});
    }
    before_ = device.memory();
    adam_ = Value(DeviceAdam::Create(device, options, std::move(parameters)));
    Expect(adam_->Clear(*stream_));
  }

  DeviceAdam& adam() { return *adam_; }
  Stream& stream() { return *stream_; }
  const MemoryUse& before() const { return before_; }
  std::vector<const void*>& pointers() { return pointers_; }

  absl::Status Step(const std::vector<AdamConstants>& constants) {
    return adam_->Step(*stream_, pointers_, grad_type_, constants, kScale);
  }

  void Write(void* to, const Bytes& bytes) {
    Expect(stream_->CopyToDevice(to, bytes.data(), bytes.size()));
    Expect(stream_->Synchronize());
  }
  void SetGradient(int i, const Bytes& bytes) {
    Write(gradients_[i].data(), bytes);
  }
  Bytes State(int i, StateKind kind) {
    return Read(adam_->state(i, kind),
                kNumels[i] * ByteSize(adam_->state_type(kind)));
  }
  Bytes Weights(int i) { return Read(weights_[i].data(), weights_[i].bytes()); }

 private:
  static void Expect(const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
  }
  template <typename T>
  static T Value(absl::StatusOr<T> value) {
    Expect(value.status());
    return *std::move(value);
  }
  Bytes Read(const void* from, int64_t bytes) {
    Bytes read(bytes);
    Expect(stream_->CopyToHost(read.data(), from, bytes));
    Expect(stream_->Synchronize());
    return read;
  }

  const DType grad_type_;
  std::vector<DeviceBuffer> weights_;
  std::vector<DeviceBuffer> gradients_;
  std::vector<const void*> pointers_;
  MemoryUse before_;
  std::optional<DeviceAdam> adam_;
  std::unique_ptr<Stream> stream_;
};

std::vector<AdamConstants> Constants(int64_t t) {
  std::vector<AdamConstants> constants;
  for (const AdamOptions& options : Options()) {
    absl::StatusOr<AdamConstants> one = ComputeAdamConstants(options, t);
    EXPECT_TRUE(one.ok()) << one.status();
    constants.push_back(*one);
  }
  return constants;
}

class DeviceAdamTest : public testing::TestWithParam<const Kernel*> {
 protected:
  const Kernel& kernel() const { return *GetParam(); }

  // Three steps on the device and, by CpuAdam on the scalar kernel, on the
  // host.
  void Compare(const DeviceAdamOptions& options, DType grad_type);

  const std::unique_ptr<HostDevice> device_ = MakeDevice(*GetParam());
};

INSTANTIATE_TEST_SUITE_P(Kernels, DeviceAdamTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

void DeviceAdamTest::Compare(const DeviceAdamOptions& options,
                             DType grad_type) {
  OnDevice device(*device_, options, grad_type);
  const auto pool = MakePool(1);
  absl::StatusOr<CpuAdam> cpu =
      CpuAdam::Create(ScalarKernel(), *pool, Options());
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  std::mt19937 random(7);
  struct Host {
    Bytes master, exp_avg, exp_avg_sq, copy;
  };
  std::vector<Host> hosts;
  for (size_t i = 0; i < kNumels.size(); ++i) {
    Host& host = hosts.emplace_back();
    host.master = Random(random, kNumels[i], kF32);
    host.exp_avg.resize(kNumels[i] * ByteSize(options.exp_avg_type));
    host.exp_avg_sq.resize(kNumels[i] * ByteSize(options.exp_avg_sq_type));
    host.copy.resize(kNumels[i] * ByteSize(options.weights_type));
    const int index = static_cast<int>(i);
    device.Write(device.adam().state(index, StateKind::kMaster), host.master);
  }
  for (int64_t t = 1; t <= 3; ++t) {
    std::vector<Bytes> gradients;
    for (size_t i = 0; i < kNumels.size(); ++i) {
      gradients.push_back(Random(random, kNumels[i], grad_type));
      device.SetGradient(static_cast<int>(i), gradients.back());
    }
    ASSERT_TRUE(device.Step(Constants(t)).ok());
    for (size_t i = 0; i < kNumels.size(); ++i) {
      Host& host = hosts[i];
      AdamSpan span;
      span.numel = kNumels[i];
      span.group = kGroups[i];
      span.param = reinterpret_cast<float*>(host.master.data());
      span.grad = gradients[i].data();
      span.exp_avg = host.exp_avg.data();
      span.exp_avg_sq = host.exp_avg_sq.data();
      span.grad_type = grad_type;
      span.exp_avg_type = ToDType(options.exp_avg_type);
      span.exp_avg_sq_type = ToDType(options.exp_avg_sq_type);
      if (options.weights_type != kF32) {
        span.copy = host.copy.data();
        span.copy_type = options.weights_type;
      }
      ASSERT_TRUE(cpu->Step(span, t, kScale).ok());
      SCOPED_TRACE(testing::Message() << "step " << t << ", parameter " << i);
      const int index = static_cast<int>(i);
      EXPECT_EQ(device.State(index, StateKind::kMaster), host.master);
      EXPECT_EQ(device.State(index, StateKind::kExpAvg), host.exp_avg);
      EXPECT_EQ(device.State(index, StateKind::kExpAvgSq), host.exp_avg_sq);
      EXPECT_EQ(device.Weights(index),
                options.weights_type == kF32 ? host.master : host.copy);
    }
  }
}

TEST_P(DeviceAdamTest, HasTheBitsOfTheCpu) {
  // Of five combinations one, which has each value at least once.
  const int stride = LongTestStride() == 1 ? 1 : 5;
  int combination = 0;
  DeviceAdamOptions options;
  for (const DType weights_type : {kBF16, kF16, kF32}) {
    options.weights_type = weights_type;
    for (const DType exp_avg_type : {kF32, kBF16}) {
      options.exp_avg_type = ToStateType(exp_avg_type);
      for (const DType exp_avg_sq_type : {kF32, kBF16}) {
        options.exp_avg_sq_type = ToStateType(exp_avg_sq_type);
        for (const DType grad_type : {kBF16, kF16, kF32}) {
          if (combination++ % stride != 0) continue;
          SCOPED_TRACE(testing::Message()
                       << "weights " << Name(weights_type) << ", exp_avg "
                       << Name(exp_avg_type) << ", exp_avg_sq "
                       << Name(exp_avg_sq_type) << ", gradients "
                       << Name(grad_type));
          Compare(options, grad_type);
        }
      }
    }
  }
}

TEST_P(DeviceAdamTest, ClearMakesAllStateZero) {
  OnDevice device(*device_, {}, kF32);
  std::mt19937 random(1);
  for (size_t i = 0; i < kNumels.size(); ++i) {
    for (const StateKind kind : kKinds) {
      device.Write(device.adam().state(static_cast<int>(i), kind),
                   Random(random, kNumels[i], kF32));
    }
  }
  ASSERT_TRUE(device.adam().Clear(device.stream()).ok());
  for (size_t i = 0; i < kNumels.size(); ++i) {
    for (const StateKind kind : kKinds) {
      EXPECT_EQ(device.State(static_cast<int>(i), kind),
                Bytes(kNumels[i] * sizeof(float)));
    }
  }
}

TEST_P(DeviceAdamTest, TakesItsMemoryAtCreation) {
  int64_t numel = 0;
  for (const int64_t one : kNumels) numel += DeviceAdam::AlignedNumel(one);
  EXPECT_EQ(numel, 5120 + 0 + 256 + 4096 + 256);
  for (const DType moment : {kF32, kBF16}) {
    const int64_t held = device_->memory().in_use;
    {
      DeviceAdamOptions options;
      options.exp_avg_type = ToStateType(moment);
      OnDevice device(*device_, options, kBF16);
      const DeviceAdam& adam = device.adam();
      EXPECT_EQ(ToDType(adam.state_type(StateKind::kMaster)), kF32);
      EXPECT_EQ(ToDType(adam.state_type(StateKind::kExpAvg)), moment);
      EXPECT_EQ(ToDType(adam.state_type(StateKind::kExpAvgSq)), kF32);
      EXPECT_EQ(device_->memory().in_use - device.before().in_use,
                numel * (8 + ByteSize(moment)));
      const std::vector<AdamConstants> constants = Constants(1);
      ASSERT_TRUE(device.Step(constants).ok());  // grows the stream's queue
      ASSERT_TRUE(device.stream().Synchronize().ok());
      const MemoryUse before = device_->memory();
      const int64_t allocations = AllocationCount();
      const absl::Status status = device.Step(constants);
      const absl::Status done = device.stream().Synchronize();
      EXPECT_EQ(AllocationCount(), allocations);
      EXPECT_TRUE(status.ok() && done.ok()) << status << done;
      EXPECT_EQ(device_->memory().allocations, before.allocations);
    }
    EXPECT_EQ(device_->memory().in_use, held);
  }
}

TEST_P(DeviceAdamTest, OneWithoutParametersStepsToo) {
  absl::StatusOr<DeviceAdam> adam = DeviceAdam::Create(*device_, {}, {});
  ASSERT_TRUE(adam.ok()) << adam.status();
  auto stream = device_->CreateStream();
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_TRUE(adam->Clear(**stream).ok());
  EXPECT_TRUE(adam->Step(**stream, {}, kBF16, {}, 1).ok());
  EXPECT_TRUE((*stream)->Synchronize().ok());
}

class DeviceAdamErrorTest : public testing::Test {
 protected:
  absl::Status Create(const DeviceAdamOptions& options,
                      std::vector<DeviceAdamParameter> parameters = {}) {
    return DeviceAdam::Create(*device_, options, std::move(parameters))
        .status();
  }
  static void ExpectInvalid(const absl::Status& status,
                            const std::string& message) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  std::unique_ptr<HostDevice> device_ = MakeDevice(ScalarKernel());
};

TEST_F(DeviceAdamErrorTest, TypesThatTheDeviceHasNot) {
  DeviceAdamOptions options;
  options.weights_type = kE4M3;
  ExpectInvalid(Create(options), "weights_type is e4m3");
  Kernel kernel = ScalarKernel();
  kernel.copy_types = {kF16};
  device_ = MakeDevice(kernel);
  options.weights_type = kBF16;
  ExpectInvalid(Create(options), "weights_type is bf16");
  for (const DType type : {kF16, kF32}) {
    options.weights_type = type;
    EXPECT_TRUE(Create(options).ok()) << Name(type);
  }
  device_.reset();  // before its kernel
}

TEST_F(DeviceAdamErrorTest, ParametersThatMakeNoSense) {
  char weights[16];
  const DeviceAdamParameter good = {4, 0, weights};
  ExpectInvalid(Create({}, {good, {-1, 0, weights}}),
                "parameter 1 has numel -1");
  ExpectInvalid(Create({}, {{4, -1, weights}, good}),
                "parameter 0 has numel 4, group -1");
  ExpectInvalid(Create({}, {good, good, {4, 0, nullptr}}),
                "parameter 2 has numel 4, group 0 and weights null");
  EXPECT_TRUE(Create({}, {good, {0, 0, nullptr}}).ok());
}

TEST_F(DeviceAdamErrorTest, RefusedMemoryIsAllGivenBack) {
  char weights[1];
  device_ = MakeDevice(ScalarKernel(), /*memory_bytes=*/2 * 4096);
  // Masters and the first moments fit.
  const absl::Status status = Create({}, {{1000, 0, weights}});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(device_->memory().in_use, 0);
  EXPECT_EQ(device_->memory().peak, 2 * 4096);
}

TEST_F(DeviceAdamErrorTest, ARefusedStepChangesNothing) {
  OnDevice device(*device_, {}, kBF16);
  std::mt19937 random(3);
  std::vector<Bytes> masters;
  for (size_t i = 0; i < kNumels.size(); ++i) {
    const int index = static_cast<int>(i);
    masters.push_back(Random(random, kNumels[i], kF32));
    device.Write(device.adam().state(index, StateKind::kMaster),
                 masters.back());
    device.SetGradient(index, Random(random, kNumels[i], kBF16));
  }
  const std::vector<AdamConstants> constants = Constants(1);
  const std::vector<const void*> pointers = device.pointers();

  device.pointers().pop_back();
  ExpectInvalid(device.Step(constants),
                "4 gradients, expected those of 5 parameters");
  device.pointers() = pointers;
  ExpectInvalid(device.Step({constants[0]}),
                "parameter 2 is of group 1, and there are constants of 1");
  device.pointers()[4] = nullptr;
  ExpectInvalid(device.Step(constants), "grad is null");
  device.pointers() = pointers;
  ExpectInvalid(
      device.adam().Step(device.stream(), pointers, kE4M3, constants, 1),
      "grad_type is e4m3");
  for (size_t i = 0; i < kNumels.size(); ++i) {
    EXPECT_EQ(device.State(static_cast<int>(i), StateKind::kMaster),
              masters[i]);
  }
  EXPECT_TRUE(device.Step(constants).ok());
  EXPECT_NE(device.State(0, StateKind::kMaster), masters[0]);
}

TEST_F(DeviceAdamErrorTest, ErrorsOfTheDeviceAreReturned) {
  DeviceAdamOptions options;
  options.weights_type = kF32;  // copied in an operation of its own
  const absl::Status error = absl::UnavailableError("injected");
  OnDevice device(*device_, options, kBF16);
  device_->RefuseCall(HostDeviceCall::kSetZero, 1, error);
  EXPECT_EQ(device.adam().Clear(device.stream()), error);
  device_->RefuseCall(HostDeviceCall::kRun, 0, error);
  EXPECT_EQ(device.Step(Constants(1)), error);
  EXPECT_TRUE(device.adam().status().ok());
  // The update is on its way by then.
  device_->RefuseCall(HostDeviceCall::kCopyOnDevice, 0, error);
  EXPECT_EQ(device.Step(Constants(1)), error);
  EXPECT_EQ(device.adam().status(), error);
}

}  // namespace
}  // namespace onepass

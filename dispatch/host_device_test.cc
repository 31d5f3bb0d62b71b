#include "dispatch/host_device.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/config.h"

#ifdef ABSL_HAVE_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "dispatch/adam_constants.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/allocation_counter.h"
#include "tests/hostile_fp_environment.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Call = HostDeviceCall;
using Direction = HostDeviceCopy::Direction;
using Clock = std::chrono::steady_clock;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;

// --- Helpers. ---

// The value of what may not fail.
template <typename T>
T Take(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return *std::move(value);
}

std::unique_ptr<HostDevice> MakeDevice(HostDeviceOptions options = {},
                                       const Kernel& kernel = ScalarKernel()) {
  return Take(HostDevice::Create(kernel, std::move(options)));
}

#define EXPECT_OK(expression) EXPECT_EQ((expression), absl::OkStatus())

constexpr double kRounding = 1e-9;  // of sums of times
double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

using Function = std::function<void()>;

// The scalar kernel with another `scale`.
template <void (*scale)(const ScaleArgs&)>
const Kernel& KernelWithScale() {
  static const KernelOperations operations = [] {
    KernelOperations operations = *ScalarKernel().operations;
    operations.scale = scale;
    return operations;
  }();
  static const Kernel kernel = [] {
    Kernel kernel = ScalarKernel();
    kernel.operations = &operations;
    return kernel;
  }();
  return kernel;
}

// A kernel whose `scale` calls what CallOperation() holds.
void CallFunction(const ScaleArgs& args) {
  (*reinterpret_cast<const Function*>(args.in))();
}
const Kernel& CallingKernel() { return KernelWithScale<CallFunction>(); }

// `function` must outlive the work.
DeviceOperation CallOperation(Function& function) {
  auto* const address = reinterpret_cast<float*>(&function);
  return ScaleArgs{1, address, address, 1};
}

// Holds a stream of a device with CallingKernel() from Hold() to Release().
// Must outlive the work of the stream.
class Gate {
 public:
  void Hold(Stream& stream) { EXPECT_OK(stream.Run({CallOperation(wait_)})); }

  // Returns when the stream stands there.
  void AwaitArrival() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return arrived_; });
  }

  void Release() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool arrived_ = false;
  bool open_ = false;
  Function wait_ = [this] {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  };
};

std::vector<uint8_t> RandomBytes(int64_t bytes, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> values(bytes);
  for (uint8_t& value : values) value = static_cast<uint8_t>(random());
  return values;
}

// A device and two streams of it, for a test that needs no others.
class HostDeviceTest : public testing::Test {
 protected:
  explicit HostDeviceTest(HostDeviceOptions options = {})
      : device_(MakeDevice(std::move(options), CallingKernel())),
        a_(Take(device_->CreateStream("a"))),
        b_(Take(device_->CreateStream("b"))) {}

  void TearDown() override {
    for (Gate& gate : gates_) gate.Release();
    for (Stream* stream : {a_.get(), b_.get()}) {
      if (stream != nullptr) stream->Synchronize().IgnoreError();
    }
  }

  // Holds the stream until it is released, or the test ends.
  Gate& Hold(Stream& stream) {
    gates_.emplace_back().Hold(stream);
    return gates_.back();
  }
  std::unique_ptr<Event> MakeEvent() { return Take(device_->CreateEvent()); }
  DeviceBuffer MakeBuffer(int64_t bytes) {
    return Take(device_->Allocate(bytes));
  }
  double Between(const Event& from, const Event& to) {
    return Take(device_->SecondsBetween(from, to));
  }

 private:
  std::deque<Gate> gates_;

 protected:
  const std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> a_;
  std::unique_ptr<Stream> b_;
};

// --- The device and its memory. ---

TEST_F(HostDeviceTest, SaysWhatItIs) {
  EXPECT_EQ(device_->name(), "host");
  EXPECT_TRUE(device_->host_accessible());
  EXPECT_EQ(&a_->device(), device_.get());
  EXPECT_EQ(&MakeEvent()->device(), device_.get());
  Kernel kernel = ScalarKernel();
  kernel.gradient_types = {DType::kFloat16};
  kernel.moment_types = {kBF16};
  kernel.copy_types = {};
  HostDeviceOptions options;
  options.name = "host:1";
  options.host_accessible = false;
  const auto other = MakeDevice(options, kernel);
  EXPECT_EQ(other->name(), "host:1");
  EXPECT_FALSE(other->host_accessible());
  EXPECT_EQ(other->gradient_types(), kernel.gradient_types);
  EXPECT_EQ(other->moment_types(), kernel.moment_types);
  EXPECT_EQ(other->copy_types(), kernel.copy_types);
}

TEST(HostDeviceOptionsTest, BadNumbersAreNamed) {
  const auto error = [](const HostDeviceOptions& options) {
    const absl::Status status =
        HostDevice::Create(ScalarKernel(), options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  HostDeviceOptions options;
  options.memory_bytes = -1;
  EXPECT_EQ(error(options),
            "host device: memory_bytes is -1, expected a finite number of at "
            "least 0");
  for (double bad : {-1.0, std::numeric_limits<double>::infinity(),
                     std::numeric_limits<double>::quiet_NaN()}) {
    options = {};
    options.link_bytes_per_s = bad;
    EXPECT_THAT(error(options), HasSubstr("link_bytes_per_s is "));
    options = {};
    options.link_bytes_per_s = 1;
    options.link_latency_s = bad;
    EXPECT_THAT(error(options), HasSubstr("link_latency_s is "));
  }
  options = {};
  options.link_latency_s = 0.5;
  EXPECT_EQ(error(options),
            "host device: link_latency_s is 0.5, expected 0 where "
            "link_bytes_per_s is");
}

TEST_F(HostDeviceTest, MemoryIsAlignedWritableAndCounted) {
  std::vector<DeviceBuffer> buffers;
  int64_t sum = 0;
  for (int64_t bytes : {1, 100, 256, 257, 100003, 3 << 20}) {
    buffers.push_back(MakeBuffer(bytes));
    sum += bytes;
    const auto address = reinterpret_cast<uintptr_t>(buffers.back().data());
    EXPECT_EQ(address % Device::kAlignment, 0u) << bytes;
    std::memset(buffers.back().data(), 1, bytes);
    EXPECT_EQ(device_->memory().in_use, sum);
  }
  buffers.clear();
  EXPECT_EQ(device_->memory().in_use, 0);
  EXPECT_EQ(device_->memory().peak, sum);
  EXPECT_EQ(device_->memory().allocations, 6);
}

TEST(HostDeviceMemoryTest, EndsAtItsCapacity) {
  HostDeviceOptions options;
  options.name = "small";
  options.memory_bytes = 1000;
  const auto device = MakeDevice(options);
  const DeviceBuffer a = Take(device->Allocate(600));
  const absl::Status status = device->Allocate(401).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(status.message(),
            "allocate: 401 bytes were asked for, small has 1000, of which 600 "
            "are in use");
  EXPECT_EQ(device->memory().in_use, 600);
  EXPECT_EQ(device->memory().allocations, 1);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(absl::IsResourceExhausted(device->Allocate(kMost).status()));
  DeviceBuffer b = Take(device->Allocate(400));
  b = DeviceBuffer();
  EXPECT_TRUE(device->Allocate(400).ok());
}

TEST(HostDeviceMemoryTest, BeginsAtAHugePageWhereItHoldsOne) {
  const auto device = MakeDevice();
  for (const int64_t pages : {1, 2}) {
    const DeviceBuffer buffer =
        Take(device->Allocate(pages * HostBuffer::kHugePageBytes + 1));
    EXPECT_EQ(
        reinterpret_cast<uintptr_t>(buffer.data()) % HostBuffer::kHugePageBytes,
        0u);
  }
}

TEST(HostDeviceMemoryTest, WhatTheSystemRefusesIsAnError) {
  if (UnderSanitizer()) {
    GTEST_SKIP() << "a sanitizer ends the program instead";
  }
  const auto device = MakeDevice();
  constexpr int64_t kBytes = int64_t{1} << 60;
  const absl::Status status = device->Allocate(kBytes).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(kBytes)));
  EXPECT_EQ(device->memory().in_use, 0);
}

TEST(HostDeviceMemoryTest, CountsAreExactForManyThreads) {
  HostDeviceOptions options;
  options.memory_bytes = 4 * 300;
  const auto device = MakeDevice(options);
  const int kRounds = UnderSanitizer() ? 200 : 2000;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        // What each holds at most fits.
        const DeviceBuffer a = Take(device->Allocate(100));
        const DeviceBuffer b = Take(device->Allocate(200));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const MemoryUse use = device->memory();
  EXPECT_EQ(use.in_use, 0);
  EXPECT_GE(use.peak, 300);
  EXPECT_LE(use.peak, options.memory_bytes);
  EXPECT_EQ(use.allocations, 4 * 2 * kRounds);
  EXPECT_TRUE(device->Allocate(options.memory_bytes).ok());
}

TEST_F(HostDeviceTest, PinnedMemoryIsCounted) {
  const auto pool = MakePool(2);
  {
    const PinnedBuffer buffer = Take(device_->AllocatePinned(*pool, 5000));
    EXPECT_EQ(buffer.as<char>()[4999], 0);
    EXPECT_EQ(device_->pinned_memory().in_use, 5000);
  }
  EXPECT_EQ(device_->pinned_memory().in_use, 0);
  EXPECT_EQ(device_->pinned_memory().peak, 5000);
  EXPECT_EQ(device_->memory().allocations, 0);
}

#ifdef ABSL_HAVE_ADDRESS_SANITIZER
TEST_F(HostDeviceTest, SanitizerSeesUseAfterFreeAndPastTheEnd) {
  DeviceBuffer buffer = MakeBuffer(100);
  char* const data = buffer.as<char>();
  EXPECT_FALSE(__asan_address_is_poisoned(data + 99));
  EXPECT_TRUE(__asan_address_is_poisoned(data + 100));
  buffer = DeviceBuffer();
  EXPECT_TRUE(__asan_address_is_poisoned(data));
}
#endif

// --- What streams do. ---

TEST_F(HostDeviceTest, CopiesThereAndBack) {
  for (int64_t bytes : {1, 3, 4096, 100003}) {
    const std::vector<uint8_t> sent = RandomBytes(bytes);
    std::vector<uint8_t> received(bytes);
    const DeviceBuffer x = MakeBuffer(bytes);
    const DeviceBuffer y = MakeBuffer(bytes);
    EXPECT_OK(a_->CopyToDevice(x.data(), sent.data(), bytes));
    EXPECT_OK(a_->CopyOnDevice(y.data(), x.data(), bytes));
    EXPECT_OK(a_->CopyToHost(received.data(), y.data(), bytes));
    EXPECT_OK(a_->SetZero(y.data(), bytes));
    EXPECT_OK(a_->Synchronize());
    EXPECT_EQ(received, sent);
    EXPECT_OK(a_->CopyToHost(received.data(), y.data(), bytes));
    EXPECT_OK(a_->Synchronize());
    EXPECT_EQ(received, std::vector<uint8_t>(bytes));
  }
}

TEST_F(HostDeviceTest, NothingIsCopiedFromAndToNull) {
  EXPECT_OK(a_->CopyToDevice(nullptr, nullptr, 0));
  EXPECT_OK(a_->CopyToHost(nullptr, nullptr, 0));
  EXPECT_OK(a_->CopyOnDevice(nullptr, nullptr, 0));
  EXPECT_OK(a_->SetZero(nullptr, 0));
  EXPECT_OK(a_->Run({}));
  EXPECT_OK(a_->Run({CastArgs{0, nullptr, nullptr, kF32, kBF16},
                     SumLeavesArgs{}, AbsMaxArgs{}}));
  EXPECT_OK(a_->Synchronize());
}

TEST_F(HostDeviceTest, BadCallsAreNamedAndDoNothing) {
  Gate& gate = Hold(*a_);
  char memory[8] = {};
  const auto error = [this](const absl::Status& status) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(device_->WorkInFlight(), 1) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(error(a_->CopyToDevice(nullptr, memory, 4)),
            "copy_to_device: to is null, bytes is 4");
  EXPECT_EQ(error(a_->CopyToHost(memory, nullptr, 4)),
            "copy_to_host: from is null, bytes is 4");
  EXPECT_EQ(error(a_->CopyOnDevice(memory, memory + 2, 4)),
            "copy_on_device: to overlaps from, bytes is 4");
  EXPECT_EQ(error(a_->SetZero(memory, -1)),
            "set_zero: bytes is -1, expected at least 0");
  Function function = [] { ADD_FAILURE() << "was run"; };
  EXPECT_THAT(error(a_->Run({CallOperation(function), ScaleArgs{-1}})),
              HasSubstr("scale: numel is -1"));
  const auto other = MakeDevice();
  const auto event = Take(other->CreateEvent());
  EXPECT_THAT(error(a_->Record(*event)), HasSubstr("record: the event"));
  EXPECT_THAT(error(a_->Wait(*event)), HasSubstr("wait: the event"));
  gate.Release();
  EXPECT_OK(a_->Synchronize());
}

TEST_F(HostDeviceTest, WorkRunsAfterTheCallInOrder) {
  Gate& gate = Hold(*a_);
  std::vector<int> order;
  std::vector<Function> functions;
  for (int i = 0; i < 300; ++i) {  // more than there is room for at first
    functions.push_back([&order, i] { order.push_back(i); });
  }
  for (Function& function : functions) {
    EXPECT_OK(a_->Run({CallOperation(function)}));
  }
  EXPECT_EQ(device_->WorkInFlight(), 301);
  EXPECT_THAT(order, IsEmpty());
  gate.Release();
  EXPECT_OK(a_->Synchronize());
  EXPECT_EQ(device_->WorkInFlight(), 0);
  EXPECT_EQ(order.size(), 300u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(HostDeviceTest, StreamsRunBesideOneAnother) {
  Hold(*a_);
  int value = 0;
  const int one = 1;
  EXPECT_OK(b_->CopyToHost(&value, &one, sizeof(value)));
  EXPECT_OK(b_->Synchronize());
  EXPECT_EQ(value, 1);
  EXPECT_EQ(device_->WorkInFlight(), 1);
}

TEST_F(HostDeviceTest, DestroyingAStreamWaits) {
  int value = 0;
  Function slow = [&value] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++value;
  };
  for (int i = 0; i < 4; ++i) EXPECT_OK(a_->Run({CallOperation(slow)}));
  a_.reset();
  EXPECT_EQ(value, 4);
}

TEST_F(HostDeviceTest, ThreadsHaveTheNamesOfTheirStreams) {
  const auto stream = Take(device_->CreateStream("a name that is too long"));
  std::string name;
  Function function = [&name] {
    char buffer[32] = {};
    pthread_getname_np(pthread_self(), buffer, sizeof(buffer));
    name = buffer;
  };
  for (Stream* one : {a_.get(), stream.get()}) {
    EXPECT_OK(one->Run({CallOperation(function)}));
    EXPECT_OK(one->Synchronize());
    EXPECT_EQ(name, one == a_.get() ? "a" : "a name that is ");
  }
}

TEST_F(HostDeviceTest, OperationsRunInTheDefaultFpEnvironment) {
  const HostileFpEnvironment hostile;
  const auto stream = Take(device_->CreateStream());
  volatile float third = 3.0f;
  float result = 0;
  // 2 / 3 rounds up, which rounding toward zero does not.
  Function function = [&] { result = 2.0f / third; };
  EXPECT_OK(stream->Run({CallOperation(function)}));
  EXPECT_OK(stream->Synchronize());
  EXPECT_EQ(result, 0x1.555556p-1f);
  EXPECT_TRUE(hostile.Intact());
}

int CountThreads() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "Threads:") continue;
    int count = 0;
    status >> count;
    return count;
  }
  return 0;
}

TEST(HostDeviceThreadTest, ARefusedThreadIsAnErrorAndLeavesNone) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "memory of a sanitizer or emulator breaks the limit here";
  }
  const auto device = MakeDevice();
  const int before = CountThreads();
  rlimit saved;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &saved), 0);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limited = saved;
  // Stacks of some threads only.
  limited.rlim_cur = pages * sysconf(_SC_PAGESIZE) + (rlim_t{256} << 20);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limited), 0);
  std::vector<std::unique_ptr<Stream>> streams;
  absl::Status status;
  while (status.ok() && streams.size() < 10000) {
    absl::StatusOr<std::unique_ptr<Stream>> stream =
        device->CreateStream("many");
    status = stream.status();
    if (stream.ok()) streams.push_back(*std::move(stream));
  }
  ASSERT_EQ(setrlimit(RLIMIT_AS, &saved), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("stream many"));
  for (const auto& stream : streams) EXPECT_OK(stream->Synchronize());
  streams.clear();
  EXPECT_EQ(CountThreads(), before);
}

// --- Operations: the bits of the CPU. ---

class HostDeviceOperationsTest : public testing::TestWithParam<const Kernel*> {
};

constexpr int64_t kNumel = 3 * kLeafNumel + 37;

// All the operations over arrays of its own. Those are filled alike.
struct Arrays {
  Arrays() {
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(0.25f, 2.0f);
    for (auto* array : {&param, &exp_avg, &exp_avg_sq, &x, &sum}) {
      for (float& value : *array) value = uniform(random);
    }
    for (uint16_t& value : grad) value = 0x3e00 + random() % 512;
  }

  bool operator==(const Arrays& other) const {
    return Same(param, other.param) && Same(exp_avg, other.exp_avg) &&
           Same(exp_avg_sq, other.exp_avg_sq) && Same(copy, other.copy) &&
           Same(mean, other.mean) && Same(scaled, other.scaled) &&
           Same(narrow, other.narrow) && Same(absmax, other.absmax) &&
           Same(high, other.high) && Same(low, other.low) &&
           Same(joined, other.joined) && Same(codes, other.codes) &&
           Same(scales, other.scales) && Same(values, other.values) &&
           norm == other.norm && mean_norm == other.mean_norm;
  }

  template <typename T>
  static bool Same(const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
  }

  AdamStepArgs Adam() {
    AdamStepArgs args;
    args.numel = kNumel;
    args.param = param.data();
    args.grad = grad.data();
    args.grad_type = kBF16;
    args.exp_avg = exp_avg.data();
    args.exp_avg_sq = exp_avg_sq.data();
    args.copy = copy.data();
    args.grad_scale = 0.5f;
    args.constants = {0.9f,  0.99f, 0.1f,  0.01f,  1e-8f,
                      0.01f, -0.1f, 1.25f, -1e-3f, WeightDecay::kAdamW};
    return args;
  }
  AccumulateArgs Accumulate() {
    return {kNumel,  sum.data(), grad.data(), mean.data(),
            nullptr, kBF16,      kBF16,       3};
  }
  ScaleArgs Scale() { return {kNumel, x.data(), scaled.data(), 1.5f}; }
  CastArgs Cast() { return {kNumel, x.data(), narrow.data(), kF32, kBF16}; }
  AbsMaxArgs AbsMax() { return {kNumel, x.data(), absmax.data(), kF32}; }
  SplitRemainderArgs Split() {
    return {kNumel, x.data(), high.data(), low.data()};
  }
  JoinRemainderArgs Join() {
    return {kNumel, high.data(), low.data(), joined.data()};
  }
  QuantizeArgs Quantize() {
    return {kNumel, x.data(), codes.data(), scales.data(), kE4M3};
  }
  DequantizeArgs Dequantize() {
    return {kNumel, codes.data(), scales.data(), values.data(), kE4M3};
  }

  template <typename T>
  using Array = std::vector<T>;
  Array<float> param = Array<float>(kNumel), exp_avg = param,
               exp_avg_sq = param, x = param, sum = param, scaled = param,
               joined = param, values = param;
  Array<uint16_t> grad = Array<uint16_t>(kNumel), copy = grad, mean = grad,
                  narrow = grad, high = grad;
  Array<int16_t> low = Array<int16_t>(kNumel);
  Array<uint8_t> codes = Array<uint8_t>(kNumel);
  Array<float> absmax = Array<float>(LeafCount(kNumel)), scales = absmax;
  NormSum norm, mean_norm;
};

TEST_P(HostDeviceOperationsTest, HaveTheBitsOfTheCpu) {
  const Kernel& kernel = *GetParam();
  const auto pool = MakePool(2);
  Arrays expected;
  EXPECT_OK(AdamStep(kernel, *pool, expected.Adam()));
  EXPECT_OK(
      Accumulate(kernel, *pool, expected.Accumulate(), &expected.mean_norm));
  EXPECT_OK(Scale(kernel, *pool, expected.Scale()));
  EXPECT_OK(Cast(kernel, *pool, expected.Cast()));
  EXPECT_OK(SquaredNorm(kernel, *pool, kNumel, expected.x.data(), kF32,
                        expected.norm));
  EXPECT_OK(AbsMax(kernel, *pool, expected.AbsMax()));
  EXPECT_OK(SplitRemainder(kernel, *pool, expected.Split()));
  EXPECT_OK(JoinRemainder(kernel, *pool, expected.Join()));
  EXPECT_OK(Quantize(kernel, *pool, expected.Quantize()));
  EXPECT_OK(Dequantize(kernel, *pool, expected.Dequantize()));
  EXPECT_FALSE(expected == Arrays());

  const auto device = MakeDevice({}, kernel);
  const auto stream = Take(device->CreateStream());
  Arrays actual;
  const int64_t leaves = LeafCount(kNumel);
  const DeviceBuffer leaf_sums =
      Take(device->Allocate(2 * leaves * sizeof(double)));
  double* const sums = leaf_sums.as<double>();
  AccumulateArgs accumulate = actual.Accumulate();
  accumulate.leaf_sums = sums + leaves;
  // By pieces of one list, and one by one.
  EXPECT_OK(
      stream->Run({actual.Adam(), accumulate, actual.Scale(), actual.Cast(),
                   SquaredNormArgs{kNumel, actual.x.data(), sums, kF32},
                   SumLeavesArgs{1, sums, &actual.norm},
                   SumLeavesArgs{leaves - 1, sums + 1, &actual.norm}}));
  EXPECT_OK(
      stream->Run({SumLeavesArgs{leaves, sums + leaves, &actual.mean_norm}}));
  EXPECT_OK(stream->Run({actual.AbsMax()}));
  EXPECT_OK(stream->Run(
      {actual.Split(), actual.Join(), actual.Quantize(), actual.Dequantize()}));
  EXPECT_OK(stream->Synchronize());
  EXPECT_TRUE(expected == actual);
  EXPECT_EQ(device->Calls(Call::kRun), 4);
}

TEST_P(HostDeviceOperationsTest, DeferredConstantsAreThoseOfWhenItRuns) {
  const AdamRule rule = {0.8f, 0.95f, 1e-6f, 0.1f, WeightDecay::kAdamW};
  Arrays expected;
  for (const auto& [lr, t] : {std::pair(0.5f, 7), std::pair(0.25f, 8)}) {
    AdamStepArgs args = expected.Adam();
    args.constants = ComputeConstants(rule, lr, t);
    EXPECT_OK(AdamStep(*GetParam(), *MakePool(1), args));
  }
  const auto device = MakeDevice({}, *GetParam());
  const auto stream = Take(device->CreateStream());
  Arrays actual;
  int64_t step = 6;
  float lr = 0.5f;
  AdamConstants constants;
  DeferredAdamStepArgs deferred = {actual.Adam(), &constants};
  deferred.step.constants = {};
  deferred.step.constants.decay_mode = WeightDecay::kAdamW;
  // What a graph captures: the same operations each time.
  const std::vector<DeviceOperation> captured = {
      AdvanceStepArgs{&step, &lr, &constants, rule}, deferred};
  EXPECT_OK(stream->Run(captured));
  EXPECT_OK(stream->Synchronize());
  EXPECT_EQ(step, 7);
  lr = 0.25f;
  EXPECT_OK(stream->Run(captured));
  EXPECT_OK(stream->Synchronize());
  EXPECT_EQ(step, 8);
  EXPECT_TRUE(expected == actual);
}

INSTANTIATE_TEST_SUITE_P(Kernels, HostDeviceOperationsTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

// --- Events. ---

TEST_F(HostDeviceTest, AnEventThatWasNeverRecordedIsDone) {
  const auto event = MakeEvent();
  EXPECT_TRUE(Take(event->Done()));
  EXPECT_OK(event->Wait());
  EXPECT_OK(a_->Wait(*event));
  EXPECT_EQ(device_->WorkInFlight(), 0);
  EXPECT_OK(a_->Synchronize());
}

TEST_F(HostDeviceTest, AnEventIsDoneAfterTheWorkBeforeIt) {
  const auto event = MakeEvent();
  int value = 0;
  Function function = [&value] { value = 1; };
  for (int round = 0; round < 3; ++round) {
    Gate& gate = Hold(*a_);
    EXPECT_OK(a_->Run({CallOperation(function)}));
    EXPECT_OK(a_->Record(*event));
    Gate& behind = Hold(*a_);
    EXPECT_FALSE(Take(event->Done()));
    gate.Release();
    EXPECT_OK(event->Wait());
    EXPECT_EQ(std::exchange(value, 0), 1);
    EXPECT_TRUE(Take(event->Done()));
    EXPECT_OK(event->Wait());
    behind.Release();
    EXPECT_OK(a_->Synchronize());
  }
}

// Not a little later: who waited may look at what is in flight.
TEST_F(HostDeviceTest, WhereAnEventIsOverNothingBeforeItIsInFlight) {
  const auto event = MakeEvent();
  const DeviceBuffer buffer = Take(device_->Allocate(64));
  for (int i = 0; i < 500; ++i) {
    EXPECT_OK(a_->SetZero(buffer.data(), 64));
    EXPECT_OK(a_->Record(*event));
    while (!Take(event->Done())) {
    }
    ASSERT_EQ(device_->WorkInFlight(), 0) << "round " << i;
  }
}

TEST_F(HostDeviceTest, AStreamWaitsForAnEventOfAnother) {
  const auto event = MakeEvent();
  Gate& gate = Hold(*a_);
  int value = 0;
  int seen = 0;
  Function write = [&value] { value = 1; };
  Function read = [&] { seen = value; };
  EXPECT_OK(a_->Run({CallOperation(write)}));
  EXPECT_OK(a_->Record(*event));
  EXPECT_OK(b_->Wait(*event));
  EXPECT_OK(b_->Run({CallOperation(read)}));
  EXPECT_EQ(device_->WorkInFlight(), 5);
  gate.Release();
  EXPECT_OK(b_->Synchronize());
  EXPECT_EQ(seen, 1);
}

TEST_F(HostDeviceTest, AWaitIsForTheRecordBeforeIt) {
  const auto event = MakeEvent();
  EXPECT_OK(a_->Record(*event));
  EXPECT_OK(b_->Wait(*event));
  Gate& gate = Hold(*a_);
  EXPECT_OK(a_->Record(*event));
  // The first record is all that b waits for.
  EXPECT_OK(b_->Synchronize());
  EXPECT_FALSE(Take(event->Done()));
  gate.Release();
  EXPECT_OK(event->Wait());
}

TEST_F(HostDeviceTest, AWaitIsNotForALaterRecordElsewhere) {
  const auto event = MakeEvent();
  const auto c = Take(device_->CreateStream("c"));
  Gate& gate = Hold(*a_);
  int value = 0;
  int seen = 0;
  Function write = [&value] { value = 1; };
  Function read = [&] { seen = value; };
  EXPECT_OK(a_->Run({CallOperation(write)}));
  EXPECT_OK(a_->Record(*event));
  EXPECT_OK(b_->Wait(*event));
  EXPECT_OK(b_->Run({CallOperation(read)}));
  // The latest record is done, that which b waits for is not.
  EXPECT_OK(c->Record(*event));
  EXPECT_OK(event->Wait());
  EXPECT_OK(c->Synchronize());
  EXPECT_TRUE(Take(event->Done()));
  EXPECT_EQ(device_->WorkInFlight(), 5);
  gate.Release();
  EXPECT_OK(b_->Synchronize());
  EXPECT_EQ(seen, 1);
}

TEST_F(HostDeviceTest, AnEventMayGoWhileStreamsReferToIt) {
  Gate& gate = Hold(*a_);
  int value = 0;
  Function write = [&value] { value = 1; };
  int seen = 0;
  Function read = [&] { seen = value; };
  {
    const auto event = MakeEvent();
    EXPECT_OK(a_->Run({CallOperation(write)}));
    EXPECT_OK(a_->Record(*event));
    EXPECT_OK(b_->Wait(*event));
  }
  EXPECT_OK(b_->Run({CallOperation(read)}));
  gate.Release();
  EXPECT_OK(b_->Synchronize());
  EXPECT_EQ(seen, 1);
}

TEST_F(HostDeviceTest, AnEventOutlivesItsStream) {
  const auto event = MakeEvent();
  EXPECT_OK(a_->Record(*event));
  a_.reset();
  EXPECT_OK(b_->Wait(*event));
  EXPECT_OK(b_->Synchronize());
  EXPECT_OK(event->Wait());
}

TEST_F(HostDeviceTest, TimesOfEvents) {
  const auto first = MakeEvent();
  const auto second = MakeEvent();
  const auto error = [this](const Event& from, const Event& to) {
    const absl::Status status = device_->SecondsBetween(from, to).status();
    return absl::StrCat(absl::StatusCodeToString(status.code()), ", ",
                        status.message());
  };
  EXPECT_EQ(error(*first, *second),
            "FAILED_PRECONDITION, seconds_between: from was not recorded");
  const auto begin = Clock::now();
  EXPECT_OK(a_->Record(*first));
  EXPECT_OK(first->Wait());
  EXPECT_EQ(error(*first, *second),
            "FAILED_PRECONDITION, seconds_between: to was not recorded");
  Gate& gate = Hold(*b_);
  EXPECT_OK(b_->Record(*second));
  EXPECT_EQ(error(*first, *second),
            "FAILED_PRECONDITION, seconds_between: to is not done");
  const auto recorded = Clock::now();
  while (SecondsSince(recorded) < 1e-3) {
  }
  gate.Release();
  EXPECT_OK(second->Wait());
  const double seconds = Between(*first, *second);
  EXPECT_GE(seconds, 1e-3);
  EXPECT_LE(seconds, SecondsSince(begin) + kRounding);
  EXPECT_EQ(Between(*second, *first), -seconds);
  EXPECT_EQ(Between(*first, *first), 0);
  const auto other = MakeDevice();
  const auto foreign = Take(other->CreateEvent());
  EXPECT_THAT(error(*first, *foreign), HasSubstr("seconds_between: the event"));
}

// --- Streams of others. ---

TEST_F(HostDeviceTest, AWrappedStreamIsTheSame) {
  std::vector<std::thread::id> threads;
  Function function = [&] { threads.push_back(std::this_thread::get_id()); };
  {
    const auto wrapper = Take(device_->WrapStream(a_->native()));
    EXPECT_EQ(wrapper->native(), a_->native());
    EXPECT_NE(wrapper->native(), b_->native());
    EXPECT_OK(wrapper->Run({CallOperation(function)}));
    EXPECT_OK(a_->Run({CallOperation(function)}));
    EXPECT_OK(wrapper->Run({CallOperation(function)}));
    EXPECT_OK(wrapper->Synchronize());
    EXPECT_EQ(threads.size(), 3u);
  }
  // It goes on without the wrapper.
  EXPECT_OK(a_->Run({CallOperation(function)}));
  EXPECT_OK(a_->Synchronize());
  EXPECT_EQ(threads, std::vector<std::thread::id>(4, threads[0]));
  EXPECT_NE(threads[0], std::this_thread::get_id());
}

TEST_F(HostDeviceTest, AStreamIsSynchronizedWithWhatOthersPutThere) {
  int value = 0;
  Function slow = [&value] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++value;
  };
  const auto wrapper = Take(device_->WrapStream(a_->native()));
  EXPECT_OK(wrapper->Run({CallOperation(slow)}));
  EXPECT_OK(a_->Synchronize());
  EXPECT_EQ(value, 1);
  EXPECT_OK(a_->Run({CallOperation(slow)}));
  EXPECT_OK(wrapper->Synchronize());
  EXPECT_EQ(value, 2);
}

TEST_F(HostDeviceTest, AWrapperWaitsForWhatItPutThere) {
  int value = 0;
  Function slow = [&value] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++value;
  };
  {
    const auto wrapper = Take(device_->WrapStream(a_->native()));
    EXPECT_OK(wrapper->Run({CallOperation(slow)}));
    Hold(*a_);  // not for this
  }
  EXPECT_EQ(value, 1);
  // Nor for anything where it put nothing there.
  { const auto wrapper = Take(device_->WrapStream(a_->native())); }
  EXPECT_EQ(device_->WorkInFlight(), 1);
}

TEST_F(HostDeviceTest, NullIsTheDefaultStream) {
  const auto one = Take(device_->WrapStream(nullptr));
  const auto other = Take(device_->WrapStream(nullptr));
  EXPECT_EQ(one->native(), other->native());
  EXPECT_NE(one->native(), nullptr);
  EXPECT_NE(one->native(), a_->native());
  const auto third = Take(device_->WrapStream(one->native()));
  std::vector<int> order;
  Function first = [&order] { order.push_back(1); };
  Function second = [&order] { order.push_back(2); };
  Function last = [&order] { order.push_back(3); };
  EXPECT_OK(one->Run({CallOperation(first)}));
  EXPECT_OK(other->Run({CallOperation(second)}));
  EXPECT_OK(third->Run({CallOperation(last)}));
  EXPECT_OK(third->Synchronize());
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST_F(HostDeviceTest, OnlyStreamsOfTheDeviceAreWrapped) {
  const auto other = MakeDevice();
  const auto stream = Take(other->CreateStream());
  void* const native = a_->native();
  a_.reset();
  for (void* wrong : {stream->native(), native}) {
    const absl::Status status = device_->WrapStream(wrong).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(), "wrap_stream: native is no stream of host");
  }
}

// --- The link. ---

HostDeviceOptions LinkOptions() {
  HostDeviceOptions options;
  options.link_bytes_per_s = 1e6;
  options.link_latency_s = 1e-3;
  return options;
}

// Copies of kBytes; times are those of the link, whatever the machine does.
class LinkTest : public HostDeviceTest {
 protected:
  static constexpr int64_t kBytes = 2000;
  static constexpr double kSeconds = 3e-3;  // 1e-3 + kBytes / 1e6

  LinkTest() : HostDeviceTest(LinkOptions()) {}

  void ToDevice(Stream& stream) {
    EXPECT_OK(stream.CopyToDevice(there_.data(), here_.data(), kBytes));
  }
  // The other way, from memory of its own.
  void ToHost(Stream& stream) {
    EXPECT_OK(stream.CopyToHost(back_.data(), there_too_.data(), kBytes));
  }
  std::unique_ptr<Event> RecordOn(Stream& stream) {
    auto event = MakeEvent();
    EXPECT_OK(stream.Record(*event));
    return event;
  }

  const std::vector<uint8_t> here_ = RandomBytes(kBytes);
  std::vector<uint8_t> back_ = std::vector<uint8_t>(kBytes);
  const DeviceBuffer there_ = MakeBuffer(kBytes);
  const DeviceBuffer there_too_ = MakeBuffer(kBytes);
};

TEST_F(LinkTest, CopiesTakeLatencyAndBytesByBandwidth) {
  // So that all are there before the first begins.
  Gate& gate = Hold(*a_);
  const auto begin = RecordOn(*a_);
  constexpr int kCopies = 5;
  for (int i = 0; i < kCopies; ++i) ToDevice(*a_);
  const auto end = RecordOn(*a_);
  const auto released = Clock::now();
  gate.Release();
  EXPECT_OK(end->Wait());
  EXPECT_GE(SecondsSince(released), kCopies * kSeconds - kRounding);
  EXPECT_NEAR(Between(*begin, *end), kCopies * kSeconds, kRounding);
  EXPECT_EQ(std::memcmp(there_.data(), here_.data(), kBytes), 0);
}

TEST(HostDeviceLinkTest, LateThreadsDoNotLengthenTheCopiesBehind) {
  HostDeviceOptions options = LinkOptions();
  // After each copy its thread is later than the next one would take.
  options.observer = [](const HostDeviceCopy&, bool begins) {
    if (!begins) std::this_thread::sleep_for(std::chrono::milliseconds(4));
  };
  Gate gate;
  const auto device = MakeDevice(options, CallingKernel());
  const auto stream = Take(device->CreateStream());
  gate.Hold(*stream);
  const int64_t here = 1;
  int64_t there = 0;
  std::vector<std::unique_ptr<Event>> events;
  for (int i = 0; i < 4; ++i) {
    events.push_back(Take(device->CreateEvent()));
    EXPECT_OK(stream->Record(*events.back()));
    EXPECT_OK(stream->CopyToDevice(&there, &here, sizeof(here)));
  }
  gate.Release();
  EXPECT_OK(stream->Synchronize());
  for (int i = 1; i < 4; ++i) {
    EXPECT_NEAR(Take(device->SecondsBetween(*events[i - 1], *events[i])),
                1.008e-3, kRounding);
  }
}

TEST_F(LinkTest, ACopyBeginsWhenItIsPut) {
  ToDevice(*a_);
  const auto first = RecordOn(*a_);
  EXPECT_OK(first->Wait());
  const auto idle = Clock::now();
  while (SecondsSince(idle) < 1e-3) {
  }
  const double pause = SecondsSince(idle);
  ToDevice(*a_);
  const auto second = RecordOn(*a_);
  EXPECT_OK(second->Wait());
  EXPECT_GE(Between(*first, *second), pause + kSeconds - kRounding);
}

TEST_F(LinkTest, DirectionsDoNotSlowOneAnother) {
  Gate& gate = Hold(*a_);
  const auto begin = RecordOn(*a_);
  EXPECT_OK(b_->Wait(*begin));
  for (int i = 0; i < 3; ++i) {
    ToDevice(*a_);
    ToHost(*b_);
  }
  const auto up = RecordOn(*a_);
  const auto down = RecordOn(*b_);
  gate.Release();
  EXPECT_OK(up->Wait());
  EXPECT_OK(down->Wait());
  EXPECT_NEAR(Between(*begin, *up), 3 * kSeconds, kRounding);
  EXPECT_NEAR(Between(*begin, *down), 3 * kSeconds, kRounding);
}

TEST_F(LinkTest, StreamsShareADirection) {
  Gate& gate = Hold(*a_);
  const auto begin = RecordOn(*a_);
  EXPECT_OK(b_->Wait(*begin));
  for (int i = 0; i < 3; ++i) {
    ToDevice(*a_);
    EXPECT_OK(b_->CopyToDevice(there_too_.data(), here_.data(), kBytes));
  }
  const auto one = RecordOn(*a_);
  const auto other = RecordOn(*b_);
  gate.Release();
  EXPECT_OK(one->Wait());
  EXPECT_OK(other->Wait());
  EXPECT_NEAR(std::max(Between(*begin, *one), Between(*begin, *other)),
              6 * kSeconds, kRounding);
}

TEST_F(LinkTest, ACopyBeginsWhenWhatItsStreamWaitsForHasEnded) {
  Gate& gate = Hold(*a_);
  const auto begin = RecordOn(*a_);
  ToDevice(*a_);
  const auto uploaded = RecordOn(*a_);
  EXPECT_OK(b_->Wait(*uploaded));
  ToHost(*b_);  // of the other direction, which is free
  const auto end = RecordOn(*b_);
  gate.Release();
  EXPECT_OK(end->Wait());
  EXPECT_NEAR(Between(*begin, *end), 2 * kSeconds, kRounding);
}

TEST_F(LinkTest, ACopyBeginsAfterTheOperationBeforeIt) {
  double took = 0;
  Function slow = [&took] {
    const auto begin = Clock::now();
    while ((took = SecondsSince(begin)) < 2e-3) {
    }
  };
  Gate& gate = Hold(*a_);
  const auto begin = RecordOn(*a_);
  EXPECT_OK(a_->Run({CallOperation(slow)}));
  ToDevice(*a_);
  const auto end = RecordOn(*a_);
  gate.Release();
  EXPECT_OK(end->Wait());
  EXPECT_GE(Between(*begin, *end), took + kSeconds - kRounding);
}

TEST(HostDeviceLinkTest, CopiesOnTheDeviceTakeNoLink) {
  HostDeviceOptions options;
  options.link_bytes_per_s = 1e-6;  // weeks a byte
  const auto device = MakeDevice(options);
  const auto stream = Take(device->CreateStream());
  const int x = 1;
  int y = 0;
  EXPECT_OK(stream->CopyOnDevice(&y, &x, sizeof(x)));
  EXPECT_OK(stream->Synchronize());
  EXPECT_EQ(y, 1);
  EXPECT_OK(stream->SetZero(&y, sizeof(y)));
  EXPECT_OK(stream->Synchronize());
  EXPECT_EQ(y, 0);
}

TEST(HostDeviceLinkTest, TimeWithoutBytes) {
  HostDeviceOptions options = LinkOptions();
  options.move_bytes = false;
  const auto device = MakeDevice(options);
  const auto stream = Take(device->CreateStream());
  const auto begin = Take(device->CreateEvent());
  const auto end = Take(device->CreateEvent());
  int here = 1;
  int there = 2;
  EXPECT_OK(stream->Record(*begin));
  EXPECT_OK(stream->CopyToDevice(&there, &here, sizeof(here)));
  EXPECT_OK(stream->CopyToHost(&here, &there, sizeof(here)));
  EXPECT_OK(stream->Record(*end));
  EXPECT_OK(end->Wait());
  EXPECT_EQ(here, 1);
  EXPECT_EQ(there, 2);
  EXPECT_GE(Take(device->SecondsBetween(*begin, *end)),
            2 * 1.004e-3 - kRounding);
  EXPECT_OK(stream->CopyOnDevice(&there, &here, sizeof(here)));
  EXPECT_OK(stream->Synchronize());
  EXPECT_EQ(there, 1);
}

// --- The observer. ---

TEST(HostDeviceObserverTest, SeesEachCopyOverTheLink) {
  struct Sight {
    HostDeviceCopy copy;
    bool begins;
    std::thread::id thread;
    int64_t in_flight;
    uint8_t first;  // byte at `to`
    Clock::time_point time;
  };
  std::vector<Sight> sights;
  HostDevice* device_or_null = nullptr;
  HostDeviceOptions options = LinkOptions();
  options.observer = [&](const HostDeviceCopy& copy, bool begins) {
    sights.push_back({copy, begins, std::this_thread::get_id(),
                      device_or_null->WorkInFlight(),
                      *static_cast<const uint8_t*>(copy.to), Clock::now()});
  };
  const auto device = MakeDevice(options, CallingKernel());
  device_or_null = device.get();
  const auto stream = Take(device->CreateStream());
  std::thread::id thread;
  Function function = [&thread] { thread = std::this_thread::get_id(); };
  EXPECT_OK(stream->Run({CallOperation(function)}));
  EXPECT_OK(stream->Synchronize());
  uint8_t x[8] = {1};
  uint8_t y[8] = {2};
  uint8_t z[8] = {3};
  const auto begin = Clock::now();
  EXPECT_OK(stream->CopyToDevice(y, x, 8));
  EXPECT_OK(stream->Synchronize());
  EXPECT_OK(stream->CopyOnDevice(x, z, 8));
  EXPECT_OK(stream->SetZero(y, 8));
  EXPECT_OK(stream->CopyToDevice(y, x, 0));
  EXPECT_OK(stream->CopyToHost(y, z, 7));
  EXPECT_OK(stream->Synchronize());
  ASSERT_EQ(sights.size(), 4u);
  EXPECT_GE(std::chrono::duration<double>(sights[1].time - begin).count(),
            1.008e-3 - kRounding);
  for (size_t i = 0; i < sights.size(); ++i) {
    const Sight& sight = sights[i];
    EXPECT_EQ(sight.begins, i % 2 == 0);
    EXPECT_EQ(sight.thread, thread);
    EXPECT_GE(sight.in_flight, 1);
    EXPECT_EQ(sight.copy.to, static_cast<void*>(y));
    EXPECT_EQ(sight.copy.from, static_cast<void*>(i < 2 ? x : z));
    EXPECT_EQ(sight.copy.bytes, i < 2 ? 8 : 7);
    EXPECT_EQ(sight.copy.direction,
              i < 2 ? Direction::kToDevice : Direction::kToHost);
    EXPECT_EQ(sight.first, (std::vector<int>{2, 1, 0, 3})[i]);
  }
}

// --- Errors. ---

absl::Status Error() { return absl::InternalError("as was asked for"); }

TEST_F(HostDeviceTest, ARefusedCallDoesNothing) {
  const auto pool = MakePool(1);
  const auto event = MakeEvent();
  const DeviceBuffer buffer = MakeBuffer(8);
  int64_t value = 1;
  const std::pair<Call, std::function<absl::Status()>> cases[] = {
      {Call::kAllocate, [&] { return device_->Allocate(1).status(); }},
      {Call::kPin, [&] { return device_->AllocatePinned(*pool, 4).status(); }},
      {Call::kCreateStream, [&] { return device_->CreateStream().status(); }},
      {Call::kWrapStream,
       [&] { return device_->WrapStream(a_->native()).status(); }},
      {Call::kCreateEvent, [&] { return device_->CreateEvent().status(); }},
      {Call::kCopyToDevice,
       [&] { return a_->CopyToDevice(buffer.data(), &value, 8); }},
      {Call::kCopyToHost,
       [&] { return a_->CopyToHost(&value, buffer.data(), 8); }},
      {Call::kCopyOnDevice,
       [&] { return a_->CopyOnDevice(&value, buffer.data(), 8); }},
      {Call::kSetZero, [&] { return a_->SetZero(buffer.data(), 8); }},
      {Call::kRun, [&] { return a_->Run({SumLeavesArgs{}}); }},
      {Call::kRecord, [&] { return a_->Record(*event); }},
      {Call::kStreamWait, [&] { return a_->Wait(*event); }},
  };
  // So that records and waits for them are work.
  EXPECT_OK(a_->Record(*event));
  EXPECT_OK(a_->Synchronize());
  for (const auto& [call, make] : cases) {
    SCOPED_TRACE(static_cast<int>(call));
    const int64_t before = device_->Calls(call);
    // The third and the fifth from here on.
    device_->RefuseCall(call, 2, Error());
    device_->RefuseCall(call, 4, absl::AbortedError("later"));
    EXPECT_OK(make());
    EXPECT_OK(make());
    EXPECT_OK(a_->Synchronize());
    const MemoryUse memory = device_->memory();
    const MemoryUse pinned = device_->pinned_memory();
    EXPECT_EQ(make(), Error());
    EXPECT_EQ(device_->WorkInFlight(), 0);
    EXPECT_EQ(device_->memory().allocations, memory.allocations);
    EXPECT_EQ(device_->pinned_memory().allocations, pinned.allocations);
    EXPECT_OK(make());
    EXPECT_EQ(make(), absl::AbortedError("later"));
    EXPECT_OK(make());
    EXPECT_EQ(device_->Calls(call), before + 6);
    EXPECT_OK(a_->Synchronize());
    EXPECT_OK(event->Wait());
  }
}

// All that an unusable device may say.
void ExpectUnusable(HostDevice& device, Stream& stream, Event& event,
                    const absl::Status& error) {
  const auto pool = MakePool(1);
  int64_t x = 1;
  int64_t y = 2;
  EXPECT_EQ(device.Allocate(1).status(), error);
  EXPECT_EQ(device.AllocatePinned(*pool, 4).status(), error);
  EXPECT_EQ(device.CreateStream().status(), error);
  EXPECT_EQ(device.WrapStream(nullptr).status(), error);
  EXPECT_EQ(device.WrapStream(stream.native()).status(), error);
  EXPECT_EQ(device.CreateEvent().status(), error);
  EXPECT_EQ(device.SecondsBetween(event, event).status(), error);
  EXPECT_EQ(event.Wait(), error);
  EXPECT_EQ(event.Done().status(), error);
  EXPECT_EQ(stream.CopyToDevice(&x, &y, 8), error);
  EXPECT_EQ(stream.CopyToHost(&x, &y, 8), error);
  EXPECT_EQ(stream.CopyOnDevice(&x, &y, 8), error);
  EXPECT_EQ(stream.CopyOnDevice(nullptr, &y, 8), error);
  EXPECT_EQ(stream.SetZero(&x, 8), error);
  EXPECT_EQ(stream.Run({ScaleArgs{}}), error);
  EXPECT_EQ(stream.Record(event), error);
  EXPECT_EQ(stream.Wait(event), error);
  EXPECT_EQ(stream.Synchronize(), error);
  EXPECT_EQ(x, 1);
  EXPECT_EQ(device.WorkInFlight(), 0);
}

TEST(HostDeviceFailureTest, ARefusedWaitMakesTheDeviceUnusable) {
  for (Call call : {Call::kSynchronize, Call::kEventWait}) {
    const auto device = MakeDevice({}, CallingKernel());
    const auto stream = Take(device->CreateStream());
    const auto event = Take(device->CreateEvent());
    device->RefuseCall(call, 1, Error());
    const auto wait = [&] {
      return call == Call::kSynchronize ? stream->Synchronize() : event->Wait();
    };
    EXPECT_OK(wait());
    EXPECT_OK(stream->Record(*event));
    EXPECT_EQ(wait(), Error());
    ExpectUnusable(*device, *stream, *event, Error());
  }
}

// The work of each call that may fail, on memory of its own.
struct FailingWork {
  Call call;
  std::function<absl::Status(Stream&, int64_t* to, const int64_t* from)> put;
};

std::vector<FailingWork> AllFailingWork() {
  return {
      {Call::kCopyToDevice,
       [](Stream& s, int64_t* to, const int64_t* from) {
         return s.CopyToDevice(to, from, 8);
       }},
      {Call::kCopyToHost,
       [](Stream& s, int64_t* to, const int64_t* from) {
         return s.CopyToHost(to, from, 8);
       }},
      {Call::kCopyOnDevice,
       [](Stream& s, int64_t* to, const int64_t* from) {
         return s.CopyOnDevice(to, from, 8);
       }},
      {Call::kSetZero,
       [](Stream& s, int64_t* to, const int64_t*) { return s.SetZero(to, 8); }},
      {Call::kRun,
       [](Stream& s, int64_t* to, const int64_t* from) {
         const auto* high = reinterpret_cast<const uint16_t*>(from);
         const auto* low = reinterpret_cast<const int16_t*>(from) + 2;
         return s.Run(
             {JoinRemainderArgs{2, high, low, reinterpret_cast<float*>(to)}});
       }},
  };
}

TEST(HostDeviceFailureTest, FailedWorkMakesTheDeviceUnusable) {
  for (const FailingWork& work : AllFailingWork()) {
    SCOPED_TRACE(static_cast<int>(work.call));
    Gate gate;
    const auto device = MakeDevice({}, CallingKernel());
    auto stream = Take(device->CreateStream());
    auto other = Take(device->CreateStream());
    auto event = Take(device->CreateEvent());
    auto buffer = Take(device->Allocate(100));
    Function never = [] { ADD_FAILURE() << "was run"; };
    const int64_t from = 0x0123456789abcdef;
    int64_t to = 1;
    // The second, beside the call of the gate.
    const bool is_run = work.call == Call::kRun;
    device->FailWork(work.call, is_run ? 2 : 1, Error());
    EXPECT_OK(work.put(*stream, &to, &from));
    EXPECT_OK(stream->Synchronize());
    EXPECT_NE(std::exchange(to, 1), 1);
    // It fails when its turn comes, not before.
    gate.Hold(*stream);
    EXPECT_OK(work.put(*stream, &to, &from));
    EXPECT_OK(stream->Record(*event));
    EXPECT_OK(stream->Run({CallOperation(never)}));
    EXPECT_OK(other->Wait(*event));
    EXPECT_OK(other->Run({CallOperation(never)}));
    EXPECT_FALSE(Take(event->Done()));
    EXPECT_EQ(device->Calls(work.call), is_run ? 5 : 2);
    gate.Release();
    EXPECT_EQ(event->Wait(), Error());
    EXPECT_EQ(to, 1);
    ExpectUnusable(*device, *stream, *event, Error());
    ExpectUnusable(*device, *other, *event, Error());
    // The first error stays.
    device->RefuseCall(Call::kSynchronize, 0, absl::AbortedError("second"));
    EXPECT_EQ(other->Synchronize(), Error());
    // All can go, in any order.
    buffer = DeviceBuffer();
    event.reset();
    stream.reset();
    EXPECT_EQ(device->memory().in_use, 0);
  }
}

TEST_F(HostDeviceTest, AnErrorIsReturnedOnceNothingRuns) {
  std::atomic<bool> begun{false};
  bool ended = false;
  Function slow = [&] {
    begun = true;
    // Until the other stream has failed, and longer than a wait would take.
    while (device_->WorkInFlight() > 1) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ended = true;
  };
  const auto event = MakeEvent();
  Gate& gate = Hold(*b_);
  int x = 1;
  device_->FailWork(Call::kSetZero, 0, Error());
  EXPECT_OK(a_->Run({CallOperation(slow)}));
  while (!begun) std::this_thread::yield();
  EXPECT_OK(b_->SetZero(&x, sizeof(x)));
  EXPECT_OK(b_->Record(*event));
  gate.Release();
  EXPECT_EQ(event->Wait(), Error());
  EXPECT_TRUE(ended);
}

TEST(HostDeviceFailureTest, AFailureEndsLongCopies) {
  HostDeviceOptions options;
  options.link_bytes_per_s = 1e-3;  // an hour for 4 bytes
  std::atomic<int> begun{0};
  std::atomic<int> ended{0};
  options.observer = [&](const HostDeviceCopy&, bool begins) {
    ++(begins ? begun : ended);
  };
  const auto device = MakeDevice(options, CallingKernel());
  const auto slow = Take(device->CreateStream());
  const auto stream = Take(device->CreateStream());
  int x = 1;
  int y = 2;
  EXPECT_OK(slow->CopyToDevice(&x, &y, sizeof(x)));
  EXPECT_OK(slow->CopyToDevice(&x, &y, sizeof(x)));
  while (begun == 0) std::this_thread::yield();
  device->FailWork(Call::kRun, 0, Error());
  EXPECT_OK(stream->Run({SumLeavesArgs{}}));
  EXPECT_EQ(slow->Synchronize(), Error());
  EXPECT_EQ(begun, 1);
  EXPECT_EQ(ended, 1);
}

TEST_F(HostDeviceTest, StreamsOfAFailedDeviceAreDestroyedFirst) {
  // One thread is in the middle of work.
  Gate& gate = Hold(*a_);
  gate.AwaitArrival();
  const auto event = MakeEvent();
  EXPECT_OK(a_->Record(*event));
  EXPECT_OK(b_->Wait(*event));
  device_->FailWork(Call::kRun, 0, Error());
  Function never = [] { ADD_FAILURE() << "was run"; };
  const auto c = Take(device_->CreateStream());
  EXPECT_OK(c->Run({CallOperation(never)}));
  while (device_->WorkInFlight() > 2) std::this_thread::yield();
  gate.Release();
  b_.reset();
  a_.reset();
  EXPECT_EQ(event->Wait(), Error());
}

// --- Allocations. ---

TEST_F(HostDeviceTest, SteadyWorkAllocatesNothing) {
  const DeviceBuffer buffer = MakeBuffer(64);
  float* const x = buffer.as<float>();
  std::vector<float> host(16);
  const auto up = MakeEvent();
  const auto down = MakeEvent();
  const auto wrapper = Take(device_->WrapStream(b_->native()));
  const auto round = [&] {
    Gate gate;
    gate.Hold(*a_);
    absl::Status status;
    // Records of an event while earlier ones of it are on streams.
    for (int i = 0; i < 100; ++i) {
      status.Update(a_->CopyToDevice(x, host.data(), 64));
      status.Update(a_->Record(*up));
      status.Update(b_->Wait(*up));
      status.Update(b_->Run(
          {AbsMaxArgs{8, x, x + 8, kF32}, CastArgs{4, x, x + 9, kF32, kBF16}}));
      status.Update(wrapper->CopyToHost(host.data(), x, 64));
      status.Update(b_->Record(*down));
      status.Update(a_->Wait(*down));
      status.Update(a_->SetZero(x, 64));
      status.Update(a_->CopyOnDevice(x, x + 8, 32));
    }
    status.Update(down->Done().status());
    gate.Release();
    status.Update(down->Wait());
    status.Update(a_->Synchronize());
    status.Update(b_->Synchronize());
    return status;
  };
  EXPECT_OK(round());
  for (int i = 0; i < 5; ++i) {
    const int64_t before = AllocationCount();
    const absl::Status status = round();
    EXPECT_EQ(AllocationCount(), before);
    EXPECT_OK(status);
  }
}

// --- All at once. ---

// A kernel whose `scale` copies.
void CopyElements(const ScaleArgs& args) {
  if (args.numel > 0) std::memcpy(args.out, args.in, args.numel * 4);
}
const Kernel& CopyingKernel() { return KernelWithScale<CopyElements>(); }

// Random copies between slots of memory on some streams, which wait for one
// another only as far as the slots demand it; and the same copies done in
// order.
class RandomCopies {
 public:
  // Of a device with CopyingKernel().
  RandomCopies(HostDevice& device, int streams, uint64_t seed) : random_(seed) {
    for (int i = 0; i < streams; ++i) {
      streams_.push_back(Take(device.CreateStream()));
    }
    for (uint64_t i = 0; i < kSlots; ++i) {
      Slot slot;
      slot.memory = Take(device.Allocate(kSlotBytes));
      slot.expected = RandomBytes(kSlotBytes, seed + i);
      std::memcpy(slot.memory.data(), slot.expected.data(), kSlotBytes);
      for (int stream = 0; stream < streams; ++stream) {
        slot.read.push_back(Take(device.CreateEvent()));
        slot.written.push_back(Take(device.CreateEvent()));
      }
      slots_.push_back(std::move(slot));
    }
  }

  // Puts `copies` of them on streams, or as many as go without an error.
  absl::Status Put(int copies) {
    absl::Status status;
    for (int i = 0; i < copies && status.ok(); ++i) status = PutOne();
    return status;
  }

  absl::Status Synchronize() {
    absl::Status status;
    for (const auto& stream : streams_) status.Update(stream->Synchronize());
    return status;
  }

  // Whether all slots are as they would be in order.
  bool AreRight() const {
    return std::all_of(slots_.begin(), slots_.end(), IsRight);
  }

 private:
  static constexpr uint64_t kSlots = 8;
  static constexpr int64_t kSlotNumel = 256;
  static constexpr int64_t kSlotBytes = kSlotNumel * 4;

  struct Slot {
    DeviceBuffer memory;
    std::vector<uint8_t> expected;
    // By stream: its last that did.
    std::vector<std::unique_ptr<Event>> read;
    std::vector<std::unique_ptr<Event>> written;
  };

  static bool IsRight(const Slot& slot) {
    return std::memcmp(slot.memory.data(), slot.expected.data(), kSlotBytes) ==
           0;
  }

  uint64_t Below(uint64_t bound) { return random_() % bound; }

  // Lets `stream` wait for those of all others.
  absl::Status WaitFor(size_t stream,
                       const std::vector<std::unique_ptr<Event>>& events) {
    absl::Status status;
    for (size_t other = 0; other < events.size(); ++other) {
      if (other == stream) continue;
      status.Update(streams_[stream]->Wait(*events[other]));
    }
    return status;
  }

  absl::Status PutOne() {
    const size_t stream = Below(streams_.size());
    const size_t target = Below(kSlots);
    Slot& to = slots_[target];
    Slot& from = slots_[(target + 1 + Below(kSlots - 1)) % kSlots];
    const int64_t offset = Below(kSlotNumel) * 4;
    const int64_t bytes = Below(kSlotNumel - offset / 4) * 4 + 4;
    absl::Status status = WaitFor(stream, to.written);
    status.Update(WaitFor(stream, to.read));
    status.Update(WaitFor(stream, from.written));
    status.Update(PutWork(*streams_[stream], to, from, offset, bytes));
    status.Update(streams_[stream]->Record(*to.written[stream]));
    status.Update(streams_[stream]->Record(*from.read[stream]));
    if (!status.ok() || Below(50) != 0) return status;
    // The host waits now and then.
    status = to.written[stream]->Wait();
    if (status.ok()) {
      EXPECT_TRUE(IsRight(to));
    }
    return status;
  }

  absl::Status PutWork(Stream& stream, Slot& to, const Slot& from,
                       int64_t offset, int64_t bytes) {
    uint8_t* const x = to.memory.as<uint8_t>() + offset;
    const uint8_t* const y = from.memory.as<uint8_t>() + offset;
    const int kind = static_cast<int>(Below(5));
    if (kind == 0) {
      std::memset(&to.expected[offset], 0, bytes);
      return stream.SetZero(x, bytes);
    }
    std::memcpy(&to.expected[offset], &from.expected[offset], bytes);
    switch (kind) {
      case 1:
        return stream.CopyToDevice(x, y, bytes);
      case 2:
        return stream.CopyToHost(x, y, bytes);
      case 3:
        return stream.CopyOnDevice(x, y, bytes);
      default:
        return stream.Run(
            {ScaleArgs{bytes / 4, reinterpret_cast<const float*>(y),
                       reinterpret_cast<float*>(x), 1}});
    }
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Slot> slots_;
};

int StressCopies() { return UnderSanitizer() || UnderEmulator() ? 500 : 5000; }

TEST(HostDeviceStressTest, EventsOrderWorkOfManyStreams) {
  for (bool link : {false, true}) {
    HostDeviceOptions options;
    if (link) options.link_bytes_per_s = 1e9;
    const auto device = MakeDevice(options, CopyingKernel());
    for (int streams : {1, 2, 4}) {
      RandomCopies copies(*device, streams, streams);
      EXPECT_OK(copies.Put(StressCopies()));
      EXPECT_OK(copies.Synchronize());
      EXPECT_TRUE(copies.AreRight()) << streams << " streams";
    }
    EXPECT_EQ(device->WorkInFlight(), 0);
    EXPECT_EQ(device->memory().in_use, 0);
  }
}

TEST(HostDeviceStressTest, ManyThreadsUseADevice) {
  const auto device = MakeDevice({}, CopyingKernel());
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&device, i] {
      RandomCopies copies(*device, 2, i);
      EXPECT_OK(copies.Put(StressCopies()));
      EXPECT_OK(copies.Synchronize());
      EXPECT_TRUE(copies.AreRight());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device->memory().in_use, 0);
}

TEST(HostDeviceStressTest, FailuresAtAnyTime) {
  const std::vector<FailingWork> kinds = AllFailingWork();
  std::mt19937_64 random(3);
  for (int round = 0; round < 40; ++round) {
    const auto device = MakeDevice({}, CopyingKernel());
    const Call call = kinds[round % kinds.size()].call;
    device->FailWork(call, random() % 30, Error());
    std::vector<std::unique_ptr<RandomCopies>> both;
    for (int i = 0; i < 2; ++i) {
      both.push_back(std::make_unique<RandomCopies>(*device, 2, 2 * round + i));
    }
    std::vector<std::thread> threads;
    for (std::unique_ptr<RandomCopies>& copies : both) {
      threads.emplace_back([&copies] {
        absl::Status status = copies->Put(300);
        if (status.ok()) status = copies->Synchronize();
        EXPECT_TRUE(status.ok() || status == Error()) << status;
        // All goes, whatever the other thread does.
        copies.reset();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(device->CreateEvent().status(), Error());
    EXPECT_EQ(device->WorkInFlight(), 0);
    EXPECT_EQ(device->memory().in_use, 0);
  }
}

}  // namespace
}  // namespace onepass

#include "dispatch/device.h"

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"

namespace onepass {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

static_assert(!std::is_copy_constructible_v<DeviceBuffer>);
static_assert(!std::is_copy_assignable_v<DeviceBuffer>);
static_assert(!std::is_copy_constructible_v<PinnedBuffer>);
static_assert(!std::is_copy_assignable_v<PinnedBuffer>);

class FakeEvent final : public Event {
 public:
  explicit FakeEvent(const Device& device) : Event(device) {}

  absl::Status Wait() override { return absl::OkStatus(); }
  absl::StatusOr<bool> Done() override { return true; }
};

// Memory only; says what was called, in order.
class FakeDevice final : public Device {
 public:
  explicit FakeDevice(std::string name = "fake") : name_(std::move(name)) {}

  absl::string_view name() const override { return name_; }
  bool host_accessible() const override { return false; }
  DTypeSet gradient_types() const override { return {DType::kFloat16}; }
  DTypeSet moment_types() const override { return {DType::kBFloat16}; }
  DTypeSet copy_types() const override { return {DType::kFloat16}; }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(
      absl::string_view) override {
    return absl::UnimplementedError("streams");
  }
  absl::StatusOr<std::unique_ptr<Stream>> WrapStream(void*) override {
    return absl::UnimplementedError("streams");
  }
  absl::StatusOr<std::unique_ptr<Event>> CreateEvent() override {
    return std::make_unique<FakeEvent>(*this);
  }
  absl::StatusOr<double> SecondsBetween(const Event&, const Event&) override {
    return 0;
  }

  void Refuse(absl::Status error) { refusal_ = std::move(error); }
  std::vector<std::string> TakeCalls() { return std::exchange(calls_, {}); }

 private:
  absl::StatusOr<void*> AllocateBytes(int64_t bytes) override {
    calls_.push_back("allocate " + std::to_string(bytes));
    if (!refusal_.ok()) return refusal_;
    return std::malloc(bytes);
  }
  void FreeBytes(void* data, int64_t bytes) override {
    calls_.push_back("free " + std::to_string(bytes));
    std::free(data);
  }
  absl::Status Pin(void* data, int64_t bytes) override {
    calls_.push_back("pin " + std::to_string(bytes));
    pinned_ = data;
    return refusal_;
  }
  void Unpin(void* data, int64_t bytes) override {
    EXPECT_EQ(data, pinned_);
    // It is still there.
    *static_cast<volatile char*>(data) = 1;
    calls_.push_back("unpin " + std::to_string(bytes));
  }

  const std::string name_;
  absl::Status refusal_;
  void* pinned_ = nullptr;
  std::vector<std::string> calls_;
};

void ExpectUse(const MemoryUse& use, int64_t in_use, int64_t peak,
               int64_t allocations) {
  EXPECT_EQ(use.in_use, in_use);
  EXPECT_EQ(use.peak, peak);
  EXPECT_EQ(use.allocations, allocations);
}

DeviceBuffer MakeBuffer(Device& device, int64_t bytes) {
  absl::StatusOr<DeviceBuffer> buffer = device.Allocate(bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

PinnedBuffer MakePinned(Device& device, ThreadPool& pool, int64_t bytes) {
  absl::StatusOr<PinnedBuffer> buffer = device.AllocatePinned(pool, bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

// --- Device memory. ---

TEST(DeviceBufferTest, IsFreedOnceAndCounted) {
  FakeDevice device;
  {
    const DeviceBuffer a = MakeBuffer(device, 100);
    EXPECT_NE(a.data(), nullptr);
    EXPECT_EQ(a.as<float>(), a.data());
    EXPECT_EQ(a.bytes(), 100);
    ExpectUse(device.memory(), 100, 100, 1);
    MakeBuffer(device, 1000);
    ExpectUse(device.memory(), 100, 1100, 2);
    const DeviceBuffer b = MakeBuffer(device, 10);
    ExpectUse(device.memory(), 110, 1100, 3);
    device.ResetPeaks();
    ExpectUse(device.memory(), 110, 110, 3);
    device.TakeCalls();
  }
  ExpectUse(device.memory(), 0, 110, 3);
  EXPECT_THAT(device.TakeCalls(), ElementsAre("free 10", "free 100"));
  ExpectUse(device.pinned_memory(), 0, 0, 0);
}

TEST(DeviceBufferTest, NothingIsNull) {
  FakeDevice device;
  for (const DeviceBuffer& buffer : {DeviceBuffer(), MakeBuffer(device, 0)}) {
    EXPECT_EQ(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), 0);
  }
  EXPECT_THAT(device.TakeCalls(), IsEmpty());
  ExpectUse(device.memory(), 0, 0, 0);
}

TEST(DeviceBufferTest, MovesLeaveTheSourceEmpty) {
  FakeDevice device;
  DeviceBuffer a = MakeBuffer(device, 100);
  void* const data = a.data();
  DeviceBuffer b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a move leaves is specified
  EXPECT_EQ(a.bytes(), 0);
  DeviceBuffer c = MakeBuffer(device, 7);
  device.TakeCalls();
  c = std::move(b);
  EXPECT_THAT(device.TakeCalls(), ElementsAre("free 7"));
  EXPECT_EQ(b.data(), nullptr);  // NOLINT
  EXPECT_EQ(c.data(), data);
  DeviceBuffer& itself = c;
  c = std::move(itself);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.bytes(), 100);
  EXPECT_THAT(device.TakeCalls(), IsEmpty());
  ExpectUse(device.memory(), 100, 107, 2);
  c = DeviceBuffer();
  EXPECT_THAT(device.TakeCalls(), ElementsAre("free 100"));
  ExpectUse(device.memory(), 0, 107, 2);
}

TEST(DeviceBufferTest, WhatIsRefusedIsNotCounted) {
  FakeDevice device;
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  for (int64_t bytes : {int64_t{-1}, kLeast}) {
    const absl::Status status = device.Allocate(bytes).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(), "allocate: bytes is " + std::to_string(bytes) +
                                    ", expected at least 0");
  }
  EXPECT_THAT(device.TakeCalls(), IsEmpty());
  device.Refuse(absl::ResourceExhaustedError("no more"));
  EXPECT_EQ(device.Allocate(10).status(),
            absl::ResourceExhaustedError("no more"));
  EXPECT_THAT(device.TakeCalls(), ElementsAre("allocate 10"));
  ExpectUse(device.memory(), 0, 0, 0);
}

TEST(PinnedBufferTest, IsPinnedZerosAndCounted) {
  FakeDevice device;
  const auto pool = MakePool(2);
  {
    const PinnedBuffer buffer = MakePinned(device, *pool, 10000);
    EXPECT_EQ(buffer.bytes(), 10000);
    EXPECT_EQ(buffer.as<char>(), buffer.data());
    EXPECT_EQ(std::vector<char>(10000),
              std::vector<char>(buffer.as<char>(), buffer.as<char>() + 10000));
    ExpectUse(device.pinned_memory(), 10000, 10000, 1);
    EXPECT_THAT(device.TakeCalls(), ElementsAre("pin 10000"));
    device.ResetPeaks();
  }
  EXPECT_THAT(device.TakeCalls(), ElementsAre("unpin 10000"));
  ExpectUse(device.pinned_memory(), 0, 10000, 1);
  device.ResetPeaks();
  ExpectUse(device.pinned_memory(), 0, 0, 1);
  ExpectUse(device.memory(), 0, 0, 0);
}

TEST(PinnedBufferTest, NothingIsNull) {
  FakeDevice device;
  const auto pool = MakePool(1);
  for (const PinnedBuffer& buffer :
       {PinnedBuffer(), MakePinned(device, *pool, 0)}) {
    EXPECT_EQ(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), 0);
  }
  EXPECT_THAT(device.TakeCalls(), IsEmpty());
  ExpectUse(device.pinned_memory(), 0, 0, 0);
}

TEST(PinnedBufferTest, MovesLeaveTheSourceEmpty) {
  FakeDevice device;
  const auto pool = MakePool(1);
  PinnedBuffer a = MakePinned(device, *pool, 100);
  void* const data = a.data();
  PinnedBuffer b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a move leaves is specified
  PinnedBuffer c;
  c = std::move(b);
  EXPECT_EQ(b.data(), nullptr);  // NOLINT
  EXPECT_EQ(c.data(), data);
  PinnedBuffer& itself = c;
  c = std::move(itself);
  EXPECT_EQ(c.data(), data);
  device.TakeCalls();
  c = PinnedBuffer();
  EXPECT_THAT(device.TakeCalls(), ElementsAre("unpin 100"));
  ExpectUse(device.pinned_memory(), 0, 100, 1);
}

TEST(PinnedBufferTest, WhatIsRefusedIsNotCounted) {
  FakeDevice device;
  const auto pool = MakePool(1);
  EXPECT_TRUE(
      absl::IsInvalidArgument(device.AllocatePinned(*pool, -1).status()));
  HostBufferOptions options;
  options.element_bytes = 3;
  const absl::Status status =
      device.AllocatePinned(*pool, 10, options).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes is 10"));
  EXPECT_THAT(device.TakeCalls(), IsEmpty());
  device.Refuse(absl::ResourceExhaustedError("not pinned"));
  EXPECT_EQ(device.AllocatePinned(*pool, 100).status(),
            absl::ResourceExhaustedError("not pinned"));
  EXPECT_THAT(device.TakeCalls(), ElementsAre("pin 100"));
  ExpectUse(device.pinned_memory(), 0, 0, 0);
}

// --- Checks of arguments. ---

std::string Message(const absl::Status& status) {
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(DeviceCheckTest, Copies) {
  char memory[8] = {};
  EXPECT_TRUE(CheckCopy("copy", memory, memory + 4, 4).ok());
  EXPECT_TRUE(CheckCopy("copy", memory + 4, memory, 4).ok());
  EXPECT_TRUE(CheckCopy("copy", nullptr, nullptr, 0).ok());
  EXPECT_TRUE(CheckCopy("copy", memory, memory, 0).ok());
  EXPECT_EQ(Message(CheckCopy("copy", memory, memory + 4, -1)),
            "copy: bytes is -1, expected at least 0");
  EXPECT_EQ(Message(CheckCopy("copy", nullptr, memory, 1)),
            "copy: to is null, bytes is 1");
  EXPECT_EQ(Message(CheckCopy("copy", memory, nullptr, 1)),
            "copy: from is null, bytes is 1");
  EXPECT_EQ(Message(CheckCopy("copy", memory, memory + 4, 5)),
            "copy: to overlaps from, bytes is 5");
  EXPECT_EQ(Message(CheckCopy("copy", memory + 4, memory, 5)),
            "copy: to overlaps from, bytes is 5");
}

TEST(DeviceCheckTest, SetZero) {
  char memory[8] = {};
  EXPECT_TRUE(CheckSetZero(memory, 8).ok());
  EXPECT_TRUE(CheckSetZero(nullptr, 0).ok());
  EXPECT_EQ(Message(CheckSetZero(memory, -3)),
            "set_zero: bytes is -3, expected at least 0");
  EXPECT_EQ(Message(CheckSetZero(nullptr, 8)),
            "set_zero: device is null, bytes is 8");
}

TEST(DeviceCheckTest, EventsOfThisDevice) {
  FakeDevice device;
  FakeDevice other("other");
  const FakeEvent event(other);
  EXPECT_EQ(&event.device(), &other);
  EXPECT_TRUE(CheckEvent("record", event, other).ok());
  EXPECT_EQ(Message(CheckEvent("record", event, device)),
            "record: the event is of another device (other), expected one of "
            "this (fake)");
}

TEST(DeviceCheckTest, EachOperation) {
  const FakeDevice device;
  EXPECT_TRUE(CheckOperations(device, {}).ok());
  float x = 0;
  const ScaleArgs good = {1, &x, &x, 2};
  // One of each kind, behind one that is right.
  const std::pair<DeviceOperation, std::string> cases[] = {
      {AdamStepArgs{}, "adam_step: grad_type is fp32, expected fp16"},
      {AccumulateArgs{-1}, "accumulate: numel is -1"},
      {ScaleArgs{-1}, "scale: numel is -1"},
      {CastArgs{}, "cast: from fp32 to fp32, expected from or to fp32"},
      {SquaredNormArgs{1, &x}, "squared_norm: leaf_sums is null"},
      {AbsMaxArgs{1, &x}, "absmax: leaf_absmax is null"},
      {SplitRemainderArgs{1}, "split_remainder: master is null"},
      {JoinRemainderArgs{1}, "join_remainder: param is null"},
      {QuantizeArgs{1, &x}, "quantize: codes is null"},
      {DequantizeArgs{1, &x, &x}, "dequantize: out is null"},
      {SumLeavesArgs{1}, "sum_leaves: leaf_sums is null"},
      {AdvanceStepArgs{}, "advance_step: step is null"},
      {DeferredAdamStepArgs{}, "adam_step: grad_type is fp32, expected fp16"},
  };
  static_assert(std::size(cases) == std::variant_size_v<DeviceOperation>);
  for (const auto& [operation, problem] : cases) {
    EXPECT_THAT(Message(CheckOperations(device, {good, operation})),
                HasSubstr(problem));
  }
  EXPECT_TRUE(CheckOperations(device, {good, good}).ok());
}

TEST(DeviceCheckTest, AdamStepTakesTheTypesOfTheDevice) {
  const FakeDevice device;
  AdamStepArgs args;
  args.grad_type = DType::kFloat16;
  args.exp_avg_type = args.exp_avg_sq_type = DType::kBFloat16;
  args.copy_type = DType::kFloat16;
  uint16_t copy;
  args.copy = &copy;
  EXPECT_TRUE(CheckOperations(device, {args}).ok());
  AdamStepArgs bad = args;
  bad.exp_avg_sq_type = DType::kFloat32;
  EXPECT_EQ(Message(CheckOperations(device, {bad})),
            "adam_step: exp_avg_sq_type is fp32, expected bf16");
  bad = args;
  bad.copy_type = DType::kBFloat16;
  EXPECT_EQ(Message(CheckOperations(device, {bad})),
            "adam_step: copy_type is bf16, expected fp16");
}

}  // namespace
}  // namespace onepass

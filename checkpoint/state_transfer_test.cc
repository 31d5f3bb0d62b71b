// Conversion of state on its way out: values, and the device memory that it
// takes in each granularity.

#include "checkpoint/state_transfer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "checkpoint/export_state.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state_dict.h"
#include "checkpoint/state_files.h"
#include "checkpoint/state_sink.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/runnable_kernels.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr int64_t kMi = int64_t{1} << 20;

// Keeps a digest of what comes, and no more than a piece of it.
class DigestSink : public StateSink {
 public:
  explicit DigestSink(int64_t piece) : buffer_(piece) {}

  const std::vector<uint64_t>& digests() const { return digests_; }

  absl::Status Open(const std::vector<StoredArray>& arrays) override {
    digests_.resize(arrays.size());
    return absl::OkStatus();
  }
  absl::StatusOr<absl::Span<char>> Next(int, int64_t bytes) override {
    return absl::MakeSpan(buffer_).subspan(0, static_cast<size_t>(bytes));
  }
  absl::Status Written(int array, int64_t bytes) override {
    // Of pieces of one size.
    digests_[array] = 31 * digests_[array] +
                      Checksum({buffer_.data(), static_cast<size_t>(bytes)});
    return absl::OkStatus();
  }
  absl::Status Close() override { return absl::OkStatus(); }

 private:
  std::vector<char> buffer_;
  std::vector<uint64_t> digests_;
};

class StateTransferTest : public testing::Test {
 protected:
  StateTransferTest()
      : kernel_(*RunnableKernels().front()), pool_(MakePool(2)) {
    auto device = HostDevice::Create(kernel_, {});
    EXPECT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  Runtime runtime() { return {kernel_, *device_, *pool_}; }

  const Kernel& kernel_;
  const std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<HostDevice> device_;
};

StateView ViewOf(const std::string& name, StateType type, int64_t numel,
                 const void* data, bool on_device,
                 const float* scales = nullptr) {
  StateView view;
  view.name = name;
  view.type = type;
  view.shape = {numel};
  view.box = {{0}, {numel}};
  view.offset = 0;
  view.numel = numel;
  view.on_device = on_device;
  view.data = data;
  view.scales = scales;
  return view;
}

// The published table: peaks of device memory of exports of two bf16 moments as
// fp32, everything converted first, one state at a time, in chunks.
TEST_F(StateTransferTest, ThePublishedTable) {
  struct Row {
    int tensors;
    int64_t numel;
    int64_t all;
    int64_t tensor;
  };
  // The same over smaller tensors where time is short.
  const int64_t unit = LongTestStride() == 1 ? kMi : 16 << 10;
  const Row rows[] = {{1, unit, 8 * unit, 4 * unit},
                      {8, unit, 64 * unit, 4 * unit},
                      {32, unit, 256 * unit, 4 * unit},
                      {8, 4 * unit, 256 * unit, 16 * unit}};
  for (const Row& row : rows) {
    SCOPED_TRACE(absl::StrCat(row.tensors, " x ", row.numel));
    absl::StatusOr<DeviceBuffer> data =
        device_->Allocate(row.tensors * 2 * row.numel * 2);
    ASSERT_TRUE(data.ok()) << data.status();
    uint32_t bits = 1;
    for (int64_t i = 0; i < data->bytes() / 2; ++i) {
      bits = bits * 1664525 + 1013904223;
      data->as<uint16_t>()[i] = static_cast<uint16_t>(bits >> 17);
    }
    std::vector<StateView> views;
    for (int i = 0; i < 2 * row.tensors; ++i) {
      views.push_back(
          ViewOf(absl::StrCat("state.", i / 2,
                              i % 2 == 0 ? ".exp_avg" : ".exp_avg_sq"),
                 StateType::kBFloat16, row.numel,
                 data->as<uint16_t>() + i * row.numel, true));
    }
    const auto tensors = StateTensors::Create(views, ExportForm::kUnscaled);
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    const int64_t before = device_->memory().in_use;
    std::vector<uint64_t> digests;
    const auto peak = [&](ExportGranularity granularity) {
      StateTransferOptions options;
      options.granularity = granularity;
      options.scratch_bytes = unit;
      device_->ResetPeaks();
      DigestSink sink(4 * row.numel);
      {
        auto transfer = StateTransfer::Create(runtime(), *tensors, options);
        EXPECT_TRUE(transfer.ok()) << transfer.status();
        const absl::Status status = ExportState(*tensors, *transfer, sink);
        EXPECT_TRUE(status.ok()) << status;
      }
      EXPECT_EQ(device_->memory().in_use, before);
      if (digests.empty()) digests = sink.digests();
      EXPECT_EQ(sink.digests(), digests);
      return device_->memory().peak - before;
    };
    EXPECT_EQ(peak(ExportGranularity::kAll), row.all);
    EXPECT_EQ(peak(ExportGranularity::kTensor), row.tensor);
    EXPECT_EQ(peak(ExportGranularity::kChunk), unit);
  }
}

// Values of every type, on the host and on the device, whole and in pieces that
// begin inside of leaves.
TEST_F(StateTransferTest, ValuesAreThoseOfTheOperations) {
  constexpr int64_t kNumel = 3 * kLeafNumel + 77;
  std::vector<float> values(kNumel);
  for (int64_t i = 0; i < kNumel; ++i) {
    values[i] = std::ldexp(static_cast<float>(i % 251 - 125), i % 13 - 6);
    // A leaf of zeros, and one whose scale would have no inverse.
    if (i / kLeafNumel == 1) values[i] = 0;
    if (i / kLeafNumel == 2) values[i] = std::ldexp(values[i], -146);
  }
  const struct {
    StateType type;
    DType dtype;
  } kTypes[] = {{StateType::kFloat32, DType::kFloat32},
                {StateType::kBFloat16, DType::kBFloat16},
                {StateType::kFloat16, DType::kFloat16},
                {StateType::kScaledFloat16, DType::kFloat16},
                {StateType::kScaledFloat8E4M3, DType::kFloat8E4M3}};
  for (const auto& [type, dtype] : kTypes) {
    std::vector<char> codes(kNumel * ByteSize(type));
    std::vector<float> scales(LeafCount(kNumel));
    std::vector<float> expected(kNumel);
    if (IsScaled(type)) {
      ASSERT_TRUE(
          Quantize(kernel_, *pool_,
                   {kNumel, values.data(), codes.data(), scales.data(), dtype})
              .ok());
      ASSERT_TRUE(Dequantize(kernel_, *pool_,
                             {kNumel, codes.data(), scales.data(),
                              expected.data(), dtype})
                      .ok());
    } else if (type == StateType::kFloat32) {
      expected = values;
      std::memcpy(codes.data(), values.data(), codes.size());
    } else {
      ASSERT_TRUE(
          Cast(kernel_, *pool_,
               {kNumel, values.data(), codes.data(), DType::kFloat32, dtype})
              .ok());
      ASSERT_TRUE(
          Cast(kernel_, *pool_,
               {kNumel, codes.data(), expected.data(), dtype, DType::kFloat32})
              .ok());
    }
    for (const bool on_device : {false, true}) {
      SCOPED_TRACE(absl::StrCat(Name(type), on_device ? ", device" : ""));
      // Memory of this device is the host's.
      const std::vector<StateView> views = {
          ViewOf("state.w.exp_avg", type, kNumel, codes.data(), on_device,
                 IsScaled(type) ? scales.data() : nullptr)};
      const auto tensors = StateTensors::Create(views, ExportForm::kUnscaled);
      ASSERT_TRUE(tensors.ok()) << tensors.status();
      StateTransferOptions options;
      options.scratch_bytes = 4 * kLeafNumel;
      auto transfer = StateTransfer::Create(runtime(), *tensors, options);
      ASSERT_TRUE(transfer.ok()) << transfer.status();
      for (const int64_t piece : {kNumel, int64_t{1000}, kLeafNumel + 1}) {
        std::vector<float> read(kNumel);
        for (int64_t first = 0; first < kNumel; first += piece) {
          ASSERT_TRUE(transfer
                          ->Read(tensors->arrays()[0], first,
                                 std::min(piece, kNumel - first),
                                 reinterpret_cast<char*>(&read[first]))
                          .ok());
        }
        EXPECT_EQ(read, expected);
        EXPECT_TRUE(std::all_of(read.begin(), read.end(),
                                [](float x) { return std::isfinite(x); }));
      }
    }
  }
}

TEST_F(StateTransferTest, RemaindersAreRebuiltOnRequest) {
  constexpr int64_t kNumel = kLeafNumel + 5;
  std::vector<float> masters(kNumel);
  for (int64_t i = 0; i < kNumel; ++i) {
    masters[i] = 0.1f * static_cast<float>(i - 2000);
  }
  std::vector<uint16_t> param(kNumel);
  std::vector<int16_t> remainder(kNumel);
  ASSERT_TRUE(
      SplitRemainder(kernel_, *pool_,
                     {kNumel, masters.data(), param.data(), remainder.data()})
          .ok());
  for (const bool on_device : {false, true}) {
    const std::vector<StateView> views = {
        ViewOf("state.w.param", StateType::kBFloat16, kNumel, param.data(),
               on_device),
        ViewOf("state.w.master_param", StateType::kInt16Remainder, kNumel,
               remainder.data(), on_device)};
    for (const ExportForm form :
         {ExportForm::kExact, ExportForm::kUnscaled, ExportForm::kRebuilt}) {
      SCOPED_TRACE(Name(form));
      const auto tensors = StateTensors::Create(views, form);
      ASSERT_TRUE(tensors.ok()) << tensors.status();
      auto transfer = StateTransfer::Create(runtime(), *tensors, {});
      ASSERT_TRUE(transfer.ok()) << transfer.status();
      StateDict dict;
      ASSERT_TRUE(ExportState(*tensors, *transfer, dict).ok());
      const StateDict::Tensor& saved =
          dict.tensors().at("state.w.master_param");
      const bool rebuilt = form == ExportForm::kRebuilt;
      EXPECT_EQ(saved.type,
                rebuilt ? SafetensorsType::kF32 : SafetensorsType::kI16);
      const void* const expected =
          rebuilt ? static_cast<const void*>(masters.data())
                  : static_cast<const void*>(remainder.data());
      EXPECT_EQ(std::memcmp(saved.bytes.data(), expected, saved.bytes.size()),
                0);
    }
    const std::vector<StateView> alone = {views[1]};
    EXPECT_TRUE(absl::StrContains(
        StateTensors::Create(alone, ExportForm::kRebuilt).status().message(),
        "expected \"state.w.param\""));
  }
}

TEST_F(StateTransferTest, AScaleThatIsNotFiniteIsRefusedByName) {
  std::vector<uint16_t> codes(2 * kLeafNumel);
  std::vector<float> scales = {1, std::numeric_limits<float>::infinity()};
  const std::vector<StateView> views = {
      ViewOf("state.w.exp_avg", StateType::kScaledFloat16, 2 * kLeafNumel,
             codes.data(), false, scales.data())};
  for (const ExportForm form : {ExportForm::kExact, ExportForm::kUnscaled}) {
    const auto tensors = StateTensors::Create(views, form);
    ASSERT_TRUE(tensors.ok());
    auto transfer = StateTransfer::Create(runtime(), *tensors, {});
    ASSERT_TRUE(transfer.ok());
    StateDict dict;
    const absl::Status status = ExportState(*tensors, *transfer, dict);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "\"state.w.exp_avg\" has the scale inf at "
                                  "leaf 1"))
        << status;
  }
}

TEST_F(StateTransferTest, ViewsThatMakeNoSenseAreNamed) {
  std::vector<float> data(3 * kLeafNumel);
  const auto error = [&](const std::vector<StateView>& views) {
    const absl::Status status =
        StateTensors::Create(views, ExportForm::kExact).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "state.w.exp_avg"))
        << status;
    return std::string(status.message());
  };
  const StateView good =
      ViewOf("state.w.exp_avg", StateType::kFloat32, 100, data.data(), false);
  const auto with = [&](auto change) {
    StateView view = good;
    change(view);
    return std::vector<StateView>{view};
  };
  const auto has = [](const std::string& message, const char* part) {
    EXPECT_TRUE(absl::StrContains(message, part)) << message;
  };
  has(error(with([](StateView& v) { v.data = nullptr; })), "without data");
  has(error(with([](StateView& v) { v.numel = 99; })), "views of 99");
  has(error(with([](StateView& v) { v.numel = 101; })), "a view of 101");
  has(error(with([](StateView& v) { v.offset = 1; })), "from 1 on");
  has(error(with([](StateView& v) { v.box.offset = {1}; })),
      "box of offset [1]");
  has(error(with([](StateView& v) { v.shape = {7, 9}; })), "shape [7, 9]");
  has(error(with([](StateView& v) { v.type = StateType::kScaledFloat16; })),
      "without data or scales");
  has(error({good, good}), "a view of 100");
  StateView other = good;
  other.name = "state.v.exp_avg";
  has(error({good, other, good}), "twice");
  StateView first = good;
  first.numel = 50;
  StateView second = good;
  second.offset = 50;
  second.numel = 50;
  has(error({first, second}), "cut at 50");
  std::vector<StateView> cut = with([](StateView& v) {
    v.shape = {200};
    v.type = StateType::kScaledFloat16;
  });
  cut[0].scales = data.data();
  has(error(cut), "cut at multiples");
}

}  // namespace
}  // namespace onepass

// What ShardOptimizer does when a call of its device fails, whichever: it is
// unusable, says why, and nothing is in flight.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "offload/shard_optimizer.h"
#include "offload/shard_optimizer_rig.h"
#include "offload/step_trace.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using Call = HostDeviceCall;
using Kind = TestGradient::Kind;

constexpr int kSplitShard = 1;

// --- Faults. ---

// The call after `skip` further ones of its kind fails: at once, or when its
// work is done.
struct Fault {
  Call call;
  const char* name;
  bool of_work;
};

constexpr Fault kFaults[] = {
    {Call::kAllocate, "allocate", false},
    {Call::kPin, "pin", false},
    {Call::kCreateStream, "create stream", false},
    {Call::kCreateEvent, "create event", false},
    {Call::kCopyToDevice, "copy to device", false},
    {Call::kCopyToDevice, "work of copy to device", true},
    {Call::kCopyToHost, "copy to host", false},
    {Call::kCopyToHost, "work of copy to host", true},
    {Call::kCopyOnDevice, "copy on device", false},
    {Call::kCopyOnDevice, "work of copy on device", true},
    {Call::kSetZero, "set zero", false},
    {Call::kSetZero, "work of set zero", true},
    {Call::kRun, "run", false},
    {Call::kRun, "work of run", true},
    {Call::kRecord, "record", false},
    {Call::kStreamWait, "wait of a stream", false},
    {Call::kEventWait, "wait for an event", false},
    {Call::kSynchronize, "synchronize", false},
};

constexpr char kInjected[] = "injected by the test";

absl::Status Injected() { return absl::UnavailableError(kInjected); }

// Calls try(skip, reached) for one call of the kind after the other, until one
// is not reached any more. Returns how many were.
template <typename Try>
int64_t ForEachCall(const Fault& fault, const Try& attempt) {
  // Some of them where others try all.
  const int64_t stride = LongTestStride() == 1 ? 1 : 3;
  for (int64_t skip = 0;; skip += stride) {
    SCOPED_TRACE(testing::Message() << fault.name << " after " << skip);
    if (!attempt(skip) || testing::Test::HasFatalFailure()) return skip;
  }
}

void Inject(HostDevice& device, const Fault& fault, int64_t skip) {
  if (fault.of_work) {
    device.FailWork(fault.call, skip, Injected());
  } else {
    device.RefuseCall(fault.call, skip, Injected());
  }
}

void ExpectInjected(const absl::Status& status) {
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(kInjected));
}

// Every call says why the optimizer is unusable.
void ExpectUnusable(Rig& rig) {
  ShardOptimizer& optimizer = rig.optimizer();
  const absl::Status why = optimizer.status();
  ASSERT_FALSE(why.ok());
  std::vector<float> values(1);
  StepTrace trace;
  const std::string name = Rig::ShardName(0);
  const absl::Status results[] = {
      optimizer.AddGradient(0, nullptr, rig.stream()).status(),
      optimizer.AddGradient(-1, nullptr, rig.stream()).status(),
      optimizer.DropGradients(),
      optimizer.LocalNorm().status(),
      optimizer.Step({}).status(),
      optimizer.SetLossScaleState(optimizer.loss_scale_state()),
      optimizer.SetGroupOptions(0, AdamOptions()),
      optimizer.SetStep(0, 1),
      optimizer.GetState(name, StateKind::kMaster, absl::MakeSpan(values)),
      optimizer.SetState(name, StateKind::kMaster, values),
      optimizer.LeaseState().status(),
      optimizer.SetTrace(&trace),
      optimizer.SetTrace(nullptr)};
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), why.code());
    EXPECT_EQ(status.message(),
              absl::StrCat("the optimizer is unusable: ", why.message()));
  }
  EXPECT_EQ(optimizer.status(), why);
}

// --- A step. ---

// With every kind of call in a step: shards on the CPU, one cut, others on the
// device; gradients missing and null.
RigConfig SmallConfig() {
  RigConfig config;
  config.numels = {100, 2 * kLeafNumel, 33, kLeafNumel + 5, 700};
  config.options.cpu_ratio = 0.35;
  config.options.piece_numel = kLeafNumel;
  // So slow that what is left behind is found.
  config.device.link_bytes_per_s = 10e6;
  return config;
}

TestGradient SomeGradients(int shard, int64_t numel, int64_t step,
                           int64_t micro_batch) {
  if (step == 2 && shard == 2) return {Kind::kMissing, {}};
  if (step == 2 && (shard == 4 || (shard == 3 && micro_batch == 1))) {
    return {Kind::kNull, {}};
  }
  return AllGradients(shard, numel, step, micro_batch);
}

class FailureTest : public testing::Test {
 protected:
  // A second step with the fault in it. False where the step did not come to
  // that call, and so has what it has to have.
  bool TryStep(const RigConfig& config, bool traced, const Fault& fault,
               int64_t skip, const Snapshot& expected) {
    StepTrace trace;
    Rig rig(config);
    const int64_t held = rig.device().memory().in_use;
    EXPECT_TRUE(rig.Create().ok());
    if (traced) {
      EXPECT_TRUE(rig.optimizer().SetTrace(&trace).ok());
    }
    EXPECT_TRUE(rig.Step(1, SomeGradients).ok());
    rig.Fill(2, SomeGradients);
    const int64_t before = rig.device().Calls(fault.call);
    Inject(rig.device(), fault, skip);
    absl::Status status = rig.Add();
    if (status.ok()) status = rig.Finish().status();
    if (rig.device().Calls(fault.call) - before <= skip) {
      EXPECT_TRUE(status.ok()) << status;
      // Without calls that the fault may wait for.
      for (size_t i = 0; i < config.numels.size(); ++i) {
        EXPECT_TRUE(rig.Weights(static_cast<int>(i)) == expected.weights[i]);
      }
      return false;
    }
    // Records of the optimizer on the stream of the gradients are not its own.
    rig.stream().Synchronize().IgnoreError();
    EXPECT_EQ(rig.device().WorkInFlight(), 0);
    ExpectInjected(status);
    EXPECT_EQ(rig.optimizer().status(), status);
    ExpectUnusable(rig);
    rig.Destroy();
    EXPECT_EQ(rig.device().memory().in_use, held);
    EXPECT_EQ(rig.device().pinned_memory().in_use, 0);
    return true;
  }

  void TryAllCallsOfAStep(const RigConfig& config, bool traced) {
    Reference reference(config);
    for (int64_t step = 1; step <= 2; ++step) {
      reference.Step(step, SomeGradients);
    }
    const Snapshot expected = reference.Take();
    for (const Fault& fault : kFaults) {
      const int64_t calls = ForEachCall(fault, [&](int64_t skip) {
        return TryStep(config, traced, fault, skip, expected);
      });
      switch (fault.call) {
        case Call::kAllocate:
        case Call::kPin:
        case Call::kCreateStream:
        case Call::kSynchronize:
          EXPECT_EQ(calls, 0) << fault.name;
          break;
        case Call::kCreateEvent:
          EXPECT_EQ(calls > 0, traced);
          break;
        case Call::kCopyOnDevice:
          // Gradients of one micro-batch, or weights in fp32.
          EXPECT_EQ(calls > 0,
                    config.options.micro_batches == 1 ||
                        config.options.weights_type == DType::kFloat32);
          break;
        default:
          EXPECT_GT(calls, 0) << fault.name;
      }
    }
  }
};

TEST_F(FailureTest, OfAnyCallOfAFusedStep) {
  TryAllCallsOfAStep(SmallConfig(), /*traced=*/false);
}

TEST_F(FailureTest, OfAnyCallOfATracedStepWithMicroBatches) {
  RigConfig config = SmallConfig();
  config.options.micro_batches = 2;
  TryAllCallsOfAStep(config, /*traced=*/true);
}

TEST_F(FailureTest, OfAnyCallOfThreePasses) {
  RigConfig config = SmallConfig();
  config.options.path = StepPath::kSeparate;
  config.options.staging_buffers = 1;
  TryAllCallsOfAStep(config, /*traced=*/false);
}

TEST_F(FailureTest, OfAnyCallOfAStepWithFp32Weights) {
  RigConfig config = SmallConfig();
  config.options.micro_batches = 2;
  config.options.weights_type = DType::kFloat32;
  TryAllCallsOfAStep(config, /*traced=*/false);
}

// --- Other calls. ---

TEST_F(FailureTest, OfCreationGivesAllBack) {
  const RigConfig config = SmallConfig();
  Reference reference(config);
  reference.Step(1, AllGradients);
  for (const Fault& fault : kFaults) {
    ForEachCall(fault, [&](int64_t skip) {
      Rig rig(config);
      const int64_t held = rig.device().memory().in_use;
      const int64_t before = rig.device().Calls(fault.call);
      Inject(rig.device(), fault, skip);
      const absl::Status status = rig.Create();
      const bool reached = rig.device().Calls(fault.call) - before > skip;
      if (!reached) {
        EXPECT_TRUE(status.ok()) << status;
        return false;
      }
      if (fault.call == Call::kPin) {  // is no error
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_TRUE(rig.Step(1, AllGradients).ok());
        ExpectSame(rig.Take(), reference.Take());
        return true;
      }
      ExpectInjected(status);
      EXPECT_EQ(rig.device().WorkInFlight(), 0);
      EXPECT_EQ(rig.device().memory().in_use, held);
      EXPECT_EQ(rig.device().pinned_memory().in_use, 0);
      // Where the device goes on, another attempt may do better.
      if (!fault.of_work && fault.call != Call::kSynchronize) {
        EXPECT_TRUE(rig.Create().ok());
      }
      return true;
    });
  }
}

TEST_F(FailureTest, OfReadingStateChangesNothing) {
  const RigConfig config = SmallConfig();
  Rig rig(config);
  ASSERT_TRUE(rig.Create().ok());
  const Snapshot before = rig.Take();
  std::vector<float> values(config.numels[kSplitShard]);
  rig.device().RefuseCall(Call::kCopyToHost, 0, Injected());
  ExpectInjected(rig.optimizer().GetState(
      Rig::ShardName(kSplitShard), StateKind::kExpAvg, absl::MakeSpan(values)));
  EXPECT_TRUE(rig.optimizer().status().ok());
  ExpectSame(rig.Take(), before);
  Reference reference(config);
  reference.Step(1);
  EXPECT_TRUE(rig.Step(1).ok());
  ExpectSame(rig.Take(), reference.Take());
}

TEST_F(FailureTest, OfTracingLeavesThatAsItWas) {
  const RigConfig config = SmallConfig();
  Rig rig(config);
  ASSERT_TRUE(rig.Create().ok());
  StepTrace trace, other;
  ASSERT_TRUE(rig.optimizer().SetTrace(&trace).ok());
  for (const Call call : {Call::kCreateEvent, Call::kRecord}) {
    rig.device().RefuseCall(call, 0, Injected());
    ExpectInjected(rig.optimizer().SetTrace(&other));
  }
  EXPECT_TRUE(rig.optimizer().status().ok());
  ASSERT_TRUE(rig.Step(1, AllGradients).ok());
  EXPECT_FALSE(trace.spans.empty());
  EXPECT_TRUE(other.spans.empty());
}

TEST_F(FailureTest, OfADeviceIsThatOfEveryCall) {
  // A device may fail in a call that is none of adding, updating or setting.
  Rig rig(SmallConfig());
  ASSERT_TRUE(rig.Create().ok());
  rig.device().RefuseCall(Call::kSynchronize, 0, Injected());
  std::vector<float> values(700);
  const std::string name = Rig::ShardName(4);  // on the device
  ExpectInjected(rig.optimizer().GetState(name, StateKind::kMaster,
                                          absl::MakeSpan(values)));
  rig.Fill(1, AllGradients);
  ExpectInjected(rig.Add());
  ExpectUnusable(rig);
}

TEST_F(FailureTest, OfSettingStateMakesItUnusable) {
  for (const StateKind kind : kStateKinds) {
    for (const Fault& fault :
         {Fault{Call::kCopyToDevice, "copy to device", false},
          Fault{Call::kCopyToDevice, "work of copy to device", true},
          Fault{Call::kSynchronize, "synchronize", false}}) {
      const int64_t calls = ForEachCall(fault, [&](int64_t skip) {
        const RigConfig config = SmallConfig();
        Rig rig(config);
        EXPECT_TRUE(rig.Create().ok());
        const int64_t before = rig.device().Calls(fault.call);
        Inject(rig.device(), fault, skip);
        const absl::Status status = rig.optimizer().SetState(
            Rig::ShardName(kSplitShard), kind,
            std::vector<float>(config.numels[kSplitShard], 0.5f));
        if (rig.device().Calls(fault.call) - before <= skip) {
          EXPECT_TRUE(status.ok()) << status;
          return false;
        }
        ExpectInjected(status);
        EXPECT_THAT(
            std::string(status.message()),
            HasSubstr(absl::StrCat("setting ", Name(kind), " of shard \"",
                                   Rig::ShardName(kSplitShard))));
        EXPECT_EQ(rig.device().WorkInFlight(), 0);
        ExpectUnusable(rig);
        return true;
      });
      EXPECT_GT(calls, 0);
    }
  }
}

TEST_F(FailureTest, OfDroppingGradientsMakesItUnusable) {
  Rig rig(SmallConfig());
  ASSERT_TRUE(rig.Create().ok());
  rig.Fill(1, AllGradients);
  ASSERT_TRUE(rig.Add().ok());
  rig.device().RefuseCall(Call::kSynchronize, 0, Injected());
  ExpectInjected(rig.optimizer().DropGradients());
  ExpectUnusable(rig);
}

TEST_F(FailureTest, TheTrainerMaySayThatItIsUnusable) {
  RigConfig config = SmallConfig();
  config.device.link_bytes_per_s = 1e5;
  Rig rig(config);
  ASSERT_TRUE(rig.Create().ok());
  rig.optimizer().MarkUnusable(absl::OkStatus());
  EXPECT_TRUE(rig.optimizer().status().ok());
  rig.Fill(1, AllGradients);
  ASSERT_TRUE(rig.Add().ok());
  EXPECT_GT(rig.device().WorkInFlight(), 0);
  const absl::Status first = absl::AbortedError("rank 3 stopped");
  rig.optimizer().MarkUnusable(first);
  EXPECT_EQ(rig.device().WorkInFlight(), 0);
  EXPECT_EQ(rig.optimizer().status(), first);
  rig.optimizer().MarkUnusable(absl::InternalError("another"));
  EXPECT_EQ(rig.optimizer().status(), first);
  ExpectUnusable(rig);
  // The device is not: another optimizer may use it.
  EXPECT_TRUE(rig.Create().ok());
}

}  // namespace
}  // namespace onepass

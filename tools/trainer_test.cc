#include "tools/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/communicator.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_communicator.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "offload/partition.h"
#include "tests/counting_kernel.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"
#include "tools/language_model.h"
#include "tools/ranks.h"

namespace onepass {
namespace {

const Kernel& SelectedKernel() { return **CreateDefaultDispatcher()->Select(); }

TrainOptions SmallOptions() {
  TrainOptions options;
  options.model.context = 4;
  options.model.embedding = 6;
  options.model.hidden = 70;  // weights of more than a leaf
  options.model.layers = 2;
  options.batch = 20;
  options.lr = 0.01;
  // Below the norms of these gradients, so that the factor matters.
  options.clip = 0.1;
  options.piece_numel = 1000;
  return options;
}

// Words, so that there is something to learn.
const std::string& SmallText() {
  static const std::string* const text = [] {
    auto* text = new std::string;
    Random random(1);
    for (int i = 0; i < 500; ++i) {
      *text += random.Below(2) == 0 ? "the cat " : "a mouse. ";
    }
    return text;
  }();
  return *text;
}

// What ranks run on.
struct Machine {
  int ranks = 1;
  int threads = 1;
  const Kernel* kernel = &SelectedKernel();  // of the CPU
};

// What a rank has.
struct TestRank {
  int rank;
  HostDevice& device;
  Trainer& trainer;
};

// Calls `work` on each rank; all of them must get there.
void OnRanks(const Machine& machine, const TrainOptions& options,
             absl::FunctionRef<void(const TestRank&)> work,
             const std::string& text = SmallText()) {
  const absl::Status status =
      RunThreadRanks(machine.ranks, [&](Communicator& communicator) {
        const auto pool = MakePool(machine.threads);
        // Of a kernel of its own, so that what the CPU does can be counted.
        auto device = HostDevice::Create(ScalarKernel());
        if (!device.ok()) return device.status();
        auto trainer = Trainer::Create({*machine.kernel, **device, *pool},
                                       communicator, options, text);
        if (!trainer.ok()) return trainer.status();
        work({communicator.rank(), **device, **trainer});
        return absl::OkStatus();
      });
  ASSERT_TRUE(status.ok()) << status;
}

// After some steps, which are clipped; the same on all ranks.
std::string DigestAfter(int steps, const Machine& machine,
                        const TrainOptions& options) {
  std::mutex mutex;
  std::string digest;
  OnRanks(machine, options, [&](const TestRank& rank) {
    for (int i = 0; i < steps; ++i) {
      const absl::StatusOr<TrainStep> step = rank.trainer.Step();
      ASSERT_TRUE(step.ok()) << step.status();
      EXPECT_LT(step->report.factor, 1);
    }
    const absl::StatusOr<std::string> mine = rank.trainer.Digest();
    ASSERT_TRUE(mine.ok()) << mine.status();
    const std::lock_guard<std::mutex> lock(mutex);
    if (digest.empty()) digest = *mine;
    EXPECT_EQ(*mine, digest);
  });
  return digest;
}

TEST(TrainerTest, TheSameBitsHoweverItIsDone) {
  constexpr int kSteps = 5;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const struct {
    bool separate;
    double ratio;
    int64_t piece_numel;
    int64_t staging_buffers;
    int64_t sub_group_numel;
    bool pin_memory;
    int threads;
  } ways[] = {
      {true, 1, 1000, 2, kMost, true, 1},
      {true, 0.5, 5000, 2, 4096, false, 2},
      {false, 1, 1, 2, kMost, true, 3},
      {false, 1, kMost, 1, kMost, true, 2},
      {false, 0.3, 1000, 3, 4096, true, 1},
      {false, 0, 1000, 2, kMost, true, 2},
      {false, 0.7, 2000, 1, 8192, false, 3},
  };
  for (const int ranks : {1, 3}) {
    for (const DType precision :
         {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      if (ranks > 1 && precision != DType::kBFloat16 && LongTestStride() > 1) {
        continue;
      }
      TrainOptions options = SmallOptions();
      options.precision = precision;
      options.micro_batches = ranks;
      const std::string expected =
          DigestAfter(kSteps, {ranks, 1, &SelectedKernel()}, options);
      EXPECT_EQ(expected.size(), 16);
      const std::vector<const Kernel*> kernels = RunnableKernels();
      size_t kernel = 0;
      for (const auto& way : ways) {
        options.separate = way.separate;
        options.ratio = way.ratio;
        options.piece_numel = way.piece_numel;
        options.staging_buffers = way.staging_buffers;
        options.sub_group_numel = way.sub_group_numel;
        options.pin_memory = way.pin_memory;
        const Machine machine = {ranks, way.threads,
                                 kernels[kernel++ % kernels.size()]};
        EXPECT_EQ(DigestAfter(kSteps, machine, options), expected)
            << ranks << " ranks, " << Name(precision) << ", way " << kernel
            << ", " << machine.kernel->name;
      }
    }
  }
}

TEST(TrainerTest, OptionsChangeTheBits) {
  const std::string base = DigestAfter(2, {}, SmallOptions());
  const auto digest = [](auto set) {
    TrainOptions options = SmallOptions();
    set(options);
    return DigestAfter(2, {}, options);
  };
  EXPECT_NE(digest([](TrainOptions& o) { o.seed = 2; }), base);
  EXPECT_NE(digest([](TrainOptions& o) { o.lr *= 2; }), base);
  EXPECT_NE(digest([](TrainOptions& o) { o.clip /= 2; }), base);
  EXPECT_NE(digest([](TrainOptions& o) { o.micro_batches = 2; }), base);
  EXPECT_NE(digest([](TrainOptions& o) { o.precision = DType::kFloat32; }),
            base);
  EXPECT_NE(digest([](TrainOptions& o) { o.precision = DType::kFloat16; }),
            base);
  EXPECT_NE(DigestAfter(3, {}, SmallOptions()), base);
  EXPECT_NE(DigestAfter(2, {/*ranks=*/2}, SmallOptions()), base);
}

// In fp32, where the mean of two gradients is half of one and half of the
// other, bit by bit.
TEST(TrainerTest, TwoRanksAreTwoMicroBatches) {
  TrainOptions options = SmallOptions();
  options.precision = DType::kFloat32;
  double loss_of_ranks = 0;
  std::string digest_of_ranks;
  OnRanks({/*ranks=*/2}, options, [&](const TestRank& rank) {
    const double loss = rank.trainer.Step()->loss;
    const std::string digest = *rank.trainer.Digest();
    if (rank.rank != 0) return;
    loss_of_ranks = loss;
    digest_of_ranks = digest;
  });
  options.micro_batches = 2;
  OnRanks({}, options, [&](const TestRank& rank) {
    EXPECT_EQ(rank.trainer.Step()->loss, loss_of_ranks);
    EXPECT_EQ(*rank.trainer.Digest(), digest_of_ranks);
  });
}

TEST(TrainerTest, FallsBackWhereTheKernelWritesNoCopies) {
  Kernel kernel = SelectedKernel();
  kernel.name = "no_copies";
  kernel.copy_types = {};
  OnRanks({}, SmallOptions(), [](const TestRank& rank) {
    EXPECT_TRUE(rank.trainer.Step()->report.copy_fused);
  });
  OnRanks({1, 2, &kernel}, SmallOptions(), [](const TestRank& rank) {
    const StepReport report = rank.trainer.Step()->report;
    EXPECT_TRUE(report.scale_fused);
    EXPECT_FALSE(report.copy_fused);
    EXPECT_TRUE(absl::StrContains(report.copy_reason, "no_copies"));
  });
  EXPECT_EQ(DigestAfter(4, {1, 2, &kernel}, SmallOptions()),
            DigestAfter(4, {}, SmallOptions()));
}

// What a few steps call on the CPU.
struct Calls {
  int64_t adam_step;
  int64_t adam_step_with_copy;
  // Times that these went over all weights, a little more where that includes
  // what lies between them.
  double adam_passes;
  double scale_passes;
  double cast_passes;
};

// A `slot` is counted in for good: each test has its own.
template <int slot>
Calls CallsOfSteps(const TrainOptions& options, DTypeSet copy_types) {
  constexpr int kSteps = 3;
  Kernel kernel = MakeCountingKernel<slot>(ScalarKernel(), "counting");
  kernel.copy_types = copy_types;
  const OperationCounter& counts = OperationCounts<slot>();
  Calls calls = {};
  OnRanks({1, 2, &kernel}, options, [&](const TestRank& rank) {
    const int64_t created = counts.cast_numel;
    for (int i = 0; i < kSteps; ++i) EXPECT_TRUE(rank.trainer.Step().ok());
    calls.adam_step = counts.adam_step;
    calls.adam_step_with_copy = counts.adam_step_with_copy;
    const auto passes = [&](int64_t numel) {
      return static_cast<double>(numel) /
             static_cast<double>(kSteps * rank.trainer.parameters());
    };
    calls.adam_passes = passes(counts.adam_step_numel);
    calls.scale_passes = passes(counts.scale_numel);
    calls.cast_passes = passes(counts.cast_numel - created);
  });
  return calls;
}

TEST(TrainerTest, FusedIsOnePass) {
  const Calls calls = CallsOfSteps<0>(SmallOptions(), kCopyTypes);
  EXPECT_EQ(calls.adam_passes, 1);
  EXPECT_GT(calls.adam_step_with_copy, 0);
  EXPECT_EQ(calls.adam_step_with_copy, calls.adam_step);
  EXPECT_EQ(calls.scale_passes, 0);
  EXPECT_EQ(calls.cast_passes, 0);
}

TEST(TrainerTest, SeparateIsThreePasses) {
  TrainOptions options = SmallOptions();
  options.separate = true;
  const Calls calls = CallsOfSteps<1>(options, kCopyTypes);
  EXPECT_EQ(calls.adam_passes, 1);
  EXPECT_EQ(calls.adam_step_with_copy, 0);
  EXPECT_GE(calls.scale_passes, 1);
  EXPECT_LT(calls.scale_passes, 1.1);
  // To fp32 before the scaling, and to bf16 after the update.
  EXPECT_GE(calls.cast_passes, 2);
  EXPECT_LT(calls.cast_passes, 2.2);
}

TEST(TrainerTest, WithoutCopiesOnlyTheCastIsAPassOfItsOwn) {
  const Calls calls = CallsOfSteps<2>(SmallOptions(), {});
  EXPECT_EQ(calls.adam_passes, 1);
  EXPECT_EQ(calls.adam_step_with_copy, 0);
  EXPECT_EQ(calls.scale_passes, 0);
  EXPECT_GE(calls.cast_passes, 1);
  EXPECT_LT(calls.cast_passes, 1.1);
}

TEST(TrainerTest, LearnsMoreThanFrequencies) {
  for (const DType precision :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (precision != DType::kBFloat16 && LongTestStride() > 1) break;
    TrainOptions options = SmallOptions();
    options.precision = precision;
    OnRanks({/*ranks=*/2}, options, [&](const TestRank& rank) {
      const double before = rank.trainer.HeldOutBits().value();
      double last = 0;
      for (int i = 0; i < 150; ++i) last = rank.trainer.Step()->loss;
      const double after = rank.trainer.HeldOutBits().value();
      EXPECT_NEAR(before, 8, 0.5);
      EXPECT_LT(after, 1) << Name(precision);
      EXPECT_LT(last, 1) << Name(precision);
      EXPECT_GT(rank.trainer.FrequencyBits(), 2);
    });
  }
}

TEST(TrainerTest, FrequencyBitsAreThoseOfTheTrainingPart) {
  // Held out: one a, where 8 of 9 bytes before it were.
  OnRanks(
      {}, SmallOptions(),
      [](const TestRank& rank) {
        EXPECT_DOUBLE_EQ(rank.trainer.FrequencyBits(),
                         -std::log2((8 + 1) / (9 + 256.0)));
      },
      "baaaaaaaaa");
}

TEST(TrainerTest, NonFiniteGradientsAreSkipped) {
  for (const bool separate : {false, true}) {
    TrainOptions options = SmallOptions();
    options.separate = separate;
    options.lr = 1e37;  // the first step ruins the weights
    OnRanks({2, 2, &SelectedKernel()}, options, [](const TestRank& rank) {
      const StepReport first = rank.trainer.Step()->report;
      EXPECT_FALSE(first.skipped);
      const std::string digest = *rank.trainer.Digest();
      const StepReport second = rank.trainer.Step()->report;
      EXPECT_TRUE(second.skipped);
      EXPECT_FALSE(std::isfinite(second.norm));
      EXPECT_EQ(second.factor, 0);
      EXPECT_EQ(*rank.trainer.Digest(), digest);
    });
  }
}

// fp16 gradients that overflow halve the loss scale, and training goes on.
TEST(TrainerTest, LossScaleFollowsOverflows) {
  TrainOptions options = SmallOptions();
  options.precision = DType::kFloat16;
  options.lr = 1;  // weights become large, and gradients larger than 1
  OnRanks({}, options, [](const TestRank& rank) {
    int64_t skipped = 0;
    double scale = 0;
    for (int i = 0; i < 20; ++i) {
      const StepReport report = rank.trainer.Step()->report;
      skipped += report.skipped ? 1 : 0;
      scale = report.loss_scale;
    }
    EXPECT_GT(skipped, 0);
    EXPECT_LT(skipped, 20);
    EXPECT_LT(scale, 65536);
  });
}

// Those that change no bits.
TEST(TrainerTest, OptionsReachTheOptimizer) {
  struct Seen {
    StepReport report;
    int64_t pinned;
    int64_t parameters;
  };
  const auto seen = [](auto set) {
    TrainOptions options = SmallOptions();
    set(options);
    Seen seen = {};
    OnRanks({}, options, [&](const TestRank& rank) {
      seen.report = rank.trainer.Step()->report;
      seen.pinned = rank.device.pinned_memory().in_use;
      seen.parameters = rank.trainer.parameters();
    });
    return seen;
  };
  const Seen base = seen([](TrainOptions&) {});
  EXPECT_EQ(base.report.device_numel, 0);
  EXPECT_EQ(base.report.cpu_numel, base.parameters);
  const Seen half = seen([](TrainOptions& o) { o.ratio = 0.5; });
  EXPECT_GT(half.report.cpu_numel, 0);
  EXPECT_GT(half.report.device_numel, 0);
  const Seen long_pieces = seen([](TrainOptions& o) { o.piece_numel = 4096; });
  EXPECT_LT(long_pieces.report.pieces, base.report.pieces);
  const Seen more = seen([](TrainOptions& o) { o.staging_buffers = 5; });
  EXPECT_GT(more.pinned, base.pinned);
  const Seen none = seen([](TrainOptions& o) { o.pin_memory = false; });
  EXPECT_EQ(none.pinned, 0);
}

// One in use and the next: not the model.
TEST(TrainerTest, TwoLayersAreGatheredAtOnce) {
  TrainOptions options = SmallOptions();
  options.model.layers = 12;
  options.micro_batches = 2;
  // The first and the last are the largest, which never meet.
  options.model.context = 1;
  options.model.embedding = 70;
  options.model.hidden = 30;
  for (const int ranks : {1, 2}) {
    OnRanks({ranks}, options, [&](const TestRank& rank) {
      const LanguageModel model(options.model, 1, *MakePool(1));
      int64_t all = 0;
      int64_t expected = 0;
      int64_t before = 0;
      for (const Layer& layer : model.layers()) {
        const int64_t bytes =
            UnitPartition::Create({layer.numel()}, ranks)->padded_numel() * 2;
        expected = std::max(expected, before + bytes);
        before = bytes;
        all += bytes;
      }
      ASSERT_TRUE(rank.trainer.Step().ok());
      EXPECT_EQ(rank.trainer.gathered().in_use, 0);
      ASSERT_TRUE(rank.trainer.HeldOutBits().ok());
      EXPECT_EQ(rank.trainer.gathered().in_use, 0);
      EXPECT_EQ(rank.trainer.gathered().peak, expected);
      EXPECT_LT(expected, all / 3);
    });
  }
}

// Of what there is only.
TEST(TrainingBytesTest, OneLayerHasNoSquareMatrix) {
  TrainOptions options;
  options.model.hidden = 100000;
  options.model.layers = 1;
  EXPECT_LT(TrainingBytes(options, 1000, 1).value(), int64_t{2} << 30);
  options.staging_buffers = 1000000;
  EXPECT_LT(TrainingBytes(options, 1000, 1).value(), int64_t{2} << 30);
  options.model.layers = 2;
  EXPECT_GT(TrainingBytes(options, 1000, 1).value(), int64_t{100} << 30);
}

TEST(TrainingBytesTest, NamesTheFlagThatIsWrong) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto with = [](auto set) {
    TrainOptions options;
    set(options);
    return options;
  };
  const struct {
    TrainOptions options;
    const char* flag;
  } cases[] = {
      {with([](TrainOptions& o) { o.steps = 0; }), "--steps is 0"},
      {with([](TrainOptions& o) { o.batch = -1; }), "--batch is -1"},
      {with([](TrainOptions& o) { o.micro_batches = 0; }),
       "--micro_batches is 0"},
      {with([](TrainOptions& o) { o.staging_buffers = 0; }),
       "--staging_buffers is 0"},
      {with([](TrainOptions& o) { o.staging_buffers = int64_t{1} << 40; }),
       "at most 2147483647"},
      {with([](TrainOptions& o) { o.sub_group_numel = 0; }),
       "--sub_group_numel is 0"},
      {with([](TrainOptions& o) { o.ratio = 1.5; }), "--ratio is 1.5"},
      {with([](TrainOptions& o) { o.ratio = kNan; }), "--ratio is nan"},
      {with([](TrainOptions& o) { o.model.context = 0; }), "--context is 0"},
      {with([](TrainOptions& o) { o.model.embedding = 0; }),
       "--embedding is 0"},
      {with([](TrainOptions& o) { o.model.hidden = -5; }), "--hidden is -5"},
      {with([](TrainOptions& o) { o.model.layers = 0; }), "--layers is 0"},
      {with([](TrainOptions& o) { o.seed = -1; }), "--seed is -1"},
      {with([](TrainOptions& o) { o.piece_numel = 0; }), "--piece_numel is 0"},
      {with([](TrainOptions& o) { o.lr = -1; }), "--lr is -1"},
      {with([](TrainOptions& o) { o.lr = kNan; }), "--lr is nan"},
      {with([](TrainOptions& o) { o.lr = 1e39; }), "--lr is 1e+39"},
      {with([](TrainOptions& o) { o.clip = kInfinity; }), "--clip is inf"},
      {with([](TrainOptions& o) { o.model.context = 900; }),
       "--context is 900, expected less than the 900 bytes"},
      {with([](TrainOptions& o) { o.batch = kMax; }), "does not fit 64 bits"},
      {with([](TrainOptions& o) { o.model.hidden = kMax; }),
       "does not fit 64 bits"},
      {with([](TrainOptions& o) { o.model.layers = int64_t{1} << 43; }),
       "does not fit 64 bits"},
  };
  for (const auto& c : cases) {
    const absl::Status status = TrainingBytes(c.options, 1000, 1).status();
    EXPECT_FALSE(status.ok()) << c.flag;
    EXPECT_TRUE(absl::StrContains(status.message(), c.flag))
        << "expected '" << c.flag << "', got " << status;
    // A trainer checks the same.
    const auto pool = MakePool(1);
    const auto device = *HostDevice::Create(SelectedKernel());
    const auto communicators = *CreateThreadCommunicators(1, {});
    EXPECT_EQ(
        Trainer::Create({SelectedKernel(), *device, *pool}, *communicators[0],
                        c.options, std::string(1000, 'a'))
            .status(),
        status);
  }
  EXPECT_TRUE(absl::StrContains(
      TrainingBytes(TrainOptions(), 9, 1).status().message(), "--text has 9"));
}

// Not less than what is taken, and not much more.
TEST(TrainingBytesTest, CountsWhatIsTaken) {
  for (const int ranks : {1, 3}) {
    for (const bool separate : {false, true}) {
      for (const DType precision : {DType::kBFloat16, DType::kFloat32}) {
        TrainOptions options;
        options.model.hidden = 400;
        options.model.layers = 2;
        options.batch = 1;
        options.micro_batches = ranks;
        options.separate = separate;
        options.precision = precision;
        const auto bytes = static_cast<double>(
            TrainingBytes(options, SmallText().size(), ranks).value());
        OnRanks({ranks}, options, [&](const TestRank& rank) {
          ASSERT_TRUE(rank.trainer.Step().ok());
          if (rank.rank > 0) return;
          // Rank 0 owns no less than any other. Masters and moments, and
          // gradients in fp32, are pageable.
          const bool keeps =
              ranks > 1 || (separate && precision != DType::kFloat32);
          const int64_t state =
              rank.trainer.parameters() / ranks * (keeps ? 16 : 12);
          const auto taken = static_cast<double>(
              state + rank.device.memory().peak +
              rank.device.pinned_memory().peak +
              *LanguageModel::ActivationBytes(options.model, options.batch));
          EXPECT_GT(bytes, taken) << ranks << " " << Name(precision);
          EXPECT_LT(bytes, 1.15 * taken + (2 << 20))
              << ranks << " " << Name(precision);
        });
      }
    }
  }
}

}  // namespace
}  // namespace onepass

#include "tools/trainer.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "tests/counting_kernel.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"
#include "tools/language_model.h"

namespace onepass {
namespace {

const Kernel& SelectedKernel() { return **CreateDefaultDispatcher()->Select(); }

TrainOptions SmallOptions() {
  TrainOptions options;
  options.model.context = 4;
  options.model.embedding = 6;
  options.model.hidden = 50;
  options.model.layers = 2;
  options.batch = 20;
  options.lr = 0.01;
  // Below the norms of these gradients, so that the factor matters.
  options.clip = 0.1;
  options.piece_numel = 1000;
  return options;
}

// Words, so that there is something to learn.
std::string SmallText() {
  std::string text;
  Random random(1);
  for (int i = 0; i < 500; ++i) {
    text += random.Below(2) == 0 ? "the cat " : "a mouse. ";
  }
  return text;
}

std::unique_ptr<Trainer> MakeTrainer(const Kernel& kernel, ThreadPool& pool,
                                     const TrainOptions& options) {
  absl::StatusOr<std::unique_ptr<Trainer>> trainer =
      Trainer::Create(kernel, pool, options, SmallText());
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  return *std::move(trainer);
}

std::string DigestAfter(int steps, const Kernel& kernel, int threads,
                        const TrainOptions& options) {
  const auto pool = MakePool(threads);
  const auto trainer = MakeTrainer(kernel, *pool, options);
  for (int i = 0; i < steps; ++i) {
    const absl::StatusOr<TrainStep> step = trainer->Step();
    EXPECT_TRUE(step.ok()) << step.status();
    EXPECT_LT(step->clip_factor, 1);
  }
  return trainer->Digest();
}

TEST(TrainerTest, TheSameBitsHoweverItIsDone) {
  constexpr int kSteps = 5;
  const std::string expected =
      DigestAfter(kSteps, SelectedKernel(), 1, SmallOptions());
  EXPECT_EQ(expected.size(), 16);
  for (const Kernel* kernel : RunnableKernels()) {
    for (const int threads : {1, 3}) {
      for (const int64_t piece_numel :
           {int64_t{1}, int64_t{1000}, std::numeric_limits<int64_t>::max()}) {
        TrainOptions options = SmallOptions();
        options.piece_numel = piece_numel;
        EXPECT_EQ(DigestAfter(kSteps, *kernel, threads, options), expected)
            << kernel->name << " threads " << threads << " piece_numel "
            << piece_numel;
      }
      TrainOptions options = SmallOptions();
      options.separate = true;
      EXPECT_EQ(DigestAfter(kSteps, *kernel, threads, options), expected)
          << kernel->name << " threads " << threads << " separate";
    }
  }
}

TEST(TrainerTest, OptionsChangeTheBits) {
  const std::string base = DigestAfter(2, SelectedKernel(), 1, SmallOptions());
  TrainOptions options = SmallOptions();
  options.seed = 2;
  EXPECT_NE(DigestAfter(2, SelectedKernel(), 1, options), base);
  options = SmallOptions();
  options.lr *= 2;
  EXPECT_NE(DigestAfter(2, SelectedKernel(), 1, options), base);
  EXPECT_NE(DigestAfter(3, SelectedKernel(), 1, SmallOptions()), base);
}

TEST(TrainerTest, FallsBackWhereTheKernelWritesNoCopies) {
  Kernel kernel = SelectedKernel();
  kernel.name = "no_copies";
  kernel.copy_types = {};
  const auto pool = MakePool(2);
  EXPECT_TRUE(MakeTrainer(SelectedKernel(), *pool, SmallOptions())->fused());
  EXPECT_FALSE(MakeTrainer(kernel, *pool, SmallOptions())->fused());
  EXPECT_EQ(DigestAfter(4, kernel, 2, SmallOptions()),
            DigestAfter(4, SelectedKernel(), 2, SmallOptions()));
}

// What a few steps call.
struct Calls {
  int64_t adam_step;
  int64_t adam_step_with_copy;
  int64_t scale;
  // Times that Adam and the cast to the device went over all weights.
  double adam_passes;
  double cast_passes;
};

// A `slot` is counted in for good: each test has its own.
template <int slot>
Calls CallsOfSteps(const TrainOptions& options, DTypeSet copy_types) {
  constexpr int kSteps = 3;
  Kernel kernel = MakeCountingKernel<slot>(ScalarKernel(), "counting");
  kernel.copy_types = copy_types;
  const OperationCounter& counts = OperationCounts<slot>();
  const auto pool = MakePool(2);
  const auto trainer = MakeTrainer(kernel, *pool, options);
  // A new trainer casts all weights to the device, and both HeldOutBits()
  // and a step cast them back to fp32.
  const int64_t to_device = counts.cast;
  EXPECT_TRUE(trainer->HeldOutBits().ok());
  const int64_t back = counts.cast - to_device;
  EXPECT_GT(to_device, 0);
  EXPECT_GT(back, 0);
  EXPECT_EQ(counts.Total(), counts.cast);
  for (int i = 0; i < kSteps; ++i) EXPECT_TRUE(trainer->Step().ok());
  Calls calls;
  calls.adam_step = counts.adam_step;
  calls.adam_step_with_copy = counts.adam_step_with_copy;
  calls.scale = counts.scale;
  calls.adam_passes = static_cast<double>(counts.adam_step_numel) /
                      static_cast<double>(kSteps * trainer->parameters());
  calls.cast_passes =
      static_cast<double>(counts.cast - to_device - (1 + kSteps) * back) /
      static_cast<double>(kSteps * to_device);
  return calls;
}

TEST(TrainerTest, FusedIsOnePass) {
  const Calls calls = CallsOfSteps<0>(SmallOptions(), kCopyTypes);
  EXPECT_EQ(calls.adam_passes, 1);
  EXPECT_GT(calls.adam_step_with_copy, 0);
  EXPECT_EQ(calls.adam_step_with_copy, calls.adam_step);
  EXPECT_EQ(calls.scale, 0);
  EXPECT_EQ(calls.cast_passes, 0);
}

TEST(TrainerTest, SeparateIsThreePasses) {
  TrainOptions options = SmallOptions();
  options.separate = true;
  const Calls calls = CallsOfSteps<1>(options, kCopyTypes);
  EXPECT_EQ(calls.adam_passes, 1);
  EXPECT_EQ(calls.adam_step_with_copy, 0);
  EXPECT_GT(calls.scale, 0);
  EXPECT_EQ(calls.cast_passes, 1);
}

TEST(TrainerTest, WithoutCopiesOnlyTheCastIsAPassOfItsOwn) {
  const Calls calls = CallsOfSteps<2>(SmallOptions(), {});
  EXPECT_EQ(calls.adam_passes, 1);
  EXPECT_EQ(calls.adam_step_with_copy, 0);
  EXPECT_EQ(calls.scale, 0);
  EXPECT_EQ(calls.cast_passes, 1);
}

TEST(TrainerTest, LearnsMoreThanFrequencies) {
  const auto pool = MakePool(2);
  const auto trainer = MakeTrainer(SelectedKernel(), *pool, SmallOptions());
  const double before = trainer->HeldOutBits().value();
  for (int i = 0; i < 150; ++i) ASSERT_TRUE(trainer->Step().ok());
  const double after = trainer->HeldOutBits().value();
  EXPECT_NEAR(before, 8, 0.5);
  EXPECT_LT(after, 1);
  EXPECT_GT(trainer->FrequencyBits(), 2);
}

TEST(TrainerTest, FrequencyBitsAreThoseOfTheTrainingPart) {
  const auto pool = MakePool(1);
  // Held out: one a, where 8 of 9 bytes before it were.
  const auto trainer =
      *Trainer::Create(SelectedKernel(), *pool, SmallOptions(), "baaaaaaaaa");
  EXPECT_DOUBLE_EQ(trainer->FrequencyBits(), -std::log2((8 + 1) / (9 + 256.0)));
}

TEST(TrainerTest, NonFiniteGradientsAreSkipped) {
  for (const bool separate : {false, true}) {
    TrainOptions options = SmallOptions();
    options.separate = separate;
    options.lr = 1e37;  // the first step ruins the weights
    const auto pool = MakePool(2);
    const auto trainer = MakeTrainer(SelectedKernel(), *pool, options);
    const TrainStep first = trainer->Step().value();
    EXPECT_FALSE(first.skipped);
    const std::string digest = trainer->Digest();
    const TrainStep second = trainer->Step().value();
    EXPECT_TRUE(second.skipped);
    EXPECT_FALSE(std::isfinite(second.norm));
    EXPECT_EQ(second.clip_factor, 0);
    EXPECT_EQ(trainer->Digest(), digest);
  }
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
       "do not fit 64 bits"},
  };
  for (const auto& c : cases) {
    const absl::Status status = TrainingBytes(c.options, 1000).status();
    EXPECT_FALSE(status.ok()) << c.flag;
    EXPECT_TRUE(absl::StrContains(status.message(), c.flag))
        << "expected '" << c.flag << "', got " << status;
    // A trainer checks the same.
    const auto pool = MakePool(1);
    EXPECT_EQ(Trainer::Create(SelectedKernel(), *pool, c.options,
                              std::string(1000, 'a'))
                  .status(),
              status);
  }
  EXPECT_TRUE(absl::StrContains(
      TrainingBytes(TrainOptions(), 9).status().message(), "--text has 9"));
}

TEST(TrainingBytesTest, CountsTheState) {
  TrainOptions options;
  options.piece_numel = 10;
  const int64_t parameters =
      LanguageModel::ParameterCount(options.model).value();
  const int64_t activations =
      LanguageModel::ActivationBytes(options.model, options.batch).value();
  const int64_t layers = options.model.layers + 2;
  EXPECT_EQ(TrainingBytes(options, 1000).value(),
            22 * parameters + 2 * 10 * 2 + activations + 1024 * layers +
                8 * options.batch + 1000);
}

}  // namespace
}  // namespace onepass

#include "offload/cpu_adam.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "tests/allocation_counter.h"
#include "tests/counting_kernel.h"
#include "tests/make_pool.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Mode = AdamOptions::Mode;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr float kScale = 0.37f;

CpuAdam MakeAdam(const Kernel& kernel, ThreadPool& pool,
                 const std::vector<AdamOptions>& groups) {
  absl::StatusOr<CpuAdam> adam = CpuAdam::Create(kernel, pool, groups);
  EXPECT_TRUE(adam.ok()) << adam.status();
  return *std::move(adam);
}

AdamOptions Options(Mode mode, double lr = 0.01) {
  AdamOptions options;
  options.lr = lr;
  options.weight_decay = 0.1;
  options.mode = mode;
  return options;
}

// `numel` elements of a type.
class Array {
 public:
  Array(DType type, int64_t numel)
      : type_(type), words_((numel * ByteSize(type) + 3) / 4) {}

  DType type() const { return type_; }
  void* data() { return words_.data(); }
  const void* data() const { return words_.data(); }
  float* floats() { return reinterpret_cast<float*>(words_.data()); }

  void Fill(unsigned char byte) {
    std::memset(words_.data(), byte, words_.size() * sizeof(uint32_t));
  }
  bool operator==(const Array& other) const { return words_ == other.words_; }

 private:
  DType type_;
  std::vector<uint32_t> words_;
};

// `from` as another type.
Array CastTo(DType type, const Array& from, int64_t numel) {
  if (type == from.type()) return from;
  Array to(type, numel);
  const auto pool = MakePool(1);
  EXPECT_TRUE(Cast(ScalarKernel(), *pool,
                   {numel, from.data(), to.data(), from.type(), type})
                  .ok());
  return to;
}

Array Normal(std::mt19937& random, int64_t numel, float deviation) {
  std::normal_distribution<float> normal(0, deviation);
  Array values(kF32, numel);
  for (int64_t i = 0; i < numel; ++i) values.floats()[i] = normal(random);
  return values;
}

// A span with the memory that it describes.
struct State {
  explicit State(int64_t numel, DType grad_type = kBF16,
                 DType moment_type = kF32, DType copy_type = kBF16,
                 unsigned seed = 1)
      : numel(numel),
        random(seed),
        param(Normal(random, numel, 0.1f)),
        grad(grad_type, numel),
        exp_avg(moment_type, numel),
        exp_avg_sq(moment_type, numel),
        copy(copy_type, numel) {
    NextGradient();
  }

  void NextGradient() {
    grad = CastTo(grad.type(), Normal(random, numel, 1), numel);
  }

  // Without a copy.
  AdamSpan Span(int group = 0) {
    AdamSpan span;
    span.numel = numel;
    span.group = group;
    span.param = param.floats();
    span.grad = grad.data();
    span.exp_avg = exp_avg.data();
    span.exp_avg_sq = exp_avg_sq.data();
    span.grad_type = grad.type();
    span.exp_avg_type = exp_avg.type();
    span.exp_avg_sq_type = exp_avg_sq.type();
    span.copy_type = copy.type();
    return span;
  }
  AdamSpan SpanWithCopy(int group = 0) {
    AdamSpan span = Span(group);
    span.copy = copy.data();
    return span;
  }

  // Of all that a step may change.
  bool operator==(const State& other) const {
    return param == other.param && exp_avg == other.exp_avg &&
           exp_avg_sq == other.exp_avg_sq && copy == other.copy;
  }

  int64_t numel;
  std::mt19937 random;
  Array param, grad, exp_avg, exp_avg_sq, copy;
};

// Steps first to last with new gradients.
void Steps(CpuAdam adam, State& state, int64_t first, int64_t last) {
  for (int64_t t = first; t <= last; ++t) {
    if (t > 1) state.NextGradient();
    const absl::Status status = adam.Step(state.SpanWithCopy(), t, kScale);
    ASSERT_TRUE(status.ok()) << status;
  }
}

// A step in pieces through two staging buffers in turn, with the copies
// gathered in state.copy.
absl::Status StepInPieces(CpuAdam& adam, State& state, int64_t t,
                          int64_t piece_numel,
                          std::vector<AdamPiece>* pieces = nullptr) {
  const int64_t bytes = ByteSize(state.copy.type());
  Array staging[2] = {state.copy, state.copy};
  int turn = 0;
  return adam.StepPieces(
      state.Span(), t, kScale, piece_numel,
      [&](const AdamPiece& piece) -> absl::StatusOr<void*> {
        if (pieces != nullptr) pieces->push_back(piece);
        std::memset(staging[turn].data(), 0xee, piece.numel * bytes);
        return staging[turn].data();
      },
      [&](const AdamPiece& piece, void* copy) {
        EXPECT_EQ(copy, staging[turn].data());
        if (pieces != nullptr) {
          EXPECT_EQ(pieces->back().offset, piece.offset);
          EXPECT_EQ(pieces->back().numel, piece.numel);
        }
        std::memcpy(
            static_cast<char*>(state.copy.data()) + piece.offset * bytes, copy,
            piece.numel * bytes);
        turn = 1 - turn;
        return absl::OkStatus();
      });
}

class CpuAdamTest : public testing::TestWithParam<const Kernel*> {
 protected:
  const Kernel& kernel() const { return *GetParam(); }
  CpuAdam Adam(const AdamOptions& options) {
    return MakeAdam(kernel(), *pool_, {options});
  }

  const std::unique_ptr<ThreadPool> pool_ = MakePool(2);
};

INSTANTIATE_TEST_SUITE_P(Kernels, CpuAdamTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

// --- Adam, by another formula. ---

// Kingma and Ba 2015, algorithm 1, and Loshchilov and Hutter 2019, algorithm 2,
// in double and as they print them.
class TextbookAdam {
 public:
  TextbookAdam(const AdamOptions& o, std::vector<double> param)
      : lr_(Float(o.lr)),
        beta1_(Float(o.beta1)),
        beta2_(Float(o.beta2)),
        eps_(Float(o.eps)),
        decay_(Float(o.weight_decay)),
        mode_(o.mode),
        param_(std::move(param)),
        m_(param_.size()),
        v_(param_.size()) {}

  void Step(const std::vector<double>& grad) {
    ++t_;
    for (size_t i = 0; i < param_.size(); ++i) {
      double g = grad[i];
      if (mode_ == Mode::kL2) g += decay_ * param_[i];
      m_[i] = beta1_ * m_[i] + (1 - beta1_) * g;
      v_[i] = beta2_ * v_[i] + (1 - beta2_) * g * g;
      const double m_hat = m_[i] / (1 - std::pow(beta1_, t_));
      const double v_hat = v_[i] / (1 - std::pow(beta2_, t_));
      double update = lr_ * m_hat / (std::sqrt(v_hat) + eps_);
      if (mode_ == Mode::kAdamW) update += lr_ * decay_ * param_[i];
      param_[i] -= update;
    }
  }
  const std::vector<double>& param() const { return param_; }

 private:
  // Options are those of fp32.
  static double Float(double x) { return static_cast<float>(x); }

  double lr_, beta1_, beta2_, eps_, decay_;
  Mode mode_;
  std::vector<double> param_, m_, v_;
  int t_ = 0;
};

TEST_P(CpuAdamTest, FollowsTheTextbook) {
  constexpr int64_t kNumel = 1003;
  constexpr int kSteps = 8;
  constexpr double kLr = 0.003;
  constexpr double kRounding = 0x1p-24;  // relative, of one fp32 operation
  for (Mode mode : {Mode::kAdamW, Mode::kL2}) {
    AdamOptions options = Options(mode, kLr);
    options.weight_decay = 2;
    options.eps = 0.01;
    State state(kNumel, kF32);
    std::vector<double> param(kNumel);
    // Each element keeps its sign, that of all its gradients: nothing cancels
    // in the gradient or in the moments, so that relative errors stay relative.
    auto sign = [](int64_t i) { return i % 2 == 0 ? 1.0f : -1.0f; };
    for (int64_t i = 0; i < kNumel; ++i) {
      state.param.floats()[i] = sign(i) * (0.04f + 0.01f * std::sin(7.0f * i));
      param[i] = state.param.floats()[i];
    }
    TextbookAdam textbook(options, param);
    CpuAdam adam = Adam(options);
    for (int t = 1; t <= kSteps; ++t) {
      std::vector<double> grad(kNumel);
      for (int64_t i = 0; i < kNumel; ++i) {
        // From 0.5 to 2 in magnitude.
        state.grad.floats()[i] = sign(i) * std::exp2(std::sin(3.0f * i + t));
        grad[i] = static_cast<double>(state.grad.floats()[i]) * kScale;
      }
      textbook.Step(grad);
      ASSERT_TRUE(adam.Step(state.Span(), t, kScale).ok());
    }
    // One step: at most 4 roundings reach m (the scale, L2's fma, the product,
    // the fma) and 5 reach v, of which the root halves the relative error; a
    // moment carries those of the steps before: below 8 t in the quotient.
    // Root, fma, division and two constants add 6. The quotient is below 1.5,
    // and all this is multiplied by lr. Beside it each step rounds the
    // parameter, below 0.06, twice.
    const double bound =
        kRounding * (1.5 * kLr * (8 * kSteps * (kSteps + 1) / 2 + 6 * kSteps) +
                     2 * kSteps * 0.06);
    EXPECT_LT(bound, 1e-5 * kLr * kSteps);  // of the sum of the updates
    double worst = 0;
    for (int64_t i = 0; i < kNumel; ++i) {
      ASSERT_GT(sign(i) * textbook.param()[i], 0);
      ASSERT_LT(sign(i) * textbook.param()[i], 0.06);
      worst = std::max(worst,
                       std::abs(state.param.floats()[i] - textbook.param()[i]));
    }
    EXPECT_LE(worst, bound);
    EXPECT_GT(worst, 0) << "the kernel is said to compute in fp32";
  }
}

// --- The same bits by every way. ---

TEST_P(CpuAdamTest, OnePassIsThreePasses) {
  constexpr int64_t kNumel = 10007;
  // Of five combinations one, which has each value at least once.
  const int stride = LongTestStride() == 1 ? 1 : 5;
  int combination = 0;
  for (Mode mode : {Mode::kAdamW, Mode::kL2}) {
    for (DType grad : {kF32, kBF16, kF16}) {
      for (DType moment : {kF32, kBF16}) {
        for (DType copy : {kBF16, kF16}) {
          if (combination++ % stride != 0) continue;
          SCOPED_TRACE(testing::Message() << Name(grad) << " " << Name(moment)
                                          << " " << Name(copy));
          CpuAdam adam = Adam(Options(mode));
          State one_pass(kNumel, grad, moment, copy);
          State three_passes(kNumel, grad, moment, copy);
          for (int64_t t = 1; t <= 3; ++t) {
            ASSERT_TRUE(adam.Step(one_pass.SpanWithCopy(), t, kScale).ok());

            Array wide = CastTo(kF32, three_passes.grad, kNumel);
            ASSERT_TRUE(Scale(kernel(), *pool_,
                              {kNumel, wide.floats(), wide.floats(), kScale})
                            .ok());
            AdamSpan span = three_passes.Span();
            span.grad = wide.data();
            span.grad_type = kF32;
            ASSERT_TRUE(adam.Step(span, t, 1).ok());
            ASSERT_TRUE(
                Cast(kernel(), *pool_,
                     {kNumel, span.param, three_passes.copy.data(), kF32, copy})
                    .ok());
            ASSERT_EQ(one_pass, three_passes) << t;
            one_pass.NextGradient();
            three_passes.NextGradient();
          }
        }
      }
    }
  }
}

TEST_P(CpuAdamTest, PiecesOfAnySizeAreOneStep) {
  const int64_t large = LongTestStride() == 1 ? 524289 : 65537;
  const std::pair<int64_t, std::vector<int64_t>> cases[] = {
      {large, {1000, 4096, large - 1, large, kMost}},
      {5003, {1, 17, 1000, 5002, 6000}},
      {7, {1, 100}},
      {1, {1}},
  };
  for (const auto& [numel, piece_sizes] : cases) {
    for (DType copy : {kBF16, kF16}) {
      CpuAdam adam = Adam(Options(Mode::kAdamW));
      State expected(numel, kBF16, kF32, copy);
      State initial = expected;
      Steps(adam, expected, 1, 1);
      for (int64_t piece_numel : piece_sizes) {
        State state = initial;
        const absl::Status status = StepInPieces(adam, state, 1, piece_numel);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(state, expected) << numel << " by " << piece_numel;
      }
    }
  }
}

TEST_P(CpuAdamTest, PiecesAreBlocksInOrder) {
  CpuAdam adam = Adam(Options(Mode::kAdamW));
  const int64_t block = adam.block_numel();
  ASSERT_GE(block, 1);
  for (int64_t numel : {int64_t{1}, block, 10 * block, 10 * block + 1}) {
    for (int64_t wanted : {int64_t{1}, block - 1, block, 2 * block - 1,
                           3 * block + 1, 10 * block, 11 * block, kMost}) {
      if (wanted < 1) continue;
      State state(numel);
      std::vector<AdamPiece> pieces;
      ASSERT_TRUE(StepInPieces(adam, state, 1, wanted, &pieces).ok());
      const int64_t size = wanted < block ? block : wanted - wanted % block;
      int64_t offset = 0;
      for (const AdamPiece& piece : pieces) {
        ASSERT_EQ(piece.offset, offset);
        ASSERT_EQ(piece.numel, std::min(size, numel - offset));
        offset += piece.numel;
      }
      ASSERT_EQ(offset, numel) << "in pieces of " << wanted;
    }
  }
}

TEST_P(CpuAdamTest, AnyNumberOfThreadsGivesTheSameBits) {
  // Some leaves for each thread.
  State initial(LongTestStride() == 1 ? 100003 : 30011);
  State expected = initial;
  Steps(Adam(Options(Mode::kL2)), expected, 1, 3);
  for (int threads : {1, 2, 3, 7}) {
    const auto pool = MakePool(threads);
    State state = initial;
    Steps(MakeAdam(kernel(), *pool, {Options(Mode::kL2)}), state, 1, 3);
    EXPECT_EQ(state, expected) << threads;
  }
}

TEST_P(CpuAdamTest, CopiesAreCastsOfTheWeights) {
  for (DType copy : {kBF16, kF16}) {
    State state(5003, kBF16, kF32, copy);
    Steps(Adam(Options(Mode::kAdamW)), state, 1, 2);
    EXPECT_EQ(state.copy, CastTo(copy, state.param, state.numel)) << Name(copy);
    State without = state;
    without.copy.Fill(0xaa);
    CpuAdam adam = Adam(Options(Mode::kAdamW));
    ASSERT_TRUE(adam.Step(state.SpanWithCopy(), 3, kScale).ok());
    ASSERT_TRUE(adam.Step(without.Span(), 3, kScale).ok());
    EXPECT_EQ(state.param, without.param);
    without.copy = state.copy;
    EXPECT_EQ(state, without);
  }
}

TEST_P(CpuAdamTest, ResumedIsUninterrupted) {
  for (DType moment : {kF32, kBF16}) {
    const AdamOptions options = Options(Mode::kAdamW);
    State uninterrupted(5003, kBF16, moment);
    State resumed = uninterrupted;
    Steps(Adam(options), uninterrupted, 1, 9);
    Steps(Adam(options), resumed, 1, 4);
    const State saved = resumed;
    State loaded = saved;
    Steps(Adam(options), loaded, 5, 9);
    EXPECT_EQ(loaded, uninterrupted);
  }
}

TEST_P(CpuAdamTest, SpansOfTwoGroupsDoNotMeet) {
  const AdamOptions options[] = {Options(Mode::kAdamW, 0.01),
                                 Options(Mode::kL2, 0.05)};
  const State initial[] = {State(3001, kF32, kF32, kBF16, 1),
                           State(4099, kF16, kBF16, kF16, 2)};
  State alone[] = {initial[0], initial[1]};
  for (int i : {0, 1}) Steps(Adam(options[i]), alone[i], 1, 3);

  State together[] = {initial[0], initial[1]};
  CpuAdam adam = MakeAdam(kernel(), *pool_, {options[0], options[1]});
  for (int64_t t = 1; t <= 3; ++t) {
    for (int i : {1, 0}) {
      if (t > 1) together[i].NextGradient();
      ASSERT_TRUE(adam.Step(together[i].SpanWithCopy(i), t, kScale).ok());
    }
  }
  EXPECT_EQ(together[0], alone[0]);
  EXPECT_EQ(together[1], alone[1]);
}

// --- Callbacks. ---

// What a step has done where it ended after `updated` elements: those as one
// whole step of them alone, the others as before.
void ExpectUpdated(CpuAdam& adam, State initial, State actual,
                   int64_t updated) {
  AdamSpan first = initial.Span();
  first.numel = updated;
  ASSERT_TRUE(adam.Step(first, 1, kScale).ok());
  actual.copy = initial.copy;
  EXPECT_EQ(actual, initial) << updated;
}

TEST_P(CpuAdamTest, ACallbacksErrorSaysHowFarTheSpanIs) {
  CpuAdam adam = Adam(Options(Mode::kAdamW));
  const int64_t size = 100 * adam.block_numel();
  const State initial(4 * size + 3);
  for (int64_t failing = 0; failing <= 4; ++failing) {
    for (bool before : {true, false}) {
      State state = initial;
      Array staging(kBF16, size);
      int calls_before = 0;
      int calls_after = 0;
      const absl::Status status = adam.StepPieces(
          state.Span(), 1, kScale, size,
          [&](const AdamPiece& piece) -> absl::StatusOr<void*> {
            ++calls_before;
            if (before && piece.offset == failing * size) {
              return absl::UnavailableError("the link is down");
            }
            return staging.data();
          },
          [&](const AdamPiece& piece, void*) -> absl::Status {
            ++calls_after;
            if (!before && piece.offset == failing * size) {
              return absl::UnavailableError("the link is down");
            }
            return absl::OkStatus();
          });
      EXPECT_EQ(calls_before, failing + 1);
      EXPECT_EQ(calls_after, before ? failing : failing + 1);
      const int64_t updated =
          before ? failing * size
                 : std::min((failing + 1) * size, initial.numel);
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(StartsWith(before ? "before_piece" : "after_piece"),
                        HasSubstr("of elements " +
                                  std::to_string(failing * size) + " to "),
                        HasSubstr("the first " + std::to_string(updated) +
                                  " are updated: the link is down")));
      ExpectUpdated(adam, initial, state, updated);
    }
  }
}

TEST_P(CpuAdamTest, AnUnusableBufferEndsTheStepBeforeItsPiece) {
  CpuAdam adam = Adam(Options(Mode::kAdamW));
  const int64_t size = 10 * adam.block_numel();
  const State initial(3 * size);
  // Where the second piece's buffer lies: in an array of the span, not
  // necessarily at the piece itself.
  struct Case {
    const char* problem;
    Array State::*array;
    int64_t offset;
  };
  for (const Case& bad :
       {Case{"the buffer is null", nullptr, 0},
        Case{"copy is at 0x", nullptr, 1},
        Case{"the buffer overlaps the span's param", &State::param, size},
        Case{"the buffer overlaps the span's param", &State::param, 0},
        Case{"the buffer overlaps the span's grad", &State::grad, size},
        Case{"the buffer overlaps the span's grad", &State::grad, 2 * size},
        Case{"the buffer overlaps the span's exp_avg", &State::exp_avg, size},
        Case{"the buffer overlaps the span's exp_avg_sq", &State::exp_avg_sq,
             2 * size}}) {
    State state = initial;
    const char* problem = bad.problem;
    Array staging(kBF16, size + 1);
    const absl::Status status = adam.StepPieces(
        state.Span(), 1, kScale, size,
        [&](const AdamPiece& piece) -> absl::StatusOr<void*> {
          if (piece.offset == 0) return staging.data();
          if (bad.array != nullptr) {
            Array& array = state.*bad.array;
            return static_cast<char*>(array.data()) +
                   bad.offset * ByteSize(array.type());
          }
          if (bad.offset == 0) return nullptr;
          return static_cast<char*>(staging.data()) + bad.offset;
        },
        [](const AdamPiece&, void*) { return absl::OkStatus(); });
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("the first " + std::to_string(size) + " are updated: "),
              HasSubstr(problem)));
    ExpectUpdated(adam, initial, state, size);
  }
}

// --- What is refused. ---

TEST(CpuAdamGroupsTest, CreateNamesGroupAndOption) {
  const auto pool = MakePool(1);
  absl::Status status = CpuAdam::Create(ScalarKernel(), *pool, {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  AdamOptions bad;
  bad.beta2 = 2;
  status = CpuAdam::Create(ScalarKernel(), *pool, {{}, bad, bad}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("group 1: beta2 is 2"));
}

TEST(CpuAdamGroupsTest, SetOptionsIsEffectiveAtTheNextStep) {
  const auto pool = MakePool(1);
  const AdamOptions old_options = Options(Mode::kAdamW, 0.01);
  const AdamOptions new_options = Options(Mode::kL2, 0.2);
  CpuAdam adam = MakeAdam(ScalarKernel(), *pool, {{}, old_options});
  State state(100);
  State expected = state;
  ASSERT_TRUE(adam.Step(state.Span(1), 1, kScale).ok());
  ASSERT_TRUE(adam.SetOptions(1, new_options).ok());
  ASSERT_TRUE(adam.Step(state.Span(1), 2, kScale).ok());

  CpuAdam before = MakeAdam(ScalarKernel(), *pool, {old_options});
  CpuAdam after = MakeAdam(ScalarKernel(), *pool, {new_options});
  ASSERT_TRUE(before.Step(expected.Span(), 1, kScale).ok());
  ASSERT_TRUE(after.Step(expected.Span(), 2, kScale).ok());
  EXPECT_EQ(state, expected);
  EXPECT_EQ(adam.groups()[0].lr, AdamOptions().lr);
}

TEST(CpuAdamGroupsTest, SetOptionsRefusesAndKeeps) {
  const auto pool = MakePool(1);
  CpuAdam adam = MakeAdam(ScalarKernel(), *pool, {{}, {}});
  AdamOptions bad;
  bad.lr = 0.5;
  for (int group : {-1, 2}) {
    const absl::Status status = adam.SetOptions(group, bad);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(),
              "group is " + std::to_string(group) + ", expected 0 to 1");
  }
  bad.eps = -1;
  const absl::Status status = adam.SetOptions(1, bad);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("group 1: eps is -1"));
  for (const AdamOptions& options : adam.groups()) {
    EXPECT_EQ(options.lr, AdamOptions().lr);
    EXPECT_EQ(options.eps, AdamOptions().eps);
  }
}

// A buffer that must not be asked for.
absl::StatusOr<void*> NoBuffer(const AdamPiece&) {
  ADD_FAILURE() << "called for a step that is refused, or of nothing";
  return absl::InternalError("");
}
absl::Status NoTransfer(const AdamPiece&, void*) {
  ADD_FAILURE() << "called for a step that is refused, or of nothing";
  return absl::InternalError("");
}

TEST(CpuAdamRefusalTest, NothingIsChanged) {
  const auto pool = MakePool(2);
  const Kernel kernel = MakeCountingKernel<0>(ScalarKernel(), "counting");
  AdamOptions overflowing;
  overflowing.lr = 3e38;
  CpuAdam adam = MakeAdam(kernel, *pool, {{}, overflowing});
  const State initial(100);

  struct Case {
    const char* problem;
    void (*change)(AdamSpan& span, int64_t& t, float& scale);
  };
  const Case cases[] = {
      {"step t is 0", [](AdamSpan&, int64_t& t, float&) { t = 0; }},
      {"step t is -5", [](AdamSpan&, int64_t& t, float&) { t = -5; }},
      {"grad_scale is nan",
       [](AdamSpan&, int64_t&, float& scale) { scale = NAN; }},
      {"grad_scale is inf",
       [](AdamSpan&, int64_t&, float& scale) { scale = INFINITY; }},
      {"span.group is 2, expected 0 to 1",
       [](AdamSpan& span, int64_t&, float&) { span.group = 2; }},
      {"span.group is -1",
       [](AdamSpan& span, int64_t&, float&) { span.group = -1; }},
      {"group 1: lr 3e+38",
       [](AdamSpan& span, int64_t&, float&) { span.group = 1; }},
      {"numel is -1",
       [](AdamSpan& span, int64_t&, float&) { span.numel = -1; }},
      {"grad is null",
       [](AdamSpan& span, int64_t&, float&) { span.grad = nullptr; }},
      {"exp_avg overlaps exp_avg_sq",
       [](AdamSpan& span, int64_t&, float&) {
         span.exp_avg_sq = span.exp_avg;
       }},
      {"exp_avg_type is fp16",
       [](AdamSpan& span, int64_t&, float&) { span.exp_avg_type = kF16; }},
  };
  for (const Case& bad : cases) {
    State state = initial;
    AdamSpan span = state.SpanWithCopy();
    int64_t t = 1;
    float scale = 1;
    bad.change(span, t, scale);
    const absl::Status whole = adam.Step(span, t, scale);
    span.copy = nullptr;
    const absl::Status in_pieces =
        adam.StepPieces(span, t, scale, 10, NoBuffer, NoTransfer);
    for (const absl::Status& status : {whole, in_pieces}) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad.problem << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(bad.problem));
    }
    EXPECT_EQ(state, initial) << bad.problem;
  }

  State state = initial;
  for (int64_t piece_numel : {int64_t{0}, int64_t{-1}, -kMost - 1}) {
    const absl::Status status =
        adam.StepPieces(state.Span(), 1, 1, piece_numel, NoBuffer, NoTransfer);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("piece_numel is " + std::to_string(piece_numel)));
  }
  const absl::Status status =
      adam.StepPieces(state.SpanWithCopy(), 1, 1, 10, NoBuffer, NoTransfer);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("span.copy is set"));
  EXPECT_EQ(state, initial);
  EXPECT_EQ(OperationCounts<0>().Total(), 0);
}

TEST(CpuAdamRefusalTest, NothingToDoIsNoError) {
  const auto pool = MakePool(1);
  CpuAdam adam = MakeAdam(ScalarKernel(), *pool, {{}});
  EXPECT_TRUE(adam.Step(AdamSpan(), 1, 1).ok());
  EXPECT_TRUE(adam.StepPieces(AdamSpan(), 1, 1, 10, NoBuffer, NoTransfer).ok());
}

TEST(CpuAdamRefusalTest, AKernelWithoutCopies) {
  const auto pool = MakePool(1);
  Kernel kernel = MakeCountingKernel<1>(ScalarKernel(), "no_copies");
  kernel.copy_types = {};
  const OperationCounter& counts = OperationCounts<1>();
  CpuAdam adam = MakeAdam(kernel, *pool, {{}});
  EXPECT_EQ(&adam.kernel(), &kernel);
  EXPECT_FALSE(adam.copy_supported(kBF16));
  EXPECT_FALSE(adam.copy_supported(kF16));
  EXPECT_TRUE(MakeAdam(ScalarKernel(), *pool, {{}}).copy_supported(kBF16));

  const State initial(100);
  State state = initial;
  const absl::Status whole = adam.Step(state.SpanWithCopy(), 1, kScale);
  const absl::Status in_pieces =
      adam.StepPieces(state.Span(), 1, kScale, 10, NoBuffer, NoTransfer);
  for (const absl::Status& status : {whole, in_pieces}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("bf16"));
  }
  EXPECT_EQ(state, initial);
  EXPECT_EQ(counts.Total(), 0);

  // The gradient scale is fused all the same.
  ASSERT_TRUE(adam.Step(state.Span(), 1, kScale).ok());
  EXPECT_EQ(counts.adam_step, 1);
  EXPECT_EQ(counts.adam_step_with_copy, 0);
  EXPECT_EQ(counts.Total(), 1);
  State expected = initial;
  CpuAdam scalar = MakeAdam(ScalarKernel(), *pool, {{}});
  ASSERT_TRUE(scalar.Step(expected.Span(), 1, kScale).ok());
  EXPECT_EQ(state, expected);
}

// --- What runs. ---

TEST_P(CpuAdamTest, IsOnePassOnTheKernelItWasGiven) {
  const Kernel counting = MakeCountingKernel<2>(kernel(), "counting");
  OperationCounter& counts = OperationCounts<2>();
  auto since = [](const std::atomic<int64_t>& count) {
    return [&count, from = count.load()] { return count - from; };
  };
  const auto steps = since(counts.adam_step);
  const auto with_copy = since(counts.adam_step_with_copy);
  const auto numel = since(counts.adam_step_numel);
  const int64_t total = counts.Total();

  CpuAdam adam = MakeAdam(counting, *pool_, {{}});
  const int64_t block = adam.block_numel();
  State state(4 * block);
  ASSERT_TRUE(adam.Step(state.SpanWithCopy(), 1, kScale).ok());
  EXPECT_EQ(steps(), 1);
  ASSERT_TRUE(StepInPieces(adam, state, 2, block).ok());
  EXPECT_EQ(steps(), 5);
  EXPECT_EQ(with_copy(), 5);
  EXPECT_EQ(numel(), 8 * block);
  EXPECT_EQ(counts.Total(), total + 5) << "another operation ran";
}

// Streaming stores are for large copies, where the kernel has them. (That the
// bits are the same is a matter of kernels/conformance_test.cc.)
TEST(CpuAdamStoresTest, AreChosenBySizeOrAsAsked) {
  const auto pool = MakePool(2);
  Kernel kernel = MakeCountingKernel<3>(ScalarKernel(), "streams");
  KernelOperations operations = *kernel.operations;
  operations.streams_copies = true;
  kernel.operations = &operations;
  const CpuAdam adam = MakeAdam(kernel, *pool, {{}});
  OperationCounter& counts = OperationCounts<3>();

  const int64_t large = kStreamedCopyBytes / 2;
  const int64_t most = large + adam.block_numel();
  std::vector<float> param(most), grad(most), exp_avg(most), exp_avg_sq(most);
  std::vector<uint16_t> copy(most);
  AdamSpan span;
  span.param = param.data();
  span.grad = grad.data();
  span.exp_avg = exp_avg.data();
  span.exp_avg_sq = exp_avg_sq.data();

  // How many calls of the kernel were asked to stream, and how many were not.
  using Calls = std::pair<int64_t, int64_t>;
  const auto count = [&](const auto& step) {
    const int64_t calls = counts.adam_step;
    const int64_t streaming = counts.adam_step_streaming;
    EXPECT_TRUE(step().ok());
    const int64_t streamed = counts.adam_step_streaming - streaming;
    return Calls(streamed, counts.adam_step - calls - streamed);
  };
  const struct {
    CopyStores stores;
    int64_t numel;
    bool streaming;
  } cases[] = {{CopyStores::kAuto, large, true},
               {CopyStores::kAuto, large - 1, false},
               {CopyStores::kStreaming, 2 * kLeafNumel, true},
               {CopyStores::kOrdinary, large, false}};
  span.copy = copy.data();
  for (const auto& c : cases) {
    SCOPED_TRACE(testing::Message()
                 << static_cast<int>(c.stores) << ", numel " << c.numel);
    operations.streams_copies = false;
    EXPECT_FALSE(adam.StreamsCopy(kBF16, c.stores, c.numel));
    operations.streams_copies = true;
    EXPECT_EQ(adam.StreamsCopy(kBF16, c.stores, c.numel), c.streaming);
    span.numel = c.numel;
    span.copy_stores = c.stores;
    EXPECT_EQ(count([&] { return adam.Step(span, 1, kScale); }),
              c.streaming ? Calls(2, 0) : Calls(0, 2));
  }

  // Of pieces it is their size that counts, for a short last one too.
  span.copy = nullptr;
  const auto pieces = [&](int64_t numel, CopyStores stores,
                          int64_t piece_numel) {
    span.numel = numel;
    span.copy_stores = stores;
    return count([&] {
      return adam.StepPieces(
          span, 1, kScale, piece_numel,
          [&](const AdamPiece&) -> absl::StatusOr<void*> {
            return copy.data();
          },
          [](const AdamPiece&, void*) { return absl::OkStatus(); });
    });
  };
  EXPECT_EQ(pieces(most, CopyStores::kAuto, large), Calls(3, 0));
  EXPECT_EQ(pieces(most, CopyStores::kAuto, large / 2), Calls(0, 5));
  EXPECT_EQ(pieces(most, CopyStores::kStreaming, large / 2), Calls(5, 0));
  EXPECT_EQ(pieces(most, CopyStores::kOrdinary, large), Calls(0, 3));
  // The only piece is as large as the span.
  EXPECT_EQ(pieces(large - 1, CopyStores::kAuto, most), Calls(0, 2));
}

TEST_P(CpuAdamTest, NothingIsAllocated) {
  CpuAdam adam = Adam(Options(Mode::kAdamW));
  State state(5 * kLeafNumel);
  Array staging(kBF16, 2 * kLeafNumel);
  auto step = [&](int64_t t) {
    absl::Status status = adam.Step(state.SpanWithCopy(), t, kScale);
    status.Update(adam.StepPieces(
        state.Span(), t, kScale, 2 * kLeafNumel,
        [&](const AdamPiece&) -> absl::StatusOr<void*> {
          return staging.data();
        },
        [](const AdamPiece&, void*) { return absl::OkStatus(); }));
    return status;
  };
  ASSERT_TRUE(step(1).ok());
  const int64_t before = AllocationCount();
  const absl::Status status = step(2);
  EXPECT_EQ(AllocationCount(), before);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace onepass

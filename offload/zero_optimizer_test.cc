#include "offload/zero_optimizer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/norm_sum.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/adam_options.h"
#include "offload/loss_scaler.h"
#include "offload/partition.h"
#include "offload/shard_optimizer.h"
#include "offload/step_trace.h"
#include "tests/allocation_counter.h"
#include "tests/make_pool.h"
#include "tests/pairwise.h"
#include "tests/process_use.h"
#include "tests/rank_threads.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Where others run all cases of a long test, or an emulator runs them.
bool Reduced() { return LongTestStride() > 1; }

// --- Errors. ---

testing::AssertionResult IsOk(const absl::Status& status) {
  if (status.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << status;
}
template <typename T>
testing::AssertionResult IsOk(const absl::StatusOr<T>& result) {
  return IsOk(result.status());
}

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::string& message) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

// --- Numbers and their types. ---

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// In [-1, 1), multiples of 2^(1 - bits). Of few bits, sums of some and their
// means are exact in any type.
constexpr int kFewBits = 7;
constexpr int kAllBits = 24;

std::vector<float> Numbers(uint64_t seed, int64_t numel, int bits) {
  const float unit = std::ldexp(1.0f, 1 - bits);
  std::vector<float> numbers(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const auto integer =
        static_cast<int64_t>(Mix(seed + Mix(i)) >> (64 - bits));
    numbers[i] =
        static_cast<float>(integer - (int64_t{1} << (bits - 1))) * unit;
  }
  return numbers;
}

// As elements of a type, and back. Aligned for any.
std::vector<uint32_t> Encode(const std::vector<float>& values, DType type) {
  const auto numel = static_cast<int64_t>(values.size());
  std::vector<uint32_t> words(numel);
  if (numel == 0) return words;
  if (type == kF32) {
    std::memcpy(words.data(), values.data(), numel * sizeof(float));
  } else {
    const auto pool = MakePool(1);
    EXPECT_TRUE(IsOk(Cast(ScalarKernel(), *pool,
                          {numel, values.data(), words.data(), kF32, type})));
  }
  return words;
}

std::vector<float> Decode(const void* elements, DType type, int64_t numel) {
  std::vector<float> values(numel);
  if (numel == 0) return values;
  if (type == kF32) {
    std::memcpy(values.data(), elements, numel * sizeof(float));
  } else {
    const auto pool = MakePool(1);
    EXPECT_TRUE(IsOk(Cast(ScalarKernel(), *pool,
                          {numel, elements, values.data(), type, kF32})));
  }
  return values;
}

std::vector<float> Round(const std::vector<float>& values, DType type) {
  return Decode(Encode(values, type).data(), type,
                static_cast<int64_t>(values.size()));
}

// Equal where their bits are.
std::vector<uint32_t> Bits(const std::vector<float>& values) {
  return Encode(values, kF32);
}

absl::StatusOr<DeviceBuffer> ToDevice(Rank& rank,
                                      const std::vector<float>& values,
                                      DType type) {
  const std::vector<uint32_t> words = Encode(values, type);
  const int64_t bytes = static_cast<int64_t>(values.size()) * ByteSize(type);
  absl::StatusOr<DeviceBuffer> buffer = rank.device->Allocate(bytes);
  if (!buffer.ok()) return buffer.status();
  ONEPASS_RETURN_IF_ERROR(
      rank.stream->CopyToDevice(buffer->data(), words.data(), bytes));
  ONEPASS_RETURN_IF_ERROR(rank.stream->Synchronize());
  return buffer;
}

std::vector<float> FromDevice(Rank& rank, const void* data, DType type,
                              int64_t numel) {
  std::vector<uint32_t> words(numel);
  const int64_t bytes = numel * ByteSize(type);
  EXPECT_TRUE(IsOk(rank.stream->CopyToHost(words.data(), data, bytes)));
  EXPECT_TRUE(IsOk(rank.stream->Synchronize()));
  return Decode(words.data(), type, numel);
}

// --- Units. ---

using Shape = std::vector<int64_t>;
using Shapes = std::vector<std::vector<Shape>>;  // of the parameters of units

int64_t Numel(const Shape& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

// Parameters that end on leaves and not, of none and one element, units without
// elements and without parameters, more and less than most ranks own.
const Shapes& ManyShapes() {
  static const auto* shapes = new Shapes{
      {{3, 5000}, {1}, {}, {0}, {4096}, {2, 3, 5}},
      {},
      {{7, 0}},
      {{4097}, {20000}, {1, 1}},
      {{5}},
  };
  return *shapes;
}

std::string NameOf(int unit, int parameter) {
  return absl::StrCat("u", unit, ".p", parameter);
}

uint64_t SeedOf(int unit, int parameter) { return Mix(unit * 100 + parameter); }

FillValues FillWith(std::vector<float> values) {
  return [values = std::move(values)](int64_t offset, absl::Span<float> part) {
    return ValuesOf(values)(offset, part);
  };
}

// Parameter p is of group p % groups.
std::vector<ZeroUnit> MakeUnits(const Shapes& shapes, int groups = 1) {
  std::vector<ZeroUnit> units;
  for (size_t u = 0; u < shapes.size(); ++u) {
    ZeroUnit& unit = units.emplace_back();
    unit.name = absl::StrCat("u", u);
    for (size_t p = 0; p < shapes[u].size(); ++p) {
      const int index = static_cast<int>(p);
      ZeroParameter& parameter = unit.parameters.emplace_back();
      parameter.name = NameOf(static_cast<int>(u), index);
      parameter.shape = shapes[u][p];
      parameter.group = index % groups;
      parameter.values = FillWith(Numbers(SeedOf(static_cast<int>(u), index),
                                          Numel(parameter.shape), kAllBits));
    }
  }
  return units;
}

// Calls visit(unit, parameter, numel) for each parameter.
template <typename Visit>
void ForEachParameter(const Shapes& shapes, const Visit& visit) {
  for (size_t u = 0; u < shapes.size(); ++u) {
    for (size_t p = 0; p < shapes[u].size(); ++p) {
      visit(static_cast<int>(u), static_cast<int>(p), Numel(shapes[u][p]));
    }
  }
}

// --- State. ---

constexpr StateKind kStateKinds[] = {StateKind::kMaster, StateKind::kExpAvg,
                                     StateKind::kExpAvgSq};

// Bits of the values of each parameter.
using Tensors = std::map<std::string, std::vector<uint32_t>>;

struct State {
  explicit State(const Shapes& shapes) {
    ForEachParameter(shapes, [&](int unit, int parameter, int64_t numel) {
      for (Tensors& tensors : kinds) {
        tensors[NameOf(unit, parameter)].resize(numel);
      }
      weights[NameOf(unit, parameter)].resize(numel);
    });
  }

  Tensors& of(StateKind kind) { return kinds[static_cast<size_t>(kind)]; }

  bool operator==(const State& other) const {
    return kinds == other.kinds && weights == other.weights;
  }

  std::array<Tensors, std::size(kStateKinds)> kinds;
  Tensors weights;  // as fp32
};

// Collective: each rank writes what it owns.
void Collect(ZeroOptimizer& optimizer, Rank& rank, DType weights_type,
             State& state) {
  for (size_t u = 0; u < optimizer.units().size(); ++u) {
    const int unit = static_cast<int>(u);
    for (const ParameterRange& range :
         optimizer.partition(unit).RangesOf(rank.rank())) {
      const std::string name = NameOf(unit, range.parameter);
      for (const StateKind kind : kStateKinds) {
        std::vector<float> part(range.numel);
        ASSERT_TRUE(IsOk(
            optimizer.shards().GetState(name, kind, absl::MakeSpan(part))));
        const std::vector<uint32_t> bits = Bits(part);
        std::copy(bits.begin(), bits.end(),
                  state.of(kind).at(name).begin() + range.offset);
      }
    }
    const absl::StatusOr<Gathered> gathered =
        optimizer.Gather(unit, *rank.stream);
    ASSERT_TRUE(IsOk(gathered));
    for (size_t p = 0; p < optimizer.units()[u].parameters.size(); ++p) {
      const int parameter = static_cast<int>(p);
      const std::vector<float> values =
          FromDevice(rank, gathered->weights(parameter), weights_type,
                     Numel(optimizer.units()[u].parameters[p].shape));
      if (rank.rank() == 0) {
        state.weights.at(NameOf(unit, parameter)) = Bits(values);
      }
    }
  }
}

// --- Training. ---

struct GradientKey {
  int step;
  int64_t micro_batch;
  int unit;
  int parameter;
  int rank;
  int64_t numel;
};

// The same for all ranks, of few bits.
std::vector<float> SameOnAllRanks(const GradientKey& key) {
  return Numbers(SeedOf(key.unit, key.parameter) + 1000 * key.step +
                     100 * key.micro_batch + 1,
                 key.numel, kFewBits);
}

struct Training {
  Shapes shapes = ManyShapes();
  int groups = 1;
  ZeroOptions options;
  int steps = 2;
  // Set before each step, where there are any.
  std::function<AdamOptions(int group, int step)> group_options;
  // Steps, beside the last one, after which state is looked at.
  std::vector<int> looks;
  // In fp32; nothing where the rank computed none.
  std::function<std::optional<std::vector<float>>(const GradientKey&)>
      gradient = SameOnAllRanks;
};

Training MakeTraining() {
  Training training;
  ShardOptimizerOptions& shard = training.options.shard;
  shard.groups[0].lr = 0.01;
  shard.groups[0].weight_decay = 0.1;
  // Small, to have many of each.
  shard.piece_numel = 4096;
  shard.sub_group_numel = 8192;
  return training;
}

// What has to be alike on all ranks, and for all ways to do a step.
struct Report {
  explicit Report(const StepReport& report)
      : skipped(report.skipped),
        skip_reason(report.skip_reason),
        norm(report.norm),
        factor(report.factor),
        loss_scale(report.loss_scale) {}

  bool operator==(const Report& other) const {
    // NaN is equal to itself.
    return std::memcmp(&norm, &other.norm, sizeof(norm)) == 0 &&
           std::tie(skipped, skip_reason, factor, loss_scale) ==
               std::tie(other.skipped, other.skip_reason, other.factor,
                        other.loss_scale);
  }

  bool skipped;
  std::string skip_reason;
  double norm;
  float factor;
  double loss_scale;
};

absl::StatusOr<std::unique_ptr<ZeroOptimizer>> CreateOn(
    Rank& rank, const Training& training) {
  return ZeroOptimizer::Create(rank.runtime(), *rank.communicator,
                               training.options,
                               MakeUnits(training.shapes, training.groups));
}

// A rank's gradients of a unit, on its device.
struct UnitGradients {
  std::vector<DeviceBuffer> buffers;
  std::vector<const void*> pointers;
};

UnitGradients MakeGradients(Rank& rank, const Training& training, int step,
                            int64_t micro_batch, int unit) {
  UnitGradients gradients;
  for (size_t p = 0; p < training.shapes[unit].size(); ++p) {
    const std::optional<std::vector<float>> values =
        training.gradient({step, micro_batch, unit, static_cast<int>(p),
                           rank.rank(), Numel(training.shapes[unit][p])});
    if (!values.has_value()) {
      gradients.pointers.push_back(nullptr);
      continue;
    }
    absl::StatusOr<DeviceBuffer> buffer =
        ToDevice(rank, *values, training.options.local_grad_type);
    EXPECT_TRUE(IsOk(buffer));
    gradients.buffers.push_back(*std::move(buffer));
    gradients.pointers.push_back(gradients.buffers.back().data());
  }
  return gradients;
}

// All micro-batches of all units.
absl::Status ReduceAll(ZeroOptimizer& optimizer, Rank& rank,
                       const Training& training, int step) {
  for (int64_t m = 0; m < training.options.shard.micro_batches; ++m) {
    for (size_t u = 0; u < training.shapes.size(); ++u) {
      const int unit = static_cast<int>(u);
      const UnitGradients gradients =
          MakeGradients(rank, training, step, m, unit);
      ONEPASS_RETURN_IF_ERROR(
          optimizer.ReduceGradients(unit, gradients.pointers, *rank.stream));
    }
  }
  return absl::OkStatus();
}

struct Outcome {
  explicit Outcome(const Shapes& shapes, size_t looks = 0)
      : state(shapes), earlier(looks, State(shapes)) {}

  bool operator==(const Outcome& other) const {
    return state == other.state && earlier == other.earlier &&
           reports == other.reports;
  }

  State state;
  std::vector<State> earlier;   // of Training::looks
  std::vector<Report> reports;  // those of rank 0; of all ranks they are equal
};

// Of either optimizer.
void SetGroupOptions(ShardOptimizer& shards, const Training& training,
                     int step) {
  if (!training.group_options) return;
  for (int group = 0; group < training.groups; ++group) {
    EXPECT_TRUE(IsOk(
        shards.SetGroupOptions(group, training.group_options(group, step))));
  }
}

// Where it is created, stepped and then looked at.
Outcome Train(const RankOptions& ranks, const Training& training) {
  Outcome outcome(training.shapes, training.looks.size());
  std::vector<std::vector<Report>> reports(ranks.world);
  RunRanks(ranks, [&](Rank& rank) {
    auto optimizer = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(optimizer));
    const DType weights_type = training.options.shard.weights_type;
    for (int step = 0; step < training.steps; ++step) {
      SetGroupOptions((*optimizer)->shards(), training, step);
      ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, step)));
      const absl::StatusOr<StepReport> report = (*optimizer)->Step({});
      ASSERT_TRUE(IsOk(report));
      reports[rank.rank()].emplace_back(*report);
      for (size_t i = 0; i < training.looks.size(); ++i) {
        if (training.looks[i] != step + 1) continue;
        Collect(**optimizer, rank, weights_type, outcome.earlier[i]);
      }
    }
    Collect(**optimizer, rank, weights_type, outcome.state);
  });
  for (const std::vector<Report>& of_rank : reports) {
    EXPECT_TRUE(of_rank == reports[0]);
  }
  outcome.reports = std::move(reports[0]);
  return outcome;
}

RankOptions Ranks(int world) {
  RankOptions options;
  options.world = world;
  return options;
}

// The mean over ranks of the gradient of a parameter: widened, summed in their
// order, divided, rounded once.
std::vector<float> Mean(const Training& training, int world, GradientKey key) {
  const DType wire = training.options.shard.grad_type;
  std::vector<float> mean;
  for (key.rank = 0; key.rank < world; ++key.rank) {
    std::vector<float> term =
        training.gradient(key).value_or(std::vector<float>(key.numel));
    term = Round(Round(term, training.options.local_grad_type), wire);
    if (key.rank == 0) {
      mean = term;
      continue;
    }
    for (int64_t i = 0; i < key.numel; ++i) mean[i] = mean[i] + term[i];
  }
  for (float& value : mean) value = value / static_cast<float>(world);
  return Round(mean, wire);
}

// The same with no ranks: a ShardOptimizer over whole parameters, of means over
// `world` ranks.
Outcome TrainAlone(int world, const Training& training) {
  Outcome outcome(training.shapes);
  RunRanks(Ranks(1), [&](Rank& rank) {
    const ShardOptimizerOptions& options = training.options.shard;
    std::vector<DeviceBuffer> weights;
    std::vector<Shard> shards;
    for (const ZeroUnit& unit : MakeUnits(training.shapes, training.groups)) {
      for (const ZeroParameter& parameter : unit.parameters) {
        Shard& shard = shards.emplace_back();
        shard.name = parameter.name;
        shard.shape = parameter.shape;
        shard.box = {std::vector<int64_t>(parameter.shape.size()),
                     parameter.shape};
        shard.group = parameter.group;
        shard.values = parameter.values;
        auto buffer = rank.device->Allocate(Numel(parameter.shape) *
                                            ByteSize(options.weights_type));
        ASSERT_TRUE(IsOk(buffer));
        weights.push_back(*std::move(buffer));
        shard.weights = weights.back().data();
      }
    }
    auto optimizer = ShardOptimizer::Create(rank.runtime(), options, shards);
    ASSERT_TRUE(IsOk(optimizer));
    for (int step = 0; step < training.steps; ++step) {
      SetGroupOptions(**optimizer, training, step);
      for (int64_t m = 0; m < options.micro_batches; ++m) {
        int index = 0;
        ForEachParameter(training.shapes, [&](int unit, int parameter,
                                              int64_t numel) {
          const auto gradient = ToDevice(
              rank, Mean(training, world, {step, m, unit, parameter, 0, numel}),
              options.grad_type);
          ASSERT_TRUE(IsOk(gradient));
          const absl::StatusOr<Event*> landed =
              (*optimizer)
                  ->AddGradient(index++, gradient->data(), *rank.stream);
          ASSERT_TRUE(IsOk(landed));
          ASSERT_TRUE(IsOk((*landed)->Wait()));
        });
      }
      StepInput input;
      const absl::StatusOr<NormSum> norm = (*optimizer)->LocalNorm();
      ASSERT_TRUE(IsOk(norm));
      input.norm = *norm;
      const absl::StatusOr<StepReport> report = (*optimizer)->Step(input);
      ASSERT_TRUE(IsOk(report));
      outcome.reports.emplace_back(*report);
    }
    size_t index = 0;
    ForEachParameter(
        training.shapes, [&](int unit, int parameter, int64_t numel) {
          const std::string name = NameOf(unit, parameter);
          for (const StateKind kind : kStateKinds) {
            std::vector<float> values(numel);
            ASSERT_TRUE(IsOk(
                (*optimizer)->GetState(name, kind, absl::MakeSpan(values))));
            outcome.state.of(kind)[name] = Bits(values);
          }
          outcome.state.weights[name] = Bits(FromDevice(
              rank, weights[index++].data(), options.weights_type, numel));
        });
  });
  return outcome;
}

// --- Weights. ---

// Options and units at random.
class RandomTrainings {
 public:
  explicit RandomTrainings(uint64_t seed) : random_(seed) {}

  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(random_() % bound);
  }

  Training Next() {
    Training training = MakeTraining();
    training.groups = 1 + static_cast<int>(Below(3));
    ShardOptimizerOptions& shard = training.options.shard;
    shard.groups.resize(training.groups);
    const DType types[] = {kBF16, kF16, kF32};
    shard.weights_type = types[number_++ % 3];
    shard.cpu_ratio = static_cast<double>(Below(5)) / 4;
    shard.piece_numel = 1 + Below(20'000);
    // Small ones, too.
    shard.sub_group_numel = 1 + Below(1 + Below(20'000));
    training.options.collective_bytes = 20000 << Below(4);
    training.shapes.assign(Below(5), {});
    for (auto& unit : training.shapes) {
      unit.resize(Below(6));
      for (Shape& shape : unit) {
        for (int64_t d = Below(3); d > 0; --d) {
          shape.push_back(Below(10) == 0 ? 0 : 1 + Below(20));
        }
        if (Below(2) == 0) shape.push_back(1 + Below(60));
      }
    }
    return training;
  }

 private:
  std::mt19937_64 random_;
  int number_ = 0;
};

TEST(ZeroOptimizerTest, GatherGivesWhatWasSet) {
  RandomTrainings trainings(1);
  const int rounds = Reduced() ? 8 : 40;
  for (int round = 0; round < rounds; ++round) {
    const Training training = trainings.Next();
    const DType type = training.options.shard.weights_type;
    RankOptions ranks = Ranks(1 + static_cast<int>(trainings.Below(8)));
    ranks.device.host_accessible = trainings.Below(2) == 0;
    RunRanks(ranks, [&](Rank& rank) {
      auto created = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(created));
      ZeroOptimizer& optimizer = **created;
      const int64_t before = rank.device->memory().in_use;
      int64_t peak = 0;
      // The initial weights, and those that are set.
      for (const uint64_t change : {0, 1}) {
        ForEachParameter(training.shapes, [&](int u, int p, int64_t numel) {
          if (change == 0) return;
          ASSERT_TRUE(IsOk(optimizer.SetParameter(
              u, p,
              FillWith(Numbers(SeedOf(u, p) + change, numel, kAllBits)))));
        });
        for (size_t u = 0; u < training.shapes.size(); ++u) {
          const int unit = static_cast<int>(u);
          const int64_t bytes =
              optimizer.partition(unit).padded_numel() * ByteSize(type);
          peak = std::max(peak, bytes);
          {
            rank.device->ResetPeaks();
            const auto gathered = optimizer.Gather(unit, *rank.stream);
            ASSERT_TRUE(IsOk(gathered));
            EXPECT_EQ(rank.device->memory().in_use, before + bytes);
            EXPECT_EQ(rank.device->memory().peak, before + bytes);
            EXPECT_EQ(optimizer.gathered().in_use, bytes);
            for (size_t p = 0; p < training.shapes[u].size(); ++p) {
              const int parameter = static_cast<int>(p);
              const int64_t numel = Numel(training.shapes[u][p]);
              std::vector<float> expected = Round(
                  Numbers(SeedOf(unit, parameter) + change, numel, kAllBits),
                  type);
              // With the gap after it.
              expected.resize(LeafCount(numel) * kLeafNumel);
              EXPECT_EQ(FromDevice(rank, gathered->weights(parameter), type,
                                   static_cast<int64_t>(expected.size())),
                        expected)
                  << NameOf(unit, parameter);
            }
          }
          EXPECT_EQ(rank.device->memory().in_use, before);
          EXPECT_EQ(optimizer.gathered().in_use, 0);
          EXPECT_EQ(optimizer.gathered().peak, peak);
        }
      }
      EXPECT_EQ(optimizer.gathered().allocations,
                static_cast<int64_t>(2 * training.shapes.size()));
    });
  }
}

TEST(ZeroOptimizerTest, GatheredIsCountedWhereItGoes) {
  RunRanks(Ranks(2), [](Rank& rank) {
    Training training = MakeTraining();
    training.shapes = {{{5000}}, {{9000}}};
    auto created = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    const auto bytes = [&](int unit) {
      return optimizer.partition(unit).padded_numel() * ByteSize(kBF16);
    };
    auto first = optimizer.Gather(0, *rank.stream);
    ASSERT_TRUE(IsOk(first));
    auto second = optimizer.Gather(1, *rank.stream);
    ASSERT_TRUE(IsOk(second));
    EXPECT_EQ(optimizer.gathered().in_use, bytes(0) + bytes(1));
    const void* weights = second->weights(0);
    // The first goes, and the second is now where it was.
    *first = *std::move(second);
    EXPECT_EQ(optimizer.gathered().in_use, bytes(1));
    EXPECT_EQ(first->weights(0), weights);
    {
      Gathered third = *std::move(first);
      EXPECT_EQ(third.weights(0), weights);
      EXPECT_EQ(optimizer.gathered().in_use, bytes(1));
      Gathered& same = third;
      third = std::move(same);
      EXPECT_EQ(third.weights(0), weights);
      EXPECT_EQ(FromDevice(rank, third.weights(0), kBF16, 9000),
                Round(Numbers(SeedOf(1, 0), 9000, kAllBits), kBF16));
    }
    EXPECT_EQ(optimizer.gathered().in_use, 0);
    EXPECT_EQ(optimizer.gathered().peak, bytes(0) + bytes(1));
    EXPECT_TRUE(IsOk(optimizer.Step({})));
  });
}

// A stream of the device, another object for it, and the device's default one.
enum class StreamKind { kOwn, kWrapped, kDefault };
constexpr StreamKind kStreamKinds[] = {StreamKind::kOwn, StreamKind::kWrapped,
                                       StreamKind::kDefault};

// For `kind` of stream; of kOwn there is none, but rank.stream itself.
std::unique_ptr<Stream> Wrap(Rank& rank, StreamKind kind) {
  if (kind == StreamKind::kOwn) return nullptr;
  auto stream = rank.device->WrapStream(
      kind == StreamKind::kDefault ? nullptr : rank.stream->native());
  EXPECT_TRUE(IsOk(stream));
  return *std::move(stream);
}

// By the event, and on the stream itself.
TEST(ZeroOptimizerTest, OtherStreamsWaitForGatheredWeights) {
  RankOptions ranks = Ranks(2);
  ranks.device.host_accessible = false;
  ranks.device.link_bytes_per_s = 1e8;
  for (const StreamKind kind : kStreamKinds) {
    for (const bool by_event : {true, false}) {
      RunRanks(ranks, [&](Rank& rank) {
        Training training = MakeTraining();
        training.shapes = {{{50000}}};
        auto optimizer = CreateOn(rank, training);
        ASSERT_TRUE(IsOk(optimizer));
        const std::unique_ptr<Stream> wrapped = Wrap(rank, kind);
        Stream& stream = wrapped == nullptr ? *rank.stream : *wrapped;
        const auto gathered = (*optimizer)->Gather(0, stream);
        ASSERT_TRUE(IsOk(gathered));
        auto reader = by_event ? rank.device->CreateStream("other")
                               : rank.device->WrapStream(stream.native());
        ASSERT_TRUE(IsOk(reader));
        if (by_event) {
          ASSERT_TRUE(IsOk((*reader)->Wait(gathered->ready())));
        }
        std::swap(rank.stream, *reader);
        EXPECT_EQ(FromDevice(rank, gathered->weights(0), kBF16, 50000),
                  Round(Numbers(SeedOf(0, 0), 50000, kAllBits), kBF16))
            << static_cast<int>(kind) << by_event;
        std::swap(rank.stream, *reader);
      });
    }
  }
}

// Gradients that come late on the stream.
TEST(ZeroOptimizerTest, ReducingWaitsForTheStream) {
  Training training = MakeTraining();
  training.shapes = {{{50000}}};
  training.steps = 1;
  const Outcome expected = Train(Ranks(2), training);
  for (const StreamKind kind : kStreamKinds) {
    for (const bool host_accessible : {true, false}) {
      RankOptions ranks = Ranks(2);
      ranks.device.host_accessible = host_accessible;
      ranks.device.link_bytes_per_s = 1e8;
      Outcome outcome(training.shapes);
      RunRanks(ranks, [&](Rank& rank) {
        auto optimizer = CreateOn(rank, training);
        ASSERT_TRUE(IsOk(optimizer));
        const std::unique_ptr<Stream> wrapped = Wrap(rank, kind);
        Stream& stream = wrapped == nullptr ? *rank.stream : *wrapped;
        const std::vector<uint32_t> gradient =
            Encode(SameOnAllRanks({0, 0, 0, 0, rank.rank(), 50000}), kBF16);
        auto buffer = rank.device->Allocate(100000);
        ASSERT_TRUE(IsOk(buffer));
        // One millisecond, of two objects one after the other where both are
        // of one stream.
        ASSERT_TRUE(
            IsOk((kind == StreamKind::kWrapped ? *rank.stream : stream)
                     .CopyToDevice(buffer->data(), gradient.data(), 100000)));
        ASSERT_TRUE(
            IsOk((*optimizer)->ReduceGradients(0, {buffer->data()}, stream)));
        const auto report = (*optimizer)->Step({});
        ASSERT_TRUE(IsOk(report));
        if (rank.rank() == 0) outcome.reports.emplace_back(*report);
        Collect(**optimizer, rank, kBF16, outcome.state);
      });
      EXPECT_TRUE(outcome == expected) << static_cast<int>(kind);
    }
  }
}

TEST(ZeroOptimizerTest, TakesTheMemoryThatItSays) {
  for (const int world : {1, 2, 5}) {
    for (const bool host_accessible : {true, false}) {
      for (const bool pin_memory : {true, false}) {
        for (const int64_t collective_bytes : {1000, 1 << 30}) {
          RankOptions ranks = Ranks(world);
          ranks.device.host_accessible = host_accessible;
          RunRanks(ranks, [&](Rank& rank) {
            Training training = MakeTraining();
            training.options.shard.pin_memory = pin_memory;
            training.options.shard.grad_type = kF32;
            training.options.shard.cpu_ratio = 0.5;
            training.options.collective_bytes = collective_bytes;
            auto created = CreateOn(rank, training);
            ASSERT_TRUE(IsOk(created));
            ZeroOptimizer& optimizer = **created;
            const MemoryUse device = rank.device->memory();
            const MemoryUse pinned = rank.device->pinned_memory();

            // One ShardOptimizer more.
            std::vector<Shard> same = optimizer.shards().shards();
            for (Shard& shard : same) {
              shard.values = FillWith(std::vector<float>(20000));
            }
            auto shards = ShardOptimizer::Create(
                rank.runtime(), training.options.shard, std::move(same));
            ASSERT_TRUE(IsOk(shards));
            const int64_t of_shards =
                rank.device->memory().in_use - device.in_use;
            shards->reset();

            int64_t weights = 0;
            int64_t most = 0;
            for (size_t u = 0; u < training.shapes.size(); ++u) {
              const UnitPartition& unit =
                  optimizer.partition(static_cast<int>(u));
              weights += unit.shard_numel();
              most = std::max(most, unit.shard_numel());
            }
            const int64_t flat = world * most * 4;
            EXPECT_EQ(device.in_use - of_shards,
                      weights * 2 + (world == 1 ? flat : 2 * flat + 4 * most));
            const int64_t chunk = std::min(most * 4, collective_bytes / world);
            const bool pins = pin_memory && !host_accessible && world > 1;
            EXPECT_EQ(pinned.in_use - optimizer.shards().pinned_bytes(),
                      pins ? 2 * world * chunk : 0);
            if (!pin_memory) {
              EXPECT_EQ(pinned.in_use, 0);
            }

            // None in a step.
            ASSERT_TRUE(IsOk(ReduceAll(optimizer, rank, training, 0)));
            rank.device->ResetPeaks();
            ASSERT_TRUE(IsOk(optimizer.Step({})));
            EXPECT_EQ(rank.device->memory().peak, device.in_use);
            EXPECT_EQ(rank.device->pinned_memory().peak, pinned.in_use);
          });
        }
      }
    }
  }
}

// To what ranks exchange, the first to be pinned; to shards(), the next; to
// neither.
TEST(ZeroOptimizerTest, SaysWhyPinningWasRefused) {
  for (const int skip : {0, 1, 2}) {
    RankOptions ranks = Ranks(2);
    ranks.device.host_accessible = false;
    RunRanks(ranks, [&](Rank& rank) {
      const absl::Status refused = absl::ResourceExhaustedError("no pages");
      if (skip < 2) {
        rank.device->RefuseCall(HostDeviceCall::kPin, skip, refused);
      }
      auto optimizer = CreateOn(rank, MakeTraining());
      ASSERT_TRUE(IsOk(optimizer));
      EXPECT_EQ((*optimizer)->pinning_error(),
                skip < 2 ? refused : absl::OkStatus());
      EXPECT_EQ((*optimizer)->shards().pinning_error().ok(), skip != 1);
    });
  }
}

// Of 4 ranks none owns a part of every parameter.
TEST(ZeroOptimizerTest, GroupsOfStateHaveAllParametersOnEveryRank) {
  Training training = MakeTraining();
  training.groups = 2;
  training.options.shard.groups.push_back(training.options.shard.groups[0]);
  training.options.shard.groups[1].lr = 0.5;
  std::vector<std::vector<std::string>> expected(2);
  ForEachParameter(training.shapes, [&](int unit, int parameter, int64_t) {
    expected[parameter % 2].push_back(NameOf(unit, parameter));
  });
  RunRanks(Ranks(4), [&](Rank& rank) {
    auto optimizer = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(optimizer));
    ASSERT_TRUE(IsOk((*optimizer)->shards().SetStep(1, 3)));
    const std::vector<StateGroup> groups = (*optimizer)->StateGroups();
    ASSERT_EQ(groups.size(), 2);
    for (size_t g = 0; g < groups.size(); ++g) {
      EXPECT_EQ(groups[g].parameters, expected[g]);
      EXPECT_NE((*optimizer)->shards().StateGroups()[g].parameters,
                expected[g]);
      EXPECT_EQ(groups[g].lr, g == 0 ? 0.01f : 0.5f);
      EXPECT_EQ(groups[g].step, g == 0 ? 0 : 3);
    }
  });
}

TEST(ZeroOptimizerTest, ASteadyStepAllocatesNothing) {
  if (UnderSanitizer()) GTEST_SKIP() << "sanitizers allocate";
  Training training = MakeTraining();
  training.shapes = {{{30000}, {100}}, {{5000}}};
  training.options.shard.cpu_ratio = 0.5;
  // In some step: streams may have more on them in another than ever before.
  int64_t least = std::numeric_limits<int64_t>::max();
  RunRanks(Ranks(2), [&](Rank& rank) {
    auto optimizer = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(optimizer));
    std::vector<UnitGradients> gradients;
    for (int unit = 0; unit < 2; ++unit) {
      gradients.push_back(MakeGradients(rank, training, 0, 0, unit));
    }
    for (int step = 0; step < 20; ++step) {
      ASSERT_TRUE(IsOk(rank.communicator->Barrier()));
      const int64_t before = AllocationCount();
      ASSERT_TRUE(IsOk(rank.communicator->Barrier()));
      for (int unit = 0; unit < 2; ++unit) {
        ASSERT_TRUE(IsOk((*optimizer)
                             ->ReduceGradients(unit, gradients[unit].pointers,
                                               *rank.stream)));
      }
      ASSERT_TRUE(IsOk((*optimizer)->Step({})));
      ASSERT_TRUE(IsOk(rank.communicator->Barrier()));
      if (rank.rank() == 0) least = std::min(least, AllocationCount() - before);
      ASSERT_TRUE(IsOk(rank.communicator->Barrier()));
    }
  });
  EXPECT_EQ(least, 0);
}

// --- Gradients. ---

// With beta1 of 0 the first moment of the first step is the gradient.
TEST(ZeroOptimizerTest, AveragesInRankOrderAndRoundsOnce) {
  struct Types {
    DType wire;
    DType local;
  };
  const Types types[] = {{kBF16, kBF16}, {kBF16, kF32}, {kF16, kF16},
                         {kF16, kF32},   {kF32, kF32},  {kF32, kBF16},
                         {kF32, kF16}};
  enum class Nulls { kNone, kOnOneRank, kOnAll };
  float powers[17];
  for (int i = 0; i < 17; ++i) powers[i] = std::ldexp(1.0f, i - 14);
  int number = 0;
  for (const auto& [wire, local] : types) {
    for (const int64_t micro_batches : {1, 3}) {
      for (const Nulls nulls :
           {Nulls::kNone, Nulls::kOnOneRank, Nulls::kOnAll}) {
        // Worlds and the rest in turn.
        const int world = 1 + ++number % 5;
        // One of the six of these types, another for the next: each value, and
        // each of the rest.
        if (Reduced() && (number - 1) % 6 != (number - 1) / 6 % 6) continue;
        Training training = MakeTraining();
        ShardOptimizerOptions& shard = training.options.shard;
        shard.groups[0].beta1 = 0;
        shard.grad_type = wire;
        shard.micro_batches = micro_batches;
        shard.cpu_ratio = number % 3 / 2.0;
        shard.path = number % 2 == 0 ? StepPath::kFused : StepPath::kSeparate;
        training.options.local_grad_type = local;
        training.options.collective_bytes = 4001;
        training.steps = 1;
        training.gradient =
            [&, nulls = nulls](
                const GradientKey& key) -> std::optional<std::vector<float>> {
          // Every other parameter of some, and all of one unit.
          const bool null =
              (key.parameter % 2 == 1 || key.unit == 3) &&
              (nulls == Nulls::kOnAll ||
               (nulls == Nulls::kOnOneRank && key.rank == world - 1));
          if (null) return std::nullopt;
          std::vector<float> values =
              Numbers(SeedOf(key.unit, key.parameter) + key.rank * 7 +
                          key.micro_batch * 77,
                      key.numel, kAllBits);
          // Of many exponents: sums are rounded, and some results subnormal.
          for (int64_t i = 0; i < key.numel; ++i) values[i] *= powers[i % 17];
          return values;
        };
        RankOptions ranks = Ranks(world);
        ranks.device.host_accessible = number % 4 != 0;
        Outcome outcome = Train(ranks, training);
        ForEachParameter(
            training.shapes, [&](int unit, int parameter, int64_t numel) {
              std::vector<float> expected(numel);
              for (int64_t m = 0; m < micro_batches; ++m) {
                const std::vector<float> mean =
                    Mean(training, world, {0, m, unit, parameter, 0, numel});
                for (int64_t i = 0; i < numel; ++i) expected[i] += mean[i];
              }
              EXPECT_EQ(
                  outcome.state.of(StateKind::kExpAvg)[NameOf(unit, parameter)],
                  Bits(expected))
                  << NameOf(unit, parameter) << " in run " << number;
            });
        EXPECT_TRUE(outcome == TrainAlone(world, training)) << number;
      }
    }
  }
}

TEST(ZeroOptimizerTest, UnitsWithoutGradientsAreZeros) {
  Training training = MakeTraining();
  training.shapes = {{{5000}}, {{9000}}, {{100}}};
  training.options.shard.micro_batches = 2;
  Training with_zeros = training;
  // After a first step, so that there is something to be left behind.
  with_zeros.gradient = [](const GradientKey& key) {
    return key.step == 1 && key.unit == 1 ? std::vector<float>(key.numel)
                                          : SameOnAllRanks(key);
  };
  const Outcome expected = Train(Ranks(2), with_zeros);
  for (const bool drop : {false, true}) {
    Outcome outcome(training.shapes);
    RunRanks(Ranks(2), [&](Rank& rank) {
      auto created = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(created));
      ZeroOptimizer& optimizer = **created;
      for (int step = 0; step < 2; ++step) {
        if (drop) {
          // What is dropped is as if it had never been, complete or not.
          ASSERT_TRUE(IsOk(ReduceAll(optimizer, rank, training, 7)));
          ASSERT_TRUE(IsOk(optimizer.DropGradients()));
          const UnitGradients some = MakeGradients(rank, training, 8, 0, 1);
          ASSERT_TRUE(
              IsOk(optimizer.ReduceGradients(1, some.pointers, *rank.stream)));
          ASSERT_TRUE(IsOk(optimizer.DropGradients()));
        }
        for (int64_t m = 0; m < 2; ++m) {
          for (const int unit : {0, 1, 2}) {
            if (step == 1 && unit == 1) continue;
            const UnitGradients gradients =
                MakeGradients(rank, training, step, m, unit);
            ASSERT_TRUE(IsOk(optimizer.ReduceGradients(unit, gradients.pointers,
                                                       *rank.stream)));
          }
        }
        const auto report = optimizer.Step({});
        ASSERT_TRUE(IsOk(report));
        if (rank.rank() == 0) outcome.reports.emplace_back(*report);
      }
      Collect(optimizer, rank, kBF16, outcome.state);
    });
    EXPECT_TRUE(outcome == expected);
  }
}

// --- The same bits. ---

TEST(ZeroOptimizerTest, EveryWayGivesTheSameBits) {
  struct Way {
    int world;
    int threads;
    int64_t piece_numel;
    double cpu_ratio;
    int64_t sub_group_numel;
    bool host_accessible;
    StepPath path;
    double link_bytes_per_s;
  };
  constexpr int64_t kAll = int64_t{1} << 28;
  constexpr StepPath kFused = StepPath::kFused;
  constexpr StepPath kSeparate = StepPath::kSeparate;
  const Way ways[] = {
      {1, 1, 4096, 1, kAll, true, kFused, 0},
      {1, 3, kAll, 0.3, 4096, false, kSeparate, 0},
      {2, 1, kAll, 0, 8192, true, kFused, 1e8},
      {2, 3, 4096, 1, kAll, false, kFused, 0},
      {3, 1, 8192, 0.3, kAll, true, kFused, 1e8},
      {3, 2, kAll, 1, 4096, false, kSeparate, 0},
      {4, 1, 4096, 0.5, 4096, true, kFused, 0},
      {5, 1, kAll, 0.9, 4096, true, kSeparate, 0},
      {7, 1, 4096, 0, kAll, false, kFused, 1e8},
      {8, 1, kAll, 1, kAll, true, kFused, 0},
      {8, 2, 4096, 0.7, 8192, false, kFused, 0},
  };
  int number = 0;
  for (const int64_t micro_batches : {1, 2}) {
    for (const DType type : {kBF16, kF32}) {
      ++number;
      Training training = MakeTraining();
      training.groups = 2;
      training.steps = 3;
      ShardOptimizerOptions& shard = training.options.shard;
      shard.groups.push_back(shard.groups[0]);
      shard.groups[1].lr = 0.02;
      shard.groups[1].mode = AdamOptions::Mode::kL2;
      shard.micro_batches = micro_batches;
      shard.max_norm = 1;  // below the norm
      shard.weights_type = type;
      shard.grad_type = type;
      training.options.local_grad_type = type;
      const Outcome expected = TrainAlone(1, training);
      ASSERT_LT(expected.reports[0].factor, 1);
      for (const Way& way : ways) {
        // Each once.
        if (Reduced() && (number + (&way - ways)) % 4 != 0) continue;
        shard.piece_numel = way.piece_numel;
        shard.cpu_ratio = way.cpu_ratio;
        shard.sub_group_numel = way.sub_group_numel;
        shard.path = way.path;
        training.options.collective_bytes = 10007;
        RankOptions ranks = Ranks(way.world);
        ranks.threads = way.threads;
        ranks.device.host_accessible = way.host_accessible;
        ranks.device.link_bytes_per_s = way.link_bytes_per_s;
        EXPECT_TRUE(Train(ranks, training) == expected)
            << "way " << &way - ways;
      }
    }
  }
}

TEST(ZeroOptimizerTest, TrainingIsThatOfOneRankWithMeans) {
  RandomTrainings trainings(2);
  const int rounds = Reduced() ? 3 : 20;
  for (int round = 0; round < rounds; ++round) {
    Training training = trainings.Next();
    // Most have few elements, or none.
    training.shapes.push_back({{1 + trainings.Below(40'000)}, {1}});
    ShardOptimizerOptions& shard = training.options.shard;
    for (int group = 0; group < training.groups; ++group) {
      shard.groups[group].lr = 0.01 * (1 + group);
      shard.groups[group].weight_decay = 0.1 * group;
    }
    const DType types[] = {kBF16, kF16, kF32};
    shard.grad_type = types[trainings.Below(3)];
    training.options.local_grad_type =
        trainings.Below(2) == 0 ? kF32 : shard.grad_type;
    shard.micro_batches = 1 + trainings.Below(2);
    shard.max_norm = static_cast<double>(trainings.Below(2));
    if (trainings.Below(2) == 0) shard.path = StepPath::kSeparate;
    // Every fifth parameter of a rank has none.
    training.gradient =
        [](const GradientKey& key) -> std::optional<std::vector<float>> {
      const uint64_t seed =
          Mix(SeedOf(key.unit, key.parameter) + 1000 * key.step +
              100 * key.micro_batch + key.rank);
      if (seed % 5 == 0) return std::nullopt;
      return Numbers(seed, key.numel, kAllBits);
    };
    // Each world from 1 to 8 in turn; 2, 5 and 8 where there are only three.
    RankOptions ranks = Ranks(1 + (1 + 3 * round) % 8);
    ranks.device.host_accessible = trainings.Below(2) == 0;
    const Outcome expected = TrainAlone(ranks.world, training);
    EXPECT_TRUE(Train(ranks, training) == expected)
        << "round " << round << ", " << ranks.world << " ranks";
  }
}

struct Case {
  RankOptions ranks;
  Training training;
};

// All that the bits of a step, or the way to them, depend on.
std::vector<Axis<Case>> StepAxes() {
  const auto shard = [](Case& of) -> ShardOptimizerOptions& {
    return of.training.options.shard;
  };
  std::vector<Axis<Case>> axes = {
      AxisOf<Case>("world", {1, 2, 4},
                   [](Case& of, int world) { of.ranks.world = world; }),
      AxisOf<Case>("max_norm", {1e-3, 1e6, 0.0},
                   [=](Case& of, double norm) { shard(of).max_norm = norm; }),
      AxisOf<Case>(
          "cpu_ratio", {0.0, 0.3, 0.5, 1.0},
          [=](Case& of, double ratio) { shard(of).cpu_ratio = ratio; }),
      AxisOf<Case>("piece_numel", {int64_t{1000}, kLeafNumel, int64_t{1} << 40},
                   [=](Case& of, int64_t n) { shard(of).piece_numel = n; }),
      AxisOf<Case>("staging_buffers", {1, 2, 3},
                   [=](Case& of, int n) { shard(of).staging_buffers = n; }),
      AxisOf<Case>("micro_batches", {1, 3},
                   [=](Case& of, int n) { shard(of).micro_batches = n; }),
      AxisOf<Case>("wire", {kBF16, kF16, kF32},
                   [=](Case& of, DType type) { shard(of).grad_type = type; }),
      AxisOf<Case>("gradients in fp32", {true, false},
                   [=](Case& of, bool fp32) {
                     of.training.options.local_grad_type =
                         fp32 ? kF32 : shard(of).grad_type;
                   }),
      AxisOf<Case>(
          "weights", {kBF16, kF16, kF32},
          [=](Case& of, DType type) { shard(of).weights_type = type; }),
      AxisOf<Case>(
          "host_accessible", {true, false},
          [](Case& of, bool is) { of.ranks.device.host_accessible = is; }),
  };
  Axis<Case>& kernels = axes.emplace_back();
  for (const Kernel* kernel : RunnableKernels()) {
    kernels.push_back({absl::StrCat("kernel ", kernel->name),
                       [kernel](Case& of) { of.ranks.kernel = kernel; }});
  }
  return axes;
}

TEST(ZeroOptimizerTest, FusedAndSeparateAreEqual) {
  const std::vector<Axis<Case>> axes = StepAxes();
  std::vector<std::vector<size_t>> rows = Pairwise(axes);
  if (Reduced()) rows = EachValueOnce(rows);
  size_t choices = 0;
  for (const Axis<Case>& axis : axes) choices += axis.size();
  ASSERT_EQ(ValuesOf(rows).size(), choices);
  // Of two ranks each norm with each ratio, and the rest in turn.
  for (size_t norm = 0; norm < axes[1].size(); ++norm) {
    for (size_t ratio = 0; ratio < axes[2].size(); ++ratio) {
      // A Latin square has each norm with one, and each ratio.
      if (Reduced() && norm != ratio % axes[1].size()) continue;
      std::vector<size_t>& row = rows.emplace_back();
      for (const Axis<Case>& axis : axes)
        row.push_back(rows.size() % axis.size());
      row[0] = 1;
      row[1] = norm;
      row[2] = ratio;
    }
  }
  for (const std::vector<size_t>& row : rows) {
    Case of;
    Training& training = of.training;
    training = MakeTraining();
    training.shapes = {{{3, 2000}, {1}}, {{5000}}};
    training.groups = 2;
    training.options.shard.groups.resize(2);
    training.group_options = [](int group, int step) {
      AdamOptions options;
      options.lr = 0.01 / (1 + step + group);
      options.weight_decay = group == 0 ? 0.1 : 0.02;
      options.beta1 = group == 0 ? 0.9 : 0.8;
      if (group == 1) options.mode = AdamOptions::Mode::kL2;
      return options;
    };
    training.steps = Reduced() ? 3 : 20;
    training.looks = {1, 3};
    training.gradient = [](const GradientKey& key) {
      return Numbers(SeedOf(key.unit, key.parameter) + key.step * 100 +
                         key.micro_batch * 10 + key.rank,
                     key.numel, kAllBits);
    };
    SCOPED_TRACE(SetRow(axes, row, of));
    ShardOptimizerOptions& shard = training.options.shard;
    const Outcome fused = Train(of.ranks, training);
    shard.path = StepPath::kSeparate;
    EXPECT_TRUE(Train(of.ranks, training) == fused);
    for (const Report& report : fused.reports) {
      EXPECT_FALSE(report.skipped);
      if (shard.max_norm == 1e-3) {
        EXPECT_LT(report.factor, 1);
      } else {
        EXPECT_EQ(report.factor, 1);
      }
    }
  }
}

TEST(ZeroOptimizerTest, ReportsWhatWasFused) {
  Kernel without_copies = *RunnableKernels().front();
  without_copies.name = "no_copies";
  without_copies.copy_types = {};
  struct Fusion {
    StepPath path = StepPath::kFused;
    DType weights = kBF16;
    const Kernel* kernel = nullptr;
    bool pin_memory = true;
    bool refuse_pinning = false;
    std::string copy_reason;  // a part of it
  };
  Fusion separate;
  separate.path = StepPath::kSeparate;
  separate.copy_reason = "the separate path was asked for";
  Fusion fp32;
  fp32.weights = kF32;
  fp32.copy_reason = "weights are fp32";
  Fusion no_copies;
  no_copies.kernel = &without_copies;
  no_copies.copy_reason = "kernel no_copies writes no copies in bf16";
  Fusion pageable;
  pageable.pin_memory = false;
  pageable.copy_reason = "pin_memory is off";
  Fusion refused;
  refused.refuse_pinning = true;
  refused.copy_reason = "not pinned: no pages";
  for (const Fusion& fusion :
       {Fusion(), separate, fp32, no_copies, pageable, refused}) {
    SCOPED_TRACE(fusion.copy_reason);
    RankOptions ranks = Ranks(2);
    ranks.kernel = fusion.kernel;
    RunRanks(ranks, [&](Rank& rank) {
      Training training = MakeTraining();
      ShardOptimizerOptions& shard = training.options.shard;
      shard.path = fusion.path;
      shard.weights_type = fusion.weights;
      shard.pin_memory = fusion.pin_memory;
      if (fusion.refuse_pinning) {
        rank.device->RefuseCall(HostDeviceCall::kPin, 0,
                                absl::ResourceExhaustedError("no pages"));
      }
      auto optimizer = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(optimizer));
      ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
      const auto report = (*optimizer)->Step({});
      ASSERT_TRUE(IsOk(report));
      EXPECT_EQ(report->scale_fused, fusion.path == StepPath::kFused);
      EXPECT_EQ(report->scale_reason.empty(), report->scale_fused);
      const bool writes_copies =
          rank.kernel->copy_types.Contains(DType::kBFloat16);
      EXPECT_EQ(report->copy_fused,
                fusion.copy_reason.empty() && writes_copies);
      if (report->copy_fused) {
        EXPECT_EQ(report->copy_reason, "");
      } else {
        EXPECT_THAT(std::string(report->copy_reason),
                    HasSubstr(fusion.copy_reason));
      }
    });
  }
}

// Counts the collectives that go through it.
class CountingCommunicator final : public Communicator {
 public:
  struct Counts {
    int all_gathers = 0;
    int all_to_alls = 0;
    int others = 0;

    bool operator==(const Counts& other) const {
      return std::tie(all_gathers, all_to_alls, others) ==
             std::tie(other.all_gathers, other.all_to_alls, other.others);
    }
  };

  explicit CountingCommunicator(Communicator& base) : base_(base) {}

  int rank() const override { return base_.rank(); }
  int size() const override { return base_.size(); }
  absl::Status AllGather(const void* mine, void* all, int64_t bytes) override {
    ++counts_.all_gathers;
    return base_.AllGather(mine, all, bytes);
  }
  absl::Status AllToAll(const void* send, void* received,
                        int64_t bytes) override {
    ++counts_.all_to_alls;
    return base_.AllToAll(send, received, bytes);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    ++counts_.others;
    return base_.Broadcast(data, bytes, root);
  }
  absl::Status Barrier() override {
    ++counts_.others;
    return base_.Barrier();
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Duplicate() override {
    ++counts_.others;
    return base_.Duplicate();
  }
  void Abort(absl::string_view reason) override { base_.Abort(reason); }

  // Those since the last call.
  Counts Take() { return std::exchange(counts_, Counts()); }

 private:
  Communicator& base_;
  Counts counts_;
};

TEST(ZeroOptimizerTest, ExchangesNoMoreThanItHasTo) {
  RunRanks(Ranks(2), [](Rank& rank) {
    using Counts = CountingCommunicator::Counts;
    const Training training = MakeTraining();
    CountingCommunicator communicator(*rank.communicator);
    auto created =
        ZeroOptimizer::Create(rank.runtime(), communicator, training.options,
                              MakeUnits(training.shapes));
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    EXPECT_TRUE(communicator.Take() == (Counts{1, 0, 0}));
    for (size_t u = 0; u < training.shapes.size(); ++u) {
      const int unit = static_cast<int>(u);
      ASSERT_TRUE(IsOk(optimizer.Gather(unit, *rank.stream).status()));
      EXPECT_TRUE(communicator.Take() == (Counts{1, 0, 0})) << unit;
      const UnitGradients gradients = MakeGradients(rank, training, 0, 0, unit);
      ASSERT_TRUE(IsOk(
          optimizer.ReduceGradients(unit, gradients.pointers, *rank.stream)));
      EXPECT_TRUE(communicator.Take() == (Counts{0, 1, 0})) << unit;
    }
    ASSERT_TRUE(IsOk(optimizer.Step({})));
    EXPECT_TRUE(communicator.Take() == (Counts{2, 0, 0}));
  });
}

// --- Steps that are skipped. ---

TEST(ZeroOptimizerTest, OneBadElementSkipsTheStepOnAllRanks) {
  struct Bad {
    int unit;
    int parameter;
    int64_t element;
    int rank;
    float value;
    double cpu_ratio;
  };
  const Bad bads[] = {
      {0, 0, 0, 0, kInfinity, 1}, {0, 0, 14999, 1, -kInfinity, 0.5},
      {0, 1, 0, 2, kNaN, 1},      {0, 2, 0, 0, kInfinity, 1},
      {3, 1, 19999, 2, kNaN, 0},  {4, 0, 4, 1, kInfinity, 1},
      {4, 0, 0, 1, kInfinity, 0},
  };
  const std::pair<DType, int64_t> types[] = {{kBF16, 1}, {kF16, 2}, {kF32, 1}};
  int number = 0;
  for (const auto& [wire, micro_batches] : types) {
    for (const Bad& bad : bads) {
      // Each place once: there are seven.
      if (Reduced() && number++ % 3 != 0) continue;
      Training training = MakeTraining();
      ShardOptimizerOptions& shard = training.options.shard;
      shard.grad_type = wire;
      shard.micro_batches = micro_batches;
      shard.cpu_ratio = bad.cpu_ratio;
      training.options.local_grad_type = wire;
      // As if the second of three steps had not been.
      Training without = training;
      without.gradient = [](GradientKey key) {
        key.step *= 2;
        return SameOnAllRanks(key);
      };
      const Outcome expected = Train(Ranks(3), without);
      training.steps = 3;
      training.gradient = [&,
                           last = micro_batches - 1](const GradientKey& key) {
        std::vector<float> values = SameOnAllRanks(key);
        if (key.step == 1 && key.micro_batch == last && key.unit == bad.unit &&
            key.parameter == bad.parameter && key.rank == bad.rank) {
          values[bad.element] = bad.value;
        }
        return values;
      };
      const Outcome outcome = Train(Ranks(3), training);
      EXPECT_TRUE(outcome.state == expected.state);
      ASSERT_EQ(outcome.reports.size(), 3u);
      const Report& report = outcome.reports[1];
      EXPECT_TRUE(report.skipped);
      EXPECT_THAT(report.skip_reason, HasSubstr("not finite"));
      EXPECT_FALSE(std::isfinite(report.norm));
      EXPECT_EQ(report.factor, 0);
      EXPECT_TRUE(outcome.reports[0] == expected.reports[0]);
      EXPECT_TRUE(outcome.reports[2] == expected.reports[1]);
    }
  }
}

TEST(ZeroOptimizerTest, InfinityThatOneRankFoundIsFoundOnAll) {
  Training training = MakeTraining();
  training.steps = 0;
  const Outcome before = Train(Ranks(3), training);
  for (int finder = 0; finder < 3; ++finder) {
    Outcome after(training.shapes);
    RunRanks(Ranks(3), [&](Rank& rank) {
      auto optimizer = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(optimizer));
      ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
      ZeroStepInput input;
      input.found_inf = rank.rank() == finder;
      const auto report = (*optimizer)->Step(input);
      ASSERT_TRUE(IsOk(report));
      EXPECT_TRUE(report->skipped);
      EXPECT_THAT(std::string(report->skip_reason), HasSubstr("found_inf"));
      EXPECT_EQ((*optimizer)->shards().step(0), 0);
      Collect(**optimizer, rank, kBF16, after.state);
    });
    EXPECT_TRUE(after.state == before.state);
  }
}

struct ScaledStep {
  double scale;
  int overflows;  // the rank; kNoRank: none
};
constexpr int kNoRank = 9;

// Steps of three ranks with gradients of fp16.
void ExpectScales(const LossScaleOptions& loss_scale,
                  absl::Span<const ScaledStep> steps) {
  Training training = MakeTraining();
  training.shapes = {{{5000}, {1}}, {{9000}}};
  ShardOptimizerOptions& shard = training.options.shard;
  shard.weights_type = kF16;
  shard.grad_type = kF16;
  training.options.local_grad_type = kF16;
  shard.loss_scale = loss_scale;
  shard.max_norm = 1;
  std::vector<double> norms[3];
  RunRanks(Ranks(3), [&](Rank& rank) {
    auto created = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    int64_t updates = 0;
    for (const ScaledStep& step : steps) {
      SCOPED_TRACE(testing::Message() << "step " << &step - steps.data());
      EXPECT_EQ(optimizer.shards().LossScale(), step.scale);
      Training scaled = training;
      scaled.gradient = [&](const GradientKey& key) {
        std::vector<float> values = SameOnAllRanks(key);
        for (float& value : values) value *= static_cast<float>(step.scale);
        if (step.overflows == key.rank && key.unit == 1) values[3] = 1e6f;
        return values;
      };
      ASSERT_TRUE(IsOk(ReduceAll(optimizer, rank, scaled, 0)));
      const auto report = optimizer.Step({});
      ASSERT_TRUE(IsOk(report));
      EXPECT_EQ(report->skipped, step.overflows != kNoRank);
      EXPECT_EQ(report->loss_scale, step.scale);
      if (!report->skipped) {
        ++updates;
        norms[rank.rank()].push_back(report->norm);
      }
      EXPECT_EQ(optimizer.shards().step(0), updates);
    }
  });
  // Scales are powers of two: the norm is that of the gradient without.
  for (const std::vector<double>& of_rank : norms) {
    ASSERT_FALSE(of_rank.empty());
    EXPECT_EQ(of_rank, std::vector<double>(of_rank.size(), norms[0][0]));
  }
}

TEST(ZeroOptimizerTest, TheDynamicLossScaleIsTheSameOnAllRanks) {
  LossScaleOptions options;
  options.mode = LossScaleOptions::Mode::kDynamic;
  options.initial_scale = 1024;
  options.hysteresis = 2;
  options.growth_interval = 3;
  ExpectScales(options, {{1024, kNoRank},
                         {1024, kNoRank},
                         {1024, kNoRank},
                         // The third without overflow doubled it.
                         {2048, 0},
                         // The first overflow is let pass, the second halves.
                         {2048, 1},
                         {1024, kNoRank},
                         {1024, 2},
                         {512, kNoRank},
                         {512, kNoRank},
                         {512, kNoRank},
                         {1024, 1},
                         {1024, 0},
                         {512, 0},
                         {256, kNoRank},
                         {256, kNoRank},
                         {256, kNoRank},
                         {512, kNoRank}});
}

TEST(ZeroOptimizerTest, AStaticLossScaleStaysAsItIs) {
  LossScaleOptions options;
  options.mode = LossScaleOptions::Mode::kStatic;
  options.initial_scale = 512;
  ExpectScales(options,
               {{512, kNoRank}, {512, 1}, {512, 2}, {512, 0}, {512, kNoRank}});
}

// --- What is refused, and changes nothing. ---

// Runs a step that is to be refused on all of three ranks, `prepare` having
// made it so, and after `mend` one as it would have been.
void ExpectRefused(
    const Training& training,
    const std::function<void(ZeroOptimizer&, Rank&, ZeroStepInput&)>& prepare,
    const std::function<void(ZeroOptimizer&, Rank&, ZeroStepInput&)>& mend,
    absl::StatusCode code, const std::string& message, int culprit) {
  Training of_one_step = training;
  of_one_step.steps = 1;
  const Outcome expected = Train(Ranks(3), of_one_step);
  Outcome outcome(training.shapes);
  RunRanks(Ranks(3), [&](Rank& rank) {
    auto created = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    ASSERT_TRUE(IsOk(ReduceAll(optimizer, rank, training, 0)));
    ZeroStepInput input;
    prepare(optimizer, rank, input);
    for (int i = 0; i < 2; ++i) {
      const absl::Status status = optimizer.Step(input).status();
      ExpectError(status, code, message);
      if (rank.rank() != culprit) {
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(absl::StrCat("rank ", culprit)));
      }
      EXPECT_EQ(optimizer.shards().step(0), 0);
    }
    EXPECT_TRUE(optimizer.shards().status().ok());
    // No gradients more.
    const UnitGradients gradients = MakeGradients(rank, training, 0, 0, 0);
    ExpectError(optimizer.ReduceGradients(0, gradients.pointers, *rank.stream),
                absl::StatusCode::kFailedPrecondition, "step first");
    mend(optimizer, rank, input);
    const auto report = optimizer.Step(input);
    ASSERT_TRUE(IsOk(report));
    if (rank.rank() == 0) outcome.reports.emplace_back(*report);
    Collect(optimizer, rank, training.options.shard.weights_type,
            outcome.state);
  });
  EXPECT_TRUE(outcome == expected);
}

TEST(ZeroOptimizerTest, NoStepWhereAUnitIsGathered) {
  std::optional<Gathered> kept[3];
  ExpectRefused(
      MakeTraining(),
      [&](ZeroOptimizer& optimizer, Rank& rank, ZeroStepInput&) {
        for (const int unit : {0, 3, 4}) {
          auto gathered = optimizer.Gather(unit, *rank.stream);
          ASSERT_TRUE(IsOk(gathered));
          if (rank.rank() == 1 && unit == 3) kept[1] = *std::move(gathered);
        }
      },
      [&](ZeroOptimizer&, Rank& rank, ZeroStepInput&) {
        kept[rank.rank()].reset();
      },
      absl::StatusCode::kFailedPrecondition, "unit \"u3\" is gathered", 1);
}

TEST(ZeroOptimizerTest, NoStepWhereStateIsLeased) {
  std::optional<StateLease> lease;
  ExpectRefused(
      MakeTraining(),
      [&](ZeroOptimizer& optimizer, Rank& rank, ZeroStepInput&) {
        if (rank.rank() != 2) return;
        auto leased = optimizer.shards().LeaseState();
        ASSERT_TRUE(IsOk(leased));
        lease = *std::move(leased);
      },
      [&](ZeroOptimizer&, Rank& rank, ZeroStepInput&) {
        if (rank.rank() == 2) lease.reset();
      },
      absl::StatusCode::kFailedPrecondition, "state is leased", 2);
}

TEST(ZeroOptimizerTest, NoStepWhereRanksDiffer) {
  using Change = std::function<void(ZeroOptimizer&, ZeroStepInput&)>;
  Training training = MakeTraining();
  training.groups = 2;
  training.options.shard.groups.resize(2);
  training.options.shard.loss_scale.mode = LossScaleOptions::Mode::kDynamic;
  // The change, and what undoes it.
  const std::pair<Change, Change> changes[] = {
      {[](ZeroOptimizer&, ZeroStepInput& input) { input.inv_scale = 1; },
       [](ZeroOptimizer&, ZeroStepInput& input) { input.inv_scale.reset(); }},
      {[](ZeroOptimizer&, ZeroStepInput& input) { input.inv_scale = 0; },
       [](ZeroOptimizer&, ZeroStepInput& input) { input.inv_scale.reset(); }},
      {[](ZeroOptimizer& optimizer, ZeroStepInput&) {
         LossScaleState state = optimizer.shards().loss_scale_state();
         state.scale /= 2;
         EXPECT_TRUE(IsOk(optimizer.shards().SetLossScaleState(state)));
       },
       [](ZeroOptimizer& optimizer, ZeroStepInput&) {
         LossScaleState state = optimizer.shards().loss_scale_state();
         state.scale *= 2;
         EXPECT_TRUE(IsOk(optimizer.shards().SetLossScaleState(state)));
       }},
      {[](ZeroOptimizer& optimizer, ZeroStepInput&) {
         LossScaleState state = optimizer.shards().loss_scale_state();
         ++state.clean_steps;
         EXPECT_TRUE(IsOk(optimizer.shards().SetLossScaleState(state)));
       },
       [](ZeroOptimizer& optimizer, ZeroStepInput&) {
         LossScaleState state = optimizer.shards().loss_scale_state();
         --state.clean_steps;
         EXPECT_TRUE(IsOk(optimizer.shards().SetLossScaleState(state)));
       }},
      {[](ZeroOptimizer& optimizer, ZeroStepInput&) {
         AdamOptions options = optimizer.shards().groups()[1];
         options.lr += 1e-9;
         EXPECT_TRUE(IsOk(optimizer.shards().SetGroupOptions(1, options)));
       },
       [](ZeroOptimizer& optimizer, ZeroStepInput&) {
         EXPECT_TRUE(
             IsOk(optimizer.shards().SetGroupOptions(1, AdamOptions())));
       }},
      {[](ZeroOptimizer& optimizer, ZeroStepInput&) {
         EXPECT_TRUE(IsOk(optimizer.shards().SetStep(1, 7)));
       },
       [](ZeroOptimizer& optimizer, ZeroStepInput&) {
         EXPECT_TRUE(IsOk(optimizer.shards().SetStep(1, 0)));
       }},
  };
  for (const auto& [change, undo] : changes) {
    for (const int culprit : {1, 2}) {
      ExpectRefused(
          training,
          [&, &change = change](ZeroOptimizer& optimizer, Rank& rank,
                                ZeroStepInput& input) {
            if (rank.rank() == culprit) change(optimizer, input);
          },
          [&, &undo = undo](ZeroOptimizer& optimizer, Rank& rank,
                            ZeroStepInput& input) {
            if (rank.rank() == culprit) undo(optimizer, input);
          },
          absl::StatusCode::kFailedPrecondition, "inv_scale", culprit);
    }
  }
}

// Units of one size, which a collective cannot tell apart.
TEST(ZeroOptimizerTest, NoStepWhereRanksCalledForOtherUnits) {
  Training training = MakeTraining();
  training.shapes = {{{5000}}, {{5000}}};
  training.steps = 1;
  const Outcome expected = Train(Ranks(2), training);
  enum class Mix { kGathers, kReductions, kOneReduction };
  for (const Mix mix : {Mix::kGathers, Mix::kReductions, Mix::kOneReduction}) {
    Outcome outcome(training.shapes);
    RunRanks(Ranks(2), [&](Rank& rank) {
      auto optimizer = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(optimizer));
      const int first = rank.rank();  // the unit that it takes first
      const auto reduce = [&](int unit) {
        const UnitGradients gradients =
            MakeGradients(rank, training, 0, 0, unit);
        ASSERT_TRUE(IsOk(
            (*optimizer)
                ->ReduceGradients(unit, gradients.pointers, *rank.stream)));
      };
      if (mix == Mix::kGathers) {
        ASSERT_TRUE(IsOk((*optimizer)->Gather(first, *rank.stream).status()));
        ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
      } else {
        reduce(first);
        if (mix == Mix::kReductions) reduce(1 - first);
      }
      const absl::Status refused = (*optimizer)->Step({}).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(refused.message()), HasSubstr("other units"));
      // Nor later, though nothing was called since.
      EXPECT_EQ((*optimizer)->Step({}).status().code(),
                absl::StatusCode::kFailedPrecondition);
      // Which nobody else is asked about.
      if (rank.rank() == 0) {
        ASSERT_TRUE(IsOk((*optimizer)->DropGradients()));
      }
      ASSERT_TRUE(IsOk((*optimizer)->Gather(0, *rank.stream).status()));
      if (rank.rank() == 1) {
        ASSERT_TRUE(IsOk((*optimizer)->DropGradients()));
      }
      ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
      const auto report = (*optimizer)->Step({});
      ASSERT_TRUE(IsOk(report));
      if (rank.rank() == 0) outcome.reports.emplace_back(*report);
      Collect(**optimizer, rank, kBF16, outcome.state);
    });
    EXPECT_TRUE(outcome == expected) << static_cast<int>(mix);
  }
}

TEST(ZeroOptimizerTest, NoStepWithAnInverseScaleThatMakesNoSense) {
  for (const double inv_scale : {0.0, -1.0, std::nan(""), 1e-300}) {
    Training training = MakeTraining();
    training.steps = 1;
    const Outcome expected = Train(Ranks(2), training);
    Outcome outcome(training.shapes);
    RunRanks(Ranks(2), [&](Rank& rank) {
      auto optimizer = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(optimizer));
      ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
      ZeroStepInput input;
      input.inv_scale = inv_scale;
      EXPECT_EQ((*optimizer)->Step(input).status().code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_TRUE((*optimizer)->shards().status().ok());
      const auto report = (*optimizer)->Step({});
      ASSERT_TRUE(IsOk(report));
      if (rank.rank() == 0) outcome.reports.emplace_back(*report);
      Collect(**optimizer, rank, kBF16, outcome.state);
    });
    EXPECT_TRUE(outcome == expected) << inv_scale;
  }
}

TEST(ZeroOptimizerTest, AnInverseScaleOfTheCallersReplacesTheLossScale) {
  RunRanks(Ranks(2), [](Rank& rank) {
    Training training = MakeTraining();
    auto optimizer = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(optimizer));
    double norms[2];
    for (const int step : {0, 1}) {
      ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
      ZeroStepInput input;
      if (step == 1) input.inv_scale = 0.25;
      const auto report = (*optimizer)->Step(input);
      ASSERT_TRUE(IsOk(report));
      norms[step] = report->norm;
      EXPECT_EQ(report->loss_scale, step == 1 ? 4 : 1);
      EXPECT_EQ(report->factor, step == 1 ? 0.25f : 1.0f);
    }
    EXPECT_EQ(norms[1], norms[0] / 4);
  });
}

// A unit that rank 0 owns alone: the others have nothing of it to miss.
TEST(ZeroOptimizerTest, NoStepWithoutAllGradients) {
  Training training = MakeTraining();
  training.shapes = {{{9000}}, {{100}}, {{5000}}};
  training.options.shard.micro_batches = 2;
  training.steps = 1;
  Training expected_training = training;
  expected_training.gradient = [](const GradientKey& key) {
    return key.unit == 2 ? std::vector<float>(key.numel) : SameOnAllRanks(key);
  };
  const Outcome expected = Train(Ranks(3), expected_training);
  Outcome outcome(training.shapes);
  RunRanks(Ranks(3), [&](Rank& rank) {
    auto created = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    const auto reduce = [&](int64_t micro_batch, int unit) {
      const UnitGradients gradients =
          MakeGradients(rank, training, 0, micro_batch, unit);
      return optimizer.ReduceGradients(unit, gradients.pointers, *rank.stream);
    };
    ASSERT_TRUE(IsOk(reduce(0, 0)));
    ASSERT_TRUE(IsOk(reduce(0, 1)));
    ASSERT_TRUE(IsOk(reduce(1, 0)));
    ExpectError(optimizer.Step({}).status(),
                absl::StatusCode::kFailedPrecondition,
                "unit \"u1\" has 1 gradients, expected 2");
    EXPECT_TRUE(optimizer.shards().status().ok());
    // What is missing may still come, and nothing more.
    ASSERT_TRUE(IsOk(reduce(1, 1)));
    ExpectError(reduce(2, 1), absl::StatusCode::kFailedPrecondition,
                "unit \"u1\" has 2 gradients of 2");
    const auto report = optimizer.Step({});
    ASSERT_TRUE(IsOk(report));
    if (rank.rank() == 0) outcome.reports.emplace_back(*report);
    Collect(optimizer, rank, kBF16, outcome.state);
  });
  EXPECT_TRUE(outcome == expected);
}

// The ranks that had nothing to refuse have taken the norm.
TEST(ZeroOptimizerTest, NoGradientsMoreOnceAStepWasRefused) {
  for (const bool drop : {false, true}) {
    RunRanks(Ranks(2), [&](Rank& rank) {
      Training training = MakeTraining();
      training.shapes = {{{5000}}, {{9000}}};
      auto created = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(created));
      ZeroOptimizer& optimizer = **created;
      const auto reduce = [&](int unit) {
        const UnitGradients gradients =
            MakeGradients(rank, training, 0, 0, unit);
        return optimizer.ReduceGradients(unit, gradients.pointers,
                                         *rank.stream);
      };
      ASSERT_TRUE(IsOk(reduce(0)));
      {
        const auto gathered = optimizer.Gather(1, *rank.stream);
        ASSERT_TRUE(IsOk(gathered));
        EXPECT_FALSE(optimizer.Step({}).ok());
      }
      ExpectError(reduce(1), absl::StatusCode::kFailedPrecondition,
                  "unit \"u1\" has 0 gradients of 1, and a step was refused");
      if (drop) {
        ASSERT_TRUE(IsOk(optimizer.DropGradients()));
        ASSERT_TRUE(IsOk(reduce(1)));
        ASSERT_TRUE(IsOk(reduce(0)));
      }
      ASSERT_TRUE(IsOk(optimizer.Step({})));
      ASSERT_TRUE(IsOk(reduce(1)));
    });
  }
}

TEST(ZeroOptimizerTest, ChecksArguments) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  RunRanks(Ranks(2), [](Rank& rank) {
    Training training = MakeTraining();
    training.shapes = {{{10}, {20}}};
    auto created = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    EXPECT_EQ(optimizer.rank(), rank.rank());
    EXPECT_EQ(optimizer.world(), 2);
    const FillValues zeros = FillWith(std::vector<float>(20));
    for (const int unit : {-1, 1}) {
      const std::string message = absl::StrCat("unit is ", unit);
      ExpectError(optimizer.Gather(unit, *rank.stream).status(), kInvalid,
                  message);
      ExpectError(
          optimizer.ReduceGradients(unit, {nullptr, nullptr}, *rank.stream),
          kInvalid, message);
      ExpectError(optimizer.SetParameter(unit, 0, zeros), kInvalid, message);
    }
    ExpectError(optimizer.ReduceGradients(0, {nullptr}, *rank.stream), kInvalid,
                "unit \"u0\" has 2 parameters, and there are 1 gradients");
    HostDeviceOptions options;
    options.name = "other";
    auto other = HostDevice::Create(*rank.kernel, options);
    ASSERT_TRUE(IsOk(other));
    auto stream = (*other)->CreateStream();
    ASSERT_TRUE(IsOk(stream));
    constexpr char kOtherStream[] =
        "stream is of device other, expected one of host";
    ExpectError(optimizer.Gather(0, **stream).status(), kInvalid, kOtherStream);
    ExpectError(optimizer.ReduceGradients(0, {nullptr, nullptr}, **stream),
                kInvalid, kOtherStream);
    const UnitGradients gradients = MakeGradients(rank, training, 0, 0, 0);
    ExpectError(
        optimizer.ReduceGradients(
            0, {gradients.pointers[0], gradients.buffers[1].as<char>() + 1},
            *rank.stream),
        kInvalid,
        "gradient of parameter \"u0.p1\" is not aligned to elements in bf16");
    for (const int parameter : {-1, 2}) {
      ExpectError(optimizer.SetParameter(0, parameter, zeros), kInvalid,
                  absl::StrCat("parameter is ", parameter));
    }
    ExpectError(optimizer.SetParameter(0, 0, nullptr), kInvalid,
                "values is not set");
    const absl::Status mine = optimizer.SetParameter(
        0, 1, [](int64_t, absl::Span<float>) -> absl::Status {
          return absl::DataLossError("bad sector");
        });
    // Of the second of two leaves.
    if (rank.rank() == 1) {
      ExpectError(mine, absl::StatusCode::kDataLoss, "bad sector");
    } else {
      EXPECT_TRUE(IsOk(mine));
    }
    // All goes on, with the weights that were.
    const auto gathered = optimizer.Gather(0, *rank.stream);
    ASSERT_TRUE(IsOk(gathered));
    EXPECT_EQ(FromDevice(rank, gathered->weights(1), kBF16, 20),
              Round(Numbers(SeedOf(0, 1), 20, kAllBits), kBF16));
    EXPECT_TRUE(
        IsOk(optimizer.ReduceGradients(0, gradients.pointers, *rank.stream)));
  });
}

// --- Creation. ---

// Creates one on each rank of what `change` makes of a training there. Returns
// the errors.
std::vector<absl::Status> CreationErrors(
    int world,
    const std::function<void(int rank, Training&, std::vector<ZeroUnit>&)>&
        change) {
  std::vector<absl::Status> errors(world);
  RunRanks(Ranks(world), [&](Rank& rank) {
    Training training = MakeTraining();
    training.shapes = {{{5000}, {3}}, {{20000}, {2, 2}}};
    std::vector<ZeroUnit> units = MakeUnits(training.shapes);
    change(rank.rank(), training, units);
    errors[rank.rank()] =
        ZeroOptimizer::Create(rank.runtime(), *rank.communicator,
                              training.options, std::move(units))
            .status();
    // The communicator is not the worse for it.
    EXPECT_TRUE(IsOk(rank.communicator->Barrier()));
  });
  return errors;
}

TEST(ZeroOptimizerTest, CreationRefusesWhatMakesNoSenseOnAllRanks) {
  struct Case {
    std::string message;
    std::function<void(Training&, std::vector<ZeroUnit>&)> change;
  };
  const Case cases[] = {
      {"parameter \"u0.p0\" is there twice",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[1].parameters[1].name = "u0.p0";
       }},
      {"parameter \"u1.p1\": shape is [2, -2]",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[1].parameters[1].shape = {2, -2};
       }},
      {"parameter \"u1.p1\": shape is [4294967296, 4294967296]",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[1].parameters[1].shape = {int64_t{1} << 32, int64_t{1} << 32};
       }},
      {"the units until \"u1\" have more elements than",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[0].parameters[1].shape = {int64_t{1} << 58};
         units[1].parameters[1].shape = {int64_t{1} << 58};
       }},
      {"unit \"u1\"",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[1].parameters[1].shape = {std::numeric_limits<int64_t>::max()};
       }},
      {"parameter \"u1.p0\": values is not set",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[1].parameters[0].values = nullptr;
       }},
      {"collective_bytes is 2",
       [](Training& training, std::vector<ZeroUnit>&) {
         training.options.collective_bytes = 2;
       }},
      {"local_grad_type is fp16, and grad_type bf16",
       [](Training& training, std::vector<ZeroUnit>&) {
         training.options.local_grad_type = kF16;
       }},
      {"local_grad_type is e4m3",
       [](Training& training, std::vector<ZeroUnit>&) {
         training.options.local_grad_type = DType::kFloat8E4M3;
       }},
      {"grad_type",
       [](Training& training, std::vector<ZeroUnit>&) {
         training.options.local_grad_type = kF32;
         training.options.shard.grad_type = DType::kFloat8E4M3;
       }},
      {"micro_batches is 0",
       [](Training& training, std::vector<ZeroUnit>&) {
         training.options.shard.micro_batches = 0;
       }},
      {"shard \"u1.p0\": group is 1",
       [](Training&, std::vector<ZeroUnit>& units) {
         units[1].parameters[0].group = 1;
       }},
  };
  for (const Case& one : cases) {
    const std::vector<absl::Status> errors = CreationErrors(
        3, [&](int, Training& training, std::vector<ZeroUnit>& units) {
          one.change(training, units);
        });
    for (const absl::Status& error : errors) {
      EXPECT_FALSE(error.ok()) << one.message;
      EXPECT_THAT(std::string(error.message()), HasSubstr(one.message));
    }
  }
}

TEST(ZeroOptimizerTest, CreationFailsOnAllRanksWhereTheyDiffer) {
  using Change = std::function<void(Training&, std::vector<ZeroUnit>&)>;
  const Change changes[] = {
      [](Training&, std::vector<ZeroUnit>& units) { units[1].name = "u"; },
      [](Training&, std::vector<ZeroUnit>& units) {
        units[1].parameters[0].name = "other";
      },
      [](Training&, std::vector<ZeroUnit>& units) {
        units[1].parameters[1].shape = {4};
      },
      [](Training&, std::vector<ZeroUnit>& units) {
        units[1].parameters[1].shape = {1, 4};
      },
      [](Training&, std::vector<ZeroUnit>& units) { units.pop_back(); },
      [](Training&, std::vector<ZeroUnit>& units) {
        std::swap(units[0], units[1]);
      },
      // The same parameters in the same order.
      [](Training&, std::vector<ZeroUnit>& units) {
        units[0].parameters.push_back(units[1].parameters[0]);
        units[1].parameters.erase(units[1].parameters.begin());
      },
      [](Training& training, std::vector<ZeroUnit>& units) {
        training.options.shard.groups.resize(2);
        units[1].parameters[1].group = 1;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups.resize(2);
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].lr *= 1 + 1e-12;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].beta1 = 0.91;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].beta2 = 0.99;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].eps = 1e-7;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].weight_decay = 0.2;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].mode = AdamOptions::Mode::kL2;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.groups[0].bias_correction = false;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.weights_type = kF16;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.grad_type = kF32;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.exp_avg_type = kBF16;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.exp_avg_sq_type = kBF16;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.micro_batches = 2;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.max_norm = 2;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.loss_scale.mode =
            LossScaleOptions::Mode::kStatic;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.loss_scale.initial_scale = 2;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.loss_scale.hysteresis = 3;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.loss_scale.min_scale = 2;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.loss_scale.growth_interval = 3;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.shard.loss_scale.max_scale = 0x1p60;
      },
      [](Training& training, std::vector<ZeroUnit>&) {
        training.options.collective_bytes = 1 << 20;
      },
  };
  for (const Change& change : changes) {
    for (const int culprit : {0, 2}) {
      // One of both ranks for each.
      if (Reduced() && (&change - changes) % 2 != culprit / 2) continue;
      const std::vector<absl::Status> errors = CreationErrors(
          3, [&](int rank, Training& training, std::vector<ZeroUnit>& units) {
            if (rank == culprit) change(training, units);
          });
      for (const absl::Status& error : errors) {
        ExpectError(error, absl::StatusCode::kInvalidArgument, "has another");
      }
      EXPECT_THAT(std::string(errors[1].message()),
                  HasSubstr(absl::StrCat("rank ", culprit)))
          << &change - changes;
    }
  }
  // What changes no bit may differ.
  for (const absl::Status& error : CreationErrors(
           3, [&](int rank, Training&training, std::vector<ZeroUnit>&) {
             ShardOptimizerOptions& shard = training.options.shard;
             shard.path = rank == 0 ? StepPath::kFused : StepPath::kSeparate;
             shard.cpu_ratio = rank / 2.0;
             shard.piece_numel <<= rank;
             shard.staging_buffers += rank;
             shard.sub_group_numel <<= rank;
             shard.pin_memory = rank == 1;
             training.options.local_grad_type = rank == 2 ? kF32 : kBF16;
           })) {
    EXPECT_TRUE(IsOk(error));
  }
}

TEST(ZeroOptimizerTest, CreationFailsOnAllRanksWhereOneFails) {
  // Its initial values.
  for (const int culprit : {0, 1, 2}) {
    const std::vector<absl::Status> errors = CreationErrors(
        3, [&](int rank, Training&, std::vector<ZeroUnit>& units) {
          if (rank != culprit) return;
          units[1].parameters[0].values =
              [](int64_t offset, absl::Span<float> values) -> absl::Status {
            if (offset + static_cast<int64_t>(values.size()) > 8192) {
              return absl::DataLossError(std::string(500, 'x'));
            }
            std::fill(values.begin(), values.end(), 0.0f);
            return absl::OkStatus();
          };
        });
    // Rank 0 has only those before.
    if (culprit == 0) {
      for (const absl::Status& error : errors) EXPECT_TRUE(IsOk(error));
      continue;
    }
    for (int rank = 0; rank < 3; ++rank) {
      ExpectError(errors[rank], absl::StatusCode::kDataLoss, "xxxxx");
      ExpectError(errors[rank], absl::StatusCode::kDataLoss,
                  rank == culprit ? "u1.p0"
                                  : absl::StrCat("rank ", culprit, " failed"));
    }
    // The others get as much of it as fits.
    EXPECT_GT(errors[culprit].message().size(), 500u);
    EXPECT_LT(errors[0].message().size(), 300u);
    EXPECT_GT(errors[0].message().size(), 200u);
  }
  // Each call of its device.
  constexpr HostDeviceCall kCalls[] = {
      HostDeviceCall::kAllocate,    HostDeviceCall::kCreateStream,
      HostDeviceCall::kCreateEvent, HostDeviceCall::kCopyToDevice,
      HostDeviceCall::kSetZero,     HostDeviceCall::kSynchronize,
  };
  for (const HostDeviceCall call : kCalls) {
    bool reached = true;
    for (int64_t skip = 0; reached; ++skip) {
      std::vector<absl::Status> errors(3);
      RunRanks(Ranks(3), [&](Rank& rank) {
        Training training = MakeTraining();
        training.options.shard.cpu_ratio = 0.5;
        const int64_t before = rank.device->Calls(call);
        if (rank.rank() == 1) {
          rank.device->RefuseCall(call, skip,
                                  absl::ResourceExhaustedError("no room"));
        }
        const auto created = CreateOn(rank, training);
        errors[rank.rank()] = created.status();
        if (rank.rank() == 1) {
          reached = rank.device->Calls(call) - before > skip;
        }
      });
      const std::string where =
          absl::StrCat("call ", static_cast<int>(call), " number ", skip);
      if (!reached) {
        EXPECT_GT(skip, call == HostDeviceCall::kAllocate ? 4 : 0) << where;
        for (const absl::Status& error : errors) {
          EXPECT_TRUE(IsOk(error)) << where;
        }
        break;
      }
      for (int rank = 0; rank < 3; ++rank) {
        SCOPED_TRACE(where);
        ExpectError(errors[rank], absl::StatusCode::kResourceExhausted,
                    "no room");
        if (rank != 1) {
          EXPECT_THAT(std::string(errors[rank].message()),
                      HasSubstr("rank 1 failed: "));
        }
      }
    }
  }
}

TEST(ZeroOptimizerTest, CreationRefusesRanksOfDifferentKinds) {
  std::vector<absl::Status> errors(2);
  RunRanks(Ranks(2), [&](Rank& rank) {
    HostDeviceOptions options;
    options.host_accessible = rank.rank() == 0;
    auto device = HostDevice::Create(*rank.kernel, options);
    ASSERT_TRUE(IsOk(device));
    const Training training = MakeTraining();
    errors[rank.rank()] =
        ZeroOptimizer::Create({*rank.kernel, **device, *rank.pool},
                              *rank.communicator, training.options,
                              MakeUnits(training.shapes))
            .status();
  });
  for (const absl::Status& error : errors) {
    ExpectError(error, absl::StatusCode::kInvalidArgument, "kind of device");
  }
}

// --- Failures. ---

// Everything that a trainer does in a step.
absl::Status WholeStep(ZeroOptimizer& optimizer, Stream& stream,
                       const std::vector<UnitGradients>& gradients) {
  const int units = static_cast<int>(gradients.size());
  for (int unit = 0; unit < units; ++unit) {
    ONEPASS_RETURN_IF_ERROR(optimizer.Gather(unit, stream).status());
  }
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    for (int unit = 0; unit < units; ++unit) {
      ONEPASS_RETURN_IF_ERROR(
          optimizer.ReduceGradients(unit, gradients[unit].pointers, stream));
    }
  }
  ONEPASS_RETURN_IF_ERROR(optimizer.Step({}).status());
  return optimizer.Gather(0, stream).status();
}

void ExpectUnusable(ZeroOptimizer& optimizer, Stream& stream) {
  EXPECT_FALSE(optimizer.shards().status().ok());
  EXPECT_FALSE(optimizer.Gather(0, stream).ok());
  const std::vector<const void*> zeros(optimizer.units()[0].parameters.size());
  EXPECT_FALSE(optimizer.ReduceGradients(0, zeros, stream).ok());
  EXPECT_FALSE(optimizer.Step({}).ok());
}

// How the optimizer is that fails.
struct FailureCase {
  bool host_accessible;
  StepPath path;
  DType weights;
  DType local;  // gradients are exchanged in bf16
  bool traced;
};

// An error at every call that a step makes of a rank's device, refused or while
// it runs: all ranks learn of it, none can go on, and nothing is in flight.
TEST(ZeroOptimizerTest, AFailureOfOneRankIsOneOfAll) {
  constexpr FailureCase kCases[] = {
      {true, StepPath::kFused, kBF16, kBF16, false},
      {false, StepPath::kFused, kBF16, kBF16, false},
      {true, StepPath::kSeparate, kBF16, kBF16, false},
      {false, StepPath::kFused, kF32, kF32, false},
      {true, StepPath::kFused, kBF16, kBF16, true},
  };
  constexpr HostDeviceCall kCalls[] = {
      HostDeviceCall::kAllocate,     HostDeviceCall::kCreateEvent,
      HostDeviceCall::kCopyToDevice, HostDeviceCall::kCopyToHost,
      HostDeviceCall::kCopyOnDevice, HostDeviceCall::kSetZero,
      HostDeviceCall::kRun,          HostDeviceCall::kRecord,
      HostDeviceCall::kStreamWait,   HostDeviceCall::kSynchronize,
      HostDeviceCall::kEventWait,
  };
  for (const FailureCase& one : kCases) {
    Training training = MakeTraining();
    training.shapes = {{{5000}, {1}}, {{9000}}};
    ShardOptimizerOptions& shard = training.options.shard;
    shard.micro_batches = 2;
    shard.cpu_ratio = 0.5;
    shard.path = one.path;
    shard.weights_type = one.weights;
    training.options.local_grad_type = one.local;
    training.options.collective_bytes = 12000;
    RankOptions ranks = Ranks(2);
    ranks.device.host_accessible = one.host_accessible;
    // The cases share what most of them do: the further ones try less of it.
    const bool is_further = &one - kCases >= 2;
    const int64_t stride =
        Reduced() ? (is_further ? 23 : 11) : (is_further ? 3 : 1);
    for (const HostDeviceCall call : kCalls) {
      // Gradients are cast on their way, not copied.
      if (call == HostDeviceCall::kCopyOnDevice && one.local != kBF16) continue;
      for (const bool while_it_runs : {false, true}) {
        const bool is_work = call >= HostDeviceCall::kCopyToDevice &&
                             call <= HostDeviceCall::kRun;
        if (while_it_runs && !is_work) continue;
        bool reached = true;
        for (int64_t skip = 0; reached; skip += stride) {
          const std::string where = absl::StrCat(
              "case ", &one - kCases, ", call ", static_cast<int>(call),
              " number ", skip, while_it_runs ? " while it runs" : "");
          absl::Status errors[2];
          absl::Status later_errors[2];
          RunRanks(ranks, [&](Rank& rank) {
            auto created = CreateOn(rank, training);
            ASSERT_TRUE(IsOk(created));
            ZeroOptimizer& optimizer = **created;
            StepTrace trace;
            if (one.traced) {
              ASSERT_TRUE(IsOk(optimizer.shards().SetTrace(&trace)));
            }
            std::vector<UnitGradients> gradients;
            for (const int unit : {0, 1}) {
              gradients.push_back(MakeGradients(rank, training, 0, 0, unit));
            }
            const int64_t before = rank.device->Calls(call);
            if (rank.rank() == 1) {
              const absl::Status fault = absl::InternalError("struck");
              while_it_runs ? rank.device->FailWork(call, skip, fault)
                            : rank.device->RefuseCall(call, skip, fault);
            }
            const auto expect_idle = [&](const absl::Status& status) {
              if (status.ok()) return;
              rank.stream->Synchronize().IgnoreError();
              EXPECT_EQ(rank.device->WorkInFlight(), 0)
                  << where << " on rank " << rank.rank();
            };
            absl::Status& error = errors[rank.rank()];
            error = WholeStep(optimizer, *rank.stream, gradients);
            if (rank.rank() == 1) {
              reached = rank.device->Calls(call) - before > skip;
            }
            expect_idle(error);
            // Where the other had finished its last call when this failed.
            absl::Status& later_error = later_errors[rank.rank()];
            later_error = error;
            later_error.Update(optimizer.Gather(0, *rank.stream).status());
            expect_idle(later_error);
            if (!later_error.ok()) ExpectUnusable(optimizer, *rank.stream);
          });
          if (!reached) {
            EXPECT_GT(skip, 0) << where;
            EXPECT_TRUE(IsOk(errors[0])) << where;
            EXPECT_TRUE(IsOk(errors[1])) << where;
            break;
          }
          EXPECT_THAT(std::string(later_errors[1].message()),
                      HasSubstr("struck"))
              << where;
          EXPECT_THAT(std::string(later_errors[0].message()),
                      HasSubstr("rank 1"))
              << where;
          EXPECT_THAT(std::string(later_errors[0].message()),
                      HasSubstr("struck"))
              << where;
        }
      }
    }
  }
}

// Whether it ends well or not, nothing of the caller's is in use any more.
TEST(ZeroOptimizerTest, ReducingLeavesNothingOnTheStream) {
  for (const int world : {1, 2}) {
    for (const bool fails : {false, true}) {
      RankOptions ranks = Ranks(world);
      ranks.device.link_bytes_per_s = 1e7;
      RunRanks(ranks, [&](Rank& rank) {
        Training training = MakeTraining();
        training.shapes = {{{5000}, {5000}}};
        auto optimizer = CreateOn(rank, training);
        ASSERT_TRUE(IsOk(optimizer));
        const UnitGradients gradients = MakeGradients(rank, training, 0, 0, 0);
        // What comes after it begins late.
        std::vector<char> bytes(100000);
        auto buffer = rank.device->Allocate(100000);
        ASSERT_TRUE(IsOk(buffer));
        ASSERT_TRUE(IsOk(
            rank.stream->CopyToHost(bytes.data(), buffer->data(), 100000)));
        if (fails && rank.rank() == 0) {
          rank.device->RefuseCall(HostDeviceCall::kCopyOnDevice, 1,
                                  absl::InternalError("refused"));
        }
        EXPECT_EQ((*optimizer)
                      ->ReduceGradients(0, gradients.pointers, *rank.stream)
                      .ok(),
                  !fails);
        EXPECT_EQ(rank.device->WorkInFlight(), 0);
      });
    }
  }
}

// State that is leased when the others have begun to update theirs.
TEST(ZeroOptimizerTest, ARefusalThatComesTooLateIsAFailure) {
  std::optional<StateLease> lease;
  RunRanks(Ranks(2), [&](Rank& rank) {
    const Training training = MakeTraining();
    std::function<void()> on_copy;
    HostDeviceOptions options;
    options.observer = [&](const HostDeviceCopy& copy, bool) {
      // The norm's, after the check for leases.
      if (on_copy && copy.bytes == sizeof(NormSum)) {
        std::exchange(on_copy, nullptr)();
      }
    };
    absl::StatusOr<std::unique_ptr<HostDevice>> device =
        HostDevice::Create(*rank.kernel, options);
    ASSERT_TRUE(IsOk(device));
    rank.stream.reset();
    rank.device = *std::move(device);
    rank.stream = *rank.device->CreateStream();
    auto optimizer = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(optimizer));
    ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
    if (rank.rank() == 1) {
      on_copy = [&] {
        auto leased = (*optimizer)->shards().LeaseState();
        ASSERT_TRUE(IsOk(leased));
        lease = *std::move(leased);
      };
    }
    ExpectError((*optimizer)->Step({}).status(),
                absl::StatusCode::kFailedPrecondition,
                rank.rank() == 1 ? "leased" : "rank 1 failed: state is leased");
    if (rank.rank() == 1) lease.reset();
    ExpectUnusable(**optimizer, *rank.stream);
  });
}

// Of two others.
TEST(ZeroOptimizerTest, ARankThatStopsIsNamed) {
  const Training training = MakeTraining();
  // Before the first, second, ... of these calls.
  for (int stop = 0; stop < 4; ++stop) {
    RunRanks(Ranks(3), [&](Rank& rank) {
      auto created = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(created));
      ZeroOptimizer& optimizer = **created;
      const UnitGradients gradients = MakeGradients(rank, training, 0, 0, 0);
      const std::function<absl::Status()> calls[] = {
          [&] { return optimizer.Gather(0, *rank.stream).status(); },
          [&] {
            return optimizer.ReduceGradients(0, gradients.pointers,
                                             *rank.stream);
          },
          [&] { return optimizer.Step({}).status(); },
          [&] { return optimizer.Gather(0, *rank.stream).status(); },
      };
      for (int i = 0; i < stop; ++i) ASSERT_TRUE(IsOk(calls[i]()));
      if (rank.rank() == 1) return;
      const absl::Status status = calls[stop]();
      ExpectError(status, absl::StatusCode::kAborted, "rank 1");
      ExpectUnusable(optimizer, *rank.stream);
    });
  }
}

TEST(ZeroOptimizerTest, ARankThatIsSilentIsNamed) {
  Training training = MakeTraining();
  training.shapes = {{{5000}}};
  RankOptions ranks = Ranks(2);
  // Longer than the slowest machine takes to create the optimizer.
  ranks.timeout = UnderEmulator() || UnderSanitizer()
                      ? std::chrono::milliseconds(5000)
                      : std::chrono::milliseconds(2000);
  std::promise<void> first_is_done;
  RunRanks(ranks, [&](Rank& rank) {
    const absl::Cleanup done = [&] {
      if (rank.rank() == 0) first_is_done.set_value();
    };
    auto created = CreateOn(rank, training);
    ASSERT_TRUE(IsOk(created));
    ZeroOptimizer& optimizer = **created;
    ASSERT_TRUE(IsOk(ReduceAll(optimizer, rank, training, 0)));
    if (rank.rank() == 1) first_is_done.get_future().wait();
    const absl::Status status = optimizer.Step({}).status();
    ExpectError(status, absl::StatusCode::kDeadlineExceeded, "rank 1");
    ExpectUnusable(optimizer, *rank.stream);
  });
}

// An error that only shards() has seen.
TEST(ZeroOptimizerTest, ARankWhoseShardsAreUnusableSaysSo) {
  for (int i = 0; i < 3; ++i) {
    RunRanks(Ranks(2), [&](Rank& rank) {
      const Training training = MakeTraining();
      auto created = CreateOn(rank, training);
      ASSERT_TRUE(IsOk(created));
      ZeroOptimizer& optimizer = **created;
      const UnitGradients gradients = MakeGradients(rank, training, 0, 0, 0);
      if (rank.rank() == 1) {
        optimizer.shards().MarkUnusable(absl::DataLossError("burnt"));
      }
      const std::function<absl::Status()> calls[] = {
          [&] { return optimizer.Gather(0, *rank.stream).status(); },
          [&] {
            return optimizer.ReduceGradients(0, gradients.pointers,
                                             *rank.stream);
          },
          [&] { return optimizer.Step({}).status(); },
      };
      const absl::Status status = calls[i]();
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(std::string(status.message()), HasSubstr("burnt"));
      if (rank.rank() == 0) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
      }
      ExpectUnusable(optimizer, *rank.stream);
    });
  }
}

// --- Created and destroyed many times. ---

TEST(ZeroOptimizerTest, LeavesNothingBehind) {
  if (UnderSanitizer() || UnderEmulator()) {
    GTEST_SKIP() << "memory of a sanitizer or emulator counts here";
  }
  const auto run = [](int times) {
    for (int i = 0; i < times; ++i) {
      RankOptions ranks = Ranks(2);
      ranks.device.host_accessible = i % 3 != 0;
      RunRanks(ranks, [&](Rank& rank) {
        Training training = MakeTraining();
        // State of some hundred kilobytes a rank.
        training.shapes = {{{10 * kLeafNumel}, {100}}, {{5000}}};
        training.options.shard.cpu_ratio = 0.5;
        auto optimizer = CreateOn(rank, training);
        ASSERT_TRUE(IsOk(optimizer));
        ASSERT_TRUE(IsOk((*optimizer)->Gather(0, *rank.stream).status()));
        ASSERT_TRUE(IsOk(ReduceAll(**optimizer, rank, training, 0)));
        // Every other one with gradients that are left.
        if (i % 2 == 0) {
          ASSERT_TRUE(IsOk((*optimizer)->Step({})));
        }
      });
    }
  };
  run(20);
  const int64_t resident = ResidentBytes();
  const int64_t descriptors = Entries(kDescriptors);
  const int64_t threads = Entries(kThreads);
  run(100);
  EXPECT_LE(ResidentBytes() - resident, int64_t{4} << 20);
  EXPECT_EQ(Entries(kDescriptors), descriptors);
  // One that was joined may be listed for a moment.
  for (int i = 0; i < 1000 && Entries(kThreads) > threads; ++i) usleep(1000);
  EXPECT_LE(Entries(kThreads), threads);
}

}  // namespace
}  // namespace onepass

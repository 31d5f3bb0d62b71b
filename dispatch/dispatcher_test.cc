#include "dispatch/dispatcher.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/cpu_features.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "tests/counting_kernel.h"

namespace onepass {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kVariable[] = "ONEPASS_KERNEL";

bool Yes() { return true; }
bool No() { return false; }

constexpr KernelOperations kFakeOperations = {
    [] { return int64_t{16}; },      [](const AdamStepArgs&) {},
    [](const AccumulateArgs&) {},    [](const ScaleArgs&) {},
    [](const CastArgs&) {},          [](const SquaredNormArgs&) {},
    [](const AbsMaxArgs&) {},        [](const SplitRemainderArgs&) {},
    [](const JoinRemainderArgs&) {}, [](const QuantizeArgs&) {},
    [](const DequantizeArgs&) {},
};

template <int rank>
constexpr Kernel Fake(const char* name, bool (*supported)() = Yes) {
  return {name,
          [] { return rank; },
          supported,
          {DType::kFloat32},
          {DType::kFloat32},
          {},
          &kFakeOperations};
}

std::vector<std::string> Names(const Dispatcher& dispatcher) {
  std::vector<std::string> names;
  for (const KernelReport& report : dispatcher.Report()) {
    names.push_back(report.kernel->name);
  }
  return names;
}

// Starts each test without the variable, whatever the configuration pins.
class DispatcherTest : public testing::Test {
 protected:
  DispatcherTest() {
    const char* value = std::getenv(kVariable);
    if (value != nullptr) pinned_ = value;
    unsetenv(kVariable);
  }
  ~DispatcherTest() override {
    if (pinned_.has_value()) {
      setenv(kVariable, pinned_->c_str(), /*overwrite=*/1);
    } else {
      unsetenv(kVariable);
    }
  }

  static void SetVariable(const char* value) {
    ASSERT_EQ(setenv(kVariable, value, /*overwrite=*/1), 0);
  }

  std::optional<std::string> pinned_;
};

TEST_F(DispatcherTest, ChoosesByRankThenNameInAnyOrderOfRegistration) {
  const Kernel kernels[] = {Fake<7>("b"), Fake<7>("c"), Fake<7>("a"),
                            Fake<-3>("aa"), Fake<900>("top", No)};
  std::vector<int> order = {0, 1, 2, 3, 4};
  do {
    Dispatcher dispatcher;
    for (int i : order) ASSERT_TRUE(dispatcher.Register(kernels[i]).ok());
    ASSERT_THAT(Names(dispatcher), ElementsAre("top", "a", "b", "c", "aa"));
    ASSERT_EQ(*dispatcher.Select(), &kernels[2]);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(DispatcherTest, ChoosesForMachinesThatAreNotHere) {
  const std::vector<std::string> ranking = Names(*CreateDefaultDispatcher());
#ifdef __x86_64__
  ASSERT_THAT(ranking, ElementsAre("avx512", "avx2", "scalar"));
#elif defined(__aarch64__)
  if (DetectCpu().sve_bits > 128) {
    ASSERT_THAT(ranking, ElementsAre("sve", "neon", "scalar"));
  } else {
    ASSERT_THAT(ranking, ElementsAre("neon", "sve", "scalar"));
  }
#elif defined(__riscv)
  ASSERT_THAT(ranking, ElementsAre("rvv", "scalar"));
#endif
  // Each machine lacks one more of the best.
  for (size_t best = 0; best < ranking.size(); ++best) {
    DispatcherOptions options;
    options.supported = [&](const Kernel& kernel) {
      return std::count(ranking.begin() + best, ranking.end(), kernel.name) > 0;
    };
    const auto dispatcher = CreateDefaultDispatcher(options);
    ASSERT_TRUE(dispatcher.ok()) << dispatcher.status();
    const auto selected = dispatcher->Select();
    ASSERT_TRUE(selected.ok()) << selected.status();
    EXPECT_EQ((*selected)->name, ranking[best]);
  }
}

// The walk over vectors halves their number: it needs a power of two.
TEST_F(DispatcherTest, RefusesLengthsThatAreNoPowersOfTwo) {
  const int bits = DetectCpu().sve_bits;
  for (const KernelReport& report : CreateDefaultDispatcher()->Report()) {
    if (report.kernel->name != std::string("sve")) continue;
    EXPECT_EQ(report.supported, bits != 0 && (bits & (bits - 1)) == 0) << bits;
  }
}

TEST_F(DispatcherTest, ChoosesAroundAHole) {
  const Kernel kernels[] = {Fake<3>("best"), Fake<2>("middle"),
                            Fake<1>("least")};
  DispatcherOptions options;
  options.supported = [](const Kernel& kernel) { return kernel.rank() != 2; };
  options.kernel = "middle";
  Dispatcher forced(options);
  options.kernel.clear();
  Dispatcher free(options);
  for (const Kernel& kernel : kernels) {
    ASSERT_TRUE(forced.Register(kernel).ok());
    ASSERT_TRUE(free.Register(kernel).ok());
  }
  EXPECT_EQ(*free.Select(), &kernels[0]);
  const absl::Status status = forced.Select().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("kernel middle cannot run here"),
                    HasSubstr("best, middle (not supported here), least")));
}

TEST_F(DispatcherTest, NothingSupportedIsAnError) {
  DispatcherOptions options;
  options.supported = [](const Kernel&) { return false; };
  const auto dispatcher = CreateDefaultDispatcher(options);
  ASSERT_TRUE(dispatcher.ok()) << dispatcher.status();
  const absl::Status status = dispatcher->Select().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("scalar (not supported here)"));
  for (const KernelReport& report : dispatcher->Report()) {
    EXPECT_FALSE(report.supported || report.selected) << report.kernel->name;
  }

  const absl::Status empty = Dispatcher().Select().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(empty)) << empty;
  EXPECT_THAT(std::string(empty.message()), HasSubstr("there are: none"));
}

TEST_F(DispatcherTest, OptionAndVariableForceAKernel) {
  const Kernel kernels[] = {Fake<1>("one"), Fake<2>("two"), Fake<3>("three")};
  auto selected = [&kernels](const char* option) {
    DispatcherOptions options;
    options.kernel = option;
    Dispatcher dispatcher(options);
    for (const Kernel& kernel : kernels) {
      EXPECT_TRUE(dispatcher.Register(kernel).ok());
    }
    return std::string((*dispatcher.Select())->name);
  };
  EXPECT_EQ(selected(""), "three");
  EXPECT_EQ(selected("one"), "one");
  SetVariable("two");
  EXPECT_EQ(selected(""), "two");
  EXPECT_EQ(selected("one"), "one");  // the option wins
  SetVariable("");
  EXPECT_EQ(selected(""), "three");
}

TEST_F(DispatcherTest, UnknownNameListsWhatThereIs) {
  const Kernel here = Fake<1>("here");
  const Kernel elsewhere = Fake<2>("elsewhere", No);
  auto select = [&](const DispatcherOptions& options) {
    Dispatcher dispatcher(options);
    EXPECT_TRUE(dispatcher.Register(here).ok());
    EXPECT_TRUE(dispatcher.Register(elsewhere).ok());
    return dispatcher.Select().status();
  };
  DispatcherOptions options;
  options.kernel = "Here";
  const absl::Status by_option = select(options);
  SetVariable("Here");
  const absl::Status by_variable = select({});
  for (const absl::Status& status : {by_option, by_variable}) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_EQ(status.message(),
              "no kernel is named Here; there are: "
              "elsewhere (not supported here), here");
  }
}

TEST_F(DispatcherTest, RefusesADuplicateNameAndStaysAsItWas) {
  const std::string same_characters = "name";
  const Kernel first = Fake<1>("name");
  const Kernel second = Fake<2>(same_characters.c_str());
  Dispatcher dispatcher;
  ASSERT_TRUE(dispatcher.Register(first).ok());
  const absl::Status status = dispatcher.Register(second);
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("name"));
  ASSERT_EQ(dispatcher.Report().size(), 1u);
  EXPECT_EQ(*dispatcher.Select(), &first);
}

TEST_F(DispatcherTest, RefusesEachNullOperationByName) {
  using Change = void (*)(KernelOperations&);
  const std::pair<const char*, Change> operations[] = {
      {"block_numel", [](KernelOperations& o) { o.block_numel = nullptr; }},
      {"adam_step", [](KernelOperations& o) { o.adam_step = nullptr; }},
      {"accumulate", [](KernelOperations& o) { o.accumulate = nullptr; }},
      {"scale", [](KernelOperations& o) { o.scale = nullptr; }},
      {"cast", [](KernelOperations& o) { o.cast = nullptr; }},
      {"squared_norm", [](KernelOperations& o) { o.squared_norm = nullptr; }},
      {"absmax", [](KernelOperations& o) { o.absmax = nullptr; }},
      {"split_remainder",
       [](KernelOperations& o) { o.split_remainder = nullptr; }},
      {"join_remainder",
       [](KernelOperations& o) { o.join_remainder = nullptr; }},
      {"quantize", [](KernelOperations& o) { o.quantize = nullptr; }},
      {"dequantize", [](KernelOperations& o) { o.dequantize = nullptr; }},
  };
  static_assert(offsetof(KernelOperations, streams_copies) ==
                    std::size(operations) * sizeof(void (*)()),
                "an operation is not tried");
  for (const auto& [name, remove] : operations) {
    KernelOperations incomplete = kFakeOperations;
    remove(incomplete);
    Kernel kernel = Fake<1>("fake");
    kernel.operations = &incomplete;
    Dispatcher dispatcher;
    const absl::Status status = dispatcher.Register(kernel);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(),
              absl::string_view(std::string("kernel fake: operation ") + name +
                                " is null"));
    EXPECT_TRUE(dispatcher.Report().empty());
  }
}

TEST_F(DispatcherTest, RefusesABadDescriptor) {
  KernelOperations blocks_of_none = kFakeOperations;
  blocks_of_none.block_numel = [] { return int64_t{0}; };
  Kernel without_rank = Fake<1>("fake");
  without_rank.rank = nullptr;
  auto rank = [] { return 1; };
  const std::pair<const char*, std::vector<Kernel>> cases[] = {
      {"without a name", {Fake<1>(nullptr), Fake<1>("")}},
      {"rank is null", {without_rank}},
      {"supported is null", {Fake<1>("fake", nullptr)}},
      {"operations is null",
       {{"fake",
         rank,
         Yes,
         {DType::kFloat32},
         {DType::kFloat32},
         {},
         nullptr}}},
      {"no gradient type",
       {{"fake", rank, Yes, {}, {DType::kFloat32}, {}, &kFakeOperations}}},
      {"no moment type",
       {{"fake", rank, Yes, {DType::kFloat32}, {}, {}, &kFakeOperations}}},
      {"block_numel() is 0",
       {{"fake",
         rank,
         Yes,
         {DType::kFloat32},
         {DType::kFloat32},
         {},
         &blocks_of_none}}},
  };
  for (const auto& [problem, kernels] : cases) {
    for (const Kernel& kernel : kernels) {
      Dispatcher dispatcher;
      const absl::Status status = dispatcher.Register(kernel);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << problem << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(problem));
      EXPECT_TRUE(dispatcher.Report().empty());
    }
  }
}

TEST_F(DispatcherTest, RunsNoCodeOfAKernelThatCannotRunHere) {
  KernelOperations traps = kFakeOperations;
  traps.block_numel = []() -> int64_t { std::abort(); };
  Kernel kernel = Fake<1>("elsewhere", No);
  kernel.operations = &traps;
  DispatcherOptions options;
  options.supported = [](const Kernel&) { return true; };
  Dispatcher dispatcher(options);
  ASSERT_TRUE(dispatcher.Register(kernel).ok());
  EXPECT_EQ(*dispatcher.Select(), &kernel);
  EXPECT_EQ(dispatcher.Report()[0].block_numel, 0);
}

TEST_F(DispatcherTest, Report) {
  const Kernel slow = Fake<1>("slow");
  const Kernel fast = Fake<2>("fast");
  const Kernel absent = Fake<3>("absent", No);
  Dispatcher dispatcher;
  for (const Kernel* kernel : {&slow, &absent, &fast}) {
    ASSERT_TRUE(dispatcher.Register(*kernel).ok());
  }
  const std::vector<KernelReport> report = dispatcher.Report();
  ASSERT_EQ(report.size(), 3u);
  const KernelReport expected[] = {{&absent, false, false, 0},
                                   {&fast, true, true, 16},
                                   {&slow, true, false, 16}};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(report[i].kernel, expected[i].kernel) << i;
    EXPECT_EQ(report[i].supported, expected[i].supported) << i;
    EXPECT_EQ(report[i].selected, expected[i].selected) << i;
    EXPECT_EQ(report[i].block_numel, expected[i].block_numel) << i;
  }
}

TEST_F(DispatcherTest, AKernelLinkedByItsOwnerStandsBesideTheBuiltIn) {
  auto dispatcher = CreateDefaultDispatcher();
  ASSERT_TRUE(dispatcher.ok()) << dispatcher.status();
  const size_t builtin = dispatcher->Report().size();
  const Kernel best = Fake<1000000>("best");
  const Kernel taken = Fake<1000001>("scalar");
  ASSERT_TRUE(dispatcher->Register(best).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(dispatcher->Register(taken)));
  EXPECT_EQ(dispatcher->Report().size(), builtin + 1);
  EXPECT_EQ(*dispatcher->Select(), &best);
}

TEST_F(DispatcherTest, ThePinnedKernelIsSelected) {
  if (pinned_.has_value()) SetVariable(pinned_->c_str());
  const auto dispatcher = CreateDefaultDispatcher();
  ASSERT_TRUE(dispatcher.ok()) << dispatcher.status();
  std::string expected = pinned_.value_or("");
  if (expected.empty()) {  // nothing pinned: the best that runs here
    for (const KernelReport& report : dispatcher->Report()) {
      if (!report.kernel->supported()) continue;
      expected = report.kernel->name;
      break;
    }
  }
  EXPECT_EQ((*dispatcher->Select())->name, expected);
}

// Slots of counting kernels, more than there are built-in kernels.
constexpr auto kSlots = std::make_index_sequence<8>();

template <size_t... slot>
std::vector<Kernel> CountingBuiltins(const std::vector<KernelReport>& builtin,
                                     std::index_sequence<slot...>) {
  using Make = Kernel (*)(const Kernel&, const char*);
  constexpr Make kMake[] = {&MakeCountingKernel<slot>...};
  std::vector<Kernel> kernels;
  for (const KernelReport& report : builtin) {
    const Kernel& kernel = *report.kernel;
    kernels.push_back(kMake[kernels.size()](kernel, kernel.name));
    kernels.back().rank = kernel.rank;
  }
  return kernels;
}

template <size_t... slot>
std::vector<int64_t> TotalCounts(size_t kernels, std::index_sequence<slot...>) {
  std::vector<int64_t> totals = {OperationCounts<slot>().Total()...};
  totals.resize(kernels);
  return totals;
}

TEST_F(DispatcherTest, TheForcedKernelIsTheOneThatRuns) {
  const std::vector<KernelReport> builtin = CreateDefaultDispatcher()->Report();
  ASSERT_LE(builtin.size(), kSlots.size());
  const std::vector<Kernel> kernels = CountingBuiltins(builtin, kSlots);
  const auto pool = ThreadPool::Create({1});
  ASSERT_TRUE(pool.ok()) << pool.status();

  auto run = [&](const DispatcherOptions& options) {
    Dispatcher dispatcher(options);
    for (const Kernel& kernel : kernels) {
      ASSERT_TRUE(dispatcher.Register(kernel).ok());
    }
    const auto selected = dispatcher.Select();
    ASSERT_TRUE(selected.ok()) << selected.status();
    float x = 3;
    ASSERT_TRUE(Scale(**selected, **pool, {1, &x, &x, 2}).ok());
    EXPECT_EQ(x, 6);
  };
  for (size_t forced = 0; forced < kernels.size(); ++forced) {
    if (!kernels[forced].supported()) continue;
    std::vector<int64_t> expected = TotalCounts(kernels.size(), kSlots);
    DispatcherOptions options;
    options.kernel = kernels[forced].name;
    run(options);
    ++expected[forced];
    EXPECT_EQ(TotalCounts(kernels.size(), kSlots), expected) << options.kernel;

    SetVariable(kernels[forced].name);
    run({});
    unsetenv(kVariable);
    ++expected[forced];
    EXPECT_EQ(TotalCounts(kernels.size(), kSlots), expected) << options.kernel;
  }
}

}  // namespace
}  // namespace onepass

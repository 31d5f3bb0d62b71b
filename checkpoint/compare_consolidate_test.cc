// What is done with checkpoints beside saving and restoring: compared, and made
// into one file.

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/compare.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/edit_index.h"
#include "checkpoint/fake_state.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/save.h"
#include "checkpoint/save_fake_state.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/kernel.h"
#include "dispatch/state.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;

std::vector<FakeTensor> EveryType() {
  // Odd, so that what follows its codes would not be aligned.
  const std::vector<int64_t> large = {7, 3001};
  return {
      {"w", StateKind::kMaster, StateType::kFloat32, large, 0},
      {"w", StateKind::kExpAvg, StateType::kBFloat16, large, 0},
      {"w", StateKind::kExpAvgSq, StateType::kScaledFloat8E4M3, large, 0},
      {"half", StateKind::kMaster, StateType::kScaledFloat16, {9001}, 1},
      {"half", StateKind::kExpAvg, StateType::kFloat16, {9001}, 1},
      {"rest", StateKind::kParam, StateType::kBFloat16, {3, 5, 700}, 1},
      {"rest", StateKind::kMaster, StateType::kInt16Remainder, {3, 5, 700}, 1},
      {"scalar", StateKind::kMaster, StateType::kFloat32, {}, 0},
      {"none", StateKind::kMaster, StateType::kFloat32, {4, 0}, 0},
  };
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class ContentsTest : public testing::Test {
 protected:
  ContentsTest() : model_(EveryType(), 7) {}

  std::string path(const std::string& name) const {
    return directory_.path() + "/" + name;
  }

  void SaveFlat(const FakeModel& model, const std::string& name, int world,
                const CheckpointMeta& meta) {
    SaveFakeState(model, FlatBoxes(model, world, random_), directory_.path(),
                  name, meta);
  }

  CompareReport Compare(const std::string& a, const std::string& b) {
    absl::StatusOr<Checkpoint> x = Checkpoint::Open(path(a));
    absl::StatusOr<Checkpoint> y = Checkpoint::Open(path(b));
    EXPECT_TRUE(x.ok() && y.ok()) << x.status() << y.status();
    CompareOptions options;
    options.buffer_bytes = 3 * 4096;
    int64_t last = 0;
    int64_t end = 0;
    options.progress = [&](int64_t done, int64_t all) {
      EXPECT_GT(done, last);
      last = done;
      end = all;
    };
    absl::StatusOr<CompareReport> report = CompareCheckpoints(*x, *y, options);
    EXPECT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(last, end);
    return *std::move(report);
  }

  const TempDirectory directory_;
  const FakeModel model_;
  std::mt19937 random_{5};
};

TEST_F(ContentsTest, HowStateIsCutIsNoDifference) {
  SaveFlat(model_, "a", 3, model_.Meta(5));
  SaveFakeState(model_, GridBoxes(model_, 4, random_), directory_.path(), "b",
                model_.Meta(5));
  // Of another order.
  CheckpointMeta meta = model_.Meta(5);
  for (StateGroup& group : meta.groups) {
    std::reverse(group.parameters.begin(), group.parameters.end());
  }
  SaveFlat(model_, "c", 1, meta);
  for (const auto& [a, b] : {std::pair{"a", "b"}, {"b", "c"}, {"a", "a"}}) {
    const CompareReport report = Compare(a, b);
    EXPECT_TRUE(report.equal()) << absl::StrJoin(report.others, "\n");
    // Scales of two of them, too.
    EXPECT_EQ(report.tensors_compared, 11);
  }
}

// Puts `value` to element `i` of a tensor of a checkpoint of one rank, and has
// its checksums follow: by saving a model that differs.
class ChangedModel {
 public:
  explicit ChangedModel(const FakeModel& model) : model_(model) {}

  template <typename T>
  void Set(int tensor, int64_t i, T value) {
    char* const bytes = const_cast<char*>(model_.bytes(tensor).data());
    std::memcpy(bytes + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
  const FakeModel& model() const { return model_; }

 private:
  FakeModel model_;
};

TEST_F(ContentsTest, DifferingElementsAreCounted) {
  ChangedModel a(model_);
  ChangedModel b(model_);
  // The master of w.
  a.Set(0, 20999, 1.5f);
  b.Set(0, 20999, -2.0f);
  a.Set(0, 5000, 0.0f);
  b.Set(0, 5000, -0.0f);
  a.Set(0, 6000, NAN);
  b.Set(0, 6000, 1.0f);
  // bf16 of 1 and 2.5; codes; fp16 of 0.5 and of 2^-24; a remainder.
  a.Set(1, 17, uint16_t{0x3f80});
  b.Set(1, 17, uint16_t{0x4020});
  a.Set(2, 20000, uint8_t{3});
  b.Set(2, 20000, uint8_t{250});
  a.Set(4, 9000, uint16_t{0x3800});
  b.Set(4, 9000, uint16_t{0x8001});
  a.Set(6, 0, int16_t{-32768});
  b.Set(6, 0, int16_t{32767});
  a.Set(7, 0, 1.0f);
  b.Set(7, 0, INFINITY);
  SaveFlat(a.model(), "a", 2, model_.Meta(5));
  SaveFakeState(b.model(), GridBoxes(model_, 3, random_), directory_.path(),
                "b", model_.Meta(5));
  const CompareReport report = Compare("a", "b");
  EXPECT_TRUE(report.others.empty());
  const struct {
    const char* name;
    int64_t differing;
    int64_t first;
    double largest;
    bool codes;
    int64_t nans;
  } expected[] = {
      {"state.half.exp_avg", 1, 9000, 0.5 + std::ldexp(1, -24), false, 0},
      {"state.rest.master_param", 1, 0, 65535, true, 0},
      {"state.scalar.master_param", 1, 0, INFINITY, false, 0},
      {"state.w.exp_avg", 1, 17, 1.5, false, 0},
      {"state.w.exp_avg_sq", 1, 20000, 247, true, 0},
      {"state.w.master_param", 3, 5000, 3.5, false, 1},
  };
  ASSERT_EQ(report.tensors.size(), std::size(expected));
  for (size_t i = 0; i < std::size(expected); ++i) {
    const TensorDifference& found = report.tensors[i];
    SCOPED_TRACE(found.name);
    EXPECT_EQ(found.name, expected[i].name);
    EXPECT_EQ(found.kind, TensorDifference::Kind::kElements);
    EXPECT_EQ(found.differing, expected[i].differing);
    EXPECT_EQ(found.first, expected[i].first);
    EXPECT_EQ(found.largest, expected[i].largest);
    EXPECT_EQ(found.codes, expected[i].codes);
    EXPECT_EQ(found.nans, expected[i].nans);
  }
}

TEST_F(ContentsTest, NamesTypesAndShapesDiffer) {
  std::vector<FakeTensor> tensors = EveryType();
  tensors[0].shape = {3001, 7};
  tensors[4].type = StateType::kBFloat16;
  tensors[7].parameter = "point";
  const FakeModel other(tensors, 7);
  SaveFlat(model_, "a", 2, model_.Meta(5));
  SaveFlat(other, "b", 3, other.Meta(5));
  const CompareReport report = Compare("a", "b");
  std::vector<std::string> found;
  for (const TensorDifference& t : report.tensors) {
    if (t.kind == TensorDifference::Kind::kElements) continue;
    found.push_back(absl::StrCat(t.name, ": ", Name(t.kind), " ", t.what));
  }
  EXPECT_EQ(found, (std::vector<std::string>{
                       "state.half.exp_avg: type fp16 as F16 and bf16 as BF16",
                       "state.point.master_param: only_in_b ",
                       "state.scalar.master_param: only_in_a ",
                       "state.w.master_param: shape [7, 3001] and [3001, 7]"}));
  EXPECT_EQ(report.others, (std::vector<std::string>{
                               "parameter \"scalar\" is in no group of B",
                               "parameter \"point\" is in no group of A"}));
}

TEST_F(ContentsTest, FormsAreOfDifferentTypes) {
  for (const ExportForm form :
       {ExportForm::kExact, ExportForm::kUnscaled, ExportForm::kRebuilt}) {
    SaveOptions options = SmallChunks();
    options.form = form;
    SaveFakeState(model_, FlatBoxes(model_, 2, random_), directory_.path(),
                  Name(form), model_.Meta(5), options);
  }
  const CompareReport rebuilt = Compare("unscaled", "rebuilt");
  ASSERT_EQ(rebuilt.tensors.size(), 1u);
  EXPECT_EQ(rebuilt.tensors[0].name, "state.rest.master_param");
  EXPECT_EQ(rebuilt.tensors[0].what,
            "int16 remainder as I16, unscaled and int16 remainder as F32, "
            "unscaled");
  const CompareReport exact = Compare("exact", "unscaled");
  // Scales are in one; of all others the form differs.
  EXPECT_EQ(exact.tensors.size(), model_.tensors().size() + 2);
  EXPECT_EQ(exact.tensors_compared, 0);
}

TEST_F(ContentsTest, WhatIsBesideTensorsDiffers) {
  SaveFlat(model_, "a", 1, model_.Meta(5));
  const auto others = [&](const CheckpointMeta& meta) {
    fs::remove_all(path("b"));
    SaveFlat(model_, "b", 2, meta);
    const CompareReport report = Compare("a", "b");
    EXPECT_TRUE(report.tensors.empty());
    return absl::StrJoin(report.others, "; ");
  };
  CheckpointMeta meta = model_.Meta(5);
  meta.step = 6;
  EXPECT_EQ(others(meta), "the step is 5 and 6");
  meta = model_.Meta(5);
  meta.groups[1].beta1 = std::nextafter(0.9f, 1.0f);
  meta.groups[0].mode = WeightDecay::kL2;
  meta.groups[0].bias_correction = !meta.groups[0].bias_correction;
  const std::string options = others(meta);
  EXPECT_TRUE(absl::StrContains(
      options, "beta1 of group 1 is 0.899999976 and 0.900000036"))
      << options;
  EXPECT_TRUE(absl::StrContains(options, "the mode of group 0 is AdamW and L2"))
      << options;
  EXPECT_TRUE(absl::StrContains(options, "bias_correction of group 0 is"))
      << options;
  meta = model_.Meta(5);
  meta.groups[0].step = 9;
  const std::string steps = others(meta);
  EXPECT_TRUE(absl::StrContains(steps, "the step of group 0 is 5 and 9"))
      << steps;
  EXPECT_TRUE(absl::StrContains(steps, "tensors differs; that of the first, "))
      << steps;
  meta = model_.Meta(5);
  meta.loss_scale->scale = 512;
  EXPECT_EQ(others(meta), "the loss scale is 1024 and 512");
  meta.loss_scale.reset();
  EXPECT_EQ(others(meta), "a loss scale is in A alone");
  meta = model_.Meta(5);
  meta.user = "x";
  EXPECT_EQ(others(meta), "the user bytes differ, of which there are 9 and 1");
  meta = model_.Meta(5);
  meta.groups.emplace_back(meta.groups[0]);
  meta.groups[2].parameters = {"scalar"};
  auto& first = meta.groups[0].parameters;
  first.erase(std::find(first.begin(), first.end(), "scalar"));
  EXPECT_EQ(others(meta),
            "the number of groups is 2 and 3; "
            "group 0 of A is in B groups 0 and 2");
}

TEST_F(ContentsTest, DamageAndSmallBuffersAreErrors) {
  SaveFlat(model_, "a", 1, model_.Meta(5));
  absl::StatusOr<Checkpoint> a = Checkpoint::Open(path("a"));
  ASSERT_TRUE(a.ok());
  CompareOptions options;
  options.buffer_bytes = 3 * 4096 - 1;
  EXPECT_EQ(CompareCheckpoints(*a, *a, options).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::string file = path("a/rank-00000-of-00001-8bit.safetensors");
  std::string bytes = ReadAll(file);
  ASSERT_GT(bytes.size(), 0u);
  bytes.back() ^= 1;
  std::ofstream(file, std::ios::binary) << bytes;
  absl::StatusOr<Checkpoint> damaged = Checkpoint::Open(path("a"));
  ASSERT_TRUE(damaged.ok());
  const auto report = CompareCheckpoints(*damaged, *damaged, {});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(report.status().message(), file));

  const auto pool = MakePool(1);
  const auto consolidated = ConsolidateCheckpoint(
      *RunnableKernels().front(), *pool, *damaged, path("out"), {});
  EXPECT_EQ(consolidated.status().code(), absl::StatusCode::kDataLoss);
  // What had been begun is gone.
  for (const auto& entry : fs::directory_iterator(directory_.path())) {
    EXPECT_EQ(entry.path().filename(), "a");
  }
}

// --- One file ---

float E4M3Value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int fraction = code & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                              : std::ldexp(static_cast<float>(fraction + 8),
                                           exponent - 10);
  if (exponent == 15 && fraction == 7) value = NAN;
  return (code & 0x80) != 0 ? -value : value;
}

float HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(fraction + 1024),
                                           exponent - 25);
  if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return (bits & 0x8000) != 0 ? -value : value;
}

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
T At(const char* bytes, int64_t i) {
  T value;
  std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)),
              sizeof(value));
  return value;
}

class ConsolidateTest : public ContentsTest {
 protected:
  struct Tensor {
    SafetensorsType type;
    std::vector<int64_t> shape;
    std::string data;
  };

  absl::StatusOr<ConsolidateReport> Consolidate(const std::string& name,
                                                ConsolidatedForm form) {
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path(name));
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    ConsolidateOptions options;
    options.form = form;
    options.buffer_bytes = 128 << 10;
    int64_t last = 0;
    int64_t end = 0;
    options.progress = [&](int64_t done, int64_t all) {
      EXPECT_GT(done, last);
      last = done;
      end = all;
    };
    auto report = ConsolidateCheckpoint(*RunnableKernels().front(), *pool_,
                                        *checkpoint, path("out"), options);
    if (report.ok()) {
      EXPECT_EQ(last, end);
    }
    return report;
  }

  std::map<std::string, Tensor> ReadOut() {
    const std::string bytes = ReadAll(path("out"));
    const int64_t size = static_cast<int64_t>(bytes.size());
    const auto length = SafetensorsHeaderLength(bytes.substr(0, 8), size);
    EXPECT_TRUE(length.ok()) << length.status();
    EXPECT_EQ((*length + 8) % 4096, 0);
    const auto header = ParseSafetensorsHeader(
        bytes.substr(8, static_cast<size_t>(*length)), size);
    EXPECT_TRUE(header.ok()) << header.status();
    std::map<std::string, Tensor> tensors;
    for (const SafetensorsTensor& tensor : header->tensors) {
      EXPECT_EQ(tensor.begin % ByteSize(tensor.type), 0) << tensor.name;
      tensors[tensor.name] = {
          tensor.type, tensor.shape,
          bytes.substr(static_cast<size_t>(8 + *length + tensor.begin),
                       static_cast<size_t>(tensor.end - tensor.begin))};
    }
    return tensors;
  }

  // What element `k` of tensor `i` of the model is.
  float Value(int i, int64_t k) {
    const FakeTensor& tensor = model_.tensors()[i];
    const char* const bytes = model_.bytes(i).data();
    const auto scale = [&] {
      return model_.scales(i)[static_cast<size_t>(k / kLeafNumel)];
    };
    switch (tensor.type) {
      case StateType::kFloat32:
        return At<float>(bytes, k);
      case StateType::kBFloat16:
        return FloatOf(uint32_t{At<uint16_t>(bytes, k)} << 16);
      case StateType::kFloat16:
        return HalfValue(At<uint16_t>(bytes, k));
      case StateType::kScaledFloat16:
        return HalfValue(At<uint16_t>(bytes, k)) * scale();
      case StateType::kScaledFloat8E4M3:
        return E4M3Value(At<uint8_t>(bytes, k)) * scale();
      case StateType::kInt16Remainder: {
        // The weight comes before it.
        const uint32_t weight = At<uint16_t>(model_.bytes(i - 1).data(), k);
        const int32_t rest = At<int16_t>(bytes, k);
        return FloatOf((weight << 16) + static_cast<uint32_t>(rest));
      }
    }
    return 0;
  }

  void ExpectValues() {
    const std::map<std::string, Tensor> tensors = ReadOut();
    EXPECT_EQ(tensors.size(), model_.tensors().size());
    for (size_t i = 0; i < model_.tensors().size(); ++i) {
      const FakeTensor& tensor = model_.tensors()[i];
      SCOPED_TRACE(tensor.name());
      ASSERT_EQ(tensors.count(tensor.name()), 1u);
      const Tensor& found = tensors.at(tensor.name());
      EXPECT_EQ(found.type, SafetensorsType::kF32);
      EXPECT_EQ(found.shape, tensor.shape);
      ASSERT_EQ(found.data.size(), static_cast<size_t>(4 * tensor.numel()));
      int different = 0;
      for (int64_t k = 0; k < tensor.numel(); ++k) {
        const float expected = Value(static_cast<int>(i), k);
        const float value = At<float>(found.data.data(), k);
        if (std::isnan(expected) && std::isnan(value)) continue;
        different += std::memcmp(&expected, &value, sizeof(value)) != 0;
      }
      EXPECT_EQ(different, 0);
    }
  }

  const std::unique_ptr<ThreadPool> pool_ = MakePool(1);
};

TEST_F(ConsolidateTest, StoredTypesStayWithScalesBeside) {
  SaveFakeState(model_, GridBoxes(model_, 3, random_), directory_.path(), "c",
                model_.Meta(5));
  const auto report = Consolidate("c", ConsolidatedForm::kStored);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->tensors, 11);
  EXPECT_EQ(report->bytes, static_cast<int64_t>(fs::file_size(path("out"))));
  const std::map<std::string, Tensor> tensors = ReadOut();
  EXPECT_EQ(tensors.size(), 11u);
  for (size_t i = 0; i < model_.tensors().size(); ++i) {
    const FakeTensor& tensor = model_.tensors()[i];
    SCOPED_TRACE(tensor.name());
    const int index = static_cast<int>(i);
    ASSERT_EQ(tensors.count(tensor.name()), 1u);
    const Tensor& found = tensors.at(tensor.name());
    EXPECT_EQ(found.type, StoredType(tensor.type, ExportForm::kExact));
    EXPECT_EQ(found.shape, tensor.shape);
    EXPECT_TRUE(std::equal(found.data.begin(), found.data.end(),
                           model_.bytes(index).begin(),
                           model_.bytes(index).end()));
    if (!IsScaled(tensor.type)) continue;
    const Tensor& scales = tensors.at(ScalesName(tensor.name()));
    EXPECT_EQ(scales.type, SafetensorsType::kF32);
    const std::vector<float>& expected = model_.scales(index);
    EXPECT_EQ(scales.shape,
              std::vector<int64_t>{static_cast<int64_t>(expected.size())});
    EXPECT_EQ(scales.data,
              std::string(reinterpret_cast<const char*>(expected.data()),
                          4 * expected.size()));
  }
}

TEST_F(ConsolidateTest, ValuesAreUnscaledAndMastersRebuilt) {
  SaveFlat(model_, "c", 3, model_.Meta(5));
  ASSERT_TRUE(Consolidate("c", ConsolidatedForm::kFloat32).ok());
  ExpectValues();
}

TEST_F(ConsolidateTest, UnscaledCheckpointsGiveTheSameValues) {
  for (const ExportForm form : {ExportForm::kUnscaled, ExportForm::kRebuilt}) {
    SaveOptions options = SmallChunks();
    options.form = form;
    SaveFakeState(model_, FlatBoxes(model_, 2, random_), directory_.path(),
                  Name(form), model_.Meta(5), options);
    ASSERT_TRUE(Consolidate(Name(form), ConsolidatedForm::kFloat32).ok());
    ExpectValues();
    fs::remove(path("out"));
  }
}

// Only what is damaged, or made by others, has that.
TEST_F(ConsolidateTest, ARemainderOfAnotherStepThanItsWeightIsRefused) {
  SaveFlat(model_, "c", 1, model_.Meta(5));
  EditIndex(path("c"), [](checkpoint::Manifest&, checkpoint::Index& index) {
    for (checkpoint::Tensor& tensor : *index.mutable_tensors()) {
      if (tensor.name() == "state.rest.master_param") tensor.set_step(9);
    }
  });
  const absl::Status status =
      Consolidate("c", ConsolidatedForm::kFloat32).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(
      status.message(),
      "\"state.rest.master_param\" is a remainder of step 9, and "
      "\"state.rest.param\", its weight, of step 6"))
      << status;
  // As they are stored, nothing is joined.
  EXPECT_TRUE(Consolidate("c", ConsolidatedForm::kStored).ok());
}

TEST_F(ConsolidateTest, WhatIsThereStays) {
  SaveFlat(model_, "c", 1, model_.Meta(5));
  std::ofstream(path("out")) << "mine";
  EXPECT_EQ(Consolidate("c", ConsolidatedForm::kStored).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadAll(path("out")), "mine");
  // Also what comes while it is written.
  fs::remove(path("out"));
  absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path("c"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ConsolidateOptions options;
  options.progress = [&](int64_t, int64_t) {
    std::ofstream(path("out")) << "theirs";
  };
  EXPECT_EQ(ConsolidateCheckpoint(*RunnableKernels().front(), *pool_,
                                  *checkpoint, path("out"), options)
                .status()
                .code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadAll(path("out")), "theirs");
  EXPECT_FALSE(fs::exists(absl::StrCat(path("out"), ".partial-", getpid())));
}

}  // namespace
}  // namespace onepass

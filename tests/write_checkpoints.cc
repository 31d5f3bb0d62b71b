// Writes checkpoints for readers that are not ours, and what is to be found in
// them.
//
//   write_checkpoints DIRECTORY
//
// Of the same state "flat", ranges of elements, "rows", boxes of a grid, and
// "full", whole tensors, all exact, and "unscaled", in fp32; and made of the
// first one file each in "stored", exact, and in "values", in fp32, where
// masters are rebuilt. In "expected" there is for each tensor "<name>.bytes",
// all its elements, "<name>.scales" where it is scaled, and a line "<name>
// <type>: <extents>" in "tensors". Nothing, and it says so, where the
// environment pins a kernel that cannot run here.

#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/fake_state.h"
#include "checkpoint/save.h"
#include "checkpoint/save_fake_state.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "tests/make_pool.h"
#include "tests/runnable_kernels.h"

namespace onepass {
namespace {

template <typename T>
void Write(const std::string& path, const std::vector<T>& elements) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(elements.data()),
             static_cast<std::streamsize>(elements.size() * sizeof(T)));
}

void Consolidate(const std::string& directory, const std::string& name,
                 ConsolidatedForm form) {
  std::filesystem::create_directory(directory + "/" + name);
  absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(directory + "/flat");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ConsolidateOptions options;
  options.form = form;
  const auto report = ConsolidateCheckpoint(
      *RunnableKernels().front(), *MakePool(1), *checkpoint,
      absl::StrCat(directory, "/", name, "/all.safetensors"), options);
  EXPECT_TRUE(report.ok()) << report.status();
}

void WriteAll(const std::string& directory) {
  const FakeModel model(
      {
          {"w", StateKind::kMaster, StateType::kFloat32, {7, 1500}},
          {"w", StateKind::kExpAvg, StateType::kBFloat16, {7, 1500}},
          {"w", StateKind::kExpAvgSq, StateType::kScaledFloat8E4M3, {7, 1500}},
          {"h", StateKind::kMaster, StateType::kScaledFloat16, {9001}},
          {"h", StateKind::kExpAvg, StateType::kFloat16, {9001}},
          {"rest", StateKind::kParam, StateType::kBFloat16, {3, 5, 200}},
          {"rest", StateKind::kMaster, StateType::kInt16Remainder, {3, 5, 200}},
          {"scalar", StateKind::kMaster, StateType::kFloat32, {}},
          {"none", StateKind::kMaster, StateType::kFloat32, {4, 0}},
      },
      /*seed=*/7);
  std::mt19937 random(5);
  SaveFakeState(model, FlatBoxes(model, 3, random), directory, "flat",
                model.Meta(5));
  SaveFakeState(model, GridBoxes(model, 4, random), directory, "rows",
                model.Meta(5));
  SaveOptions options = SmallChunks();
  options.form = ExportForm::kUnscaled;
  SaveFakeState(model, FlatBoxes(model, 2, random), directory, "unscaled",
                model.Meta(5), options);
  options = SmallChunks();
  options.full = true;
  SaveFakeState(model, GridBoxes(model, 3, random), directory, "full",
                model.Meta(5), options);
  Consolidate(directory, "stored", ConsolidatedForm::kStored);
  Consolidate(directory, "values", ConsolidatedForm::kFloat32);
  const std::string expected = directory + "/expected";
  std::filesystem::create_directory(expected);
  std::ofstream list(expected + "/tensors");
  for (size_t i = 0; i < model.tensors().size(); ++i) {
    const FakeTensor& tensor = model.tensors()[i];
    const int index = static_cast<int>(i);
    const std::string path = absl::StrCat(expected, "/", tensor.name());
    Write(path + ".bytes", model.bytes(index));
    if (IsScaled(tensor.type)) Write(path + ".scales", model.scales(index));
    list << tensor.name() << " " << Name(tensor.type) << ": "
         << absl::StrJoin(tensor.shape, " ") << "\n";
  }
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: write_checkpoints DIRECTORY\n";
    return 2;
  }
  const absl::Status status = onepass::PinnedStatus();
  if (absl::IsFailedPrecondition(status)) {
    std::cout << "SKIPPED: " << status.message() << "\n";
    return 0;
  }
  onepass::WriteAll(argv[1]);
  const bool failed =
      testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed();
  return failed ? 1 : 0;
}

// The subcommands of `onepass checkpoint`, on checkpoints of made-up state.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "checkpoint/fake_state.h"
#include "checkpoint/publish.h"
#include "checkpoint/save_fake_state.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/temp_directory.h"
#include "tests/test_kernels.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/run_command.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

struct Result {
  int status;
  std::string out;
  std::string err;
};

Result RunCheckpoint(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "checkpoint");
  std::ostringstream out;
  std::ostringstream err;
  const int status =
      RunCommandLine(kCommands, kCommandGroups, std::move(arguments), out, err);
  return {status, out.str(), err.str()};
}

AssertionResult Has(const std::string& text, const std::string& part) {
  if (absl::StrContains(text, part)) return AssertionSuccess();
  return AssertionFailure() << "expected '" << part << "' in\n" << text;
}

std::vector<FakeTensor> Tensors() {
  return {
      {"w", StateKind::kMaster, StateType::kFloat32, {7, 700}, 0},
      {"w", StateKind::kExpAvgSq, StateType::kScaledFloat8E4M3, {7, 700}, 0},
      {"b", StateKind::kExpAvg, StateType::kBFloat16, {5}, 1},
      {"b", StateKind::kMaster, StateType::kFloat32, {5}, 1},
  };
}

class CheckpointCommandsTest : public testing::Test {
 protected:
  CheckpointCommandsTest() : model_(Tensors(), 3) {}

  std::string path(const std::string& name) const {
    return directory_.path() + "/" + name;
  }
  void Save(const FakeModel& model, const std::string& name, int world,
            int64_t step) {
    SaveFakeState(model, FlatBoxes(model, world, random_), directory_.path(),
                  name, model.Meta(step));
  }
  // Turns one bit of the last byte of a file.
  void Damage(const std::string& name) const {
    std::fstream file(path(name),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const int byte = file.get();
    ASSERT_TRUE(file.good()) << name;
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(byte ^ 1));
  }

  const TempDirectory directory_;
  const FakeModel model_;
  std::mt19937 random_{5};
};

TEST_F(CheckpointCommandsTest, InspectPrintsWhatACheckpointHolds) {
  Save(model_, "c", 3, 7);
  const Result result = RunCheckpoint({"inspect", path("c"), "--json"});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(Keys(report),
            (std::set<std::string>{"path", "step", "world", "leaf", "layout",
                                   "distribution", "user_bytes", "loss_scale",
                                   "groups", "bytes", "tensors"}));
  EXPECT_EQ(report.at("path"), path("c"));
  EXPECT_EQ(report.at("step"), 7);
  EXPECT_EQ(report.at("world"), 3);
  EXPECT_EQ(report.at("layout"), "flat");
  EXPECT_EQ(report.at("distribution"), "sharded");
  EXPECT_EQ(report.at("user_bytes"), 9);
  EXPECT_EQ(
      report.at("loss_scale"),
      (json{{"scale", 1024.0}, {"hysteresis_left", 2}, {"clean_steps", 17}}));
  EXPECT_EQ(report.at("bytes"), 4 * 4900 + 4900 + 2 * 4 + 2 * 5 + 4 * 5);
  const json& groups = report.at("groups");
  ASSERT_EQ(groups.size(), 2);
  EXPECT_EQ(Keys(groups[0]),
            (std::set<std::string>{"step", "lr", "beta1", "beta2", "eps",
                                   "weight_decay", "mode", "bias_correction",
                                   "parameters"}));
  EXPECT_EQ(groups[0].at("mode"), "adamw");
  EXPECT_EQ(groups[0].at("step"), 7);
  EXPECT_EQ(groups[1].at("mode"), "l2");
  EXPECT_EQ(groups[1].at("lr"), 0.0625);
  EXPECT_EQ(groups[1].at("parameters"), json::array({"b"}));
  const json& tensors = report.at("tensors");
  ASSERT_EQ(tensors.size(), 5);
  EXPECT_EQ(Keys(tensors[0]),
            (std::set<std::string>{"name", "type", "state", "exact", "shape",
                                   "ranks", "chunks", "bytes", "step"}));
  EXPECT_EQ(tensors[0].at("name"), "state.b.exp_avg");
  EXPECT_EQ(tensors[0].at("type"), "BF16");
  EXPECT_EQ(tensors[0].at("shape"), json::array({5}));
  EXPECT_EQ(tensors[2].at("name"), "state.w.exp_avg_sq");
  EXPECT_EQ(tensors[2].at("state"), "scaled e4m3");
  EXPECT_EQ(tensors[2].at("type"), "U8");
  EXPECT_EQ(tensors[2].at("shape"), json::array({7, 700}));
  EXPECT_EQ(tensors[2].at("bytes"), 4900);
  EXPECT_EQ(tensors[3].at("name"), "state.w.exp_avg_sq.scale");
  EXPECT_EQ(tensors[3].at("state"), "scales");
  // 19600 bytes, in chunks of at most 4096.
  EXPECT_GE(tensors[4].at("chunks"), 5);

  const Result text = RunCheckpoint({"inspect", path("c")});
  ASSERT_EQ(text.status, kExitSuccess) << text.err;
  EXPECT_TRUE(Has(text.out, ": step 7, 3 ranks, flat, sharded; 5 tensors, "));
  EXPECT_TRUE(Has(text.out, "; 9 bytes of the trainer's own\n"));
  EXPECT_TRUE(Has(text.out, "loss scale 1024, hysteresis left 2, clean"));
  EXPECT_TRUE(Has(text.out, "group 1: step 8, 1 parameter, lr 0.0625, "));
  EXPECT_TRUE(Has(text.out, "\nname "));
  for (const json& tensor : tensors) {
    bool found = false;
    for (const auto line : absl::StrSplit(text.out, '\n')) {
      const std::vector<std::string> words =
          absl::StrSplit(line, ' ', absl::SkipEmpty());
      found |= words.size() > 4 && tensor.at("name") == words[0] &&
               tensor.at("type") == words[1] &&
               absl::StrCat(tensor.at("bytes").get<int64_t>()) == words.back();
    }
    EXPECT_TRUE(found) << tensor << " in\n" << text.out;
  }
}

TEST_F(CheckpointCommandsTest, InspectListsTheNewestFirstAndWhatIsLeft) {
  Save(model_, "z", 1, 7);
  Save(model_, "a", 2, 20);
  Save(model_, "broken", 1, 30);
  Save(model_, "half", 2, 25);
  Damage("broken/manifest");
  // Its manifest is whole.
  ASSERT_TRUE(fs::remove(path("half/rank-00001-of-00002.index")));
  const absl::StatusOr<PartialDirectory> partial =
      CreatePartial(directory_.path(), "b");
  ASSERT_TRUE(partial.ok()) << partial.status();

  const auto list = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"inspect", directory_.path(), "--json"});
    const Result result = RunCheckpoint(more);
    EXPECT_EQ(result.status, kExitFailure);
    EXPECT_TRUE(Has(result.err, "2 of 4 checkpoints cannot be read"));
    return json::parse(result.out);
  };
  json report = list({});
  EXPECT_EQ(Keys(report),
            (std::set<std::string>{"path", "checkpoints", "partials"}));
  const json checkpoints = report.at("checkpoints");
  ASSERT_EQ(checkpoints.size(), 4);
  EXPECT_EQ(checkpoints[0].at("name"), "half");
  EXPECT_TRUE(Has(checkpoints[0].at("damage"), "index"));
  EXPECT_EQ(checkpoints[1].at("name"), "a");
  EXPECT_EQ(Keys(checkpoints[1]),
            (std::set<std::string>{"name", "step", "world", "tensors", "bytes",
                                   "damage"}));
  EXPECT_EQ(checkpoints[1].at("step"), 20);
  EXPECT_EQ(checkpoints[1].at("world"), 2);
  EXPECT_EQ(checkpoints[1].at("tensors"), 5);
  EXPECT_EQ(checkpoints[1].at("damage"), nullptr);
  EXPECT_EQ(checkpoints[2].at("name"), "z");
  EXPECT_EQ(checkpoints[3].at("name"), "broken");
  EXPECT_TRUE(Has(checkpoints[3].at("damage"), "broken/manifest"));
  EXPECT_EQ(report.at("partials"),
            (json::array({{{"path", partial->path}, {"removed", false}}})));
  EXPECT_TRUE(fs::exists(partial->path));

  const Result text = RunCheckpoint({"inspect", directory_.path()});
  EXPECT_EQ(text.status, kExitFailure);
  EXPECT_TRUE(Has(text.out, "a: step 20, 2 ranks, 5 tensors, "));
  EXPECT_TRUE(Has(text.out, "broken: DAMAGED: "));
  EXPECT_TRUE(Has(text.out, partial->path + ": partial, "));

  EXPECT_EQ(list({"--remove_partials"}).at("partials"),
            (json::array({{{"path", partial->path}, {"removed", true}}})));
  EXPECT_FALSE(fs::exists(partial->path));
  EXPECT_TRUE(fs::exists(path("a")));
  EXPECT_EQ(list({}).at("partials"), json::array());
}

TEST_F(CheckpointCommandsTest, InspectListsWhatLostItsManifest) {
  Save(model_, "step-00000007", 1, 7);
  ASSERT_TRUE(fs::create_directory(path("step-00000008")));
  ASSERT_TRUE(fs::create_directory(path("step-00000009")));
  fs::create_symlink("../step-00000007/manifest",
                     path("step-00000009/manifest"));
  // These are nothing.
  ASSERT_TRUE(fs::create_directory(path("others")));
  std::ofstream(path("step-file")) << "x";
  const Result text = RunCheckpoint({"inspect", directory_.path()});
  EXPECT_EQ(text.status, kExitFailure);
  EXPECT_TRUE(Has(text.err, "2 of 3 checkpoints cannot be read"));
  EXPECT_TRUE(Has(text.out, "step-00000007: step 7, 1 rank"));
  EXPECT_TRUE(Has(text.out, "step-00000008: DAMAGED: "));
  EXPECT_TRUE(Has(text.out, "step-00000009: DAMAGED: "));
}

TEST_F(CheckpointCommandsTest, InspectSaysWhatItCannotRead) {
  const Result none = RunCheckpoint({"inspect", path("none")});
  EXPECT_EQ(none.status, kExitFailure);
  EXPECT_TRUE(Has(none.err, path("none")));
  const Result empty = RunCheckpoint({"inspect", directory_.path()});
  EXPECT_EQ(empty.status, kExitSuccess);
  EXPECT_TRUE(Has(empty.out, ": no checkpoints\n"));
  Save(model_, "c", 1, 7);
  const Result remove =
      RunCheckpoint({"inspect", path("c"), "--remove_partials"});
  EXPECT_EQ(remove.status, kExitFailure);
  EXPECT_TRUE(Has(remove.err, "is a checkpoint, expected"));
  Damage("c/manifest");
  const Result damaged = RunCheckpoint({"inspect", path("c")});
  EXPECT_EQ(damaged.status, kExitFailure);
  EXPECT_EQ(damaged.out, "");
  EXPECT_TRUE(Has(damaged.err, "c/manifest"));
}

TEST_F(CheckpointCommandsTest, VerifyFindsDamage) {
  Save(model_, "c", 2, 7);
  const Result good = RunCheckpoint({"verify", path("c")});
  EXPECT_EQ(good.status, kExitSuccess) << good.err;
  EXPECT_EQ(good.err, "");
  EXPECT_TRUE(Has(good.out, "nothing is damaged"));
  const Result good_json = RunCheckpoint({"verify", path("c"), "--json"});
  EXPECT_EQ(good_json.status, kExitSuccess);
  const json report = json::parse(good_json.out);
  EXPECT_EQ(Keys(report), (std::set<std::string>{"path", "bytes", "problems"}));
  EXPECT_GT(report.at("bytes"), 5 * 4900);
  EXPECT_EQ(report.at("problems"), json::array());

  // One rank may have nothing of the smaller types.
  std::vector<std::string> damaged;
  for (const auto& entry : fs::directory_iterator(path("c"))) {
    const std::string name = entry.path().filename();
    if (absl::EndsWith(name, ".safetensors")) damaged.push_back(name);
  }
  ASSERT_GE(damaged.size(), 2);
  for (const std::string& name : damaged) Damage("c/" + name);
  const Result bad = RunCheckpoint({"verify", path("c")});
  EXPECT_EQ(bad.status, kExitFailure);
  EXPECT_TRUE(
      Has(bad.err, absl::StrCat("is damaged: ", damaged.size(), " problems")));
  const Result bad_json = RunCheckpoint({"verify", path("c"), "--json"});
  EXPECT_EQ(bad_json.status, kExitFailure);
  const json problems = json::parse(bad_json.out).at("problems");
  EXPECT_EQ(problems.size(), damaged.size());
  for (const std::string& name : damaged) {
    EXPECT_TRUE(Has(bad.out, name));
    EXPECT_TRUE(Has(problems.dump(), name));
  }
  EXPECT_EQ(RunCheckpoint({"verify", path("none")}).status, 2);
}

TEST_F(CheckpointCommandsTest, WhatLostItsManifestIsNoDirectoryOfCheckpoints) {
  Save(model_, "c", 2, 7);
  fs::remove(path("c/manifest"));
  const Result result = RunCheckpoint({"inspect", path("c")});
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(Has(result.err, "manifest")) << result.err;
  EXPECT_TRUE(Has(result.err, "missing in the checkpoint")) << result.err;
  EXPECT_EQ(RunCheckpoint({"verify", path("c")}).status, 1);
  EXPECT_EQ(RunCheckpoint({"diff", path("c"), path("c")}).status, 1);
  // What has a name like that of an index is no file of a rank.
  std::ofstream(directory_.path() + "/words.index") << "x";
  fs::remove_all(path("c"));
  Save(model_, "d", 1, 7);
  const Result list = RunCheckpoint({"inspect", directory_.path()});
  EXPECT_EQ(list.status, 0) << list.err;
  EXPECT_TRUE(Has(list.out, "d: step 7")) << list.out;
  EXPECT_EQ(RunCheckpoint({"verify", directory_.path()}).status, 2);
  // What is no file is damage.
  const std::string file = path("d/rank-00000-of-00001.index");
  fs::remove(file);
  fs::create_directory(file);
  EXPECT_EQ(RunCheckpoint({"verify", path("d")}).status, 1);
}

TEST_F(CheckpointCommandsTest, DiffHasThreeExitStatuses) {
  const FakeModel other(Tensors(), 4);
  Save(model_, "a", 1, 7);
  Save(model_, "b", 3, 7);
  Save(other, "c", 2, 8);
  const Result equal = RunCheckpoint({"diff", path("a"), path("b")});
  EXPECT_EQ(equal.status, 0) << equal.err;
  EXPECT_EQ(equal.err, "");
  EXPECT_EQ(equal.out, "5 tensors compared, nothing differs\n");
  const std::set<std::string> keys = {
      "a",         "b",       "equal", "tensors_compared", "first_tensor",
      "differing", "tensors", "others"};
  const json same =
      json::parse(RunCheckpoint({"diff", path("a"), path("b"), "--json"}).out);
  EXPECT_EQ(Keys(same), keys);
  EXPECT_EQ(same.at("equal"), true);
  EXPECT_EQ(same.at("first_tensor"), nullptr);

  const Result text = RunCheckpoint({"diff", path("a"), path("c")});
  EXPECT_EQ(text.status, 1);
  EXPECT_TRUE(Has(text.err, " differ\n"));
  EXPECT_TRUE(Has(text.out, "the step is 7 and 8\n"));
  EXPECT_TRUE(Has(text.out, "state.w.exp_avg_sq: "));
  EXPECT_TRUE(Has(text.out, " of 4900 elements differ, from element "));
  EXPECT_TRUE(Has(text.out, " (of codes)"));
  const Result result = RunCheckpoint({"diff", path("a"), path("c"), "--json"});
  EXPECT_EQ(result.status, 1);
  const json report = json::parse(result.out);
  EXPECT_EQ(Keys(report), keys);
  EXPECT_EQ(report.at("equal"), false);
  EXPECT_EQ(report.at("first_tensor"), "state.b.exp_avg");
  ASSERT_EQ(report.at("tensors").size(), 5);
  int64_t differing = 0;
  for (const json& tensor : report.at("tensors")) {
    EXPECT_EQ(Keys(tensor), (std::set<std::string>{
                                "name", "kind", "numel", "differing", "first",
                                "largest_difference", "of", "nans"}));
    EXPECT_EQ(tensor.at("kind"), "elements");
    differing += tensor.at("differing").get<int64_t>();
  }
  EXPECT_EQ(report.at("differing"), differing);
  EXPECT_EQ(report.at("tensors")[2].at("of"), "codes");

  EXPECT_EQ(RunCheckpoint({"diff", path("a"), path("none")}).status, 2);
  EXPECT_EQ(RunCheckpoint({"diff", path("a")}).status, 2);
  for (const auto& entry : fs::directory_iterator(path("b"))) {
    if (entry.path().extension() == ".safetensors") {
      Damage("b/" + entry.path().filename().string());
    }
  }
  const Result damaged = RunCheckpoint({"diff", path("a"), path("b")});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_EQ(damaged.out, "");
  EXPECT_TRUE(Has(damaged.err, "is damaged between bytes"));
  Damage("b/manifest");
  EXPECT_EQ(RunCheckpoint({"diff", path("b"), path("a")}).status, 1);
}

TEST_F(CheckpointCommandsTest, DiffSaysWhatIsMissingOrOfAnotherShape) {
  std::vector<FakeTensor> tensors = Tensors();
  tensors[0].shape = {700, 7};
  tensors[3].parameter = "c";
  const FakeModel other(tensors, 3);
  Save(model_, "a", 2, 7);
  Save(other, "b", 2, 7);
  const Result text = RunCheckpoint({"diff", path("a"), path("b")});
  EXPECT_EQ(text.status, 1);
  EXPECT_TRUE(Has(text.out, "state.b.master_param: only in A\n"));
  EXPECT_TRUE(Has(text.out, "state.c.master_param: only in B\n"));
  EXPECT_TRUE(
      Has(text.out, "state.w.master_param: shape: [7, 700] and [700, 7]\n"));
  const json report =
      json::parse(RunCheckpoint({"diff", path("a"), path("b"), "--json"}).out);
  EXPECT_EQ(report.at("tensors")[0],
            (json{{"name", "state.b.master_param"}, {"kind", "only_in_a"}}));
  EXPECT_EQ(report.at("tensors")[2], (json{{"name", "state.w.master_param"},
                                           {"kind", "shape"},
                                           {"what", "[7, 700] and [700, 7]"}}));
}

TEST_F(CheckpointCommandsTest, ConsolidateWritesOneFile) {
  Save(model_, "c", 3, 7);
  const std::string file = path("out.safetensors");
  const Result result = RunCheckpoint({"consolidate", path("c"), file});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  EXPECT_EQ(result.out, absl::StrCat(file, ": 5 tensors, ", fs::file_size(file),
                                     " bytes\n"));
  const Result again = RunCheckpoint({"consolidate", path("c"), file});
  EXPECT_EQ(again.status, kExitFailure);
  EXPECT_TRUE(Has(again.err, file));

  fs::remove(file);
  const Result values =
      RunCheckpoint({"consolidate", path("c"), file, "--as", "fp32", "--json"});
  ASSERT_EQ(values.status, kExitSuccess) << values.err;
  const json report = json::parse(values.out);
  EXPECT_EQ(report, (json{{"path", path("c")},
                          {"out", file},
                          {"as", "fp32"},
                          {"tensors", 4},
                          {"bytes", fs::file_size(file)}}));
  std::ifstream in(file, std::ios::binary);
  std::string header(4096, '\0');
  in.read(header.data(), 4096);
  const json entries = json::parse(header.substr(8));
  EXPECT_EQ(entries.at("state.w.exp_avg_sq").at("dtype"), "F32");
  EXPECT_EQ(entries.at("state.w.exp_avg_sq").at("shape"),
            json::array({7, 700}));

  const Result bad =
      RunCheckpoint({"consolidate", path("c"), path("x"), "--as", "bf16"});
  EXPECT_EQ(bad.status, kExitFailure);
  EXPECT_TRUE(Has(bad.err, "--as is bf16, expected fp32 or stored"));
  EXPECT_FALSE(fs::exists(path("x")));
}

TEST_F(CheckpointCommandsTest, ArgumentsAreAskedFor) {
  for (const char* command : {"inspect", "verify", "consolidate"}) {
    const Result result = RunCheckpoint({command});
    EXPECT_EQ(result.status, kExitUsage) << command;
    EXPECT_TRUE(Has(result.err, "PATH is required"));
    const Result help = RunCheckpoint({command, "--help"});
    EXPECT_EQ(help.status, kExitSuccess) << command;
    EXPECT_TRUE(Has(help.out, "PATH"));
    EXPECT_TRUE(Has(help.out, "--json"));
  }
  EXPECT_TRUE(
      Has(RunCheckpoint({"verify", "a", "b"}).err, "unexpected argument b"));
}

}  // namespace
}  // namespace onepass

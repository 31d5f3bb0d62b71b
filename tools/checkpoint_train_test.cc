// onepass train --save_dir: saving, resuming, and ending on a signal.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/find.h"
#include "checkpoint/meta.h"
#include "checkpoint/safetensors.h"
#include "dispatch/dtype.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/temp_directory.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/data_position.h"
#include "tools/run_command.h"
#include "tools/stop_signals.h"

namespace onepass {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

using Flags = std::vector<std::string>;

std::vector<json> ParseLines(const std::string& text) {
  std::vector<json> lines;
  for (const auto line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    lines.push_back(json::parse(std::string(line)));
  }
  return lines;
}

// Runs of a model of layers of more than a leaf, at a rate at which fp16
// gradients overflow now and then.
class CheckpointTrainTest : public testing::Test {
 protected:
  CheckpointTrainTest() : text_(directory_.path() + "/text") {
    std::ofstream text(text_);
    for (int i = 0; i < 100; ++i) text << "line " << i << " of a text\n";
  }

  Flags With(Flags flags) const {
    const std::pair<const char*, std::string> small[] = {
        {"--text", text_},         {"--steps", "12"},
        {"--hidden", "70"},        {"--batch", "4"},
        {"--context", "4"},        {"--embedding", "6"},
        {"--threads", "1"},        {"--budget_mb", "1"},
        {"--precision", "fp16"},   {"--ratio", "0.5"},
        {"--clip", "0.1"},         {"--lr", "0.3"},
        {"--piece_numel", "1000"},
    };
    for (const auto& [flag, value] : small) {
      if (std::count(flags.begin(), flags.end(), flag) > 0) continue;
      flags.push_back(flag);
      flags.push_back(value);
    }
    flags.push_back("--json");
    return flags;
  }

  CommandResult Train(const Flags& flags) const {
    return RunCommand(&NewTrainCommand, With(flags));
  }
  // The summary, or null after an error.
  json Summary(const Flags& flags) const {
    const CommandResult result = Train(flags);
    EXPECT_TRUE(result.status.ok()) << result.status;
    return result.status.ok() ? ParseLines(result.out).back() : json();
  }
  void ExpectError(const Flags& flags, absl::StatusCode code,
                   const std::string& message) const {
    const CommandResult result = Train(flags);
    EXPECT_EQ(result.status.code(), code) << result.status;
    EXPECT_TRUE(absl::StrContains(result.status.message(), message))
        << "expected '" << message << "', got " << result.status;
  }

  std::string Path(const std::string& name) const {
    return absl::StrCat(directory_.path(), "/", name);
  }

  const TempDirectory directory_;
  const std::string text_;
};

// The bytes of all tensors, by name.
std::map<std::string, std::string> Tensors(const std::string& path) {
  std::map<std::string, std::string> tensors;
  absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  if (!checkpoint.ok()) return tensors;
  std::vector<char> buffer(8192);
  for (const auto& [name, tensor] : checkpoint->tensors()) {
    std::string& bytes = tensors[name];
    bytes.resize(tensor.bytes());
    const int64_t size = ByteSize(tensor.type);
    const absl::Status read = checkpoint->Read(
        tensor, Box{{0}, {tensor.numel()}}, absl::MakeSpan(buffer),
        [&](int64_t first, int64_t n, const char* data) {
          std::memcpy(&bytes[first * size], data, n * size);
          return absl::OkStatus();
        });
    EXPECT_TRUE(read.ok()) << read;
  }
  return tensors;
}

std::vector<std::string> Names(const std::string& directory) {
  std::vector<std::string> names;
  const auto found = FindCheckpoints(directory);
  EXPECT_TRUE(found.ok()) << found.status();
  if (!found.ok()) return names;
  for (const FoundCheckpoint& checkpoint : *found) {
    names.push_back(checkpoint.name);
  }
  return names;
}

// Changes a byte in the middle of a file.
void Damage(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(0, std::ios::end);
  const std::streamoff middle = file.tellg() / 2;
  file.seekg(middle);
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(middle);
  file.put(byte);
  EXPECT_TRUE(file.good()) << path;
}

// The largest file of tensors of a checkpoint.
std::string DataFile(const std::string& checkpoint) {
  fs::path largest;
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    if (entry.path().extension() != ".safetensors") continue;
    if (largest.empty() || fs::file_size(largest) < entry.file_size()) {
      largest = entry.path();
    }
  }
  return largest.string();
}

TEST_F(CheckpointTrainTest, ResumedRunsEndAsUninterruptedOnes) {
  for (const std::string ranks : {"1", "4"}) {
    const json whole = Summary({"--ranks", ranks});
    ASSERT_GT(whole.at("skipped"), 0);  // the loss scale was halved
    const std::string dir = Path(absl::StrCat("ranks", ranks));
    // In the middle of what the loss scale does.
    ASSERT_FALSE(
        Summary({"--ranks", ranks, "--steps", "5", "--save_dir", dir}).empty());
    const CommandResult result =
        Train({"--ranks", ranks, "--save_dir", dir, "--save_every", "4",
               "--keep_last", "2", "--resume"});
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_TRUE(absl::StrContains(
        result.err, absl::StrCat("resumed from ", dir, "/step-00000005")))
        << result.err;
    const json resumed = ParseLines(result.out).back();
    for (const char* field : {"digest", "skipped", "steps", "bits_per_byte"}) {
      EXPECT_EQ(resumed.at(field), whole.at(field)) << field;
    }
    EXPECT_EQ(Names(dir),
              (std::vector<std::string>{"step-00000012", "step-00000008"}));
    // There is nothing left to do, nor to save.
    const json done =
        Summary({"--ranks", ranks, "--save_dir", dir, "--resume"});
    EXPECT_EQ(done.at("digest"), whole.at("digest"));
    EXPECT_EQ(done.count("fused") + done.count("pieces"), 0);
    EXPECT_EQ(resumed.count("fused") + resumed.count("pieces"), 2);
    EXPECT_EQ(Names(dir).size(), 2);
  }
}

TEST_F(CheckpointTrainTest, SavesAreReported) {
  const std::string dir = Path("saves");
  const CommandResult result = Train(
      {"--ranks", "2", "--save_dir", dir, "--save_every", "4", "--steps", "6"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  std::vector<std::string> paths;
  for (const json& line : ParseLines(result.out)) {
    if (line.count("saved") == 0) continue;
    EXPECT_EQ(Keys(line), (std::set<std::string>{"saved", "step", "bytes",
                                                 "direct", "seconds"}));
    const std::string path = line.at("saved").get<std::string>();
    paths.push_back(path);
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.path().extension() == ".safetensors") {
        bytes += static_cast<int64_t>(entry.file_size());
      }
    }
    EXPECT_EQ(line.at("bytes"), bytes);
    EXPECT_GT(line.at("seconds"), 0);
  }
  EXPECT_EQ(paths, (std::vector<std::string>{dir + "/step-00000004",
                                             dir + "/step-00000006"}));
}

TEST_F(CheckpointTrainTest, PathsNeedNotBeUtf8) {
  const CommandResult result =
      Train({"--steps", "1", "--save_dir", Path("\xff")});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(ParseLines(result.out)[1].at("saved"),
            Path("\xef\xbf\xbd/step-00000001"));  // U+FFFD in its place
  EXPECT_EQ(Names(Path("\xff")).size(), 1);
}

// Training goes on meanwhile, and what is saved is what was.
TEST_F(CheckpointTrainTest, AsyncSavesHoldTheSame) {
  const auto run = [&](const std::string& name, bool async) {
    Flags flags = {"--ranks",      "2", "--save_dir",  Path(name),
                   "--save_every", "2", "--keep_last", "3"};
    if (async) flags.push_back("--async_save");
    const CommandResult result = Train(flags);
    EXPECT_TRUE(result.status.ok()) << result.status;
    std::vector<int64_t> steps;
    std::string digest;
    for (const json& line : ParseLines(result.out)) {
      if (line.count("saved") > 0) steps.push_back(line.at("step"));
      if (line.count("digest") > 0) digest = line.at("digest");
    }
    EXPECT_EQ(steps, (std::vector<int64_t>{2, 4, 6, 8, 10, 12}));
    return digest;
  };
  const std::string digest = run("sync", false);
  EXPECT_NE(digest, "");
  EXPECT_EQ(run("async", true), digest);
  const std::vector<std::string> names = Names(Path("async"));
  EXPECT_EQ(names, (std::vector<std::string>{"step-00000012", "step-00000010",
                                             "step-00000008"}));
  for (const std::string& name : names) {
    EXPECT_TRUE(Tensors(Path("async/" + name)) == Tensors(Path("sync/" + name)))
        << name;
  }
  ExpectError({"--async_save"}, absl::StatusCode::kInvalidArgument,
              "--async_save needs --save_dir");
}

TEST_F(CheckpointTrainTest, AnotherNumberOfRanksHasTheSameState) {
  const std::string dir = Path("four");
  ASSERT_FALSE(
      Summary({"--ranks", "4", "--steps", "6", "--save_dir", dir}).empty());
  const std::string saved = dir + "/step-00000006";
  const auto expected = Tensors(saved);
  ASSERT_GT(expected.size(), 9);
  const absl::StatusOr<Checkpoint> four = Checkpoint::Open(saved);
  ASSERT_TRUE(four.ok()) << four.status();
  for (const std::string ranks : {"2", "1"}) {
    const std::string again = Path(absl::StrCat("again", ranks));
    const CommandResult resumed =
        Train({"--ranks", ranks, "--steps", "6", "--resume", "--load_dir", dir,
               "--save_dir", again});
    ASSERT_TRUE(resumed.status.ok()) << resumed.status;
    EXPECT_TRUE(absl::StrContains(
        resumed.err, absl::StrCat("the number of ranks is ", ranks,
                                  ", and was 4: the digest will differ")))
        << resumed.err;
    const std::string path = again + "/step-00000006";
    const CommandResult diff =
        RunCommand(&NewCheckpointDiffCommand, {saved, path});
    EXPECT_TRUE(diff.status.ok()) << diff.status << "\n" << diff.out;
    EXPECT_TRUE(Tensors(path) == expected) << ranks;
    const absl::StatusOr<Checkpoint> few = Checkpoint::Open(path);
    ASSERT_TRUE(few.ok()) << few.status();
    EXPECT_EQ(few->manifest().world(), std::stoi(ranks));
    const CheckpointMeta a = four->meta();
    const CheckpointMeta b = few->meta();
    EXPECT_EQ(b.user, a.user);
    EXPECT_EQ(b.groups[0].step, a.groups[0].step);
    EXPECT_EQ(b.groups[0].lr, a.groups[0].lr);
    ASSERT_TRUE(b.loss_scale.has_value());
    EXPECT_EQ(b.loss_scale->scale, a.loss_scale->scale);
    EXPECT_EQ(b.loss_scale->clean_steps, a.loss_scale->clean_steps);
    // And it trains on, from where the others stopped in the data.
    ASSERT_FALSE(
        Summary({"--ranks", ranks, "--save_dir", again, "--resume"}).empty());
    const absl::StatusOr<Checkpoint> last =
        Checkpoint::Open(again + "/step-00000012");
    ASSERT_TRUE(last.ok()) << last.status();
    const auto position = DecodeDataPosition(last->meta().user);
    ASSERT_TRUE(position.ok()) << position.status();
    EXPECT_EQ(position->drawn, 4 * 6 * 4 + 4 * 6 * std::stoi(ranks));
  }
}

TEST_F(CheckpointTrainTest, WhatIsNotThisRunIsRefused) {
  const std::string dir = Path("refused");
  ASSERT_FALSE(
      Summary({"--ranks", "2", "--steps", "2", "--save_dir", dir}).empty());
  const auto state = Tensors(dir + "/step-00000002");
  constexpr auto kFailed = absl::StatusCode::kFailedPrecondition;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectError({"--save_dir", dir}, kFailed,
              "has checkpoints, up to step-00000002: expected --resume");
  const Flags resume = {"--ranks", "2", "--save_dir", dir, "--resume"};
  const auto with = [&resume](Flags flags) {
    flags.insert(flags.end(), resume.begin(), resume.end());
    return flags;
  };
  ExpectError(with({"--seed", "2"}), kFailed, "--seed is 2, and that of");
  const std::string other = Path("other");
  std::ofstream(other) << std::string(fs::file_size(text_), 'a');
  ExpectError(with({"--text", other}), kFailed, "is not that of the checkp");
  ExpectError(with({"--precision", "bf16"}), kFailed,
              "--precision is bf16, and that of the checkpoint fp16");
  ExpectError(with({"--hidden", "71"}), kFailed, "of shape");
  ExpectError(with({"--layers", "3"}), kFailed, "lacks");
  ExpectError(with({"--steps", "1"}), kInvalid, "is of step 2");
  ExpectError({"--resume"}, kInvalid, "--resume needs --save_dir");
  ExpectError({"--load_dir", dir}, kInvalid, "--load_dir is for --resume");
  ExpectError({"--resume_from_previous"}, kInvalid,
              "--resume_from_previous is for --resume");
  ExpectError(with({"--save_every", "0"}), kInvalid, "--save_every is 0");
  ExpectError(with({"--keep_last", "0"}), kInvalid, "--keep_last is 0");
  ExpectError(with({"--budget_mb", "0"}), kInvalid, "--budget_mb is 0");
  ExpectError({"--save_dir", Path("no/parent")}, kInvalid,
              "No such file or directory");
  ExpectError({"--save_dir", text_}, kInvalid, "--save_dir");
  ExpectError({"--resume", "--load_dir", Path("none")},
              absl::StatusCode::kNotFound, "--resume");
  ASSERT_TRUE(fs::create_directory(Path("bare")));
  ExpectError({"--resume", "--load_dir", Path("bare")},
              absl::StatusCode::kNotFound,
              "no checkpoint in --load_dir " + Path("bare"));
  const std::string else_dir = Path("else");
  ASSERT_FALSE(Summary({"--steps", "1", "--save_dir", else_dir}).empty());
  ExpectError({"--resume", "--load_dir", dir, "--save_dir", else_dir}, kFailed,
              "expected --resume without --load_dir");
  EXPECT_TRUE(Tensors(dir + "/step-00000002") == state);
}

TEST_F(CheckpointTrainTest, NothingToResumeFromIsSaid) {
  const std::string dir = Path("empty");
  const CommandResult result =
      Train({"--steps", "1", "--save_dir", dir, "--resume"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(
      result.err,
      absl::StrCat("no checkpoint in ", dir, ": training starts anew")))
      << result.err;
  EXPECT_EQ(Names(dir), std::vector<std::string>{"step-00000001"});
}

TEST_F(CheckpointTrainTest, TheRateOfTheCheckpointIsUsed) {
  const std::string dir = Path("rate");
  const json whole = Summary({"--steps", "4"});
  ASSERT_FALSE(Summary({"--steps", "2", "--save_dir", dir}).empty());
  const CommandResult result =
      Train({"--steps", "4", "--save_dir", dir, "--resume", "--lr", "0.5"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(
      result.err, "--lr is 0.5, and that of the checkpoint, 0.3, is used"))
      << result.err;
  EXPECT_EQ(ParseLines(result.out).back().at("digest"), whole.at("digest"));
}

TEST_F(CheckpointTrainTest, WhatChangesTheDigestIsSaid) {
  const std::string dir = Path("changed");
  ASSERT_FALSE(Summary({"--steps", "2", "--save_dir", dir}).empty());
  const auto resume = [&](Flags flags) {
    flags.insert(flags.end(), {"--steps", "3", "--load_dir", dir, "--resume"});
    const CommandResult result = Train(flags);
    EXPECT_TRUE(result.status.ok()) << result.status;
    return result.err;
  };
  EXPECT_FALSE(absl::StrContains(resume({}), "will differ"));
  const std::string said =
      resume({"--batch", "8", "--micro_batches", "2", "--clip", "0.25"});
  for (const char* what :
       {"--batch is 8, and was 4: the digest will differ\n",
        "--micro_batches is 2, and was 1: the digest will differ\n",
        "--clip is 0.25, and was 0.1: the digest will differ\n"}) {
    EXPECT_TRUE(absl::StrContains(said, what)) << said;
  }
}

TEST_F(CheckpointTrainTest, OnlyCheckpointsOfTheRunAreRemoved) {
  const std::string dir = Path("removed");
  ASSERT_FALSE(Summary({"--steps", "6", "--save_every", "2", "--save_dir", dir})
                   .empty());
  // Copies that count for nothing, even one that is newer than all.
  const auto copy = [&](const std::string& from, const std::string& to) {
    fs::copy(dir + "/" + from, dir + "/" + to);
  };
  copy("step-00000002", "best");
  copy("step-00000002", "step-00000002-of-mine");
  copy("step-00000002", "step-00000002-2");
  // Nobody removes what has a directory in it; others go.
  ASSERT_TRUE(fs::create_directory(dir + "/step-00000002/notes"));
  const CommandResult result =
      Train({"--steps", "8", "--save_every", "8", "--save_dir", dir, "--resume",
             "--keep_last", "2"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(
      result.err, "not all older checkpoints could be removed: " + dir +
                      "/step-00000002/notes"))
      << result.err;
  EXPECT_EQ(Names(dir), (std::vector<std::string>{
                            "step-00000008", "step-00000006",
                            "step-00000002-of-mine", "step-00000002", "best"}));
}

TEST_F(CheckpointTrainTest, ACheckpointWithoutAManifestIsDamaged) {
  const std::string dir = Path("lost");
  const auto run = [&](const std::string& steps, Flags flags) {
    flags.insert(flags.end(), {"--steps", steps, "--save_dir", dir});
    return flags;
  };
  ASSERT_FALSE(Summary(run("4", {"--save_every", "2"})).empty());
  const std::string newest = dir + "/step-00000004";
  const std::string manifest = newest + "/manifest";
  for (const bool link : {false, true}) {
    fs::remove(manifest);
    if (link) {
      fs::create_symlink("../step-00000002/manifest", manifest);
    }
    ExpectError(run("6", {"--resume"}), absl::StatusCode::kDataLoss, manifest);
    const CommandResult previous = Train(
        run("3", {"--resume", "--resume_from_previous", "--keep_last", "1"}));
    ASSERT_TRUE(previous.status.ok()) << previous.status;
    EXPECT_TRUE(absl::StrContains(
        previous.err,
        absl::StrCat("the checkpoint ", newest, " is damaged: ", manifest)))
        << previous.err;
    // What is damaged is newer still.
    EXPECT_TRUE(fs::exists(dir + "/step-00000002/manifest"));
    EXPECT_TRUE(fs::remove_all(dir + "/step-00000003") > 0);
  }
  // Also where it is the only one.
  fs::remove_all(dir + "/step-00000002");
  ExpectError(run("6", {}), absl::StatusCode::kFailedPrecondition,
              "has checkpoints, up to step-00000004");
  ExpectError(run("6", {"--resume"}), absl::StatusCode::kDataLoss, manifest);
}

// Of the newest checkpoint: of tensors, and of the manifest.
TEST_F(CheckpointTrainTest, ADamagedCheckpointIsNamedAndThePreviousOneUsed) {
  const json whole = Summary({"--ranks", "2"});
  for (const bool manifest : {false, true}) {
    const std::string dir = Path(absl::StrCat("damaged", manifest));
    const Flags flags = {"--ranks", "2", "--save_dir", dir, "--resume"};
    ASSERT_FALSE(Summary({"--ranks", "2", "--steps", "8", "--save_every", "4",
                          "--save_dir", dir})
                     .empty());
    const std::string newest = dir + "/step-00000008";
    Damage(manifest ? newest + "/manifest" : DataFile(newest));
    ExpectError(flags, absl::StatusCode::kDataLoss, "step-00000008");
    ExpectError(flags, absl::StatusCode::kDataLoss, "--resume_from_previous");
    Flags previous = flags;
    // It is in nobody's way.
    previous.insert(previous.end(), {"--resume_from_previous", "--save_every",
                                     "2", "--keep_last", "1"});
    Flags six = previous;
    six.insert(six.end(), {"--steps", "6"});
    const CommandResult result = Train(six);
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_TRUE(absl::StrContains(
        result.err, absl::StrCat("the checkpoint ", newest, " is damaged: ")))
        << result.err;
    EXPECT_TRUE(absl::StrContains(
        result.err,
        absl::StrCat("using the previous checkpoint ", dir, "/step-00000004")))
        << result.err;
    ASSERT_TRUE(fs::exists(dir + "/step-00000006"));
    const CommandResult last = Train(previous);
    ASSERT_TRUE(last.status.ok()) << last.status;
    EXPECT_TRUE(absl::StrContains(last.err, "step-00000006 after step 6"))
        << last.err;
    EXPECT_TRUE(absl::StrContains(last.out, newest + "-2")) << last.out;
    EXPECT_EQ(ParseLines(last.out).back().at("digest"), whole.at("digest"));
    EXPECT_EQ(Names(dir).front(), "step-00000012");
    for (const std::string& name : Names(dir)) {
      fs::resize_file(dir + "/" + name + "/manifest", 10);
    }
    ExpectError(previous, absl::StatusCode::kDataLoss,
                "all checkpoints of " + dir + " are damaged");
  }
}

// Else a whole one would go for it.
TEST_F(CheckpointTrainTest, ADamagedOneIsNotAmongThoseThatAreKept) {
  const std::string dir = Path("kept");
  ASSERT_FALSE(Summary({"--steps", "8", "--save_every", "4", "--save_dir", dir})
                   .empty());
  Damage(DataFile(dir + "/step-00000008"));
  ASSERT_FALSE(
      Summary({"--steps", "10", "--save_every", "10", "--save_dir", dir,
               "--resume", "--resume_from_previous", "--keep_last", "2"})
          .empty());
  EXPECT_EQ(Names(dir),
            (std::vector<std::string>{"step-00000010", "step-00000008",
                                      "step-00000004"}));
}

// A copy under a name of its own, which lost a file, is not the newest.
TEST_F(CheckpointTrainTest, ADamagedCopyOfAnOlderOneIsInNobodysWay) {
  const std::string dir = Path("copy");
  ASSERT_FALSE(Summary({"--steps", "8", "--save_every", "4", "--save_dir", dir})
                   .empty());
  fs::copy(dir + "/step-00000004", dir + "/best");
  ASSERT_TRUE(fs::remove(DataFile(dir + "/best")));
  const CommandResult result =
      Train({"--steps", "9", "--save_dir", dir, "--resume"});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(result.err, "step-00000008 after step 8"))
      << result.err;
}

// What a child process that trains says, until it has taken a step, and how it
// ends after a signal.
TEST_F(CheckpointTrainTest, ASignalSavesAndEndsAllRanks) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string dir = Path(absl::StrCat("signal", signal));
    const std::string out = absl::StrCat(dir, ".out");
    const std::string err = absl::StrCat(dir, ".err");
    const Flags flags = {"--ranks", "3", "--save_dir", dir};
    Flags endless = flags;
    endless.insert(endless.end(), {"--steps", "1000000", "--save_every", "3",
                                   "--keep_last", "1000000"});
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::signal(signal, SIG_DFL);  // whatever tests are started with
      alarm(600);                 // it does not outlive a test that failed
      std::vector<std::string> arguments = With(endless);
      arguments.insert(arguments.begin(), "train");
      std::ofstream out_file(out);
      std::ofstream err_file(err);
      const int status = RunCommandLine(kCommands, kCommandGroups, arguments,
                                        out_file, err_file);
      out_file.close();
      err_file.close();
      _exit(status);
    }
    while (!fs::exists(dir + "/step-00000003")) {
      ASSERT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "it has ended";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    // As from a `timeout` above it, which signals its group as well.
    ASSERT_EQ(kill(child, signal), 0);
    ASSERT_EQ(kill(child, signal), 0);
    int status;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    std::stringstream said;
    said << std::ifstream(err).rdbuf();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << status << ": " << said.str();
    EXPECT_TRUE(absl::StrContains(
        said.str(), signal == SIGINT ? "SIGINT: ended" : "SIGTERM: ended"))
        << said.str();
    const std::vector<std::string> names = Names(dir);
    ASSERT_FALSE(names.empty());
    const int steps = std::stoi(names.front().substr(5));
    EXPECT_TRUE(absl::StrContains(
        said.str(), absl::StrCat("after step ", steps, " of 1000000")))
        << said.str();
    const std::string total = absl::StrCat(steps + 2);
    Flags resumed = flags;
    resumed.insert(resumed.end(), {"--resume", "--steps", total});
    EXPECT_EQ(Summary(resumed).at("digest"),
              Summary({"--ranks", "3", "--steps", total}).at("digest"));
  }
}

// But not one that comes with the first.
TEST(StopSignalsTest, ALaterSignalEndsTheProcess) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    const StopSignals signals;
    if (StopSignals::Received() != 0) _exit(1);
    raise(SIGTERM);
    if (StopSignals::Received() != SIGTERM) _exit(2);
    raise(SIGTERM);
    if (StopSignals::Received() != SIGTERM) _exit(3);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    raise(SIGINT);
    _exit(4);
  }
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
}

TEST(StopSignalsTest, WhatWasIgnoredStaysIgnored) {
  const auto before = signal(SIGTERM, SIG_IGN);
  {
    const StopSignals signals;
    raise(SIGTERM);
    EXPECT_EQ(StopSignals::Received(), 0);
  }
  EXPECT_EQ(signal(SIGTERM, before), SIG_IGN);
}

TEST(StopSignalsTest, WhatWasBeforeComesBack) {
  signal(SIGTERM, SIG_DFL);
  struct sigaction before;
  ASSERT_EQ(sigaction(SIGTERM, nullptr, &before), 0);
  {
    const StopSignals signals;
    raise(SIGTERM);
    EXPECT_EQ(StopSignals::Received(), SIGTERM);
  }
  EXPECT_EQ(StopSignals::Received(), 0);
  struct sigaction after;
  ASSERT_EQ(sigaction(SIGTERM, nullptr, &after), 0);
  EXPECT_EQ(after.sa_handler, before.sa_handler);
}

TEST(DataPositionTest, ComesBackAsItWas) {
  for (const DataPosition& position :
       {DataPosition{}, DataPosition{1, 2, 3, 4, 5, 6, 0.1, DType::kBFloat16},
        DataPosition{INT64_MAX, INT64_MAX, UINT64_MAX, kMostDrawn, INT64_MAX,
                     INT64_MAX, 1e300, DType::kFloat16}}) {
    const auto read = DecodeDataPosition(EncodeDataPosition(position));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->seed, position.seed);
    EXPECT_EQ(read->text_bytes, position.text_bytes);
    EXPECT_EQ(read->text_hash, position.text_hash);
    EXPECT_EQ(read->drawn, position.drawn);
    EXPECT_EQ(read->batch, position.batch);
    EXPECT_EQ(read->micro_batches, position.micro_batches);
    EXPECT_EQ(read->clip, position.clip);
    EXPECT_EQ(read->precision, position.precision);
  }
}

TEST(DataPositionTest, OtherTextsAreRefused) {
  const std::string good =
      EncodeDataPosition({1, 2, 3, 4, 5, 6, 7, DType::kBFloat16});
  const auto refused = [](const std::string& text) {
    return DecodeDataPosition(text).status().code() ==
           absl::StatusCode::kDataLoss;
  };
  ASSERT_FALSE(refused(good));
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_TRUE(refused(good.substr(0, i))) << i;
    if (good[i] >= '0' && good[i] <= '9' && i > 20) continue;
    std::string other = good;
    other[i] ^= 1;
    EXPECT_TRUE(refused(other)) << other;
  }
  const auto with = [&good](const std::string& is, const std::string& other) {
    return absl::StrReplaceAll(good, {{is, other}});
  };
  for (const std::string& other :
       {with("data 2", "data 1"), with("seed 1", "seed -1"),
        with("seed 1", "seed 01"), with("bytes 2", "bytes -2"),
        // 2^62 + 1, 2^63
        with("drawn 4", "drawn 4611686018427387905"),
        with("drawn 4", "drawn 9223372036854775808"),
        with("drawn 4", "drawn -4"), with("batch 5", "batch 0"),
        with("batches 6", "batches 0"), with("clip 7", "clip -7"),
        with("clip 7", "clip inf"), with("clip 7", "clip nan"),
        with("clip 7", "clip 7.0"), with("bf16", "e4m3")}) {
    ASSERT_NE(other, good);
    EXPECT_TRUE(refused(other)) << other;
  }
  EXPECT_TRUE(refused(good + " "));
  EXPECT_TRUE(refused(good + '\0'));
}

}  // namespace
}  // namespace onepass

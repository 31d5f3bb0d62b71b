#include "tools/commands.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/default.h"
#include "nlohmann/json.hpp"
#include "tests/test_kernels.h"
#include "tools/command_line.h"
#include "tools/golden.h"
#include "tools/run_command.h"

namespace onepass {
namespace {

using nlohmann::json;

struct Result {
  int status;
  std::string out;
  std::string err;
};

Result RunOnepass(std::vector<std::string> arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int status =
      RunCommandLine(kCommands, kCommandGroups, std::move(arguments), out, err);
  return {status, out.str(), err.str()};
}

std::vector<json> ParseLines(const std::string& text) {
  std::vector<json> lines;
  for (const auto line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    lines.push_back(json::parse(std::string(line)));
  }
  return lines;
}

json Names(DTypeSet types) {
  json names = json::array();
  for (const DType type : kAllDTypes) {
    if (types.Contains(type)) names.push_back(Name(type));
  }
  return names;
}

// A small run on a text of our own.
class TrainCommandTest : public testing::Test {
 protected:
  TrainCommandTest() : path_(testing::TempDir() + "/commands_test.txt") {
    std::string text;
    for (int i = 0; i < 300; ++i) absl::StrAppend(&text, "line ", i, "\n");
    Write(text);
  }

  void Write(const std::string& text) {
    std::ofstream(path_, std::ios::binary) << text;
  }

  // With `flags`, which may be those of the small run with other values.
  Result Train(const std::vector<std::string>& flags) {
    const std::map<std::string, std::string> small = {
        {"--text", path_}, {"--steps", "45"},  {"--hidden", "32"},
        {"--batch", "16"}, {"--context", "4"}, {"--threads", "2"},
    };
    std::vector<std::string> arguments = {"train"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    for (const auto& [flag, value] : small) {
      if (std::count(flags.begin(), flags.end(), flag) > 0) continue;
      arguments.push_back(flag);
      arguments.push_back(value);
    }
    return RunOnepass(arguments);
  }

  const std::string path_;
};

TEST(CommandsTest, EveryGroupHasASummaryAndSubcommands) {
  std::set<std::string> used;
  for (const CommandFactory make : kCommands) {
    const std::vector<std::string> words = absl::StrSplit(make()->name(), ' ');
    ASSERT_LE(words.size(), 2);
    if (words.size() == 2) used.insert(words[0]);
  }
  std::set<std::string> described;
  for (const CommandGroup& group : kCommandGroups) {
    EXPECT_TRUE(described.emplace(group.name).second) << group.name;
    EXPECT_STRNE(group.summary, "") << group.name;
  }
  EXPECT_EQ(used, described);
}

TEST(KernelsCommandTest, JsonHasWhatTheDispatcherReports) {
  const Result result = RunOnepass({"kernels", "--json"});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  const json kernels = json::parse(result.out).at("kernels");
  const std::vector<KernelReport> reports = CreateDefaultDispatcher()->Report();
  ASSERT_EQ(kernels.size(), reports.size());
  int selected = 0;
  for (size_t i = 0; i < reports.size(); ++i) {
    const json& kernel = kernels[i];
    EXPECT_EQ(kernel.at("name"), reports[i].kernel->name);
    EXPECT_EQ(kernel.at("rank"), reports[i].kernel->rank());
    EXPECT_EQ(kernel.at("supported"), reports[i].supported);
    EXPECT_EQ(kernel.at("selected"), reports[i].selected);
    EXPECT_EQ(kernel.at("block_numel"), reports[i].block_numel);
    const Kernel& descriptor = *reports[i].kernel;
    EXPECT_EQ(kernel.at("copy_types"), Names(descriptor.copy_types));
    EXPECT_EQ(kernel.at("gradient_types"), Names(descriptor.gradient_types));
    EXPECT_EQ(kernel.at("moment_types"), Names(descriptor.moment_types));
    EXPECT_EQ(kernel.at("gradient_types").at(0), "fp32");
    EXPECT_EQ(Keys(kernel),
              (std::set<std::string>{"name", "rank", "supported", "selected",
                                     "block_numel", "copy_types",
                                     "gradient_types", "moment_types"}));
    selected += kernel.at("selected").get<bool>() ? 1 : 0;
  }
  EXPECT_EQ(selected, 1);
}

TEST(KernelsCommandTest, TableHasEveryKernel) {
  const Result result = RunOnepass({"kernels"});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  for (const KernelReport& report : CreateDefaultDispatcher()->Report()) {
    EXPECT_TRUE(absl::StrContains(result.out, report.kernel->name));
  }
  EXPECT_TRUE(absl::StrContains(result.out, "* "));
}

TEST(KernelsCommandTest, UnknownKernelInTheEnvironmentIsAnError) {
  const char* pinned = std::getenv("ONEPASS_KERNEL");
  const std::string saved = pinned == nullptr ? "" : pinned;
  setenv("ONEPASS_KERNEL", "scalr", /*overwrite=*/1);
  for (const char* command : {"kernels", "verify", "train", "bench step",
                              "bench scaling", "bench pipeline"}) {
    const Result result = RunOnepass(absl::StrSplit(command, ' '));
    EXPECT_EQ(result.status, kExitFailure) << command;
    EXPECT_EQ(result.out, "") << command;
    EXPECT_TRUE(absl::StrContains(result.err,
                                  "ONEPASS_KERNEL: no kernel is named scalr"))
        << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "did you mean scalar?"))
        << result.err;
  }
  if (saved.empty()) {
    unsetenv("ONEPASS_KERNEL");
  } else {
    setenv("ONEPASS_KERNEL", saved.c_str(), /*overwrite=*/1);
  }
}

TEST(VerifyCommandTest, EveryKernelGivesTheGoldenDigest) {
  const Result result = RunOnepass({"verify", "--json"});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(report.at("identical"), true);
  EXPECT_EQ(report.at("golden"), kGoldenDigest);
  // Threads and piece_numel of each run, by kernel.
  using Runs = std::multiset<std::pair<int, int64_t>>;
  std::map<std::string, Runs> runs;
  for (const json& run : report.at("results")) {
    EXPECT_EQ(run.at("digest"), kGoldenDigest);
    runs[run.at("kernel").get<std::string>()].emplace(
        run.at("threads").get<int>(), run.at("piece_numel").get<int64_t>());
  }
  std::map<std::string, Runs> expected;
  for (const KernelReport& kernel : CreateDefaultDispatcher()->Report()) {
    if (!kernel.supported) continue;
    expected[kernel.kernel->name] = {
        {1, 0}, {2, 64}, {3, 0}, {2, 8192}, {5, 1000}};
  }
  EXPECT_EQ(runs, expected);
}

TEST(VerifyCommandTest, ADifferenceIsAFailure) {
  if (UnderEmulator() || UnderSanitizer()) {
    GTEST_SKIP() << "runs once more what takes long there";
  }
  constexpr CommandFactory kOther[] = {
      [] { return NewVerifyCommand("0123456789abcdef"); }};
  std::ostringstream out;
  std::ostringstream err;
  EXPECT_EQ(
      RunCommandLine(kOther, kCommandGroups, {"verify", "--json"}, out, err),
      kExitFailure);
  EXPECT_EQ(json::parse(out.str()).at("identical"), false);
  EXPECT_TRUE(absl::StrContains(err.str(), "differ from 0123456789abcdef"))
      << err.str();
}

TEST_F(TrainCommandTest, JsonLines) {
  const Result result = Train({"--lr", "0.02", "--json"});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  const std::vector<json> lines = ParseLines(result.out);
  ASSERT_GT(lines.size(), 20);
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    for (const char* field : {"step", "loss", "bits_per_byte", "gradient_norm",
                              "clip_factor", "tokens_per_s", "optimizer_ms"}) {
      EXPECT_GT(lines[i].at(field), 0) << field;
    }
    EXPECT_EQ(lines[i].at("loss_scale"), 1);
    EXPECT_EQ(lines[i].at("skipped"), 0);
  }
  EXPECT_EQ(lines[lines.size() - 2].at("step"), 45);
  const json& last = lines.back();
  EXPECT_EQ(last.at("steps"), 45);
  EXPECT_EQ(last.at("skipped"), 0);
  EXPECT_EQ(last.at("kernel"), (*CreateDefaultDispatcher()->Select())->name);
  EXPECT_EQ(last.at("threads"), 2);
  EXPECT_EQ(last.at("ranks"), 1);
  EXPECT_EQ(last.at("comm"), "threads");
  EXPECT_EQ(last.at("precision"), "bf16");
  EXPECT_GT(last.at("all_gathered_bytes"),
            2 * last.at("parameters").get<int64_t>());
  EXPECT_GT(last.at("gathered_peak_bytes"), 0);
  EXPECT_LT(last.at("gathered_peak_bytes"), last.at("all_gathered_bytes"));
  EXPECT_EQ(last.at("fused"), true);
  EXPECT_EQ(last.at("pieces"), 1);
  EXPECT_GT(last.at("pinned_bytes"), 0);
  EXPECT_EQ(last.at("digest").get<std::string>().size(), 16);
  EXPECT_GT(last.at("bits_per_byte"), 0);
  EXPECT_LT(last.at("bits_per_byte"), last.at("baseline_bits_per_byte"));
  EXPECT_EQ(Keys(last),
            (std::set<std::string>{
                "steps", "skipped", "parameters", "precision", "kernel",
                "ranks", "comm", "threads", "fused", "pieces", "pinned_bytes",
                "all_gathered_bytes", "gathered_peak_bytes", "bits_per_byte",
                "baseline_bits_per_byte", "digest"}));
}

TEST_F(TrainCommandTest, FlagsReachTheTrainer) {
  // Fewer steps say the same where they take long.
  const int steps = LongTestStride() == 1 ? 45 : 9;
  const auto last = [&](std::vector<std::string> flags) {
    if (std::count(flags.begin(), flags.end(), "--steps") == 0) {
      flags.insert(flags.end(), {"--steps", absl::StrCat(steps)});
    }
    flags.push_back("--json");
    const Result result = Train(flags);
    EXPECT_EQ(result.status, kExitSuccess) << result.err;
    return ParseLines(result.out).back();
  };
  const auto digest = [&last](const std::vector<std::string>& flags) {
    return last(flags).at("digest").get<std::string>();
  };
  const json base = last({});
  const std::string expected = base.at("digest").get<std::string>();
  // What says that it is another way, and gives the same.
  const auto same_by = [&](const std::vector<std::string>& flags,
                           const char* field, const json& value) {
    const json report = last(flags);
    EXPECT_EQ(report.at(field), value);
    EXPECT_EQ(report.at("digest"), expected) << field;
  };
  same_by({"--threads", "3"}, "threads", 3);
  same_by({"--kernel", "scalar"}, "kernel", "scalar");
  same_by({"--fused"}, "fused", true);
  same_by({"--separate"}, "fused", false);
  // The same where one piece is at stake: all of them, by default.
  const auto more_by = [&](const std::vector<std::string>& flags,
                           const char* field, const json& than) {
    const json report = last(flags);
    EXPECT_GT(report.at(field), than.at(field)) << flags.front();
    EXPECT_EQ(report.at("digest"), expected) << flags.front();
    return report;
  };
  const json many = more_by({"--piece_numel", "100"}, "pieces", base);
  more_by({"--piece_numel", "100", "--staging_buffers", "9"}, "pinned_bytes",
          many);
  more_by({"--sub_group_numel", "4096"}, "pieces", base);
  const json cut = last({"--piece_numel", "100", "--ratio", "0.4"});
  EXPECT_LT(cut.at("pieces"), many.at("pieces"));
  EXPECT_EQ(cut.at("digest"), expected);
  same_by({"--ratio", "0"}, "pieces", 0);
  same_by({"--ratio", "0"}, "fused", true);
  EXPECT_EQ(digest({"--link_gbps", "5"}), expected);
  same_by({"--pin_memory", "off"}, "fused", false);
  same_by({"--ranks", "1"}, "ranks", 1);
  const json three = last({"--ranks", "3"});
  EXPECT_EQ(three.at("ranks"), 3);
  EXPECT_NE(three.at("digest"), expected);
  EXPECT_EQ(digest({"--ranks", "3", "--separate"}), three.at("digest"));
  const json half = last({"--precision", "fp16"});
  EXPECT_EQ(half.at("precision"), "fp16");
  EXPECT_NE(half.at("digest"), expected);
  EXPECT_NE(digest({"--micro_batches", "2"}), expected);
  EXPECT_NE(digest({"--steps", absl::StrCat(steps - 1)}), expected);
  EXPECT_NE(digest({"--batch", "17"}), expected);
  EXPECT_NE(digest({"--context", "5"}), expected);
  EXPECT_NE(digest({"--hidden", "33"}), expected);
  EXPECT_NE(digest({"--seed", "9"}), expected);
  EXPECT_NE(digest({"--lr", "0.01"}), expected);
  EXPECT_NE(digest({"--clip", "0.01"}), expected);
  EXPECT_NE(digest({"--layers", "3"}), expected);
  EXPECT_NE(digest({"--embedding", "3"}), expected);
}

// Where they are not given: two ranks have half of them each.
TEST_F(TrainCommandTest, RanksShareTheProcessors) {
  const int processors = ThreadPool::AllowedProcessors();
  const auto threads = [this](const std::string& ranks) {
    const Result result =
        Train({"--threads", "0", "--ranks", ranks, "--steps", "1", "--json"});
    EXPECT_EQ(result.status, kExitSuccess) << result.err;
    return ParseLines(result.out).back().at("threads").get<int>();
  };
  EXPECT_EQ(threads("1"), processors);
  EXPECT_EQ(threads("2"), std::max(processors / 2, 1));
  EXPECT_EQ(threads("7"), std::max(processors / 7, 1));
}

// What the gradient was multiplied by, in fp16 beside the loss scale.
TEST_F(TrainCommandTest, ClipFactorIsWithoutTheLossScale) {
  for (const char* precision : {"bf16", "fp16"}) {
    const Result result = Train(
        {"--precision", precision, "--clip", "0.5", "--lr", "0.02", "--json"});
    ASSERT_EQ(result.status, kExitSuccess) << result.err;
    std::vector<json> lines = ParseLines(result.out);
    lines.pop_back();
    int clipped = 0;
    for (const json& line : lines) {
      const double norm = line.at("gradient_norm");
      const double factor = line.at("clip_factor");
      if (factor == 0) continue;  // a skipped step
      EXPECT_NEAR(factor, std::min(1.0, 0.5 / norm), 1e-3) << line;
      ++clipped;
    }
    EXPECT_GT(clipped, 5) << precision;
  }
  const Result text = Train({"--precision", "fp16", "--clip", "0"});
  EXPECT_TRUE(absl::StrContains(text.out, "  clip 1.0000  ")) << text.out;
}

TEST_F(TrainCommandTest, SaysWhyCopiesAreNotFused) {
  EXPECT_EQ(Train({}).err, "");
  // Nothing is to be copied.
  EXPECT_EQ(Train({"--ratio", "0"}).err, "");
  EXPECT_EQ(Train({"--separate"}).err, "");
  const Result result = Train({"--pin_memory", "off", "--ranks", "2"});
  EXPECT_EQ(result.status, kExitSuccess);
  EXPECT_EQ(result.err,
            "copies to the device are not fused: memory is not pinned: "
            "pin_memory is off\n");
}

// What a traced run on a slow link did: how many updates lie within the copy of
// an earlier piece, and how many overlap such a copy at all.
struct Overlaps {
  int updates = 0;
  int inside = 0;
  int overlap = 0;
};

class TrainTraceTest : public TrainCommandTest {
 protected:
  static constexpr int kSteps = 3;

  Overlaps Count(const std::vector<std::string>& flags) {
    const std::string path = testing::TempDir() + "/commands_test.trace.json";
    std::vector<std::string> all = {
        "--ranks",  "2",   "--steps",       absl::StrCat(kSteps),
        "--hidden", "150", "--piece_numel", "4096",
        "--trace",  path,  "--link_gbps",   "0.002"};
    all.insert(all.end(), flags.begin(), flags.end());
    const Result result = Train(all);
    EXPECT_EQ(result.status, kExitSuccess) << result.err;
    std::ifstream file(path);
    const json trace = json::parse(file);
    Overlaps overlaps;
    for (const int rank : {0, 1}) {
      for (int step = 1; step <= kSteps; ++step)
        Add(trace, rank, step, overlaps);
    }
    return overlaps;
  }

 private:
  static void Add(const json& trace, int rank, int step, Overlaps& overlaps) {
    using Span = std::pair<double, double>;
    std::vector<Span> updates;
    std::vector<Span> copies;
    for (const json& event : trace) {
      if (event.at("ph") != "X" || event.at("pid") != rank ||
          event.at("args").at("step") != step) {
        continue;
      }
      const double begin = event.at("ts");
      const double end = begin + event.at("dur").get<double>();
      EXPECT_LE(begin, end);
      if (event.at("name") == "update") updates.emplace_back(begin, end);
      if (event.at("name") == "copy") {
        copies.emplace_back(begin, end);
        // bf16 over 0.002 GB/s, in microseconds.
        EXPECT_GT(end - begin,
                  0.99 * event.at("args").at("numel").get<double>());
      }
    }
    EXPECT_GE(updates.size(), 3);
    // In order, of a piece each.
    ASSERT_EQ(copies.size(), updates.size());
    for (size_t i = 0; i < updates.size(); ++i) {
      const Span& update = updates[i];
      const auto before = copies.begin() + static_cast<int64_t>(i);
      overlaps.inside +=
          std::any_of(copies.begin(), before, [&](const Span& copy) {
            return copy.first <= update.first && update.second <= copy.second;
          });
      overlaps.overlap +=
          std::any_of(copies.begin(), before, [&](const Span& copy) {
            return copy.first < update.second && update.first < copy.second;
          });
      ++overlaps.updates;
    }
  }
};

TEST_F(TrainTraceTest, ShowsThatUpdatesAndCopiesOverlap) {
  const Overlaps two = Count({});
  // The others are held up, at times.
  EXPECT_GT(two.inside, 0) << "of " << two.updates;
  EXPECT_GT(two.overlap, two.updates / 2);
  EXPECT_EQ(Count({"--staging_buffers", "1"}).overlap, 0);
}

// More steps than are kept, which are written as they come.
TEST_F(TrainCommandTest, TraceHasEveryStepOfEveryRankOnce) {
  const std::string path = testing::TempDir() + "/commands_test.long.json";
  std::ofstream(path) << "what was there before";
  const Result result = Train({"--ranks", "3", "--steps", "103", "--hidden",
                               "4", "--batch", "1", "--trace", path});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  std::ifstream file(path);
  std::map<std::pair<int, int>, int> updates;
  for (const json& event : json::parse(file)) {
    if (event.at("name") != "update") continue;
    ++updates[{event.at("pid").get<int>(),
               event.at("args").at("step").get<int>()}];
  }
  // A layer of these fits into the part of rank 0.
  EXPECT_EQ(updates.size(), 103);
  for (int step = 1; step <= 103; ++step) {
    EXPECT_EQ((updates[{0, step}]), (updates[{0, 1}])) << step;
  }
}

TEST_F(TrainCommandTest, TextOutputSaysTheSame) {
  const Result text = Train({});
  ASSERT_EQ(text.status, kExitSuccess) << text.err;
  const json last = ParseLines(Train({"--json"}).out).back();
  EXPECT_TRUE(absl::StrContains(
      text.out, absl::StrCat("digest: ", last.at("digest").get<std::string>())))
      << text.out;
  EXPECT_TRUE(absl::StrContains(
      text.out,
      absl::StrCat("weights gathered at once: at most ",
                   last.at("gathered_peak_bytes").get<int64_t>(),
                   " bytes; all would be ",
                   last.at("all_gathered_bytes").get<int64_t>(), "\n")))
      << text.out;
}

TEST_F(TrainCommandTest, DivergenceIsAFailureAndSkippedStepsAreCounted) {
  // Large enough that sums of two weights overflow, whatever the order of an
  // architecture's sums.
  const Result result = Train({"--lr", "3e37", "--json"});
  EXPECT_EQ(result.status, kExitFailure);
  EXPECT_TRUE(absl::StrContains(result.err, "diverged")) << result.err;
  const json last = ParseLines(result.out).back();
  EXPECT_GT(last.at("skipped"), 0);
  EXPECT_TRUE(last.at("bits_per_byte").is_null());
}

TEST_F(TrainCommandTest, BadInputIsNamedBeforeAnyWork) {
  const struct {
    std::vector<std::string> flags;
    const char* problem;
  } cases[] = {
      {{"--context", "0"}, "--context is 0"},
      {{"--context", "1000000"}, "--context is 1000000, expected less than"},
      {{"--threads", "5000"}, "--threads is 5000, expected 0 to 4096"},
      {{"--kernel", "avx51"}, "no kernel is named avx51"},
      {{"--fused", "--separate"}, "--fused and --separate"},
      {{"--layers", "1000000000"}, "MiB are available"},
      {{"--layers", "9000000000000000"}, "64 bits"},
      {{"--lr", "nan"}, "--lr is nan"},
      {{"--ranks", "-1"}, "--ranks is -1, expected 0 to 1024"},
      {{"--ranks", "1025"}, "--ranks is 1025, expected 0 to 1024"},
      {{"--comm", "tcp"}, "--comm is tcp, expected threads or mpi"},
      {{"--precision", "e4m3"}, "--precision is e4m3, expected bf16, fp16 or"},
      {{"--pin_memory", "no"}, "--pin_memory is no, expected on or off"},
      {{"--link_gbps", "-1"}, "--link_gbps is -1, expected"},
      {{"--ratio", "2"}, "--ratio is 2, expected a number from 0 to 1"},
      {{"--micro_batches", "0"}, "--micro_batches is 0"},
      {{"--link_gbps", "1e300"}, "--link_gbps is 1e+300, expected"},
      {{"--link_gbps", "1e-300"},
       "--link_gbps is 1e-300, expected 0 or a finite number of at least 1e-0"},
      {{"--link_gbps", "nan"}, "--link_gbps is nan, expected"},
      {{"--trace", "/nonexistent/trace"},
       "--trace /nonexistent/trace: No such file"},
      {{"--trace", path_}, "is the file of --text"},
      {{"--save_every", "0"}, "--save_every is 0, expected 1 to"},
      {{"--keep_last", "-1"}, "--keep_last is -1, expected 1 to 2147483647"},
      {{"--budget_mb", "1048577"}, "is 1048577, expected 1 to 1048576"},
      {{"--resume"}, "--resume needs --save_dir or --load_dir"},
      {{"--save_dir", "/nonexistent/runs"},
       "--save_dir /nonexistent/runs: No such file"},
      {{"--save_dir", path_}, "--save_dir"},
  };
  for (const auto& c : cases) {
    std::vector<std::string> arguments = {"train", "--text", path_};
    arguments.insert(arguments.end(), c.flags.begin(), c.flags.end());
    const Result result = RunOnepass(arguments);
    EXPECT_EQ(result.status, kExitFailure) << c.problem;
    EXPECT_EQ(result.out, "") << c.problem;
    EXPECT_TRUE(absl::StrContains(result.err, c.problem))
        << "expected '" << c.problem << "', got " << result.err;
  }
}

// It would train as often as there are processes.
TEST_F(TrainCommandTest, ThreadsUnderMpirunAreRefused) {
  setenv("OMPI_COMM_WORLD_SIZE", "2", /*overwrite=*/1);
  const Result two = Train({});
  setenv("OMPI_COMM_WORLD_SIZE", "1", /*overwrite=*/1);
  const Result one = Train({"--steps", "1"});
  unsetenv("OMPI_COMM_WORLD_SIZE");
  EXPECT_EQ(two.status, kExitFailure);
  EXPECT_EQ(two.out, "");
  EXPECT_TRUE(absl::StrContains(
      two.err, "--comm is threads, and mpirun started 2 processes"))
      << two.err;
  EXPECT_EQ(one.status, kExitSuccess) << one.err;
}

TEST_F(TrainCommandTest, BadTextsAreNamed) {
  const auto error = [](const std::string& path) {
    const Result result = RunOnepass({"train", "--text", path});
    EXPECT_EQ(result.status, kExitFailure);
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  EXPECT_TRUE(absl::StrContains(error("/nonexistent"), "No such file"));
  EXPECT_TRUE(absl::StrContains(error("/"), "is a directory"));
  EXPECT_TRUE(absl::StrContains(error("/dev/zero"), "not a regular file"));
  Write("");
  EXPECT_TRUE(absl::StrContains(error(path_), "is empty"));
  Write("short");
  EXPECT_TRUE(absl::StrContains(error(path_), "--text has 5 bytes"));
}

// A run of bench step that takes no time worth speaking of.
Result BenchStep(std::vector<std::string> flags) {
  std::vector<std::string> arguments = {"bench", "step",     "--numel",
                                        "8192",  "--rounds", "2"};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  return RunOnepass(arguments);
}

TEST(BenchStepCommandTest, JsonHasRatiosAndRates) {
  const Result result = BenchStep({"--json", "--threads", "3"});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  EXPECT_TRUE(absl::StrContains(result.err, "MiB of memory")) << result.err;
  EXPECT_TRUE(absl::StrContains(result.err, "2 rounds")) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(Keys(report),
            (std::set<std::string>{"numel", "threads", "rounds", "ratios",
                                   "gb_per_s", "kernel", "store"}));
  EXPECT_EQ(report.at("numel"), 8192);
  EXPECT_EQ(report.at("threads"), 3);
  EXPECT_EQ(report.at("rounds"), 2);
  EXPECT_EQ(report.at("kernel"), (*CreateDefaultDispatcher()->Select())->name);
  EXPECT_TRUE(report.at("store") == "ordinary" ||
              report.at("store") == "streaming")
      << report.at("store");
  EXPECT_EQ(report.at("ratios").count("three_pass/fused"), 1);
  EXPECT_EQ(report.at("ratios").count("fused/adam_only"), 1);
  for (const auto& [name, ratio] : report.at("ratios").items()) {
    EXPECT_TRUE(absl::StrContains(name, '/')) << name;
    EXPECT_EQ(Keys(ratio), (std::set<std::string>{"median", "p10", "p90"}));
    EXPECT_GT(ratio.at("p10"), 0) << name;
    EXPECT_GE(ratio.at("median"), ratio.at("p10")) << name;
    EXPECT_GE(ratio.at("p90"), ratio.at("median")) << name;
  }
  EXPECT_EQ(report.at("gb_per_s").count("fused"), 1);
  for (const auto& [variant, rate] : report.at("gb_per_s").items()) {
    EXPECT_GT(rate, 0) << variant;
  }
}

TEST(BenchStepCommandTest, FlagsReachTheBenchmark) {
  const auto report = [](const std::vector<std::string>& flags) {
    std::vector<std::string> arguments = {"bench", "step", "--json"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Result result = RunOnepass(arguments);
    EXPECT_EQ(result.status, kExitSuccess) << result.err;
    return json::parse(result.out);
  };
  const json one =
      report({"--numel", "4099", "--rounds", "1", "--kernel", "scalar"});
  EXPECT_EQ(one.at("numel"), 4099);
  EXPECT_EQ(one.at("rounds"), 1);
  EXPECT_EQ(one.at("threads"), 1);
  EXPECT_EQ(one.at("kernel"), "scalar");
  EXPECT_EQ(report({"--numel", "4099", "--rounds", "1", "--threads", "0"})
                .at("threads"),
            ThreadPool::AllowedProcessors());
  // Of one round all quantiles are that round's.
  for (const auto& [name, ratio] : one.at("ratios").items()) {
    EXPECT_EQ(ratio.at("p10"), ratio.at("p90")) << name;
  }
}

TEST(BenchStepCommandTest, TableHasARowAndABarForEach) {
  const Result result = BenchStep({});
  ASSERT_EQ(result.status, kExitSuccess) << result.err;
  const json names = json::parse(BenchStep({"--json"}).out);
  const std::vector<std::string> lines = absl::StrSplit(result.out, '\n');
  EXPECT_TRUE(absl::StrContains(
      lines.front(),
      absl::StrCat("8192 elements, 2 rounds, 1 thread, kernel ",
                   names.at("kernel").get<std::string>(), ", ",
                   names.at("store").get<std::string>(), " stores")))
      << lines.front();
  // The lines that begin with a name, and the longest bar among them.
  const auto expect_rows = [&](const json& expected) {
    size_t longest = 0;
    size_t room = 40;
    for (const auto& item : expected.items()) {
      int rows = 0;
      for (const std::string& line : lines) {
        if (!absl::StartsWith(line, absl::StrCat(item.key(), " "))) continue;
        ++rows;
        const size_t bar = line.find('#');
        if (bar == line.npos) continue;  // shorter than half a sign
        const size_t end = line.find_first_not_of('#', bar);
        EXPECT_TRUE(end == line.npos ||
                    (end == line.size() - 1 && line.back() == '>'))
            << line;
        longest = std::max(longest, line.size() - bar);
        room = std::min<size_t>(100 - bar, 40);
      }
      EXPECT_EQ(rows, 1) << item.key() << " in\n" << result.out;
    }
    // The largest value, or what is clipped, fills what the texts leave.
    EXPECT_EQ(longest, room) << result.out;
  };
  expect_rows(names.at("ratios"));
  expect_rows(names.at("gb_per_s"));
  EXPECT_TRUE(absl::StrContains(result.out, ">= 1.55")) << result.out;
  EXPECT_TRUE(absl::StrContains(result.out, "reached") ||
              absl::StrContains(result.out, "MISSED"))
      << result.out;
  for (const std::string& line : lines) {
    EXPECT_LE(line.size(), 100) << line;
    EXPECT_FALSE(absl::EndsWith(line, " ")) << line;
  }
}

TEST(BenchStepCommandTest, BadInputIsNamedBeforeAnyWork) {
  const struct {
    std::vector<std::string> flags;
    const char* problem;
  } cases[] = {
      {{"--numel", "0"}, "--numel is 0, expected"},
      {{"--numel", "-8"}, "--numel is -8, expected"},
      {{"--numel", "9223372036854775807"}, "--numel is 9223372036854775807"},
      {{"--rounds", "0"}, "--rounds is 0, expected"},
      {{"--threads", "5000"}, "--threads is 5000, expected 0 to 4096"},
      {{"--threads", "-1"}, "--threads is -1, expected 0 to 4096"},
      {{"--kernel", "avx51"}, "--kernel: no kernel is named avx51"},
  };
  for (const auto& c : cases) {
    std::vector<std::string> arguments = {"bench", "step"};
    arguments.insert(arguments.end(), c.flags.begin(), c.flags.end());
    const Result result = RunOnepass(arguments);
    EXPECT_EQ(result.status, kExitFailure) << c.problem;
    EXPECT_EQ(result.out, "") << c.problem;
    EXPECT_TRUE(absl::StartsWith(
        result.err, absl::StrCat("onepass bench step: ", c.problem)))
        << "expected '" << c.problem << "', got " << result.err;
  }
}

TEST(BenchStepCommandTest, MemoryThatIsNotThereIsRefusedWithNumbers) {
  const Result result =
      RunOnepass({"bench", "step", "--numel", "10000000000000"});
  EXPECT_EQ(result.status, kExitFailure);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err,
              testing::MatchesRegex(
                  "onepass bench step: the benchmark needs [0-9]+ MiB of "
                  "memory, [0-9]+ MiB are available; lower --numel\n"));
}

}  // namespace
}  // namespace onepass

#include "tools/command_line.h"

#include <cstdint>
#include <memory>
#include <new>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

// Prints its flags, and fails where --fail or --exhaust is given.
class EchoCommand : public Command {
 public:
  const char* name() const override { return "echo"; }
  const char* summary() const override { return "Says what it was told."; }
  void AddFlags(Flags& flags) override {
    flags.Add("steps", &steps_, "updates", "How many.");
    flags.Add("rate", &rate_, "1/s", "How fast.");
    flags.Add("word", &word_, "text", "What.");
    flags.Add("fail", &fail_, "Fails.");
    flags.Add("exhaust", &exhaust_, "Runs out of memory.");
  }
  absl::Status Run(std::ostream& out, std::ostream&) override {
    out << absl::StrCat(steps_, " ", rate_, " ", word_);
    if (exhaust_) throw std::bad_alloc();
    return fail_ ? absl::InternalError("as asked") : absl::OkStatus();
  }

 private:
  int64_t steps_ = 300;
  double rate_ = 0.5;
  std::string word_ = "hello";
  bool fail_ = false;
  bool exhaust_ = false;
};

// The same as the subcommand of a group.
class ShoutEchoCommand : public EchoCommand {
 public:
  const char* name() const override { return "shout echo"; }
};

// Another of the group, which only says that it ran.
class ShoutStopCommand : public Command {
 public:
  const char* name() const override { return "shout stop"; }
  const char* summary() const override { return "Ends the shouting."; }
  void AddFlags(Flags&) override {}
  absl::Status Run(std::ostream& out, std::ostream&) override {
    out << "stopped";
    return absl::OkStatus();
  }
};

// Wants two values without flags, and fails with another status.
class MirrorCommand : public Command {
 public:
  const char* name() const override { return "mirror"; }
  const char* summary() const override { return "Says two words backwards."; }
  void AddFlags(Flags& flags) override {
    flags.AddArgument("FIRST", &first_, "Said last.");
    flags.AddArgument("SECOND", &second_, "Said first.");
    flags.Add("fail", &fail_, "Fails.");
  }
  absl::Status Run(std::ostream& out, std::ostream&) override {
    if (fail_) return absl::InternalError("as\x1b[2J asked");
    out << second_ << " " << first_;
    return absl::OkStatus();
  }
  int failure_status() const override { return 7; }

 private:
  std::string first_;
  std::string second_;
  bool fail_ = false;
};

template <typename T>
std::unique_ptr<Command> Make() {
  return std::make_unique<T>();
}

// The group's subcommands need not stand together.
constexpr CommandFactory kCommands[] = {
    &Make<ShoutEchoCommand>, &Make<EchoCommand>, &Make<ShoutStopCommand>,
    &Make<MirrorCommand>};
constexpr CommandGroup kGroups[] = {{"whisper", "Of no subcommand here."},
                                    {"shout", "Says it louder."}};

struct Result {
  int status;
  std::string out;
  std::string err;
};

Result RunEcho(std::vector<std::string> arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int status =
      RunCommandLine(kCommands, kGroups, std::move(arguments), out, err);
  return {status, out.str(), err.str()};
}

TEST(CommandLineTest, FlagsHaveDefaultsAndTakeValues) {
  EXPECT_EQ(RunEcho({"echo"}).out, "300 0.5 hello");
  const Result all =
      RunEcho({"echo", "--steps", "-7", "--rate=1e-3", "--word", "a b"});
  EXPECT_EQ(all.status, kExitSuccess);
  EXPECT_EQ(all.out, "-7 0.001 a b");
  EXPECT_EQ(all.err, "");
  // Decimal, whatever it starts with.
  EXPECT_EQ(RunEcho({"echo", "--steps", "010"}).out, "10 0.5 hello");
}

TEST(CommandLineTest, HelpShowsFlagsUnitsAndDefaults) {
  const Result help = RunEcho({"echo", "--help"});
  EXPECT_EQ(help.status, kExitSuccess);
  EXPECT_EQ(help.err, "");
  for (const char* text :
       {"Says what it was told.", "--steps <updates>", "How many. [300]",
        "--rate <1/s>", "[0.5]", "--word <text>", "[hello]", "--fail"}) {
    EXPECT_NE(help.out.find(text), std::string::npos) << text << " is not in\n"
                                                      << help.out;
  }
  EXPECT_NE(RunEcho({"--help"}).out.find("echo"), std::string::npos);
}

TEST(CommandLineTest, ArgumentsComeInTheirOrderAmongFlags) {
  EXPECT_EQ(RunEcho({"mirror", "a", "b c"}).out, "b c a");
  const Result failed = RunEcho({"mirror", "a", "--fail", "b"});
  EXPECT_EQ(failed.status, 7);
  EXPECT_EQ(failed.err, "onepass mirror: as\\x1b[2J asked\n");
  const Result help = RunEcho({"mirror", "--help"});
  EXPECT_EQ(help.status, kExitSuccess);
  for (const char* text : {"FIRST SECOND", "Said last.", "Said first."}) {
    EXPECT_NE(help.out.find(text), std::string::npos) << text << " is not in\n"
                                                      << help.out;
  }
}

TEST(CommandLineTest, WithoutSubcommandTheHelpIsAnError) {
  const Result none = RunEcho({});
  EXPECT_EQ(none.status, kExitUsage);
  EXPECT_EQ(none.out, "");
  EXPECT_NE(none.err.find("echo"), std::string::npos);
}

TEST(CommandLineTest, TwoWordsNameASubcommandOfAGroup) {
  EXPECT_EQ(RunEcho({"shout", "echo", "--steps", "4"}).out, "4 0.5 hello");
  EXPECT_EQ(RunEcho({"shout", "stop"}).out, "stopped");
  EXPECT_EQ(RunEcho({"echo", "--steps", "5"}).out, "5 0.5 hello");
  EXPECT_EQ(RunEcho({"shout", "echo", "--word", "stop"}).out, "300 0.5 stop");
}

TEST(CommandLineTest, AGroupHasHelpOfItsOwn) {
  const std::string root = RunEcho({"--help"}).out;
  EXPECT_NE(root.find("Says it louder."), std::string::npos) << root;
  EXPECT_EQ(root.find("shout"), root.rfind("shout")) << root;
  EXPECT_EQ(root.find("Ends the shouting."), std::string::npos) << root;
  EXPECT_EQ(root.find("whisper"), std::string::npos) << root;

  const Result help = RunEcho({"shout", "--help"});
  EXPECT_EQ(help.status, kExitSuccess);
  EXPECT_EQ(help.err, "");
  for (const char* text :
       {"Says it louder.", "Usage: onepass shout ", "echo", "stop",
        "Ends the shouting.", "'onepass shout <subcommand> --help'"}) {
    EXPECT_NE(help.out.find(text), std::string::npos) << text << " is not in\n"
                                                      << help.out;
  }
  // Without a second word it is an error, as the program's is without any.
  const Result none = RunEcho({"shout"});
  EXPECT_EQ(none.status, kExitUsage);
  EXPECT_EQ(none.out, "");
  EXPECT_EQ(none.err, help.out);

  const std::string of_one = RunEcho({"shout", "echo", "--help"}).out;
  EXPECT_NE(of_one.find("Usage: onepass shout echo "), std::string::npos)
      << of_one;
  EXPECT_NE(of_one.find("--steps <updates>"), std::string::npos) << of_one;
}

TEST(CommandLineTest, MistakesAreNamed) {
  const struct {
    std::vector<std::string> arguments;
    std::string problem;
  } cases[] = {
      {{"ecko"}, "unknown subcommand ecko; did you mean echo?"},
      {{"checkpoint"}, "unknown subcommand checkpoint\n"},
      {{"echo", "--step", "3"}, "unknown flag --step; did you mean --steps?"},
      {{"echo", "--setps=3"}, "unknown flag --setps; did you mean --steps?"},
      {{"echo", "--quantize"}, "unknown flag --quantize\n"},
      {{"--steps", "3", "echo"}, "--steps must come after echo"},
      {{"echo", "3"}, "unexpected argument 3"},
      {{"echo", "echo"}, "unexpected argument echo"},
      {{"echo", "--steps"}, "--steps has no value"},
      {{"echo", "--steps", "1", "--steps", "2"},
       "--steps is given more than once"},
      {{"echo", "--fail=yes"}, "--fail takes no value"},
      {{"echo", "--steps", "1e3"}, "--steps: 1e3 is not a whole number"},
      {{"echo", "--steps", "9223372036854775808"},
       "--steps: 9223372036854775808 is not a whole number of 64 bits"},
      {{"echo", "--rate", "fast"}, "--rate: fast is not a number"},
      {{"shuot"}, "unknown subcommand shuot; did you mean shout?"},
      {{"stop"}, "unknown subcommand stop\n"},
      {{"shout", "ecko"},
       "unknown subcommand shout ecko; did you mean shout echo?\n"
       "Try 'onepass shout --help'."},
      {{"shout", "checkpoint"}, "unknown subcommand shout checkpoint\n"},
      {{"shout", "shout"}, "unknown subcommand shout shout\n"},
      {{"echo", "stop"}, "unexpected argument stop"},
      {{"shout", "echo", "echo"}, "unexpected argument echo"},
      {{"shout", "3", "echo"}, "unexpected argument 3"},
      {{"shout", "echo", "--step", "3"},
       "unknown flag --step; did you mean --steps?\n"
       "Try 'onepass shout echo --help'."},
      {{"--steps", "3", "shout", "echo"}, "--steps must come after shout echo"},
      {{"shout", "--steps=3", "echo"}, "--steps must come after shout echo"},
      {{"shout", "--steps", "3"}, "unknown flag --steps\n"},
      {{"shout", "stop", "--steps"}, "unknown flag --steps\n"},
      {{"--loud", "shout"}, "unknown flag --loud\n"},
      {{"shout", "echo", "--rate", "fast"}, "--rate: fast is not a number"},
      {{"mirror"}, "FIRST is required"},
      {{"mirror", "a"}, "SECOND is required"},
      {{"mirror", "", "b"}, "FIRST: the value is empty"},
      {{"mirror", "a", "b", "c"}, "unexpected argument c"},
  };
  for (const auto& c : cases) {
    const Result result = RunEcho(c.arguments);
    EXPECT_EQ(result.status, kExitUsage) << c.problem;
    EXPECT_EQ(result.out, "") << c.problem;
    EXPECT_NE(result.err.find(c.problem), std::string::npos)
        << "expected '" << c.problem << "', got\n"
        << result.err;
  }
}

TEST(CommandLineTest, FailuresAreReported) {
  const Result failed = RunEcho({"echo", "--fail"});
  EXPECT_EQ(failed.status, kExitFailure);
  EXPECT_EQ(failed.err, "onepass echo: as asked\n");
  const Result exhausted = RunEcho({"echo", "--exhaust"});
  EXPECT_EQ(exhausted.status, kExitFailure);
  EXPECT_EQ(exhausted.err, "onepass echo: out of memory\n");
  EXPECT_EQ(RunEcho({"shout", "echo", "--fail"}).err,
            "onepass shout echo: as asked\n");
}

TEST(CommandLineTest, OutputThatIsNotTakenIsAFailure) {
  for (const char* argument : {"echo", "--help"}) {
    std::ostringstream out;
    out.setstate(std::ios::badbit);
    std::ostringstream err;
    EXPECT_EQ(RunCommandLine(kCommands, kGroups, {argument}, out, err),
              kExitFailure)
        << argument;
  }
}

TEST(DidYouMeanTest, TakesTheNearest) {
  EXPECT_EQ(DidYouMean("avx51", {"avx2", "avx512", "scalar"}),
            "; did you mean avx512?");
  EXPECT_EQ(DidYouMean("sclar", {"avx2", "avx512", "scalar"}),
            "; did you mean scalar?");
  EXPECT_EQ(DidYouMean("neon", {"avx2", "avx512", "scalar"}), "");
  EXPECT_EQ(DidYouMean("x", {}), "");
  EXPECT_EQ(DidYouMean("setp", {"step"}, "bench "),
            "; did you mean bench step?");
}

}  // namespace
}  // namespace onepass

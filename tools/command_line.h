// The command line of onepass: subcommands, their flags, and what is said of
// mistakes in them.
//
//   class GreetCommand : public Command {
//     const char* name() const override { return "greet"; }
//     const char* summary() const override { return "Says hello."; }
//     void AddFlags(Flags& flags) override {
//       flags.Add("times", &times_, "greetings", "How often.");
//     }
//     absl::Status Run(std::ostream& out, std::ostream&) override {
//       for (int64_t i = 0; i < times_; ++i) out << "hello\n";
//       return absl::OkStatus();
//     }
//     int64_t times_ = 1;
//   };
//
// A name of two words, "bench step", is reached as `onepass bench step`: the
// first is that of a group, whose help lists its subcommands.
//
// To add a subcommand: its file and its line in commands.h. To add a type of
// flags: an overload of Flags::Add.

#ifndef ONEPASS_TOOLS_COMMAND_LINE_H_
#define ONEPASS_TOOLS_COMMAND_LINE_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace CLI {
class App;
}  // namespace CLI

namespace onepass {

// The flags and arguments of one subcommand. Each is bound to a variable that
// holds its default before parsing and its value after; the variable must
// outlive the parsing.
class Flags {
 public:
  explicit Flags(CLI::App& app) : app_(app) {}

  // --name, false where it is not given.
  void Add(absl::string_view name, bool* value, absl::string_view help);

  // --name VALUE. `unit` says what the value counts or is; an empty string has
  // no default to show, so `help` says what happens then.
  void Add(absl::string_view name, int64_t* value, absl::string_view unit,
           absl::string_view help);
  void Add(absl::string_view name, double* value, absl::string_view unit,
           absl::string_view help);
  void Add(absl::string_view name, std::string* value, absl::string_view unit,
           absl::string_view help);

  // A value without a flag, which has to be given: `name` is what the help
  // calls it, as "PATH". In the order of the calls.
  void AddArgument(absl::string_view name, std::string* value,
                   absl::string_view help);

 private:
  CLI::App& app_;
};

inline constexpr int kExitSuccess = 0;
inline constexpr int kExitFailure = 1;  // the subcommand failed
// An unknown subcommand or flag, or none, or a value that cannot be read; of
// some subcommands (failure_status()), all but what they were asked to find.
inline constexpr int kExitUsage = 2;

class Command {
 public:
  virtual ~Command() = default;

  // One word, or a group's and one more; unique, and no group's.
  virtual const char* name() const = 0;
  // One sentence.
  virtual const char* summary() const = 0;
  virtual void AddFlags(Flags& flags) = 0;
  // Results go to `out`, remarks about the run to `err`. The caller reports an
  // error, so Run() does not print it; nor does it catch std::bad_alloc.
  virtual absl::Status Run(std::ostream& out, std::ostream& err) = 0;
  // The exit status of the program after an error of Run(), not 0.
  virtual int failure_status() const { return kExitFailure; }
};

using CommandFactory = std::unique_ptr<Command> (*)();

// What the help says of the subcommands whose names begin with one word.
struct CommandGroup {
  absl::string_view name;
  const char* summary;  // one sentence
};

// Runs the subcommand that `arguments` (without the name of the program) ask
// for and returns the exit status of the program. 0 only if everything asked
// for was done and `out` took all of it. Groups are made of the names of
// `commands`; one that `groups` lacks has no summary.
int RunCommandLine(absl::Span<const CommandFactory> commands,
                   absl::Span<const CommandGroup> groups,
                   std::vector<std::string> arguments, std::ostream& out,
                   std::ostream& err);

// "; did you mean X?" with the candidate nearest to `word` (Levenshtein 1966:
// fewest letters inserted, left out or replaced), or nothing where none is
// near. `prefix` comes before X.
std::string DidYouMean(absl::string_view word,
                       absl::Span<const std::string> candidates,
                       absl::string_view prefix = "");

}  // namespace onepass

#endif  // ONEPASS_TOOLS_COMMAND_LINE_H_

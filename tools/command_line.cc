#include "tools/command_line.h"

#include <algorithm>
#include <new>
#include <utility>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Error.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Option.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace onepass {
namespace {

// Errors quote names that come from files: without what a terminal would obey.
std::string Visible(absl::string_view message) {
  std::string text;
  for (const char c : message) {
    if (absl::ascii_iscntrl(c) && c != '\n') {
      absl::StrAppend(
          &text, "\\x",
          absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    } else {
      text.push_back(c);
    }
  }
  return text;
}

constexpr char kProgram[] = "onepass";

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1] ? 1 : 0);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// Adds --name. `parse` stores a value's text and returns what is wrong with it,
// or nothing. CLI11 converts numbers by itself too, but takes "010" for eight
// and a number that does not fit for the largest that does.
template <typename Parse>
void AddValueFlag(CLI::App& app, absl::string_view name, absl::string_view unit,
                  absl::string_view help, absl::string_view default_text,
                  Parse parse) {
  std::string description(help);
  if (!default_text.empty()) {
    absl::StrAppend(&description, " [", default_text, "]");
  }
  app.add_option_function<std::string>(
         absl::StrCat("--", name), [](const std::string&) {}, description)
      ->check(CLI::Validator(
          [parse](std::string& text) -> std::string { return parse(text); },
          /*validator_desc=*/""))
      ->option_text(absl::StrCat("<", unit, ">"));
}

// The words of a subcommand's name; the first of two is its group.
struct CommandName {
  explicit CommandName(absl::string_view name) {
    const size_t space = name.find(' ');
    if (space != name.npos) {
      group = std::string(name.substr(0, space));
      name.remove_prefix(space + 1);
    }
    word = std::string(name);
  }

  std::string group;  // empty where there is none
  std::string word;
};

std::string Footer(absl::string_view command) {
  return absl::StrCat("'", command,
                      " <subcommand> --help' lists the flags of one.\n"
                      "Exit status: 0 success, 1 failure, 2 an unknown "
                      "subcommand or flag, or a value that cannot be read.");
}

// The app of a group in `root`, made where its first subcommand comes.
CLI::App& GroupApp(CLI::App& root, const std::string& name,
                   absl::Span<const CommandGroup> groups) {
  const std::vector<CLI::App*> found = root.get_subcommands(
      [&name](const CLI::App* app) { return app->get_name() == name; });
  if (!found.empty()) return *found.front();
  const auto group =
      std::find_if(groups.begin(), groups.end(),
                   [&name](const CommandGroup& g) { return g.name == name; });
  CLI::App* app =
      root.add_subcommand(name, group == groups.end() ? "" : group->summary);
  app->require_subcommand(0, 1);
  app->footer(Footer(absl::StrCat(kProgram, " ", name)));
  return *app;
}

// The program, the group if one is named, and the subcommand: as far as the
// arguments went.
std::vector<const CLI::App*> ChosenApps(const CLI::App& root) {
  std::vector<const CLI::App*> apps = {&root};
  for (;;) {
    const std::vector<CLI::App*> next = apps.back()->get_subcommands();
    if (next.empty()) return apps;
    apps.push_back(next.front());
  }
}

// "bench step"; empty for the program itself.
std::string NameOf(absl::Span<const CLI::App* const> apps) {
  return absl::StrJoin(apps.subspan(1), " ",
                       [](std::string* out, const CLI::App* app) {
                         out->append(app->get_name());
                       });
}

// Whether subcommands follow: the program and groups.
bool HasSubcommands(const CLI::App& app) {
  return !app.get_subcommands({}).empty();
}

std::vector<std::string> FlagNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back(absl::StrCat("--", name));
    }
  }
  return names;
}

// "unknown subcommand bench stop; did you mean bench step?" for a `word` that
// follows `apps`.
std::string DescribeUnknownSubcommand(absl::Span<const CLI::App* const> apps,
                                      const std::string& word) {
  std::string prefix = NameOf(apps);
  if (!prefix.empty()) prefix.append(" ");
  std::vector<std::string> words;
  for (const CLI::App* app : apps.back()->get_subcommands({})) {
    words.push_back(app->get_name());
  }
  return absl::StrCat("unknown subcommand ", prefix, word,
                      DidYouMean(word, words, prefix));
}

// What is wrong with the arguments that nothing took, of which there is one.
std::string DescribeExtras(absl::Span<const CLI::App* const> apps) {
  const CLI::App& app = *apps.back();
  // Those of the subcommand itself first, then what came before it.
  const auto holder =
      std::find_if(apps.rbegin(), apps.rend(),
                   [](const CLI::App* a) { return a->remaining_size() > 0; });
  const std::vector<std::string> extras = (*holder)->remaining();
  const bool misplaced = *holder != &app;
  const std::string& first = extras.front();
  if (!misplaced && HasSubcommands(app) && !absl::StartsWith(first, "-")) {
    return DescribeUnknownSubcommand(apps, first);
  }
  // A value that follows an unknown flag is not what the user got wrong.
  const auto flag = std::find_if(
      extras.begin(), extras.end(),
      [](const std::string& extra) { return absl::StartsWith(extra, "-"); });
  if (flag == extras.end()) return absl::StrCat("unexpected argument ", first);
  const std::string name = flag->substr(0, flag->find('='));
  const std::vector<std::string> known = FlagNames(app);
  if (misplaced && std::count(known.begin(), known.end(), name) > 0) {
    return absl::StrCat(name, " must come after ", NameOf(apps));
  }
  return absl::StrCat("unknown flag ", name, DidYouMean(name, known));
}

// CLI11 says what it missed in its own terms ("1 required TEXT missing").
std::string DescribeMismatch(const std::string& what) {
  const std::string flag = what.substr(0, what.find_first_of(": "));
  if (absl::EndsWith(what, " missing")) {
    return absl::StrCat(flag, " has no value");
  }
  if (absl::StrContains(what, ": At Most ")) {
    return absl::StrCat(flag, " is given more than once");
  }
  if (absl::EndsWith(what, " flag override")) {
    return absl::StrCat("--", flag, " takes no value");
  }
  return what;
}

int UsageError(absl::string_view problem, absl::string_view command,
               std::ostream& err) {
  err << kProgram << ": " << problem << "\nTry '" << kProgram
      << (command.empty() ? "" : " ") << command << " --help'.\n";
  return kExitUsage;
}

}  // namespace

void Flags::Add(absl::string_view name, bool* value, absl::string_view help) {
  app_.add_flag(absl::StrCat("--", name), *value, std::string(help))
      ->disable_flag_override();
}

void Flags::Add(absl::string_view name, int64_t* value, absl::string_view unit,
                absl::string_view help) {
  AddValueFlag(app_, name, unit, help, absl::StrCat(*value),
               [value](const std::string& text) -> std::string {
                 if (absl::SimpleAtoi(text, value)) return "";
                 return absl::StrCat(text, " is not a whole number of 64 bits");
               });
}

void Flags::Add(absl::string_view name, double* value, absl::string_view unit,
                absl::string_view help) {
  AddValueFlag(app_, name, unit, help, absl::StrCat(*value),
               [value](const std::string& text) -> std::string {
                 if (absl::SimpleAtod(text, value)) return "";
                 return absl::StrCat(text, " is not a number");
               });
}

void Flags::Add(absl::string_view name, std::string* value,
                absl::string_view unit, absl::string_view help) {
  AddValueFlag(app_, name, unit, help, *value,
               [value](const std::string& text) -> std::string {
                 if (text.empty()) return "the value is empty";
                 *value = text;
                 return "";
               });
}

void Flags::AddArgument(absl::string_view name, std::string* value,
                        absl::string_view help) {
  app_.add_option_function<std::string>(
          std::string(name), [](const std::string&) {}, std::string(help))
      ->check(CLI::Validator(
          [value](std::string& text) -> std::string {
            if (text.empty()) return "the value is empty";
            *value = text;
            return "";
          },
          /*validator_desc=*/""))
      ->required()
      ->option_text(" ");
}

int RunCommandLine(absl::Span<const CommandFactory> commands,
                   absl::Span<const CommandGroup> groups,
                   std::vector<std::string> arguments, std::ostream& out,
                   std::ostream& err) {
  CLI::App root(
      "The optimizer step of offloaded training, in one pass over CPU memory.",
      kProgram);
  root.require_subcommand(0, 1);
  root.footer(Footer(kProgram));
  std::vector<std::unique_ptr<Command>> made;
  for (const CommandFactory make : commands) {
    made.push_back(make());
    const CommandName command_name(made.back()->name());
    CLI::App& parent = command_name.group.empty()
                           ? root
                           : GroupApp(root, command_name.group, groups);
    CLI::App* app =
        parent.add_subcommand(command_name.word, made.back()->summary());
    app->get_formatter()->column_width(34);
    Flags flags(*app);
    made.back()->AddFlags(flags);
  }

  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
  std::string problem;
  // CLI11 reports in exceptions alone; none goes further than this.
  try {
    root.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    out << root.help();
    out.flush();
    return out.good() ? kExitSuccess : kExitFailure;
  } catch (const CLI::ExtrasError&) {
    problem = DescribeExtras(ChosenApps(root));
  } catch (const CLI::ArgumentMismatch& error) {
    problem = DescribeMismatch(error.what());
  } catch (const CLI::ParseError& error) {
    problem = error.what();
  }
  const std::vector<const CLI::App*> chosen = ChosenApps(root);
  const std::string name = NameOf(chosen);
  if (!problem.empty()) return UsageError(problem, name, err);
  if (HasSubcommands(*chosen.back())) {
    err << root.help();  // of the group, where one is chosen
    return kExitUsage;
  }

  const auto command = std::find_if(
      made.begin(), made.end(),
      [&name](const std::unique_ptr<Command>& c) { return name == c->name(); });
  absl::Status status;
  // Sizes are checked before, but others take memory too.
  try {
    status = (*command)->Run(out, err);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("out of memory");
  }
  out.flush();
  if (!status.ok()) {
    err << kProgram << " " << name << ": " << Visible(status.message()) << "\n";
    return (*command)->failure_status();
  }
  if (!out.good()) {
    err << kProgram << " " << name << ": could not write the output\n";
    return (*command)->failure_status();
  }
  return kExitSuccess;
}

std::string DidYouMean(absl::string_view word,
                       absl::Span<const std::string> candidates,
                       absl::string_view prefix) {
  const std::string* nearest = nullptr;
  // Further away than a third of its letters it is another word.
  size_t least = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(word, candidate);
    if (distance >= least) continue;
    least = distance;
    nearest = &candidate;
  }
  return nearest == nullptr
             ? ""
             : absl::StrCat("; did you mean ", prefix, *nearest, "?");
}

}  // namespace onepass

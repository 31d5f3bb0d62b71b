// Runs a subcommand by itself, for a test.
//
//   const CommandResult result =
//       RunCommand(&NewTrainCommand, {"--steps", "3"});
//   ASSERT_TRUE(result.status.ok()) << result.status;

#ifndef ONEPASS_TOOLS_RUN_COMMAND_H_
#define ONEPASS_TOOLS_RUN_COMMAND_H_

#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/status/status.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"

namespace onepass {

struct CommandResult {
  absl::Status status;
  std::string out;
  std::string err;
};

inline CommandResult RunCommand(CommandFactory make,
                                const std::vector<std::string>& flags) {
  const std::unique_ptr<Command> command = make();
  CLI::App app;
  Flags known(app);
  command->AddFlags(known);
  // CLI11 takes them from the end.
  app.parse(std::vector<std::string>(flags.rbegin(), flags.rend()));
  std::ostringstream out;
  std::ostringstream err;
  absl::Status status = command->Run(out, err);
  return {std::move(status), out.str(), err.str()};
}

// Those of a JSON object.
inline std::set<std::string> Keys(const nlohmann::json& object) {
  std::set<std::string> keys;
  for (const auto& item : object.items()) keys.insert(item.key());
  return keys;
}

}  // namespace onepass

#endif  // ONEPASS_TOOLS_RUN_COMMAND_H_

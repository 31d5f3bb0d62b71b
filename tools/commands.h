// The subcommands of onepass, each in the file of its name.
//
//   return RunCommandLine(kCommands, kCommandGroups, arguments, std::cout,
//                         std::cerr);
//
// To add one: <name>_command.cc, and a declaration and a line in the table
// here. The first of a group ("bench step") adds the group's line too.

#ifndef ONEPASS_TOOLS_COMMANDS_H_
#define ONEPASS_TOOLS_COMMANDS_H_

#include <memory>
#include <string>

#include "tools/command_line.h"

namespace onepass {

std::unique_ptr<Command> NewBenchExportCommand();
std::unique_ptr<Command> NewBenchPipelineCommand();
std::unique_ptr<Command> NewBenchScalingCommand();
std::unique_ptr<Command> NewBenchStepCommand();
std::unique_ptr<Command> NewCheckpointConsolidateCommand();
std::unique_ptr<Command> NewCheckpointDiffCommand();
std::unique_ptr<Command> NewCheckpointInspectCommand();
std::unique_ptr<Command> NewCheckpointVerifyCommand();
std::unique_ptr<Command> NewKernelsCommand();
std::unique_ptr<Command> NewTrainCommand();
std::unique_ptr<Command> NewVerifyCommand();
// Against another digest than that of tools/golden.h, for tests.
std::unique_ptr<Command> NewVerifyCommand(std::string golden);

// In the order of the help.
inline constexpr CommandFactory kCommands[] = {
    &NewKernelsCommand,
    &NewVerifyCommand,
    &NewTrainCommand,
    &NewBenchStepCommand,
    &NewBenchScalingCommand,
    &NewBenchPipelineCommand,
    &NewBenchExportCommand,
    &NewCheckpointInspectCommand,
    &NewCheckpointVerifyCommand,
    &NewCheckpointDiffCommand,
    &NewCheckpointConsolidateCommand,
};

inline constexpr CommandGroup kCommandGroups[] = {
    {"bench", "Measures what this machine does, as ratios."},
    {"checkpoint", "Looks at checkpoints that were saved."},
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_COMMANDS_H_

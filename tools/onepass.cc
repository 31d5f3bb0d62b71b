// The program `onepass`: see commands.h for its subcommands.

#include <iostream>
#include <string>
#include <vector>

#include "tools/command_line.h"
#include "tools/commands.h"

int main(int argc, char** argv) {
  return onepass::RunCommandLine(
      onepass::kCommands, std::vector<std::string>(argv + 1, argv + argc),
      std::cout, std::cerr);
}

// The program `onepass`: see commands.h for its subcommands.

#include <malloc.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "tools/command_line.h"
#include "tools/commands.h"

int main(int argc, char** argv) {
  // What is freed goes back to the system. By default the allocator keeps more
  // and more of it, for each thread, and a run would take more memory than it
  // says it needs.
  constexpr int kMappedBytes = 128 << 10;
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);

  // `bazel run` starts a program in its runfiles, and names here the folder in
  // which it was called: paths in flags are relative to that one.
  const char* called_in = std::getenv("BUILD_WORKING_DIRECTORY");
  if (called_in != nullptr && chdir(called_in) != 0) {
    std::cerr << "onepass: BUILD_WORKING_DIRECTORY " << called_in << ": "
              << std::strerror(errno) << "\n";
    return onepass::kExitFailure;
  }
  return onepass::RunCommandLine(
      onepass::kCommands, onepass::kCommandGroups,
      std::vector<std::string>(argv + 1, argv + argc), std::cout, std::cerr);
}

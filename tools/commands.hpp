// The subcommands of hexpert. Each adds itself to the parser; its callback stores the exit code and
// reports failures by throwing: hexpert::Error (mapped to a code by exit_code_of), CLI::ParseError
// for usage.
#pragma once

#include <CLI/CLI.hpp>

#include "hexpert/status.hpp"

namespace hexpert::tools {

enum ExitCode : int {
  kExitOk = 0,
  kExitCheckFailed = 1,
  kExitUsage = 2,
  kExitBadInput = 3,
  kExitUnsupported = 4,
};

// The exit code that a failed library call becomes.
int exit_code_of(ErrorCode code);

void add_info(CLI::App& parent, int* exit_code);
void add_inspect(CLI::App& parent, int* exit_code);
void add_quantize(CLI::App& parent, int* exit_code);
void add_run(CLI::App& parent, int* exit_code);
void add_check(CLI::App& parent, int* exit_code);
void add_bench(CLI::App& parent, int* exit_code);

// Parses a command line, runs it, prints errors to stderr. Never throws.
int run_command_line(int argc, const char* const* argv);

}  // namespace hexpert::tools

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "commands.hpp"
#include "common.hpp"

namespace hexpert::tools {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  hexpert info                                       what this machine can run\n"
    "  hexpert inspect model.safetensors                  experts found, sizes, quantization "
    "error\n"
    "  hexpert quantize model.safetensors out.safetensors BF16 -> NVFP4\n"
    "  hexpert run model.safetensors --tokens tokens.safetensors --all-layers\n"
    "  hexpert check --model qwen3-30b --tokens 64        every backend against the reference\n"
    "  hexpert bench --model qwen3-30b --tokens 1,8,64    speed, as ratios to this machine's "
    "limits\n"
    "\n"
    "Exit codes: 0 ok, 1 check failed, 2 usage, 3 bad input, 4 unsupported here.\n"
    "'hexpert COMMAND --help' explains one command.";

int parse_and_run(int argc, const char* const* argv) {
  CLI::App app("Routed NVFP4 mixture-of-experts inference.", "hexpert");
  app.footer(kFooter);
  app.set_version_flag("--version", "hexpert " HEXPERT_VERSION);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  int exit_code = kExitOk;
  add_info(app, &exit_code);
  add_inspect(app, &exit_code);
  add_quantize(app, &exit_code);
  add_run(app, &exit_code);
  add_check(app, &exit_code);
  add_bench(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto chosen = app.get_subcommands();
    const auto unknown = app.remaining(true);
    if (chosen.empty() && !unknown.empty()) {
      print_error("'" + unknown.front() + "' is no command");
    } else {
      print_error(error.what());
    }
    const std::string command = chosen.empty() ? "" : chosen.front()->get_name() + " ";
    std::fputs(("Try 'hexpert " + command + "--help'.\n").c_str(), stderr);
    return kExitUsage;
  }
  return exit_code;
}

}  // namespace

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return kExitOk;
    case ErrorCode::kUnsupported:
    case ErrorCode::kUnsupportedDevice:
    case ErrorCode::kTooLarge:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kDeviceError:
      return kExitUnsupported;
    default:
      return kExitBadInput;
  }
}

int run_command_line(int argc, const char* const* argv) {
  int exit_code = kExitOk;
  try {
    exit_code = parse_and_run(argc, argv);
  } catch (const Error& error) {
    print_error(error.what());
    exit_code = exit_code_of(error.status().code());
  } catch (const std::bad_alloc&) {
    print_error("out of memory");
    exit_code = kExitUnsupported;
  } catch (const std::exception& error) {
    print_error(error.what());
    exit_code = kExitBadInput;
  }
  // A full disk or a closed pipe behind stdout must not look like success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    print_error(std::string("cannot write standard output: ") + std::strerror(errno));
    if (exit_code == kExitOk) exit_code = kExitBadInput;
  }
  return exit_code;
}

}  // namespace hexpert::tools

// The command line, called in this process.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "commands.hpp"

namespace hexpert::test {

struct Outcome {
  int exit_code = 0;
  std::string out;
  std::string err;
};

inline Outcome hexpert_cli(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"hexpert"};
  for (const std::string& argument : arguments)
    argv.push_back(argument.c_str());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Outcome outcome;
  outcome.exit_code = tools::run_command_line(static_cast<int>(argv.size()), argv.data());
  std::fflush(stdout);
  outcome.out = ::testing::internal::GetCapturedStdout();
  outcome.err = ::testing::internal::GetCapturedStderr();
  return outcome;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace hexpert::test

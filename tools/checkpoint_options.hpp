// Options of the commands that open a checkpoint.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "hexpert/checkpoint.hpp"

namespace hexpert::tools {

inline void add_stacked_option(CLI::App* command, StackedLayout* value) {
  static const std::map<std::string, StackedLayout> names = {
      {"auto", StackedLayout::kAuto},
      {"rows", StackedLayout::kOutputRows},
      {"transposed", StackedLayout::kInputRows},
  };
  command
      ->add_option("--layout",
                   *value,
                   "stacked expert tensors: rows = [L, 2I, H] and [L, H, I]; transposed = "
                   "[L, H, 2I] and [L, I, H]; auto = told by the shapes")
      ->transform(CLI::CheckedTransformer(names, CLI::ignore_case))
      ->option_text("auto|rows|transposed");
}

}  // namespace hexpert::tools

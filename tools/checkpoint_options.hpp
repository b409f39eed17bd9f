// Options of the commands that open a checkpoint.
#pragma once

#include <CLI/CLI.hpp>

#include "hexpert/checkpoint.hpp"
#include "option_values.hpp"

namespace hexpert::tools {

inline void add_stacked_option(CLI::App* command, StackedLayout* value) {
  add_choice<StackedLayout>(command,
                            "--layout",
                            value,
                            {{"auto", StackedLayout::kAuto},
                             {"rows", StackedLayout::kOutputRows},
                             {"transposed", StackedLayout::kInputRows}},
                            "stacked expert tensors: rows = [L, 2I, H] and [L, H, I]; transposed = "
                            "[L, H, 2I] and [L, I, H]; auto = told by the shapes");
}

}  // namespace hexpert::tools

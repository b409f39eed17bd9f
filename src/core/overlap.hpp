// Memory that a call writes has no byte in common with its other arguments.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "hexpert/status.hpp"

namespace hexpert {

// The memory of an argument, under its name in messages.
struct MemoryRange {
  std::string_view name;
  const void* data = nullptr;
  int64_t bytes = 0;  // 0, or null data: it overlaps nothing
};

// kInvalidOutput unless `written` and `other` are apart; `kind` says what the other is: "input".
// Allocates for the text of a failure only.
Status check_no_overlap(const MemoryRange& written,
                        const MemoryRange& other,
                        std::string_view kind);

// The same of every two outputs.
Status check_outputs_apart(std::span<const MemoryRange> outputs);

}  // namespace hexpert

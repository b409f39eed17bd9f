#include "core/overlap.hpp"

#include <fmt/format.h>

namespace hexpert {

Status check_no_overlap(const MemoryRange& written,
                        const MemoryRange& other,
                        std::string_view kind) {
  const auto begin = [](const MemoryRange& m) { return reinterpret_cast<uintptr_t>(m.data); };
  const auto end = [&](const MemoryRange& m) { return begin(m) + static_cast<uintptr_t>(m.bytes); };
  const auto empty = [](const MemoryRange& m) { return m.bytes == 0 || m.data == nullptr; };
  const bool apart = empty(written) || empty(other) || begin(written) >= end(other) ||
                     begin(other) >= end(written);
  if (apart) return Status::success();
  return {ErrorCode::kInvalidOutput,
          fmt::format("{}: expected memory that overlaps no {}, got [{:#x}, {:#x}) over {} at "
                      "[{:#x}, {:#x})",
                      written.name,
                      kind,
                      begin(written),
                      end(written),
                      other.name,
                      begin(other),
                      end(other))};
}

Status check_outputs_apart(std::span<const MemoryRange> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t j = i + 1; j < outputs.size(); ++j)
      HX_RETURN_IF_ERROR(check_no_overlap(outputs[i], outputs[j], "other output"));
  }
  return Status::success();
}

}  // namespace hexpert

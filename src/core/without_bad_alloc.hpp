// The library does not throw: what runs out of memory reports it.
#pragma once

#include <new>
#include <stdexcept>

#include "hexpert/status.hpp"

namespace hexpert {

// Calls `function` and turns an allocation failure into a Status.
template <typename Function>
auto without_bad_alloc(Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kOutOfMemory, "out of memory");
  } catch (const std::length_error&) {
    return Status(ErrorCode::kOutOfMemory, "out of memory");
  }
}

}  // namespace hexpert

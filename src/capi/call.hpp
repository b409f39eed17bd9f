// What every function of the C ABI is made of: handles, the text of the last error, arguments.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "capi/dlpack_view.hpp"
#include "hexpert/hexpert.h"
#include "hexpert/moe.hpp"
#include "hexpert/weights.hpp"

struct hx_weights {
  std::shared_ptr<hexpert::ExpertWeights> weights;
};

struct hx_moe {
  std::shared_ptr<const hexpert::ExpertWeights> weights;  // before the layer that refers to them
  hexpert::RoutedMoe layer;
  std::string plan;
};

namespace hexpert::capi {

// Keeps the text of a failure for hx_last_error(). Without memory for it, "out of memory".
void set_last_error(const Status& status);
void set_last_error_out_of_memory() noexcept;

// Runs `function`, which returns a Status.
template <typename Function>
hx_status call(const Function& function) noexcept {
  try {
    const Status status = function();
    if (!status.ok()) set_last_error(status);
    return static_cast<hx_status>(status.code());
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  set_last_error_out_of_memory();
  return HX_OUT_OF_MEMORY;
}

inline Status require(const char* name, const void* pointer) {
  if (pointer != nullptr) return {};
  return {ErrorCode::kNullPointer, fmt::format("{}: expected a pointer, got null", name)};
}

// A struct whose size says that it is of this version. A version that appends members takes the
// sizes before it as well.
template <typename Struct>
Result<Struct> read(const char* name, const Struct* given) {
  HX_RETURN_IF_ERROR(require(name, given));
  if (given->size != sizeof(Struct)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}.size: expected {} (start from the ..._INIT of hexpert.h), got {}",
                              name,
                              sizeof(Struct),
                              given->size));
  }
  return *given;
}
template <typename Struct>
Result<Struct> read_or(const char* name, const Struct* given, const Struct& defaults) {
  if (given == nullptr) return defaults;
  return read(name, given);
}

inline std::string string_of(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

// A packed tensor in memory of `device`.
Result<TensorView> packed(const char* name,
                          const char* wanted,
                          const DLTensor* tensor,
                          std::initializer_list<DType> accepted,
                          const Device& device = Device::cpu());

// Memory of exactly `count` bytes; `scales` may also be e4m3.
Result<uint8_t*> bytes(const char* name,
                       const DLTensor* tensor,
                       int64_t count,
                       bool scales,
                       const Device& device = Device::cpu());
// Memory of exactly `count` f32.
Result<float*> floats(const char* name,
                      const DLTensor* tensor,
                      int64_t count,
                      const Device& device = Device::cpu());

}  // namespace hexpert::capi

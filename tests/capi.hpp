// DLPack tensors and handles for tests of the C ABI.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "hexpert/hexpert.h"

namespace hexpert::test {

inline constexpr DLDataType kBf16 = {kDLBfloat, 16, 1};
inline constexpr DLDataType kF32 = {kDLFloat, 32, 1};
inline constexpr DLDataType kF64 = {kDLFloat, 64, 1};
inline constexpr DLDataType kU8 = {kDLUInt, 8, 1};
inline constexpr DLDataType kI32 = {kDLInt, 32, 1};
inline constexpr DLDataType kI64 = {kDLInt, 64, 1};

// A DLTensor with room for its shape and strides.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  DLTensor dl{};

  Tensor(const void* data,
         DLDataType dtype,
         std::vector<int64_t> extents,
         DLDevice device = {kDLCPU, 0})
      : shape(std::move(extents)) {
    dl.data = const_cast<void*>(data);
    dl.device = device;
    dl.ndim = static_cast<int32_t>(shape.size());
    dl.dtype = dtype;
    dl.shape = shape.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  void set_strides(std::vector<int64_t> values) {
    strides = std::move(values);
    dl.strides = strides.data();
  }
  const DLTensor* operator&() const { return &dl; }  // NOLINT(google-runtime-operator)
};

struct Weights {
  hx_weights* handle = nullptr;
  ~Weights() { hx_weights_free(handle); }
};
struct Moe {
  hx_moe* handle = nullptr;
  ~Moe() { hx_moe_free(handle); }
};

}  // namespace hexpert::test

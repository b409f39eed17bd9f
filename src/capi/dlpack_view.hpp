// DLPack tensors as views, for the C ABI and the Python module.
#pragma once

#include <cstdint>
#include <string>

#include "hexpert/dlpack.h"
#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert {

// "[4, 48] f64", for element types without a DType too.
std::string describe(const DLTensor& tensor);
// "cpu", "cuda:0", "device type 8".
std::string describe(const DLDevice& device);

// kDeviceMismatch for devices that hexpert has no name for.
Result<Device> device_of(const char* name, const DLDevice& device);

// The view of `tensor`, an argument called `name` of which `wanted` are the accepted element types.
//
// Shapes are checked as far as reading them needs; whatever depends on the operation is left to it.
// Returns kNullPointer, kInvalidShape (rank over kMaxRank, negative extent, 64-bit overflow),
// kInvalidDtype, kDeviceMismatch.
Result<TensorView> view_of(const char* name, const char* wanted, const DLTensor* tensor);

// A tensor without elements is packed, whatever its strides: numpy gives zeros there.
void pack_if_empty(TensorView& view);

}  // namespace hexpert

// Argument checks of the quantizers. Every message names the argument, what it must be, what it is.
#pragma once

#include <cstdint>

#include "hexpert/format.hpp"
#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert {

inline constexpr int64_t kBf16Alignment = 16;
inline constexpr int64_t kScaleAlignment = 16;
inline constexpr int64_t kCodesAlignment = 32;
inline constexpr int64_t kOuterAlignment = 4;
inline constexpr int64_t kNoAlignment = 1;

// A pointer to `bytes` bytes: not null unless there are none, and aligned.
Status check_pointer(const char* name, const void* pointer, int64_t bytes, int64_t alignment);

// A BF16 matrix on `device` with strided rows; no dimension of 0 unless `rows_may_be_zero`.
Status check_bf16_matrix(const char* name,
                         const ConstTensorView& view,
                         bool rows_may_be_zero,
                         const Device& device = {});

// rows * cols fits in 64 bits, cols is a multiple of 16, and the three pointers are there.
Status check_nvfp4(const char* name, const ConstNvfp4View& view, bool aligned);

// Of a quantizer's arguments that passed the checks above: the three parts of `out` lie apart from
// each other and from `input`, all of it from its first to its last element.
Status check_quantize_overlap(const char* name, const ConstTensorView& input, const Nvfp4View& out);

// Likewise `out` from the three parts of `in`, which are only read and may overlap.
Status check_dequantize_overlap(const ConstNvfp4View& in, const TensorView& out);

inline ConstNvfp4View as_const(const Nvfp4View& v) {
  return {v.codes, v.block_scales, v.outer, v.rows, v.cols, v.per_row, v.scale_layout};
}

}  // namespace hexpert

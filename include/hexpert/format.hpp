// NVFP4: constants, storage views and sizes. docs/format.md states the bytes.
#pragma once

#include <cstdint>

namespace hexpert {

inline constexpr int64_t kBlockSize = 16;         // consecutive K elements that share a block scale
inline constexpr float kE2M1Max = 6.0F;           // largest magnitude of an E2M1 code
inline constexpr float kE4M3Max = 448.0F;         // largest finite E4M3 value
inline constexpr float kFullRange = 2688.0F;      // kE2M1Max * kE4M3Max: where amax lands
inline constexpr int64_t kPaddingMultiple = 256;  // canonical hidden and intermediate padding

/// Order of E4M3 block scales in memory. docs/format.md section 4.
enum class ScaleLayout : uint8_t {
  kLinear,  // row major [rows, cols / 16]
  k128x4,   // tiles of 128 rows x 4 scale columns, as block-scaled MMA and cuBLAS want them
  k8x4,     // tiles of 8 rows x 4 scale columns
};

/// Bytes of a block-scale buffer, padding included, for `rows` x `cols` elements (cols % 16 == 0).
int64_t block_scale_bytes(ScaleLayout layout, int64_t rows, int64_t cols);

/// `value` rounded up to a multiple of `multiple`.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A quantized matrix in memory of the caller.
///
///   value(r, c) = e2m1(codes[r, c]) * e4m3(block_scales[r, c / 16]) * outer[per_row ? r : 0]
///
/// `outer` is the FP32 decode scale: `alpha` of a weight matrix, `t` of an activation row.
template <typename Byte, typename Float>
struct BasicNvfp4View {
  Byte* codes = nullptr;         // [rows, cols / 2] u8; element 2j in the low nibble of byte j
  Byte* block_scales = nullptr;  // E4M3, one per 16 elements, in `scale_layout`
  Float* outer = nullptr;        // [rows] f32 if per_row, else [1]
  int64_t rows = 0;
  int64_t cols = 0;  // a multiple of 16
  bool per_row = true;
  ScaleLayout scale_layout = ScaleLayout::kLinear;
};
using Nvfp4View = BasicNvfp4View<uint8_t, float>;
using ConstNvfp4View = BasicNvfp4View<const uint8_t, const float>;

}  // namespace hexpert

// Copies one row of an intermediate result into a StageDump array.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "format/codec.hpp"

namespace hexpert {

// A quantized row of k columns, extended to `columns` as the quantizer extends it: codes 0 and
// block scales 0x00, or 0x7F in a poisoned row. Null arrays are skipped.
inline void dump_quantized_row(int64_t row,
                               int64_t columns,
                               const uint8_t* codes,
                               const uint8_t* block_scales,
                               float token_scale,
                               int64_t k,
                               uint8_t* dump_codes,
                               uint8_t* dump_block_scales,
                               float* dump_token_scale) {
  const auto extend = [row](
                          uint8_t* array, int64_t width, const uint8_t* from, int64_t n, int fill) {
    if (array == nullptr) return;
    uint8_t* to = array + row * width;
    std::memcpy(to, from, static_cast<size_t>(std::min(n, width)));
    if (n < width) std::memset(to + n, fill, static_cast<size_t>(width - n));
  };
  extend(dump_codes, columns / 2, codes, k / 2, 0);
  extend(dump_block_scales,
         columns / 16,
         block_scales,
         k / 16,
         std::isnan(token_scale) ? kE4M3Nan : 0);
  if (dump_token_scale != nullptr) dump_token_scale[row] = token_scale;
}

// A BF16 row of n columns, extended with +0.
inline void dump_bf16_row(
    int64_t row, int64_t columns, const uint16_t* from, int64_t n, uint16_t* dump) {
  if (dump == nullptr) return;
  uint16_t* to = dump + row * columns;
  const int64_t copied = std::min(n, columns);
  std::copy_n(from, copied, to);
  std::fill(to + copied, to + columns, uint16_t{0});
}

}  // namespace hexpert

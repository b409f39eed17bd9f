// One row of any length, padded with zeros, through the kernels' quantizer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.hpp"
#include "hexpert/format.hpp"

namespace hexpert::cpu {

// Where contiguous rows, each read for its maximum first, are fetched from: with one row the last lines
// of the next row are still on their way when its maximum is taken (59 % of the read bandwidth, two
// rows 65 %, three or four the same).
inline constexpr int64_t kRowsAhead = 2;

// x[size] -> codes [padded / 2] and scales [padded / 16]; padded is a multiple of 16, >= size.
// `ahead` as in Kernels::quantize_row.
inline void quantize_padded_row(const Kernels& kernels,
                                const uint16_t* x,
                                int64_t size,
                                int64_t padded,
                                const OuterScale& outer,
                                uint8_t* codes,
                                uint8_t* scales,
                                const uint16_t* ahead) {
  int64_t done = size / kBlockSize * kBlockSize;
  kernels.quantize_row(x, done, outer, codes, scales, ahead);
  if (done < size) {
    uint16_t last[kBlockSize] = {};
    std::copy(x + done, x + size, last);
    kernels.quantize_row(
        last, kBlockSize, outer, codes + done / 2, scales + done / kBlockSize, last);
    done += kBlockSize;
  }
  std::memset(codes + done / 2, 0, static_cast<size_t>((padded - done) / 2));
  std::memset(scales + done / kBlockSize,
              outer.poisoned ? kE4M3Nan : 0,
              static_cast<size_t>((padded - done) / kBlockSize));
}

}  // namespace hexpert::cpu

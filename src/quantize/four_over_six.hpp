// The "four over six" block quantizer. docs/format.md section 3.
#pragma once

#include <cstdint>

#include "hexpert/quantize.hpp"
#include "quantize/block_quantizer.hpp"

namespace hexpert {

// What all blocks of one row or matrix share.
struct FourOverSixScale {
  OuterScale outer;
  FourOverSix options;
  // The error of a row is taken against fl(q * sf * amax) / full_range, that of a matrix against
  // fl(q * sf) * decode.
  bool per_row = false;
  float amax = 0;
  float full_range = kFullRange;
};

FourOverSixScale four_over_six_scale(const FourOverSix& options, bool per_row, uint16_t amax_bits);

// Quantizes 16 BF16 values to 8 bytes of codes; returns the scale byte.
uint8_t quantize_block(const uint16_t* x, const FourOverSixScale& scale, uint8_t* codes);

}  // namespace hexpert

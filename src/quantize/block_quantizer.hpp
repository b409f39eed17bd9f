// The block quantizer, exact math: the definition, and the oracle of every faster version.
// docs/format.md section 2. One IEEE operation a step: build with -ffp-contract=off, FTZ and DAZ off.
#pragma once

#include <cstdint>

#include "format/codec.hpp"
#include "hexpert/format.hpp"

namespace hexpert {

// Encode scale S, its decode scale fl(1/S), and mult = fl(S * fl(1/6)), of one row or matrix.
struct OuterScale {
  float encode = 1;       // S
  float mult = 0;         // fl(S * fl(1/6))
  float decode = 1;       // d = fl(1/S), used inside the block quantizer
  float stored = 1;       // what is stored: alpha or t
  bool poisoned = false;  // amax is NaN: scales 0x7F, codes 0
};

// amax_bits: maximum over `bits & 0x7FFF` of the BF16 patterns, so NaN wins over infinity, and
// infinity over finite values. `full_range` is 6 * the E4M3 maximum in use.
HX_HOST_DEVICE constexpr OuterScale outer_scale(uint16_t amax_bits,
                                                float stored_for_zero,
                                                float full_range = kFullRange) {
  OuterScale scale;
  if (amax_bits > 0x7F80) {
    const float nan = std::bit_cast<float>(kCanonicalNan);
    return {nan, nan, nan, nan, true};
  }
  if (amax_bits == 0) {
    scale.encode = 1;
    scale.decode = 1;
    scale.stored = stored_for_zero;
  } else {
    const float flt_max = std::bit_cast<float>(kFltMax);
    const float amax = bf16_to_f32(amax_bits);
    float encode = amax_bits == 0x7F80 ? 0.0F : full_range / amax;
    if (encode > flt_max) encode = flt_max;
    if (encode == 0) encode = 1;  // amax was infinite
    scale.encode = encode;
    scale.decode = 1.0F / encode;
    scale.stored = scale.decode;
  }
  scale.mult = scale.encode * std::bit_cast<float>(kOneSixth);
  return scale;
}
HX_HOST_DEVICE constexpr OuterScale token_scale(uint16_t amax_bits) {
  return outer_scale(amax_bits, 0.0F);
}
HX_HOST_DEVICE constexpr OuterScale matrix_scale(uint16_t amax_bits) {
  return outer_scale(amax_bits, 1.0F);
}

// Multiplier of a block's elements, from its stored scale.
HX_HOST_DEVICE constexpr float block_encode(uint8_t scale_code, float decode) {
  const float den = e4m3_value(scale_code) * decode;
  const float flt_max = std::bit_cast<float>(kFltMax);
  if (den == 0) return flt_max;
  const float encode = 1.0F / den;
  return encode > flt_max ? flt_max : encode;
}

// Quantizes 16 BF16 values to 8 bytes of codes; returns the scale byte.
HX_HOST_DEVICE constexpr uint8_t quantize_block(const uint16_t* x,
                                                const OuterScale& outer,
                                                uint8_t* codes) {
  if (outer.poisoned) {
    for (int j = 0; j < 8; ++j)
      codes[j] = 0;
    return kE4M3Nan;
  }
  uint16_t bmax_bits = 0;
  for (int i = 0; i < 16; ++i) {
    const uint16_t magnitude = x[i] & 0x7FFF;
    if (magnitude > bmax_bits) bmax_bits = magnitude;
  }
  const float raw = bf16_to_f32(bmax_bits) * outer.mult;
  const uint8_t scale_code = e4m3_encode(raw);
  const float encode = block_encode(scale_code, outer.decode);
  for (int j = 0; j < 8; ++j) {
    const uint8_t low = e2m1_encode(bf16_to_f32(x[2 * j]) * encode);
    const uint8_t high = e2m1_encode(bf16_to_f32(x[2 * j + 1]) * encode);
    codes[j] = static_cast<uint8_t>(low | high << 4);
  }
  return scale_code;
}

}  // namespace hexpert

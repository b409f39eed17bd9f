// The block quantizer on the GPU: exact math, the bytes of quantize/block_quantizer.hpp.
// Build without contraction, flush-to-zero or approximate division.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "quantize/block_quantizer.hpp"

namespace hexpert::cuda {

// 16 BF16 values, two to a word, the first in the low half.
struct Block {
  uint32_t pairs[8];
};

// Maximum of the magnitudes' bit patterns, as integers: NaN wins over infinity.
__device__ __forceinline__ uint32_t amax_bits(const Block& x) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    amax = __vmaxu2(amax, x.pairs[i] & 0x7FFF7FFFU);
  return max(amax & 0xFFFFU, amax >> 16);
}

// Nearest E2M1 magnitude code of v, ties to even, saturating. v is not NaN.
//
// The codes are consecutive integers in steps of 0.5 below 2, of 1 below 4, of 2 from there on: half
// of the power of two below v, and of 1 where v is less. Adding 2^22 times that power rounds v to
// such a step and leaves the number of steps in the low bits of the sum.
__device__ __forceinline__ uint32_t e2m1_magnitude(float v) {
  constexpr uint32_t kOne = 0x4A800000U;  // 2^22 * 1
  const float a = fminf(fabsf(v), 6.0F);
  const uint32_t magic = max((__float_as_uint(a) & 0x7F800000U) + (22U << 23), kOne);
  const float sum = __fadd_rn(a, __uint_as_float(magic));
  return __float_as_uint(sum) - magic + ((magic - kOne) >> 22);
}

struct QuantizedBlock {
  uint32_t low_codes;   // elements 0..7, 4 bits each, the first lowest
  uint32_t high_codes;  // elements 8..15
  uint8_t scale;
};

__device__ __forceinline__ QuantizedBlock quantize_block(const Block& x, const OuterScale& outer) {
  if (outer.poisoned) return {0, 0, kE4M3Nan};
  const float raw = __fmul_rn(__uint_as_float(amax_bits(x) << 16), outer.mult);
  const auto scale = static_cast<uint8_t>(__nv_cvt_float_to_fp8(raw, __NV_SATFINITE, __NV_E4M3));
  const float encode = block_encode(scale, outer.decode);
  QuantizedBlock q = {0, 0, scale};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float even = __fmul_rn(__uint_as_float(x.pairs[i] << 16), encode);
    const float odd = __fmul_rn(__uint_as_float(x.pairs[i] & 0xFFFF0000U), encode);
    const uint32_t codes = e2m1_magnitude(even) | (x.pairs[i] >> 12 & 8) |
                           (e2m1_magnitude(odd) | (x.pairs[i] >> 28 & 8)) << 4;
    (i < 4 ? q.low_codes : q.high_codes) |= codes << (8 * (i % 4));
  }
  return q;
}

// 8 codes -> FP16 e2m1 * e4m3, exactly. FP16 whose exponent and mantissa bits start with a
// magnitude code is code * 2^-14; the product with the scale is a multiple of 2^-24.
__device__ __forceinline__ uint4 expand_codes(uint32_t codes, uint8_t scale) {
  const __half2_raw raw_scale =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(scale | scale << 8), __NV_E4M3);
  // 2^14 is applied to the codes: 448 * 2^14 is beyond FP16.
  const __half2 lift = __float2half2_rn(16384.0F);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = codes >> (8 * i);
    const uint32_t bits =
        (two & 7) << 9 | (two & 8) << 12 | (two & 0x70) << 21 | (two & 0x80) << 24;
    const __half2 value =
        __hmul2(__hmul2(*reinterpret_cast<const __half2*>(&bits), lift), __half2(raw_scale));
    pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

}  // namespace hexpert::cuda

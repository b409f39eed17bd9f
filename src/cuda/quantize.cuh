// The block quantizer on the GPU: exact math, the bytes of quantize/block_quantizer.hpp.
// Build without contraction, flush-to-zero or approximate division.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "quantize/block_quantizer.hpp"

namespace hexpert::cuda {

// BF16 values, two to a word, the first in the low half.
template <int kPairs>
struct Values {
  uint32_t pairs[kPairs];
};

// Values `first`, `first` + 1, ... of a row of `cols`; zeros past its end.
template <int kPairs>
__device__ __forceinline__ Values<kPairs> load_values(const uint16_t* row,
                                                      int64_t first,
                                                      int64_t cols) {
  Values<kPairs> x;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t col = first + 2 * i;
    const uint32_t even = col < cols ? row[col] : 0;
    const uint32_t odd = col + 1 < cols ? row[col + 1] : 0;
    x.pairs[i] = even | odd << 16;
  }
  return x;
}

// Maxima of the even and of the odd values' magnitudes, as bit patterns: NaN wins over infinity.
template <int kPairs>
__device__ __forceinline__ uint32_t amax_of_halves(const Values<kPairs>& x) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    amax = __vmaxu2(amax, x.pairs[i] & 0x7FFF7FFFU);
  return amax;
}
__device__ __forceinline__ uint16_t larger_half(uint32_t halves) {
  return static_cast<uint16_t>(max(halves & 0xFFFFU, halves >> 16));
}

// |v| rounded to the steps of E2M1, ties to even; those above 6 go on past it, without an end. v is
// not NaN.
//
// E2M1 goes in steps of 0.5 below 2, of 1 below 4, of 2 from there on: half of the power of two below
// v, and of 1 where v is less. Adding 2^22 times that power rounds v to such a step; where there is no
// such power, v is so large that adding what wraps around changes nothing.
__device__ __forceinline__ float in_e2m1_steps(float v) {
  constexpr uint32_t kOne = 0x4A800000U;  // 2^22 * 1
  const float magic = __uint_as_float(max((__float_as_uint(v) & 0x7F800000U) + (22U << 23), kOne));
  return __fsub_rn(__fadd_rn(fabsf(v), magic), magic);
}

// The scale of a block with largest magnitude `amax`: its E4M3 code, and the multiplier of the block's
// values. Those of a poisoned row must be zeros: the scale is NaN all the same.
__device__ __forceinline__ uint8_t block_scale_code(uint16_t amax, const OuterScale& outer) {
  const float raw = __fmul_rn(bf16_to_f32(amax), outer.mult);
  return static_cast<uint8_t>(__nv_cvt_float_to_fp8(raw, __NV_SATFINITE, __NV_E4M3));
}
__device__ __forceinline__ float block_encode(__half scale, const OuterScale& outer) {
  // The reciprocal of zero is infinite, that of NaN is dropped by the minimum.
  const float reciprocal = __frcp_rn(__fmul_rn(__half2float(scale), outer.decode));
  return fminf(reciprocal, __uint_as_float(kFltMax));
}
__device__ __forceinline__ __half e4m3_to_half(uint8_t code) {
  return __half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3));
}

struct BlockScale {
  uint8_t code;
  __half value;
  float encode;
};
__device__ __forceinline__ BlockScale block_scale(uint16_t amax, const OuterScale& outer) {
  const uint8_t code = block_scale_code(amax, outer);
  const __half value = e4m3_to_half(code);
  return {code, value, block_encode(value, outer)};
}

// E2M1 values in FP16, two to a word.
template <int kPairs>
__device__ __forceinline__ Values<kPairs> quantize_values(const Values<kPairs>& x, float encode) {
  Values<kPairs> q;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float even = __fmul_rn(__uint_as_float(x.pairs[i] << 16), encode);
    const float odd = __fmul_rn(__uint_as_float(x.pairs[i] & 0xFFFF0000U), encode);
    const __half2 steps = __floats2half2_rn(in_e2m1_steps(even), in_e2m1_steps(odd));
    const __half2 magnitudes = __hmin2(steps, __float2half2_rn(6.0F));
    q.pairs[i] = *reinterpret_cast<const uint32_t*>(&magnitudes) | (x.pairs[i] & 0x80008000U);
  }
  return q;
}

template <int kPairs>
__device__ __forceinline__ Values<kPairs> times(const Values<kPairs>& q, __half factor) {
  Values<kPairs> product;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const __half2 value =
        __hmul2(*reinterpret_cast<const __half2*>(&q.pairs[i]), __half2half2(factor));
    product.pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
  return product;
}

// E2M1 values times 2^-14 are their codes: of 16 bits the highest is the sign, and bits 11..9 are the
// magnitude code.
template <int kPairs>
__device__ __forceinline__ Values<kPairs> spread_codes(const Values<kPairs>& q) {
  return times(q, __float2half(0x1p-14F));
}

// Eight codes of 4 bits, the first lowest.
__device__ __forceinline__ uint32_t pack_codes(const Values<4>& q) {
  const Values<4> spread = spread_codes(q);
  // Their high bytes, first of all eight in order, then of the even and of the odd ones.
  const uint32_t low = __byte_perm(spread.pairs[0], spread.pairs[1], 0x7531);
  const uint32_t high = __byte_perm(spread.pairs[2], spread.pairs[3], 0x7531);
  const uint32_t even = __byte_perm(low, high, 0x6420);
  const uint32_t odd = __byte_perm(low, high, 0x7531);
  const auto select = [](uint32_t mask, uint32_t x, uint32_t y) {
    return (x & mask) | (y & ~mask);
  };
  return select(
      0x0F0F0F0FU, select(0x08080808U, even >> 4, even >> 1), select(0x80808080U, odd, odd << 3));
}

}  // namespace hexpert::cuda

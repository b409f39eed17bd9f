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

// Nearest E2M1 magnitude, ties to even, saturating. v is not NaN.
//
// E2M1 goes in steps of 0.5 below 2, of 1 below 4, of 2 from there on: half of the power of two below
// v, and of 1 where v is less. Adding 2^22 times that power rounds v to such a step.
__device__ __forceinline__ float nearest_e2m1(float v) {
  constexpr uint32_t kOne = 0x4A800000U;  // 2^22 * 1
  const float a = fminf(fabsf(v), 6.0F);
  const float magic = __uint_as_float(max((__float_as_uint(a) & 0x7F800000U) + (22U << 23), kOne));
  return __fsub_rn(__fadd_rn(a, magic), magic);
}

// The scale of a block with largest magnitude `amax`, and the multiplier of its values. Those of a
// poisoned row must be zeros: the scale is NaN all the same.
struct BlockScale {
  uint8_t code;
  __half value;
  float encode;
};
__device__ __forceinline__ BlockScale block_scale(uint16_t amax, const OuterScale& outer) {
  BlockScale scale;
  const float raw = __fmul_rn(bf16_to_f32(amax), outer.mult);
  scale.code = static_cast<uint8_t>(__nv_cvt_float_to_fp8(raw, __NV_SATFINITE, __NV_E4M3));
  scale.value = __half(__nv_cvt_fp8_to_halfraw(scale.code, __NV_E4M3));
  // The reciprocal of zero is infinite, that of NaN is dropped by the minimum.
  const float reciprocal = __frcp_rn(__fmul_rn(__half2float(scale.value), outer.decode));
  scale.encode = fminf(reciprocal, __uint_as_float(kFltMax));
  return scale;
}

// E2M1 values in FP16, two to a word.
template <int kPairs>
__device__ __forceinline__ Values<kPairs> quantize_values(const Values<kPairs>& x, float encode) {
  Values<kPairs> q;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float even = __fmul_rn(__uint_as_float(x.pairs[i] << 16), encode);
    const float odd = __fmul_rn(__uint_as_float(x.pairs[i] & 0xFFFF0000U), encode);
    const __half2 magnitudes = __floats2half2_rn(nearest_e2m1(even), nearest_e2m1(odd));
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
  // Four codes in the low nibbles of bytes, then two in a byte.
  const auto pack = [](uint32_t first, uint32_t second) {
    const uint32_t high = __byte_perm(first, second, 0x7531);
    const uint32_t nibbles = (high >> 4 & 0x08080808U) | (high >> 1 & 0x07070707U);
    return nibbles | nibbles >> 4;
  };
  return __byte_perm(
      pack(spread.pairs[0], spread.pairs[1]), pack(spread.pairs[2], spread.pairs[3]), 0x6420);
}

}  // namespace hexpert::cuda

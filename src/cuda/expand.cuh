// Packed weight fragments -> FP16 operands of the tensor cores, exactly.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx.cuh"

namespace hexpert::cuda {

// The operands are E2M1 * 2^-14 * E4M3; this takes the power of two back.
constexpr float kUnscale = 16384.0F;
// Bytes of 16 rows x 64 k.
constexpr int kSlabCodes = 512;
constexpr int kSlabScales = 64;

// What a thread needs of 16 rows x 64 k: four words of codes, eight scales.
struct Packed {
  uint4 words;
  uint2 scales;
};

__device__ __forceinline__ Packed load_packed(const uint8_t* codes,
                                              const uint8_t* scales,
                                              int lane) {
  return {reinterpret_cast<const uint4*>(codes)[lane],
          reinterpret_cast<const uint2*>(scales)[lane / 4]};
}

// 8 codes and the scales of their two rows -> the four registers of a wgmma operand. E2M1 times 2^-14 has
// its sign in bit 15 of FP16 and its magnitude in bits 11..9: a byte of the word holds one code in those bits
// of a high byte, and the other in the rest. The shifts to the left are multiplications, on another pipe
// than the logic.
__device__ __forceinline__ void expand(uint32_t word, __half2 scales, uint32_t (&a)[4]) {
  const __half2 upper = __low2half2(scales);
  const __half2 lower = __high2half2(scales);
  const auto times = [](uint32_t codes, __half2 scale) {
    const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&codes), scale);
    return *reinterpret_cast<const uint32_t*>(&product);
  };
  constexpr uint32_t kCode = 0x8E008E00U;
  const uint32_t others = ptx::select_bits(0x80808080U, word << 7, word >> 3);
  a[0] = times((word << 8) & kCode, upper);
  a[1] = times(word & kCode, lower);
  a[2] = times((others << 8) & kCode, upper);
  a[3] = times(others & kCode, lower);
}

// Steps kFirst .. kFirst + kSteps - 1 of the four 16-k steps of a span.
template <int kFirst, int kSteps>
__device__ __forceinline__ void expand(const Packed& packed, uint32_t (&a)[kSteps][4]) {
  const uint32_t words[4] = {packed.words.x, packed.words.y, packed.words.z, packed.words.w};
  __half2 scales[4];
  ptx::e4m3_to_half(packed.scales.x, scales[0], scales[1]);
  ptx::e4m3_to_half(packed.scales.y, scales[2], scales[3]);
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    expand(words[kFirst + i], scales[kFirst + i], a[i]);
}

}  // namespace hexpert::cuda

// E2M1, E4M3, BF16 and FP16 codecs, bit exact, one source for host and device.
// docs/format.md sections 1 and 2.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HX_HOST_DEVICE __host__ __device__
#else
#define HX_HOST_DEVICE
#endif

namespace hexpert {

inline constexpr uint8_t kE4M3Nan = 0x7F;
inline constexpr uint8_t kE4M3MaxCode = 0x7E;  // 448
inline constexpr uint32_t kCanonicalNan = 0x7FC00000;
inline constexpr uint32_t kOneSixth = 0x3E2AAAAB;  // fl(1/6), rounded up
inline constexpr uint32_t kFltMax = 0x7F7FFFFF;
inline constexpr uint32_t kPerTokenGlobalScale = 0x39C30C31;  // fl(1 / 2688)

// --- E2M1: bit 3 sign, bits 2..0 magnitude ---

// Twice the value: an integer in -12..12. Code 8 (-0) gives 0.
HX_HOST_DEVICE constexpr int e2m1_doubled(unsigned code) {
  const unsigned magnitude = code & 7;
  const int doubled = magnitude < 4
                          ? static_cast<int>(magnitude)
                          : static_cast<int>((2 + (magnitude & 1)) << (magnitude / 2 - 1));
  return (code & 8) != 0 ? -doubled : doubled;
}

HX_HOST_DEVICE constexpr float e2m1_value(unsigned code) {
  const float magnitude = 0.5F * static_cast<float>(e2m1_doubled(code & 7));
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// Nearest E2M1, ties to the even code, saturating; the sign bit of v is kept for zeros too.
HX_HOST_DEVICE constexpr uint8_t e2m1_encode(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const float a = std::bit_cast<float>(bits & 0x7FFFFFFFU);
  const unsigned magnitude = static_cast<unsigned>(a > 0.25F) + static_cast<unsigned>(a >= 0.75F) +
                             static_cast<unsigned>(a > 1.25F) + static_cast<unsigned>(a >= 1.75F) +
                             static_cast<unsigned>(a > 2.5F) + static_cast<unsigned>(a >= 3.5F) +
                             static_cast<unsigned>(a > 5.0F);
  return static_cast<uint8_t>(magnitude | (bits >> 31 << 3));
}

// --- E4M3 "fn": sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity ---

HX_HOST_DEVICE constexpr float e4m3_value(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7F;
  if (magnitude == kE4M3Nan) return std::bit_cast<float>(kCanonicalNan | sign);
  if (magnitude < 8) {  // subnormal: a multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0.001953125F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120U << 23)));
}

// A finite E4M3 value in units of 2^-9: an integer up to 229376.
HX_HOST_DEVICE constexpr int32_t e4m3_multiple(uint8_t code) {
  const int32_t exponent = (code >> 3) & 15;
  const int32_t mantissa = code & 7;
  const int32_t magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Nearest E4M3, ties to even, saturating at 448; NaN gives 0x7F.
HX_HOST_DEVICE constexpr uint8_t e4m3_encode(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return kE4M3Nan;
  if (magnitude >= 0x43E00000U) return static_cast<uint8_t>(sign | kE4M3MaxCode);  // 448
  if (magnitude < 0x3C800000U) {  // below 2^-6: adding 2^14 leaves a multiple of 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 16384.0F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000U));
  }
  const uint32_t rounded = magnitude + 0x7FFFFU + (magnitude >> 20 & 1);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120U << 3)));
}

// --- BF16 and FP16 bit patterns ---

HX_HOST_DEVICE constexpr float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Nearest BF16, ties to even; NaN stays NaN (quiet, canonical payload, sign kept).
HX_HOST_DEVICE constexpr uint16_t bf16_from_f32(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>(bits >> 31 << 15 | 0x7FC0U);
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1)) >> 16);
}

HX_HOST_DEVICE constexpr float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFFU;
  if (magnitude >= 0x7C00U) {
    return std::bit_cast<float>(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
  }
  if (magnitude < 0x400U) {
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8F;  // 2^-24
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
}

}  // namespace hexpert

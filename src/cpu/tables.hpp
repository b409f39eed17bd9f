// Look-up tables of the integer kernels.
#pragma once

#include <array>
#include <cstdint>

#include "format/codec.hpp"

namespace hexpert::cpu {

// f(code) for the 16 E2M1 codes, repeated to 64 entries: a byte permute that reads six index bits
// then ignores what lies above the nibble.
template <typename T, typename Function>
constexpr std::array<T, 64> repeat_codes(Function f) {
  std::array<T, 64> table{};
  for (size_t i = 0; i < 64; ++i)
    table[i] = static_cast<T>(f(static_cast<unsigned>(i % 16)));
  return table;
}

// Weights: 2w + 12, so 0..24, unsigned.
alignas(64) inline constexpr std::array<uint8_t, 64> kDoubledPlus12 =
    repeat_codes<uint8_t>([](unsigned code) { return e2m1_doubled(code) + 12; });
// Activations: 2a, so -12..12.
alignas(64) inline constexpr std::array<int8_t, 64> kDoubled =
    repeat_codes<int8_t>([](unsigned code) { return e2m1_doubled(code); });

// Values of the 256 E4M3 codes.
inline constexpr std::array<float, 256> kE4M3Values = [] {
  std::array<float, 256> table{};
  for (size_t i = 0; i < 256; ++i)
    table[i] = e4m3_value(static_cast<uint8_t>(i));
  return table;
}();

// The same for the tokens of the integer GEMMs that read weight scales as FP16 bits (2^-8 of their
// value). Codes are doubled on both sides (4). A power of two here changes no bit of a sum.
inline constexpr std::array<float, 256> kTokenScales = [] {
  std::array<float, 256> table = kE4M3Values;
  for (float& value : table) {
    if (value == value) value *= 256.0F / 4.0F;  // arithmetic with NaN is no constant expression
  }
  return table;
}();

// Distance at which the weight stream of a group is prefetched into L2, in records of cpu_tiles. Past
// its end a kernel goes on where it reads next. A core alone keeps too few loads in flight for DRAM:
// 1.5x over none at one token, measured with two streams.
inline constexpr int64_t kPrefetchRecords = 8;

}  // namespace hexpert::cpu

// Any CPU: the same steps as the vector kernels, one lane at a time. Built without automatic
// vectorization, so that "scalar" keeps one meaning.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/kernels.hpp"
#include "cpu/tables.hpp"
#include "format/layout.hpp"
#include "moe/activation.hpp"

namespace hexpert::cpu {
namespace {

namespace tiles = layout::cpu_tiles;
using tiles::kStripRows;

struct Vec {
  using F = float;
  using I = int32_t;
  static constexpr int kLanes = 1;
  static constexpr int kTogether = 1;
  static F load(const float* p) { return *p; }
  static void store(float* p, F v) { *p = v; }
  static F set1(float v) { return v; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F abs(F v) { return std::fabs(v); }
  // The second operand when either is NaN.
  static F max_or_second(F a, F b) { return a > b ? a : b; }
  static F min_or_second(F a, F b) { return a < b ? a : b; }
  static F if_negative(F v, F yes, F no) { return std::signbit(v) ? yes : no; }
  static I subtract_bits(F v, int32_t bits) {
    return static_cast<I>(std::bit_cast<uint32_t>(v) - static_cast<uint32_t>(bits));
  }
  static I quarter(I n) { return n >> 2; }
  static I minus_3_times(I n, I q) {
    return static_cast<I>(static_cast<uint32_t>(n) - 3 * static_cast<uint32_t>(q));
  }
  static F pow2(I n) { return std::bit_cast<float>((static_cast<uint32_t>(n) + 127U) << 23); }
  static F load_bf16(const uint16_t* p) { return bf16_to_f32(*p); }
  static void store_bf16(uint16_t* p, F v) { *p = bf16_from_f32(v); }
  static void store_bf16(uint16_t* p, F low, F high) {
    p[0] = bf16_from_f32(low);
    p[1] = bf16_from_f32(high);
  }
};

#include "cpu/epilogue.inl"
#include "cpu/quantize_scalar.inl"

void expand_tile(const Nvfp4Row* rows, int64_t m, int64_t k, uint8_t* tile) {
  constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  for (int64_t b = 0; b < k / kBlockSize; ++b, tile += kTileBlockBytes * m) {
    auto* codes = reinterpret_cast<int8_t*>(tile);
    auto* start = reinterpret_cast<int32_t*>(tile + 16 * m);
    auto* scale = reinterpret_cast<float*>(tile + 20 * m);
    for (int64_t t = 0; t < m; ++t) {
      int32_t sum = 0;
      for (int i = 0; i < 16; ++i) {
        const int64_t element = 16 * b + i / 8 * 8 + kOrder[i % 8];
        const int8_t value = kDoubled[rows[t].codes[element / 2] >> (element % 2 * 4) & 15];
        codes[16 * t + i] = value;
        sum += value;
      }
      start[t] = kMagicBits - 12 * sum;
      scale[t] = kE4M3Values[rows[t].scales[b]] * 0.25F;
    }
  }
}

constexpr int64_t kWidestTile = 4;

void gemm_group(const uint8_t* group, int64_t k, const uint8_t* tile, int64_t m, float* c) {
  constexpr int kShift[4] = {0, 4, 0, 4};
  float acc[kWidestTile][tiles::kGroupRows] = {};
  for (int64_t b = 0; b < k / kBlockSize; ++b, tile += kTileBlockBytes * m) {
    const uint8_t* chunks = group + b / 4 * tiles::kRecordBytes + b % 4 * 128;
    const uint8_t* scales = group + tiles::scale_offset(0, b);
    const auto* codes = reinterpret_cast<const int8_t*>(tile);
    const auto* start = reinterpret_cast<const int32_t*>(tile + 16 * m);
    const auto* scale = reinterpret_cast<const float*>(tile + 20 * m);
    for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
      uint8_t weight[16];
      for (int i = 0; i < 16; ++i) {
        const uint8_t byte = chunks[i / 8 * 64 + 4 * n + i % 4];
        weight[i] = kDoubledPlus12[byte >> kShift[i / 4] & 15];
      }
      const float ws = kE4M3Values[scales[n] & 0x7F];
      for (int64_t t = 0; t < m; ++t) {
        int32_t sum = start[t];
        for (int i = 0; i < 16; ++i)
          sum += weight[i] * codes[16 * t + i];
        const float term = std::fma(std::bit_cast<float>(sum), ws, -kMagic * ws);
        acc[t][n] = std::fma(term, scale[t], acc[t][n]);
      }
    }
  }
  for (int64_t t = 0; t < m; ++t) {
    std::copy_n(acc[t], tiles::kGroupRows, c + t * kStripRows);
  }
}

void gemm_tile(const uint8_t* strip, int64_t k, const uint8_t* tile, int64_t m, float* c) {
  for (int64_t row = 0; row < kStripRows; row += tiles::kGroupRows)
    gemm_group(strip + tiles::matrix_bytes(row, k), k, tile, m, c + row);
}

#include "cpu/gemm_int_dispatch.inl"

constexpr Kernels kTable = {"scalar",
                            amax_bits,
                            quantize_row,
                            pack_group,
                            kWidestTile,
                            expand_int,
                            gemm_int,
                            activate,
                            round_routes,
                            combine};

}  // namespace

const Kernels* scalar_kernels() {
  return &kTable;
}

}  // namespace hexpert::cpu

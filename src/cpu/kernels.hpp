// The functions that differ between instruction sets, one table per ISA. Results are the same bits
// in every table: block sums are exact integers, FP32 steps come in one order. (AMX is apart: it
// adds in the order of the tile unit; gemm_amx.hpp.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "hexpert/moe.hpp"
#include "quantize/block_quantizer.hpp"

namespace hexpert::cpu {

// One quantized activation row: packed codes, linear E4M3 scales.
struct Nvfp4Row {
  const uint8_t* codes = nullptr;   // [k / 2]
  const uint8_t* scales = nullptr;  // [k / 16]
};

// The activations of one expert for the integer GEMM: tokens in tiles of nearly equal width, at most
// the kernel's widest; a tile is block after block of 16 k, one block of an m-token tile 24 m bytes:
//     int8 codes[m][16]  doubled E2M1, in the order of cpu_tiles: k = 0 4 1 5 2 6 3 7, then + 8
//     int32 start[m]     kMagicBits - 12 * sum(codes of the block)
//     float scale[m]     value of the block's E4M3 scale / 4 (both sides are doubled), and times 2^8
//                        where the kernel reads weight scales as 2^-8 of their value
// Weights enter as 2w + 12 (unsigned), so the block sum starts at -12 * sum(codes). Started from
// the bits of kMagic as well, the int32 sum read as FP32 is kMagic + sum: no conversion is needed,
// and with w the weights' block scale fma(that, w, -kMagic * w) is sum * w exactly. That times the
// tokens' scale is exact inside the second FMA, which adds it up.
inline constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23
inline constexpr int32_t kMagicBits = 0x4B400000;
inline constexpr int64_t kTileBlockBytes = 24;  // per token
constexpr int64_t int_tile_bytes(int64_t tokens, int64_t k) {
  return tokens * k / 16 * kTileBlockBytes;
}

// `count` tokens cut into the fewest parts of at most `widest`, nearly equal: decoding the weights
// costs the same for a narrow part as for a wide one.
struct TokenCut {
  int64_t count;
  int64_t parts;
  TokenCut(int64_t count_in, int64_t widest)
      : count(count_in), parts((count_in + widest - 1) / widest) {}
  int64_t begin(int64_t part) const { return part * count / parts; }
  int64_t width(int64_t part) const { return begin(part + 1) - begin(part); }
};

// Tokens that a thread's memory holds results and scales of.
inline constexpr int64_t kMaxPassTokens = 256;

// Most tokens of one pass of the integer GEMM: their tiles are to stay in L2 (1 MiB of it), and
// decoding the weights again for the next pass is to cost little.
constexpr int64_t int_pass_tokens(int64_t k) {
  const int64_t fit = (int64_t{1} << 20) / int_tile_bytes(1, k);
  return std::clamp<int64_t>(fit, 32, kMaxPassTokens);
}

struct Kernels {
  std::string_view name;

  // Maximum over `bits & 0x7FFF` of n BF16 patterns.
  uint16_t (*amax_bits)(const uint16_t* x, int64_t n);
  // n (a multiple of 16) BF16 values -> n / 2 bytes of codes, n / 16 scale bytes. `ahead`: n
  // values that the caller reads soon, fetched meanwhile (any address will do, nothing is read).
  void (*quantize_row)(const uint16_t* x,
                       int64_t n,
                       const OuterScale& outer,
                       uint8_t* codes,
                       uint8_t* scales,
                       const uint16_t* ahead);
  // 16 quantized rows -> one cpu_tiles group. `rows` in order; k a multiple of 64.
  void (*pack_group)(const Nvfp4Row* rows, int64_t k, uint8_t* group);

  int64_t widest_tile;  // of the integer GEMM, in tokens
  // Writes the tiles of `count` rows: int_tile_bytes(count, k).
  void (*expand_int)(const Nvfp4Row* rows, int64_t count, int64_t k, uint8_t* tiles);
  // c[i * 64 + n] = sum over k of row n times token i, for n < 64, i < count. `strip`: four
  // adjacent cpu_tiles groups, 64 rows. `c` is aligned to 64 bytes.
  void (*gemm_int)(const uint8_t* strip, int64_t k, const uint8_t* tiles, int64_t count, float* c);

  // FC1 epilogue of `columns` (32 or 64) rows of weights for `count` routes; row i of `c` has their
  // results:
  //   gated       up of 16 features, gate of the same, and so on -> columns / 2 values
  //   not gated   one of each feature                            -> columns values
  // out[i * stride ...] = bf16(activation(fl(up * up_scale[i]), fl(gate * gate_scale[i]))).
  void (*activate)(const Activation& activation,
                   bool gated,
                   const float* c,
                   int64_t columns,
                   int64_t count,
                   const float* up_scale,
                   const float* gate_scale,
                   uint16_t* out,
                   int64_t stride);
  // FC2 epilogue: out[i * stride + n] = bf16(fl(scale[i] * c[i * columns + n])), n < columns.
  void (*round_routes)(const float* c,
                       int64_t columns,
                       int64_t count,
                       const float* scale,
                       uint16_t* out,
                       int64_t stride);
  // acc = fma(probability[s], route[s][c], acc) in slot order, acc from +0, for columns
  // [begin, end) of one token. Null routes are skipped.
  void (*combine)(const uint16_t* const* routes,
                  const float* probabilities,
                  int64_t slots,
                  int64_t begin,
                  int64_t end,
                  void* out,
                  bool out_is_f32);
};

// Null when this build or this machine has not got the instructions.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_vnni_kernels();
// The best table of this machine, for work that no plan chooses (quantizers, packing).
const Kernels& best_kernels();

// What the processor and the operating system allow.
struct CpuFeatures {
  bool avx2_f16c_fma = false;
  bool avx512_vnni_vbmi = false;  // F, BW, DQ, VL, VBMI, VNNI
  bool amx_bf16 = false;          // with permission for the tile state granted to this process
  std::string_view avx2_missing;  // the first missing feature, or empty
  std::string_view avx512_missing;
  std::string_view amx_missing;
};
const CpuFeatures& cpu_features();

}  // namespace hexpert::cpu

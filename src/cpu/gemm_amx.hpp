// The AMX-BF16 route: weights expanded exactly to BF16 tiles, tdpbf16ps, 32 rows x 32 tokens.
#pragma once

#include <cstdint>

#include "cpu/kernels.hpp"

namespace hexpert::cpu {

// Activations of one expert as AMX tiles: for each 16 tokens and 32 k one tile of 16 rows x 64
// bytes (1 KiB); tiles ordered [ceil(m / 16)][k / 32]. Rows past m are zero. Values are
// E2M1 * E4M3, exact in BF16.
constexpr int64_t amx_tile_bytes(int64_t tokens, int64_t k) {
  return (tokens + 15) / 16 * 16 * k * 2;
}
inline constexpr int64_t kAmxMaxTokens = 256;  // of one pass

struct AmxKernels {
  // Once per thread and forward, before and after the others.
  void (*begin)();
  void (*end)();
  void (*expand)(const Nvfp4Row* rows, int64_t m, int64_t k, uint8_t* tiles);
  // c[i * 32 + n] = sum over k of row n times token i, for n < 32, i < m rounded up to 16.
  // `pair`: two adjacent cpu_tiles groups (32 rows). `scratch`: scratch_bytes, 64-byte aligned,
  // per thread.
  void (*gemm_pair)(
      const uint8_t* pair, int64_t k, const uint8_t* tiles, int64_t m, float* c, uint8_t* scratch);
  int64_t (*scratch_bytes)(int64_t k);
};

// The hardware's, or null without AMX.
const AmxKernels* amx_kernels();
// The same code over a tile unit emulated in plain C++: lets machines without AMX test everything
// but the instructions. Never chosen by a plan.
const AmxKernels& emulated_amx_kernels();

}  // namespace hexpert::cpu

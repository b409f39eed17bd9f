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

// Takes the result of one pair of groups: c[i * 32 + n] is row n times token i.
struct PairSink {
  void* context = nullptr;
  void (*finish)(void* context, int64_t pair, const float* c) = nullptr;
};

struct AmxKernels {
  // Once per thread and forward, before and after the others.
  void (*begin)();
  void (*end)();
  void (*expand)(const Nvfp4Row* rows, int64_t m, int64_t k, uint8_t* tiles);
  // Multiplies `num_pairs` consecutive pairs of cpu_tiles groups (32 rows each) with m tokens; the
  // sink is called once per pair, in order. `c` holds kMaxPassTokens x 32 floats, `panel`
  // panel_bytes, 64-byte aligned, both of the calling thread.
  void (*gemm_pairs)(const uint8_t* pairs,
                     int64_t num_pairs,
                     int64_t k,
                     const uint8_t* tiles,
                     int64_t m,
                     float* c,
                     uint8_t* panel,
                     const PairSink& sink);
  int64_t panel_bytes;
};

// The hardware's, or null without AMX.
const AmxKernels* amx_kernels();
// The same code over a tile unit emulated in plain C++: lets machines without AMX test everything
// but the instructions. Needs AVX-512 with VBMI; null without. Never chosen by a plan.
const AmxKernels* emulated_amx_kernels();

}  // namespace hexpert::cpu

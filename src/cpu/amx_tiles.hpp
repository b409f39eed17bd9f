// The tile unit, in hardware and in plain C++. Tiles 0 to 3 are the results of 32 tokens x 32 rows,
// 4 and 5 the activations of 2 x 16 tokens, 6 and 7 the weights of 2 x 16 rows; each 16 x 64 bytes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format/codec.hpp"

namespace hexpert::cpu {

inline constexpr int64_t kTileBytes = 1024;
inline constexpr int64_t kTileStride = 64;
inline constexpr int64_t kResultStride = 128;  // of c, in bytes: 32 floats

// A 32 x 32 x 32 product in steps, apart so that other work can be placed between them. The
// instructions want literal tile numbers, hence one function a step.
struct HardwareTiles {
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Config) == 64);

#define HX_TILE_FUNCTION \
  static inline __attribute__((always_inline, target("amx-tile,amx-bf16"))) void
// GCC 12's intrinsics do not say that they read memory: a store before them counts as dead when the same
// place is written again after them.
#define HX_LOAD_TILE(instruction, tile, from, stride) \
  asm volatile(instruction " (%0,%1,1), %%tmm" #tile  \
               :                                      \
               : "r"(from),                           \
                 "r"(int64_t{stride}),                \
                 "m"(*reinterpret_cast<const uint8_t(*)[16 * (stride)]>(from)))
  HX_TILE_FUNCTION configure() {
    // GCC 12's intrinsic names only the first bytes of the configuration as its input.
    static const Config config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  HX_TILE_FUNCTION release() {
    _tile_release();
  }
  HX_TILE_FUNCTION zero_first() {
    _tile_zero(0);
    _tile_zero(1);
  }
  HX_TILE_FUNCTION zero_second() {
    _tile_zero(2);
    _tile_zero(3);
  }
  HX_TILE_FUNCTION load_first(const float* c) {
    HX_LOAD_TILE("tileloadd", 0, c, kResultStride);
    HX_LOAD_TILE("tileloadd", 1, c + 16, kResultStride);
  }
  HX_TILE_FUNCTION load_second(const float* c) {
    HX_LOAD_TILE("tileloadd", 2, c, kResultStride);
    HX_LOAD_TILE("tileloadd", 3, c + 16, kResultStride);
  }
  HX_TILE_FUNCTION store_first(float* c) {
    _tile_stored(0, c, kResultStride);
    _tile_stored(1, c + 16, kResultStride);
  }
  HX_TILE_FUNCTION store_second(float* c) {
    _tile_stored(2, c, kResultStride);
    _tile_stored(3, c + 16, kResultStride);
  }
  HX_TILE_FUNCTION exchange_first(float* c, const float* next) {
    _tile_stored(0, c, kResultStride);
    HX_LOAD_TILE("tileloadd", 0, next, kResultStride);
    _tile_stored(1, c + 16, kResultStride);
    HX_LOAD_TILE("tileloadd", 1, next + 16, kResultStride);
  }
  HX_TILE_FUNCTION exchange_second(float* c, const float* next) {
    _tile_stored(2, c, kResultStride);
    HX_LOAD_TILE("tileloadd", 2, next, kResultStride);
    _tile_stored(3, c + 16, kResultStride);
    HX_LOAD_TILE("tileloadd", 3, next + 16, kResultStride);
  }
  HX_TILE_FUNCTION load_weights(const uint8_t* weights) {
    HX_LOAD_TILE("tileloadd", 6, weights, kTileStride);
    HX_LOAD_TILE("tileloadd", 7, weights + kTileBytes, kTileStride);
  }
  // Activations pass L1 by: what is used again is the weights.
  HX_TILE_FUNCTION multiply_00(const uint8_t* activations) {
    HX_LOAD_TILE("tileloaddt1", 4, activations, kTileStride);
    _tile_dpbf16ps(0, 4, 6);
  }
  HX_TILE_FUNCTION multiply_01() {
    _tile_dpbf16ps(1, 4, 7);
  }
  HX_TILE_FUNCTION multiply_10(const uint8_t* activations) {
    HX_LOAD_TILE("tileloaddt1", 5, activations, kTileStride);
    _tile_dpbf16ps(2, 5, 6);
  }
  HX_TILE_FUNCTION multiply_11() {
    _tile_dpbf16ps(3, 5, 7);
  }
#undef HX_LOAD_TILE
#undef HX_TILE_FUNCTION
};

struct EmulatedTiles {
  struct State {
    float result[4][16][16];
    uint16_t operand[4][16][32];  // tiles 4 to 7
  };
  static State& state() {
    static thread_local State tiles;
    return tiles;
  }
  static void configure() { std::memset(&state(), 0xFF, sizeof(State)); }
  static void release() { configure(); }
  static void zero_first() { std::memset(state().result[0], 0, 2 * kTileBytes); }
  static void zero_second() { std::memset(state().result[2], 0, 2 * kTileBytes); }
  static void load_first(const float* c) { copy_in(0, c); }
  static void load_second(const float* c) { copy_in(2, c); }
  static void store_first(float* c) { copy_out(0, c); }
  static void store_second(float* c) { copy_out(2, c); }
  static void exchange_first(float* c, const float* next) {
    store_first(c);
    load_first(next);
  }
  static void exchange_second(float* c, const float* next) {
    store_second(c);
    load_second(next);
  }
  static void load_weights(const uint8_t* weights) {
    std::memcpy(state().operand[2], weights, 2 * kTileBytes);
  }
  static void multiply_00(const uint8_t* activations) {
    std::memcpy(state().operand[0], activations, kTileBytes);
    dot(0, 0, 2);
  }
  static void multiply_01() { dot(1, 0, 3); }
  static void multiply_10(const uint8_t* activations) {
    std::memcpy(state().operand[1], activations, kTileBytes);
    dot(2, 1, 2);
  }
  static void multiply_11() { dot(3, 1, 3); }

 private:
  static void copy_in(int first, const float* c) {
    for (int t = 0; t < 2; ++t) {
      for (int i = 0; i < 16; ++i) {
        std::memcpy(state().result[first + t][i], c + i * 32 + 16 * t, kTileStride);
      }
    }
  }
  static void copy_out(int first, float* c) {
    for (int t = 0; t < 2; ++t) {
      for (int i = 0; i < 16; ++i) {
        std::memcpy(c + i * 32 + 16 * t, state().result[first + t][i], kTileStride);
      }
    }
  }
  // tdpbf16ps: even and odd k summed apart, then added to the result.
  static void dot(int to, int a, int b) {
    State& s = state();
    for (int i = 0; i < 16; ++i) {
      for (int n = 0; n < 16; ++n) {
        float even = 0;
        float odd = 0;
        for (int k = 0; k < 16; ++k) {
          even = std::fma(
              bf16_to_f32(s.operand[a][i][2 * k]), bf16_to_f32(s.operand[b][k][2 * n]), even);
          odd = std::fma(bf16_to_f32(s.operand[a][i][2 * k + 1]),
                         bf16_to_f32(s.operand[b][k][2 * n + 1]),
                         odd);
        }
        s.result[to][i][n] += even + odd;
      }
    }
  }
};

}  // namespace hexpert::cpu

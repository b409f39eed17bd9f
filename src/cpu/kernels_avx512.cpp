// AVX-512 with VBMI and VNNI: integer GEMM on vpdpbusd.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/kernels.hpp"
#include "cpu/tables.hpp"
#include "format/layout.hpp"
#include "moe/activation.hpp"

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,f16c")
#endif

namespace hexpert::cpu {
namespace {

namespace tiles = layout::cpu_tiles;
using tiles::kPairRows;

struct Vec {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F abs(F v) { return _mm512_abs_ps(v); }
  // The second operand when either is NaN.
  static F max_or_second(F a, F b) { return _mm512_max_ps(a, b); }
  static F min_or_second(F a, F b) { return _mm512_min_ps(a, b); }
  static F if_negative(F v, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(v)), no, yes);
  }
  static I subtract_bits(F v, int32_t bits) {
    return _mm512_sub_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(bits));
  }
  static I quarter(I n) { return _mm512_srai_epi32(n, 2); }
  static I minus_3_times(I n, I q) {
    return _mm512_sub_epi32(n, _mm512_add_epi32(q, _mm512_add_epi32(q, q)));
  }
  static F pow2(I n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  }
  static F load_bf16(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static void store_bf16(uint16_t* p, F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF))), 16);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
    rounded = _mm512_mask_or_epi32(
        rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), sign, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
  }
};

#include "cpu/epilogue.inl"
#include "cpu/quantize_avx512.inl"

// E4M3 bytes read as FP16 after a shift: exactly 2^-8 times their value, subnormals included.
inline __m512 scales_f32(const uint8_t* scales) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
}

void expand_tile(const Nvfp4Row* rows, int m, int64_t k, uint8_t* tile) {
  const __m512i table = _mm512_load_si512(kDoubled.data());
  // Bit offsets of nibbles 0 4 1 5 2 6 3 7 in each 32 bits of codes.
  const __m512i pick = _mm512_set1_epi64(0x1C0C18081404'1000);
  const __m512i ones = _mm512_set1_epi8(1);
  const int64_t block_bytes = kTileBlockBytes * m;
  for (int t = 0; t < m; ++t) {
    uint8_t* block = tile;
    for (int64_t span = 0; span < k / tiles::kSpan; ++span) {
      const __m256i codes =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[t].codes + 32 * span));
      const __m512i nibbles = _mm512_multishift_epi64_epi8(pick, _mm512_cvtepu32_epi64(codes));
      const __m512i values = _mm512_permutexvar_epi8(nibbles, table);
      __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, values);
      sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
      sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
      alignas(64) int32_t sum[16];
      alignas(64) int8_t value[64];
      _mm512_store_si512(sum, sums);
      _mm512_store_si512(value, values);
      for (int b = 0; b < 4; ++b, block += block_bytes) {
        const float scale = kE4M3Values[rows[t].scales[4 * span + b]];
        std::memcpy(block + 16 * t, value + 16 * b, 16);
        auto* words = reinterpret_cast<int32_t*>(block + 16 * m);
        words[t] = kMagicBits - 12 * sum[4 * b];
        auto* factors = reinterpret_cast<float*>(block + 20 * m);
        factors[t] = scale;
      }
    }
  }
}

// The weights of one group and block of 16 k, as the multiplication takes them: four operands of
// vpdpbusd and the scales of the 16 rows. Decoded on demand:
struct EncodedBlock {
  const uint8_t* codes;
  const uint8_t* scales;
  __m512i table;
  EncodedBlock(const uint8_t* record, int64_t block, __m512i table_in)
      : codes(record + 128 * block),
        scales(record + tiles::kScalesAt + 16 * block),
        table(table_in) {}
  inline __attribute__((always_inline)) __m512i operand(int j) const {
    const __m512i chunk = _mm512_loadu_si512(codes + 64 * (j / 2));
    return _mm512_permutexvar_epi8(j % 2 == 0 ? chunk : _mm512_srli_epi16(chunk, 4), table);
  }
  inline __attribute__((always_inline)) __m512 scale() const { return scales_f32(scales); }
  static inline __attribute__((always_inline)) __m512 magic(__m512 scale) {
    return _mm512_mul_ps(scale, _mm512_set1_ps(kMagic));
  }
};
inline __attribute__((always_inline)) void prefetch_record(const uint8_t* record) {
#pragma GCC unroll 9
  for (int64_t line = 0; line < tiles::kRecordBytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(record) + line, _MM_HINT_T1);
}

constexpr int kWidestTile = 8;  // 16 block sums in registers of 32; their totals lie in L1

template <int M>
struct Accumulators {
  __m512 sum[M][2];
};

// One block of 16 k: two groups of 16 rows, each in the 16 lanes, times M tokens. It costs each
// group and token four vpdpbusd and two FMAs, of which two start a cycle: two thirds of the vpdpbusd
// peak. All 2 M sums go side by side, so that hardly an instruction waits for the one before it.
// Token by token the loop is a tenth slower, and a quarter while the core is shared with a busy
// hardware thread.
template <int M, typename Block>
inline __attribute__((always_inline)) void multiply_block(const Block& block0,
                                                          const Block& block1,
                                                          const uint8_t* tile,
                                                          Accumulators<M>& acc) {
  const auto* codes = reinterpret_cast<const int32_t*>(tile);
  const auto* start = codes + 4 * M;
  const auto* token_scale = reinterpret_cast<const float*>(start + M);
  __m512i d[M][2];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
    d[i][0] = d[i][1] = _mm512_set1_epi32(start[i]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i w0 = block0.operand(j);
    const __m512i w1 = block1.operand(j);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const __m512i a = _mm512_set1_epi32(codes[4 * i + j]);
      d[i][0] = _mm512_dpbusd_epi32(d[i][0], w0, a);
      d[i][1] = _mm512_dpbusd_epi32(d[i][1], w1, a);
    }
  }
  const __m512 scale0 = block0.scale();
  const __m512 scale1 = block1.scale();
  const __m512 magic0 = block0.magic(scale0);
  const __m512 magic1 = block1.magic(scale1);
  __m512 terms[M][2];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    terms[i][0] = _mm512_fmsub_ps(_mm512_castsi512_ps(d[i][0]), scale0, magic0);
    terms[i][1] = _mm512_fmsub_ps(_mm512_castsi512_ps(d[i][1]), scale1, magic1);
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    const __m512 factor = _mm512_set1_ps(token_scale[i]);
    acc.sum[i][0] = _mm512_fmadd_ps(terms[i][0], factor, acc.sum[i][0]);
    acc.sum[i][1] = _mm512_fmadd_ps(terms[i][1], factor, acc.sum[i][1]);
  }
}

// One tile of tokens: weights are decoded on the way, ten instructions a block and group.
template <int M>
[[gnu::noinline]] void gemm_tile(const uint8_t* pair, int64_t k, const uint8_t* tile, float* c) {
  const __m512i table = _mm512_load_si512(kDoubledPlus12.data());
  const uint8_t* second = pair + tiles::group_bytes(k);
  Accumulators<M> acc;
  for (int i = 0; i < M; ++i)
    acc.sum[i][0] = acc.sum[i][1] = _mm512_setzero_ps();
  const int64_t records = k / tiles::kSpan;
  for (int64_t record = 0; record < records; ++record) {
    // Past its end a group goes on in the next pair, beyond the other group.
    const int64_t ahead = kPrefetchRecords * tiles::kRecordBytes +
                          (record + kPrefetchRecords < records ? 0 : tiles::group_bytes(k));
    prefetch_record(pair + ahead);
    prefetch_record(second + ahead);
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b, tile += kTileBlockBytes * M) {
      multiply_block(EncodedBlock(pair, b, table), EncodedBlock(second, b, table), tile, acc);
    }
    pair += tiles::kRecordBytes;
    second += tiles::kRecordBytes;
  }
  const __m512 unit = _mm512_set1_ps(kIntSumUnit);
  for (int i = 0; i < M; ++i) {
    _mm512_storeu_ps(c + i * kPairRows, _mm512_mul_ps(acc.sum[i][0], unit));
    _mm512_storeu_ps(c + i * kPairRows + 16, _mm512_mul_ps(acc.sum[i][1], unit));
  }
}

// Several tiles: a span of weights is decoded once into L1, and the tiles go over it in turn. Sums
// wait in `c` between spans, so every element still adds its blocks in ascending k.
constexpr int64_t kPanelSpan = 512;
constexpr int64_t kPanelBlocks = kPanelSpan / kBlockSize;

struct DecodedBlock {
  __m512i operands[4];
  __m512 scales;
  __m512 magics;
  inline __attribute__((always_inline)) __m512i operand(int j) const { return operands[j]; }
  inline __attribute__((always_inline)) __m512 scale() const { return scales; }
  inline __attribute__((always_inline)) __m512 magic(__m512) const { return magics; }
};
struct PanelBlock {
  DecodedBlock group[2];
};
using Panel = PanelBlock[kPanelBlocks];  // 24 KiB

inline __attribute__((always_inline)) DecodedBlock decode(const EncodedBlock& block) {
  const __m512 scale = block.scale();
  return {{block.operand(0), block.operand(1), block.operand(2), block.operand(3)},
          scale,
          block.magic(scale)};
}

// The next pair's weights, fetched into L2 in even steps while this one is multiplied.
struct Ahead {
  const uint8_t* at;
  int64_t step;  // bytes a block
};

template <int M>
[[gnu::noinline]] void multiply_panel(const Panel& panel,
                                      int64_t blocks,
                                      const uint8_t* tile,
                                      bool first,
                                      bool last,
                                      float* c,
                                      Ahead& ahead) {
  const uint8_t* next = ahead.at;
  const int64_t step = ahead.step;
  Accumulators<M> acc;
  for (int i = 0; i < M; ++i) {
    for (int g = 0; g < 2; ++g) {
      acc.sum[i][g] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * kPairRows + 16 * g);
    }
  }
  for (int64_t b = 0; b < blocks; ++b, tile += kTileBlockBytes * M) {
    for (int64_t line = 0; line < step; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next) + line, _MM_HINT_T1);
    next += step;
    multiply_block(panel[b].group[0], panel[b].group[1], tile, acc);
  }
  ahead.at = next;
  const __m512 unit = _mm512_set1_ps(last ? kIntSumUnit : 1.0F);
  for (int i = 0; i < M; ++i) {
    for (int g = 0; g < 2; ++g) {
      _mm512_storeu_ps(c + i * kPairRows + 16 * g, _mm512_mul_ps(acc.sum[i][g], unit));
    }
  }
}

template <int M = 1>
void multiply_panel_of_width(int m,
                             const Panel& panel,
                             int64_t blocks,
                             const uint8_t* tile,
                             bool first,
                             bool last,
                             float* c,
                             Ahead& ahead) {
  if constexpr (M < kWidestTile) {
    if (m > M) return multiply_panel_of_width<M + 1>(m, panel, blocks, tile, first, last, c, ahead);
  }
  multiply_panel<M>(panel, blocks, tile, first, last, c, ahead);
}

#include "cpu/gemm_int_dispatch.inl"

void gemm_int(const uint8_t* pair, int64_t k, const uint8_t* tiles_in, int64_t count, float* c) {
  if (count <= kWidestTile) return gemm_tiles(pair, k, tiles_in, count, c);
  const __m512i table = _mm512_load_si512(kDoubledPlus12.data());
  const TokenCut cut(count, kWidestTile);
  const int64_t pair_bytes = 2 * tiles::group_bytes(k);
  const int64_t steps = cut.parts * (k / kBlockSize);
  Ahead ahead = {pair + pair_bytes, (pair_bytes + steps - 1) / steps};
  Panel panel;
  for (int64_t k0 = 0; k0 < k; k0 += kPanelSpan) {
    const int64_t span = std::min(kPanelSpan, k - k0);
    for (int64_t record = 0; record < span / tiles::kSpan; ++record) {
      for (int g = 0; g < 2; ++g) {
        const uint8_t* source =
            pair + g * tiles::group_bytes(k) + (k0 / tiles::kSpan + record) * tiles::kRecordBytes;
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b)
          panel[4 * record + b].group[g] = decode(EncodedBlock(source, b, table));
      }
    }
    for (int64_t t = 0; t < cut.parts; ++t) {
      const int64_t begin = cut.begin(t);
      const int m = cut.width(t);
      const uint8_t* tile =
          tiles_in + int_tile_bytes(begin, k) + k0 / kBlockSize * kTileBlockBytes * m;
      multiply_panel_of_width(
          m, panel, span / kBlockSize, tile, k0 == 0, k0 + span == k, c + begin * kPairRows, ahead);
    }
  }
}

constexpr Kernels kTable = {"avx512-vnni",
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
}  // namespace hexpert::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace hexpert::cpu {
const Kernels* avx512_vnni_kernels() {
  return cpu_features().avx512_vnni_vbmi ? &kTable : nullptr;
}
}  // namespace hexpert::cpu

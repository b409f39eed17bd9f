// AVX2 with FMA and F16C: integer GEMM on vpmaddubsw.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "cpu/kernels.hpp"
#include "cpu/tables.hpp"
#include "format/layout.hpp"
#include "moe/activation.hpp"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace hexpert::cpu {
namespace {

namespace tiles = layout::cpu_tiles;
using tiles::kStripRows;

struct Vec {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kTogether = 4;
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F abs(F v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), v); }
  // The second operand when either is NaN.
  static F max_or_second(F a, F b) { return _mm256_max_ps(a, b); }
  static F min_or_second(F a, F b) { return _mm256_min_ps(a, b); }
  static F if_negative(F v, F yes, F no) { return _mm256_blendv_ps(no, yes, v); }
  static I subtract_bits(F v, int32_t bits) {
    return _mm256_sub_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(bits));
  }
  static I quarter(I n) { return _mm256_srai_epi32(n, 2); }
  static I minus_3_times(I n, I q) {
    return _mm256_sub_epi32(n, _mm256_add_epi32(q, _mm256_add_epi32(q, q)));
  }
  static F pow2(I n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static F load_bf16(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static void store_bf16(uint16_t* p, F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i even = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7FFF))), 16);
    const __m256i nan = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)),
                                        _mm256_set1_epi32(0x7FC0));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, nan, is_nan);
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0b00001000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void store_bf16(uint16_t* p, F low, F high) {
    store_bf16(p, low);
    store_bf16(p + kLanes, high);
  }
};

#include "cpu/epilogue.inl"
#include "cpu/quantize_avx2.inl"

void expand_tile(const Nvfp4Row* rows, int64_t m, int64_t k, uint8_t* tile) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kDoubled.data()));
  const __m128i low = _mm_set1_epi8(15);
  // From [low nibbles of 8 bytes, high nibbles]: k = 0 4 1 5 2 6 3 7, twice.
  const __m128i order = _mm_setr_epi8(0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15);
  for (int64_t b = 0; b < k / kBlockSize; ++b, tile += kTileBlockBytes * m) {
    auto* start = reinterpret_cast<int32_t*>(tile + 16 * m);
    auto* scale = reinterpret_cast<float*>(tile + 20 * m);
    for (int64_t t = 0; t < m; ++t) {
      const __m128i bytes =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[t].codes + 8 * b));
      const __m128i nibbles =
          _mm_and_si128(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)), low);
      const __m128i values = _mm_shuffle_epi8(table, _mm_shuffle_epi8(nibbles, order));
      __m128i sum = _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), values), _mm_set1_epi16(1));
      sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01001110));
      sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10110001));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(tile + 16 * t), values);
      start[t] = kMagicBits - 12 * _mm_cvtsi128_si32(sum);
      scale[t] = kTokenScales[rows[t].scales[b]];
    }
  }
}

// One group as two halves of 8 rows, in the 8 lanes, times M tokens.
template <int M>
void gemm_group(const uint8_t* group, int64_t k, const uint8_t* tile, float* c) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(kDoubledPlus12.data())));
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 acc[M][2];
  for (int i = 0; i < M; ++i)
    acc[i][0] = acc[i][1] = _mm256_setzero_ps();
  for (int64_t record = 0; record < k / tiles::kSpan; ++record, group += tiles::kRecordBytes) {
    for (int64_t line = 0; line < tiles::kRecordBytes; line += 64) {
      _mm_prefetch(
          reinterpret_cast<const char*>(group) + kPrefetchRecords * tiles::kRecordBytes + line,
          _MM_HINT_T1);
    }
    for (int b = 0; b < 4; ++b, tile += kTileBlockBytes * M) {
      const auto* codes = reinterpret_cast<const int32_t*>(tile);
      const auto* start = codes + 4 * M;
      const auto* scale = reinterpret_cast<const float*>(start + M);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const auto* chunk = reinterpret_cast<const __m256i*>(group + 128 * b + 32 * h);
        const __m256i c0 = _mm256_loadu_si256(chunk);
        const __m256i c1 = _mm256_loadu_si256(chunk + 2);
        const __m256i w0 = _mm256_shuffle_epi8(table, _mm256_and_si256(c0, low));
        const __m256i w1 =
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(c0, 4), low));
        const __m256i w2 = _mm256_shuffle_epi8(table, _mm256_and_si256(c1, low));
        const __m256i w3 =
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(c1, 4), low));
        // E4M3 bytes read as FP16 after a shift: exactly 2^-8 times their value.
        const __m128i bytes = _mm_loadl_epi64(
            reinterpret_cast<const __m128i*>(group + tiles::kScalesAt + 16 * b + 8 * h));
        const __m256 ws = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
        const __m256 magic = _mm256_mul_ps(ws, _mm256_set1_ps(kMagic));
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
          // Four products of at most 24 * 12, twice: far inside int16.
          const __m256i p = _mm256_add_epi16(
              _mm256_add_epi16(_mm256_maddubs_epi16(w0, _mm256_set1_epi32(codes[4 * i])),
                               _mm256_maddubs_epi16(w1, _mm256_set1_epi32(codes[4 * i + 1]))),
              _mm256_add_epi16(_mm256_maddubs_epi16(w2, _mm256_set1_epi32(codes[4 * i + 2])),
                               _mm256_maddubs_epi16(w3, _mm256_set1_epi32(codes[4 * i + 3]))));
          const __m256i d =
              _mm256_add_epi32(_mm256_madd_epi16(p, ones), _mm256_set1_epi32(start[i]));
          const __m256 term = _mm256_fmsub_ps(_mm256_castsi256_ps(d), ws, magic);
          acc[i][h] = _mm256_fmadd_ps(term, _mm256_set1_ps(scale[i]), acc[i][h]);
        }
      }
    }
  }
  for (int i = 0; i < M; ++i) {
    _mm256_storeu_ps(c + i * kStripRows, acc[i][0]);
    _mm256_storeu_ps(c + i * kStripRows + 8, acc[i][1]);
  }
}

constexpr int64_t kWidestTile = 4;  // 8 accumulators and 4 weight registers of 16

template <int M = 1>
void gemm_tile(const uint8_t* strip, int64_t k, const uint8_t* tile, int64_t m, float* c) {
  if constexpr (M < kWidestTile) {
    if (m > M) return gemm_tile<M + 1>(strip, k, tile, m, c);
  }
  for (int64_t row = 0; row < kStripRows; row += tiles::kGroupRows)
    gemm_group<M>(strip + tiles::matrix_bytes(row, k), k, tile, c + row);
}

#include "cpu/gemm_int_dispatch.inl"

constexpr Kernels kTable = {"avx2",
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
const Kernels* avx2_kernels() {
  return cpu_features().avx2_f16c_fma ? &kTable : nullptr;
}
}  // namespace hexpert::cpu

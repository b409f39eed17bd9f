// AVX-512 with VBMI and VNNI: integer GEMM on vpdpbusd.
#include <immintrin.h>

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

void expand_int(const Nvfp4Row* rows, int m, int64_t k, uint8_t* tile) {
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
        factors[m + t] = kMagic * scale;
      }
    }
  }
}

// One group of 16 rows, in the 16 lanes, times M tokens. A block of 16 k is four vpdpbusd per
// token, two FMAs, and 8 instructions of decoding shared by the M tokens.
template <int M>
void gemm_tile(const uint8_t* group, int64_t k, const uint8_t* tile, float* c, int64_t c_stride) {
  const __m512i table = _mm512_load_si512(kDoubledPlus12.data());
  __m512 acc[M];
  for (int i = 0; i < M; ++i)
    acc[i] = _mm512_setzero_ps();
  for (int64_t record = 0; record < k / tiles::kSpan; ++record, group += tiles::kRecordBytes) {
    for (int64_t line = 0; line < tiles::kRecordBytes; line += 64) {
      _mm_prefetch(
          reinterpret_cast<const char*>(group) + kPrefetchRecords * tiles::kRecordBytes + line,
          _MM_HINT_T1);
    }
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b, tile += kTileBlockBytes * M) {
      const __m512i c0 = _mm512_loadu_si512(group + 128 * b);
      const __m512i c1 = _mm512_loadu_si512(group + 128 * b + 64);
      const __m512i w0 = _mm512_permutexvar_epi8(c0, table);
      const __m512i w1 = _mm512_permutexvar_epi8(_mm512_srli_epi16(c0, 4), table);
      const __m512i w2 = _mm512_permutexvar_epi8(c1, table);
      const __m512i w3 = _mm512_permutexvar_epi8(_mm512_srli_epi16(c1, 4), table);
      const __m512 ws = scales_f32(group + tiles::kScalesAt + 16 * b);
      const auto* codes = reinterpret_cast<const int32_t*>(tile);
      const auto* start = codes + 4 * M;
      const auto* scale = reinterpret_cast<const float*>(start + M);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        __m512i d = _mm512_set1_epi32(start[i]);
        d = _mm512_dpbusd_epi32(d, w0, _mm512_set1_epi32(codes[4 * i]));
        d = _mm512_dpbusd_epi32(d, w1, _mm512_set1_epi32(codes[4 * i + 1]));
        d = _mm512_dpbusd_epi32(d, w2, _mm512_set1_epi32(codes[4 * i + 2]));
        d = _mm512_dpbusd_epi32(d, w3, _mm512_set1_epi32(codes[4 * i + 3]));
        const __m512 term = _mm512_fmsub_ps(
            _mm512_castsi512_ps(d), _mm512_set1_ps(scale[i]), _mm512_set1_ps(scale[M + i]));
        acc[i] = _mm512_fmadd_ps(term, ws, acc[i]);
      }
    }
  }
  for (int i = 0; i < M; ++i) {
    _mm512_storeu_ps(c + i * c_stride, _mm512_mul_ps(acc[i], _mm512_set1_ps(kIntSumUnit)));
  }
}

#include "cpu/gemm_int_dispatch.inl"

constexpr Kernels kTable = {"avx512-vnni",
                            amax_bits,
                            quantize_row,
                            pack_group,
                            kMaxTileTokens,
                            expand_int,
                            gemm_int<kMaxTileTokens>,
                            activate16,
                            round_route,
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

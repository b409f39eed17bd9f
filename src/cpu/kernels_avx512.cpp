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
using tiles::kStripRows;

// Every second of 32 words, from word `first` on, then the others.
constexpr std::array<uint16_t, 32> every_second_from(int first) {
  std::array<uint16_t, 32> order{};
  for (int i = 0; i < 32; ++i)
    order[static_cast<size_t>(i)] =
        static_cast<uint16_t>(2 * (i % 16) + (i < 16 ? first : 1 - first));
  return order;
}
alignas(64) constexpr std::array<uint16_t, 32> kEvenThenOdd = every_second_from(0);
alignas(64) constexpr std::array<uint16_t, 32> kOddThenEven = every_second_from(1);

struct Vec {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kTogether = 4;
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
    I words = bf16_above(v, v);
    words = _mm512_permutexvar_epi16(_mm512_load_si512(kOddThenEven.data()), words);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(words));
  }
  static void store_bf16(uint16_t* p, F low, F high) {
    const I words = _mm512_mask_blend_epi16(
        0x55555555, bf16_above(high, low), _mm512_srli_epi32(bf16_above(low, high), 16));
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(_mm512_load_si512(kEvenThenOdd.data()), words));
  }

 private:
  // BF16 of `v` in the upper halves, anything in the lower ones. NaNs are rare: one comparison looks for
  // one in `v` and in `other`.
  static I bf16_above(F v, F other) {
    const I bits = _mm512_castps_si512(v);
    const I even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), even);
    if (_mm512_cmp_ps_mask(v, other, _CMP_UNORD_Q) == 0) [[likely]]
      return rounded;
    const I sign = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN));
    return _mm512_mask_or_epi32(
        rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), sign, _mm512_set1_epi32(0x7FC00000));
  }
};

#include "cpu/epilogue.inl"
#include "cpu/quantize_avx512.inl"

// E4M3 bytes read as FP16 after a shift: exactly 2^-8 times their value, subnormals included.
inline __m512 scales_f32(const uint8_t* scales) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
}

void expand_tile(const Nvfp4Row* rows, int64_t m, int64_t k, uint8_t* tile) {
  const __m512i table = _mm512_load_si512(kDoubled.data());
  // Bit offsets of nibbles 0 4 1 5 2 6 3 7 in each 32 bits of codes.
  const __m512i pick = _mm512_set1_epi64(0x1C0C18081404'1000);
  const __m512i ones = _mm512_set1_epi8(1);
  const int64_t block_bytes = kTileBlockBytes * m;
  for (int64_t span = 0; span < k / tiles::kSpan; ++span) {
    for (int64_t t = 0; t < m; ++t) {
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
      for (int64_t b = 0; b < 4; ++b) {
        uint8_t* block = tile + (4 * span + b) * block_bytes;
        std::memcpy(block + 16 * t, value + 16 * b, 16);
        auto* start = reinterpret_cast<int32_t*>(block + 16 * m);
        start[t] = kMagicBits - 12 * sum[4 * b];
        auto* scale = reinterpret_cast<float*>(block + 20 * m);
        scale[t] = kTokenScales[rows[t].scales[4 * span + b]];
      }
    }
  }
}

inline void prefetch_record(const uint8_t* record) {
#pragma GCC unroll 9
  for (int64_t line = 0; line < tiles::kRecordBytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(record) + line, _MM_HINT_T1);
}

constexpr int kStripGroups = kStripRows / tiles::kGroupRows;
constexpr int64_t kWidestTile = 64;  // 16 KiB of sums

// One block of 16 k of four groups of 16 rows, each in the 16 lanes, times one tile of tokens. Its
// weights are decoded into registers, 16 operands of vpdpbusd, and all tokens go over them; their
// sums lie in `c`, in L1. A token costs each group four vpdpbusd and two FMAs, of which two start a
// cycle: two thirds of the vpdpbusd peak at most. Around them are 17 instructions for all four
// groups, few enough for a core that shares its front end with a busy hardware thread.
template <bool kFirst>
inline void multiply_block(const uint8_t* record,
                           int64_t group_bytes,
                           int64_t b,
                           const uint8_t* tile,
                           int64_t m,
                           float* c) {
  const __m512i table = _mm512_load_si512(kDoubledPlus12.data());
  __m512i weights[kStripGroups][4];
  __m512 scales[kStripGroups];
  __m512 magics[kStripGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kStripGroups; ++g) {
    const uint8_t* group = record + g * group_bytes;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512i chunk = _mm512_loadu_si512(group + 128 * b + 64 * j);
      weights[g][2 * j] = _mm512_permutexvar_epi8(chunk, table);
      weights[g][2 * j + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(chunk, 4), table);
    }
    scales[g] = scales_f32(group + tiles::kScalesAt + 16 * b);
    magics[g] = _mm512_mul_ps(scales[g], _mm512_set1_ps(kMagic));
  }
  const auto* codes = reinterpret_cast<const int32_t*>(tile);
  const auto* start = codes + 4 * m;
  const auto* token_scale = reinterpret_cast<const float*>(start + m);
  for (int64_t t = 0; t < m; ++t, codes += 4, c += kStripRows) {
    __m512i d[kStripGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kStripGroups; ++g)
      d[g] = _mm512_set1_epi32(start[t]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i a = _mm512_set1_epi32(codes[j]);
#pragma GCC unroll 4
      for (int g = 0; g < kStripGroups; ++g)
        d[g] = _mm512_dpbusd_epi32(d[g], weights[g][j], a);
    }
    const __m512 factor = _mm512_set1_ps(token_scale[t]);
#pragma GCC unroll 4
    for (int g = 0; g < kStripGroups; ++g) {
      const __m512 term = _mm512_fmsub_ps(_mm512_castsi512_ps(d[g]), scales[g], magics[g]);
      float* sum = c + 16 * g;
      const __m512 before = kFirst ? _mm512_setzero_ps() : _mm512_load_ps(sum);
      _mm512_store_ps(sum, _mm512_fmadd_ps(term, factor, before));
    }
  }
}

void gemm_tile(const uint8_t* strip, int64_t k, const uint8_t* tile, int64_t m, float* c) {
  const int64_t group_bytes = tiles::group_bytes(k);
  const int64_t records = k / tiles::kSpan;
  for (int64_t record = 0; record < records; ++record, strip += tiles::kRecordBytes) {
    // Past its end a group goes on in the next strip, beyond the other groups.
    const int64_t ahead =
        kPrefetchRecords * tiles::kRecordBytes +
        (record + kPrefetchRecords < records ? 0 : (kStripGroups - 1) * group_bytes);
    for (int64_t b = 0; b < 4; ++b, tile += kTileBlockBytes * m) {
      // One group with each block: evenly spread, 4 to 7 % faster than all at once for few tokens.
      prefetch_record(strip + b * group_bytes + ahead);
      if (record == 0 && b == 0) {
        multiply_block<true>(strip, group_bytes, b, tile, m, c);
      } else {
        multiply_block<false>(strip, group_bytes, b, tile, m, c);
      }
    }
  }
}

#include "cpu/gemm_int_dispatch.inl"

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

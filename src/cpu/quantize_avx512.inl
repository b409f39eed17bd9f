// Quantizer and packing for AVX-512 with VBMI and VNNI. Bit for bit the scalar oracle, for rows
// whose outer scale was made from their own maximum (or a larger one).

constexpr int64_t kBatchBlocks = 16;                   // scales of 16 blocks fill a register
constexpr int64_t kBatch = kBatchBlocks * kBlockSize;  // elements

inline __m512i load32(const uint16_t* x) {
  return _mm512_loadu_si512(x);
}

inline __m512i magnitudes(__m512i bf16) {
  return _mm512_and_si512(bf16, _mm512_set1_epi16(0x7FFF));
}

uint16_t amax_bits(const uint16_t* x, int64_t n) {
  __m512i amax[4] = {};
  int64_t i = 0;
  for (; i + 128 <= n; i += 128) {
    for (int j = 0; j < 4; ++j)
      amax[j] = _mm512_max_epu16(amax[j], magnitudes(load32(x + i + 32 * j)));
  }
  for (; i < n; i += 32) {
    const __mmask32 mask = n - i >= 32 ? ~0U : (1U << (n - i)) - 1;
    amax[0] = _mm512_max_epu16(amax[0], magnitudes(_mm512_maskz_loadu_epi16(mask, x + i)));
  }
  const __m512i all =
      _mm512_max_epu16(_mm512_max_epu16(amax[0], amax[1]), _mm512_max_epu16(amax[2], amax[3]));
  const __m256i half =
      _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  const __m128i quarter =
      _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // There is a minimum over eight words only.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(least));
}

inline __m512i fold32(__m512i a, __m512i b) {  // dwords of a lane: a b a b
  return _mm512_max_epu16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
inline __m512i fold64(__m512i ab, __m512i cd) {  // a b c d
  return _mm512_max_epu16(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// Maxima of the 16 blocks, as FP32. Letters are registers of two blocks, a block per 256 bits.
inline __m512 block_maxima(const uint16_t* x) {
  __m512i m[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    m[i] = magnitudes(load32(x + 32 * i));
  const __m512i abcd = fold64(fold32(m[0], m[1]), fold32(m[2], m[3]));
  const __m512i efgh = fold64(fold32(m[4], m[5]), fold32(m[6], m[7]));
  constexpr __mmask32 kOdd = 0xAAAAAAAA;
  const __m512i low = _mm512_mask_blend_epi16(kOdd, abcd, _mm512_slli_epi32(efgh, 16));
  const __m512i high = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(abcd, 16), efgh);
  __m512i words = _mm512_max_epu16(low, high);  // a e b f c g d h in every lane
  words = _mm512_max_epu16(words, _mm512_shuffle_i64x2(words, words, 0xB1));
  // The high half of dword 2i + j takes block j of register i.
  const __m512i order = _mm512_slli_epi32(
      _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 1, 17, 3, 19, 5, 21, 7, 23), 16);
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kOdd, order, words));
}

// Block scales of 16 blocks and the multipliers of their elements. Adding a power of two that is
// 2^20 times the value's own (at least 2^-6: below lie the subnormals) rounds to three mantissa
// bits; the sum's low bits count the steps.
inline __m512 encode_scales(__m512 maxima, const OuterScale& outer, uint8_t* scales) {
  const __m512 raw =
      _mm512_min_ps(_mm512_mul_ps(maxima, _mm512_set1_ps(outer.mult)), _mm512_set1_ps(kE4M3Max));
  const __m512i exponent =
      _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(raw), _mm512_set1_epi32(0x7F800000)),
                       _mm512_set1_epi32(0x3C800000));
  const __m512i anchor = _mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23));
  const __m512 sum = _mm512_add_ps(raw, _mm512_castsi512_ps(anchor));
  const __m512i steps = _mm512_sub_epi32(_mm512_castps_si512(sum), anchor);
  const __m512i codes = _mm512_add_epi32(
      steps, _mm512_sub_epi32(_mm512_srli_epi32(exponent, 20), _mm512_set1_epi32(0x3C8)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(scales), _mm512_cvtepi32_epi8(codes));
  const __m512 value = _mm512_sub_ps(sum, _mm512_castsi512_ps(anchor));
  const __m512 den = _mm512_mul_ps(value, _mm512_set1_ps(outer.decode));
  return _mm512_min_ps(_mm512_div_ps(_mm512_set1_ps(1.0F), den), _mm512_set1_ps(FLT_MAX));
}

// A value a = x * multiplier is rounded as for the scales: 2^22 d + a, d being the power of two of a,
// at least 1, rounds to one mantissa bit and counts k half steps of d in its low bits. With e the
// exponent of d the code is k + 2 e. The sum takes the sign of a; kSpare more steps make the offset
// of encode128 a multiple of 2^kChunkShift, and being even they leave ties to even as they are.
constexpr int kSpare = 6;
constexpr int kChunkShift = 10;

// Values in the high halves of dwords, and zeros; N registers side by side, so that hardly an
// instruction waits for the one before it.
template <bool kSaturate, int N>
inline __attribute__((always_inline)) void round_codes(__m512i (&x)[N],
                                                       const __m512 (&multiplier)[N]) {
  constexpr int kLargerMagnitude = 3, kSmallerMagnitude = 2;  // sign of the first operand
  const __m512 sign_and_exponent =
      _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xFF800000)));
  __m512 a[N], d[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    a[i] = _mm512_mul_ps(_mm512_castsi512_ps(x[i]), multiplier[i]);
    if constexpr (kSaturate) a[i] = _mm512_range_ps(a[i], _mm512_set1_ps(6.0F), kSmallerMagnitude);
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
    d[i] = _mm512_and_ps(a[i], sign_and_exponent);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
    d[i] = _mm512_range_ps(d[i], _mm512_set1_ps(1.0F), kLargerMagnitude);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
    x[i] =
        _mm512_castps_si512(_mm512_fmadd_ps(d[i], _mm512_set1_ps(0x1p22F + 0.5F * kSpare), a[i]));
}

// 128 values and the multipliers of their 8 blocks -> 64 bytes.
//
// Dwords add up 64 * code of a value 2 i and 1024 * code of 2 i + 1, and 2^15 and 2^19 less where they
// are negative; a product of both 16-bit halves of a rounded value takes its steps, its exponent and
// its sign with their weights. Bits 6..8 and 10..12 are then the magnitudes, 15 and 19 the inverted
// signs of a pair, and kChunkShift above them lies a pair 32 values before it.
template <bool kSaturate>
inline __attribute__((always_inline)) void encode128(const uint16_t* x,
                                                     const float* multipliers,
                                                     uint8_t* codes) {
  constexpr int kExponent = 127 + 22;
  constexpr int kOffset = (1 << 15) + (1 << 19) - (64 + 1024) * (2 * kExponent + kSpare);
  static_assert(kOffset % (1 << kChunkShift) == 0);
  const __m512i even_weights = _mm512_set1_epi32(1 << 16 | 64);
  const __m512i odd_weights = _mm512_set1_epi32(16 << 16 | 1024);
  const __m512 eight = _mm512_castps256_ps512(_mm256_load_ps(multipliers));
  const __m512i two_blocks = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  __m512i value[8];
  __m512 multiplier[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i both = _mm512_loadu_si512(x + 32 * i);
    value[2 * i] = _mm512_slli_epi32(both, 16);
    value[2 * i + 1] = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
    multiplier[2 * i] = multiplier[2 * i + 1] =
        _mm512_permutexvar_ps(_mm512_add_epi32(two_blocks, _mm512_set1_epi32(2 * i)), eight);
  }
  round_codes<kSaturate>(value, multiplier);
  __m512i sums[2];
  sums[0] = sums[1] = _mm512_set1_epi32(kOffset + (kOffset >> kChunkShift));
  for (int j : {0, 1})
    sums[j] = _mm512_dpwssd_epi32(sums[j], value[4 * j], even_weights);
  for (int j : {0, 1})
    sums[j] = _mm512_dpwssd_epi32(sums[j], value[4 * j + 1], odd_weights);
  for (int j : {0, 1})
    sums[j] = _mm512_slli_epi32(sums[j], kChunkShift);
  for (int j : {0, 1})
    sums[j] = _mm512_dpwssd_epi32(sums[j], value[4 * j + 2], even_weights);
  for (int j : {0, 1})
    sums[j] = _mm512_dpwssd_epi32(sums[j], value[4 * j + 3], odd_weights);

  // Bit offsets of the magnitudes and signs of a byte of codes, for the two dwords of a qword.
  const __m512i magnitude_bits = _mm512_set1_epi64(0x2606'3010'2606'3010);
  const __m512i sign_bits = _mm512_set1_epi64(0x2C0C'3616'2C0C'3616);
  constexpr __mmask64 kSecond = 0xF0F0F0F0F0F0F0F0;
  const __m512i order = _mm512_set_epi16(31,
                                         27,
                                         23,
                                         19,
                                         15,
                                         11,
                                         7,
                                         3,
                                         30,
                                         26,
                                         22,
                                         18,
                                         14,
                                         10,
                                         6,
                                         2,
                                         29,
                                         25,
                                         21,
                                         17,
                                         13,
                                         9,
                                         5,
                                         1,
                                         28,
                                         24,
                                         20,
                                         16,
                                         12,
                                         8,
                                         4,
                                         0);
  const __m512i magnitude = _mm512_mask_multishift_epi64_epi8(
      _mm512_multishift_epi64_epi8(magnitude_bits, sums[0]), kSecond, magnitude_bits, sums[1]);
  const __m512i sign = _mm512_mask_multishift_epi64_epi8(
      _mm512_multishift_epi64_epi8(sign_bits, sums[0]), kSecond, sign_bits, sums[1]);
  // magnitude & 0x77 | ~sign & 0x88
  const __m512i bytes = _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi8(0x77), 0xB1);
  _mm512_storeu_si512(codes, _mm512_permutexvar_epi16(order, bytes));
}

// Scales and multipliers of 16 blocks. Returns the blocks with values beyond the largest code: from
// 7 on a value would be rounded to 8.
inline __mmask16 batch_scales(const uint16_t* x,
                              const OuterScale& outer,
                              uint8_t* scales,
                              float* multipliers) {
  const __m512 maxima = block_maxima(x);
  const __m512 multiplier = encode_scales(maxima, outer, scales);
  _mm512_store_ps(multipliers, multiplier);
  return _mm512_cmp_ps_mask(_mm512_mul_ps(maxima, multiplier), _mm512_set1_ps(7.0F), _CMP_GE_OQ);
}

template <bool kSaturate>
[[gnu::noinline]] void encode_span(
    const uint16_t* x, int64_t n, const float* multipliers, uint8_t* codes, const uint16_t* ahead) {
  for (int64_t i = 0; i < n; i += 128) {
    const auto* next = reinterpret_cast<const char*>(ahead) + n / 2 + i / 128 * 192;
#pragma GCC unroll 4
    for (int64_t line = 0; line < 3 * 64; line += 64)
      _mm_prefetch(next + line, _MM_HINT_T0);
    encode128<kSaturate>(x + i, multipliers + i / kBlockSize, codes + i / 2);
  }
}

// Scales first, then codes: two small loops, which stay in the cache of decoded instructions where one
// of both does not. x stays in L1 meanwhile.
constexpr int64_t kQuantizeSpan = 2048;

// n: a multiple of kBatch, at most kQuantizeSpan. `ahead` is fetched in ascending order, which hardware
// prefetchers follow, a quarter here and the rest by encode_span: spread over the arithmetic, so that
// neither waits for the other.
inline void quantize_span(const uint16_t* x,
                          int64_t n,
                          const OuterScale& outer,
                          uint8_t* codes,
                          uint8_t* scales,
                          const uint16_t* ahead) {
  alignas(64) float multipliers[kQuantizeSpan / kBlockSize];
  unsigned beyond = 0;
  for (int64_t i = 0; i < n; i += kBatch) {
    const int64_t block = i / kBlockSize;
    const auto* next = reinterpret_cast<const char*>(ahead) + i / 2;
#pragma GCC unroll 2
    for (int64_t line = 0; line < 128; line += 64)
      _mm_prefetch(next + line, _MM_HINT_T0);
    beyond |= batch_scales(x + i, outer, scales + block, multipliers + block);
  }
  (beyond == 0 ? encode_span<false> : encode_span<true>)(x, n, multipliers, codes, ahead);
}

void quantize_row(const uint16_t* x,
                  int64_t n,
                  const OuterScale& outer,
                  uint8_t* codes,
                  uint8_t* scales,
                  const uint16_t* ahead) {
  if (outer.poisoned) {
    std::memset(codes, 0, static_cast<size_t>(n / 2));
    std::memset(scales, kE4M3Nan, static_cast<size_t>(n / kBlockSize));
    return;
  }
  const int64_t whole = n / kBatch * kBatch;
  for (int64_t i = 0; i < whole; i += kQuantizeSpan) {
    const int64_t size = std::min(kQuantizeSpan, whole - i);
    quantize_span(x + i, size, outer, codes + i / 2, scales + i / kBlockSize, ahead + i);
  }
  if (whole == n) return;
  if (n > kBatch) {  // the last batch overlaps the one before it, and writes the same there
    const int64_t last = n - kBatch;
    quantize_span(
        x + last, kBatch, outer, codes + last / 2, scales + last / kBlockSize, ahead + whole);
    return;
  }
  alignas(64) uint16_t last[kBatch] = {};
  alignas(64) uint8_t last_codes[kBatch / 2];
  alignas(64) uint8_t last_scales[kBatchBlocks];
  std::memcpy(last, x + whole, static_cast<size_t>(n - whole) * sizeof(uint16_t));
  quantize_span(last, kBatch, outer, last_codes, last_scales, ahead + whole);
  std::memcpy(codes + whole / 2, last_codes, static_cast<size_t>(n - whole) / 2);
  std::memcpy(
      scales + whole / kBlockSize, last_scales, static_cast<size_t>((n - whole) / kBlockSize));
}

// Nibbles 0..7 of every dword -> 0 2 4 6 in the low word, 1 3 5 7 in the high word.
inline __m512i split_parity(__m512i v) {
  const __m512i middle = _mm512_set1_epi16(0x00F0);
  const __m512i swap =
      _mm512_ternarylogic_epi32(v, _mm512_srli_epi16(v, 4), middle, 0x28);  // (v ^ v >> 4) & middle
  v = _mm512_ternarylogic_epi32(v, swap, _mm512_slli_epi16(swap, 4), 0x96);  // xor of all
  return _mm512_shuffle_epi8(
      v,
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
}

inline __m256i load32_codes(const Nvfp4Row& row, int64_t span) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.codes + 32 * span));
}

void pack_group(const Nvfp4Row* rows, int64_t k, uint8_t* group) {
  alignas(64) uint8_t transpose[64];  // byte 4 n + b -> 16 b + n
  for (int i = 0; i < 64; ++i)
    transpose[i] = static_cast<uint8_t>(i % 16 * 4 + i / 16);
  const __m512i scale_order = _mm512_load_si512(transpose);
  for (int64_t span = 0; span < k / tiles::kSpan; ++span, group += tiles::kRecordBytes) {
    // columns[h][j]: dwords j (even lanes) and 4 + j (odd lanes) of rows 8 h .. 8 h + 7.
    __m512i columns[2][4];
    for (int h = 0; h < 2; ++h) {
      __m512i r[4];
      for (int n = 0; n < 4; ++n) {
        r[n] = split_parity(
            _mm512_inserti64x4(_mm512_castsi256_si512(load32_codes(rows[8 * h + n], span)),
                               load32_codes(rows[8 * h + 4 + n], span),
                               1));
      }
      const __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(r[2], r[3]);
      const __m512i high01 = _mm512_unpackhi_epi32(r[0], r[1]);
      const __m512i high23 = _mm512_unpackhi_epi32(r[2], r[3]);
      columns[h][0] = _mm512_unpacklo_epi64(low01, low23);
      columns[h][1] = _mm512_unpackhi_epi64(low01, low23);
      columns[h][2] = _mm512_unpacklo_epi64(high01, high23);
      columns[h][3] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (int j = 0; j < 4; ++j) {
      _mm512_storeu_si512(group + 64 * j, _mm512_shuffle_i32x4(columns[0][j], columns[1][j], 0x88));
      _mm512_storeu_si512(group + 64 * (4 + j),
                          _mm512_shuffle_i32x4(columns[0][j], columns[1][j], 0xDD));
    }
    alignas(64) uint8_t scales[64];
    for (int64_t n = 0; n < tiles::kGroupRows; ++n)
      std::memcpy(scales + 4 * n, rows[n].scales + 4 * span, 4);
    _mm512_storeu_si512(group + tiles::kScalesAt,
                        _mm512_permutexvar_epi8(scale_order, _mm512_load_si512(scales)));
  }
}

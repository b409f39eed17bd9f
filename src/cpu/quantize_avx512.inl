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

// 16 magnitudes a -> 65535 - 64 (7 - code), or more where the code is past 7. As for the scales,
// d 2^22 + a rounds to one mantissa bit and counts k steps in its low bits, d being the power of two
// of a, at least 1. With e its exponent the code is k + 2 e, and a product of the two 16-bit halves
// adds k and the exponent field with their weights.
inline __m512i encode16(__m512 magnitude, __m512 multiplier) {
  const __m512 a = _mm512_mul_ps(magnitude, multiplier);
  const __m512 d = _mm512_max_ps(
      _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000))), _mm512_set1_ps(1.0F));
  const __m512 sum = _mm512_fmadd_ps(d, _mm512_set1_ps(0x1p22F), a);
  constexpr int kBias = 65535 - 64 * (7 + 298);  // 298: twice the exponent field of 2^22
  return _mm512_dpwssd_epi32(
      _mm512_set1_epi32(kBias), _mm512_castps_si512(sum), _mm512_set1_epi32(1 << 16 | 64));
}

// 32 values -> 16 dwords, 256 times a byte of codes.
inline __m512i encode32(__m512i x, __m512 multiplier) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i a = magnitudes(x);
  const __m512i low = encode16(_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, a)), multiplier);
  const __m512i high = encode16(_mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, a)), multiplier);
  // Saturation makes code 7 of everything above. All bits but 6..8 are ones; bit 9 becomes the
  // sign: words & (sign | all other bits).
  const __m512i words = _mm512_packus_epi32(low, high);
  const __m512i signs = _mm512_srli_epi16(x, 6);
  const __m512i nibbles = _mm512_ternarylogic_epi32(
      words, signs, _mm512_set1_epi16(static_cast<int16_t>(0xFDFF)), 0xE0);
  // A word is 64 (nibble - 15) - 1 as a signed number; the start of the sum takes that out.
  constexpr int kOffset = (64 * 15 + 1) * (4 + 64);
  return _mm512_dpwssd_epi32(_mm512_set1_epi32(kOffset), nibbles, _mm512_set1_epi32(64 << 16 | 4));
}

inline __m512 batch_multipliers(const uint16_t* x, const OuterScale& outer, uint8_t* scales) {
  return encode_scales(block_maxima(x), outer, scales);
}

inline __attribute__((always_inline)) void encode_batch(const uint16_t* x,
                                                        __m512 multipliers,
                                                        uint8_t* codes) {
  const __m512i lane_order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i pick = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512i bytes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      bytes[i] =
          encode32(load32(x + 128 * half + 32 * i), _mm512_permutexvar_ps(pick, multipliers));
      pick = _mm512_add_epi32(pick, _mm512_set1_epi32(2));
    }
    const __m512i low = _mm512_srli_epi16(_mm512_packus_epi32(bytes[0], bytes[1]), 8);
    const __m512i high = _mm512_srli_epi16(_mm512_packus_epi32(bytes[2], bytes[3]), 8);
    _mm512_storeu_si512(codes + 64 * half,
                        _mm512_permutexvar_epi32(lane_order, _mm512_packus_epi16(low, high)));
  }
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
  __m512 multipliers = {};
  if (whole > 0) multipliers = batch_multipliers(x, outer, scales);
  for (int64_t done = 0; done < whole; done += kBatch) {
    // Spread over the arithmetic, so that neither waits for the other.
    const auto* next = reinterpret_cast<const char*>(ahead + done);
#pragma GCC unroll 8
    for (int64_t line = 0; line < kBatch * 2; line += 64)
      _mm_prefetch(next + line, _MM_HINT_T0);
    // The scales of a batch are one long chain of dependent steps; they are made one batch ahead.
    const __m512 current = multipliers;
    const int64_t following = done + kBatch;
    if (following < whole) {
      multipliers = batch_multipliers(x + following, outer, scales + following / kBlockSize);
    }
    encode_batch(x + done, current, codes + done / 2);
  }
  if (whole == n) return;
  alignas(64) uint16_t last[kBatch] = {};
  alignas(64) uint8_t last_codes[kBatch / 2];
  alignas(64) uint8_t last_scales[kBatchBlocks];
  std::memcpy(last, x + whole, static_cast<size_t>(n - whole) * sizeof(uint16_t));
  encode_batch(last, batch_multipliers(last, outer, last_scales), last_codes);
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

// Quantizer and packing for AVX2 with FMA: the steps of quantize_avx512.inl, eight blocks at a time.

constexpr int64_t kBatchBlocks = 8;                    // scales of 8 blocks fill a register
constexpr int64_t kBatch = kBatchBlocks * kBlockSize;  // elements

inline __m256i load16(const uint16_t* x) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
}

inline __m256i magnitudes(__m256i bf16) {
  return _mm256_and_si256(bf16, _mm256_set1_epi16(0x7FFF));
}

uint16_t amax_bits(const uint16_t* x, int64_t n) {
  __m256i amax[4] = {};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j)
      amax[j] = _mm256_max_epu16(amax[j], magnitudes(load16(x + i + 16 * j)));
  }
  if (i < n) {
    uint16_t last[64] = {};
    std::memcpy(last, x + i, static_cast<size_t>(n - i) * sizeof(uint16_t));
    for (int j = 0; j < 4; ++j)
      amax[j] = _mm256_max_epu16(amax[j], magnitudes(load16(last + 16 * j)));
  }
  const __m256i all =
      _mm256_max_epu16(_mm256_max_epu16(amax[0], amax[1]), _mm256_max_epu16(amax[2], amax[3]));
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  // There is a minimum over eight words only.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(least));
}

inline __m256i fold32(__m256i a, __m256i b) {  // dwords of a lane: a b a b
  return _mm256_max_epu16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
inline __m256i fold64(__m256i ab, __m256i cd) {  // a b c d
  return _mm256_max_epu16(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Maxima of the 8 blocks, as FP32. Letters are registers of one block each.
inline __m256 block_maxima(const uint16_t* x) {
  __m256i m[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    m[i] = magnitudes(load16(x + 16 * i));
  const __m256i abcd = fold64(fold32(m[0], m[1]), fold32(m[2], m[3]));
  const __m256i efgh = fold64(fold32(m[4], m[5]), fold32(m[6], m[7]));
  const __m256i words =  // a e b f c g d h in both lanes
      _mm256_max_epu16(_mm256_blend_epi16(abcd, _mm256_slli_epi32(efgh, 16), 0xAA),
                       _mm256_blend_epi16(_mm256_srli_epi32(abcd, 16), efgh, 0xAA));
  const __m128i both =
      _mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i ordered =
      _mm_shuffle_epi8(both, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(ordered), 16));
}

// Block scales of 8 blocks and the multipliers of their elements. Adding a power of two that is
// 2^20 times the value's own (at least 2^-6: below lie the subnormals) rounds to three mantissa
// bits; the sum's low bits count the steps.
inline __m256 encode_scales(__m256 maxima, const OuterScale& outer, uint8_t* scales) {
  const __m256 raw =
      _mm256_min_ps(_mm256_mul_ps(maxima, _mm256_set1_ps(outer.mult)), _mm256_set1_ps(kE4M3Max));
  const __m256i exponent =
      _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(raw), _mm256_set1_epi32(0x7F800000)),
                       _mm256_set1_epi32(0x3C800000));
  const __m256i anchor = _mm256_add_epi32(exponent, _mm256_set1_epi32(20 << 23));
  const __m256 sum = _mm256_add_ps(raw, _mm256_castsi256_ps(anchor));
  const __m256i steps = _mm256_sub_epi32(_mm256_castps_si256(sum), anchor);
  const __m256i codes = _mm256_add_epi32(
      steps, _mm256_sub_epi32(_mm256_srli_epi32(exponent, 20), _mm256_set1_epi32(0x3C8)));
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(scales), _mm_packus_epi16(words, words));
  const __m256 value = _mm256_sub_ps(sum, _mm256_castsi256_ps(anchor));
  const __m256 den = _mm256_mul_ps(value, _mm256_set1_ps(outer.decode));
  return _mm256_min_ps(_mm256_div_ps(_mm256_set1_ps(1.0F), den), _mm256_set1_ps(FLT_MAX));
}

// 8 magnitudes a -> 64 (code + 298), or more where the code is past 7. As for the scales, d 2^22 + a
// rounds to one mantissa bit and counts k steps in its low bits, d being the power of two of a, at
// least 1. With e its exponent the code is k + 2 e, and a product of the two 16-bit halves adds k
// and the exponent field with their weights.
inline __m256i encode8(__m256 magnitude, __m256 multiplier) {
  const __m256 a = _mm256_mul_ps(magnitude, multiplier);
  const __m256 d = _mm256_max_ps(
      _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000))), _mm256_set1_ps(1.0F));
  const __m256 sum = _mm256_fmadd_ps(d, _mm256_set1_ps(0x1p22F), a);
  return _mm256_madd_epi16(_mm256_castps_si256(sum), _mm256_set1_epi32(1 << 16 | 64));
}

// 16 values -> 8 dwords, 256 times a byte of codes.
inline __m256i encode16(__m256i x, __m256 multiplier) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i a = magnitudes(x);
  const __m256i low = encode8(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, a)), multiplier);
  const __m256i high = encode8(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, a)), multiplier);
  const __m256i words =
      _mm256_min_epu16(_mm256_packus_epi32(low, high), _mm256_set1_epi16(64 * (7 + 298)));
  // The code moves to bits 6..8, the sign to bit 9.
  const __m256i nibbles =
      _mm256_or_si256(_mm256_sub_epi16(words, _mm256_set1_epi16(64 * 298)),
                      _mm256_and_si256(_mm256_srli_epi16(x, 6), _mm256_set1_epi16(1 << 9)));
  return _mm256_madd_epi16(nibbles, _mm256_set1_epi32(64 << 16 | 4));
}

// 128 values and the multipliers of their 8 blocks -> 64 bytes.
inline void encode_batch(const uint16_t* x, const float* multipliers, uint8_t* codes) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256i bytes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      bytes[i] =
          encode16(load16(x + 64 * half + 16 * i), _mm256_set1_ps(multipliers[4 * half + i]));
    }
    const __m256i low = _mm256_srli_epi16(_mm256_packus_epi32(bytes[0], bytes[1]), 8);
    const __m256i high = _mm256_srli_epi16(_mm256_packus_epi32(bytes[2], bytes[3]), 8);
    const __m256i ordered = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                                                        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32 * half), ordered);
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
  // The multipliers are a batch ahead: a batch takes no longer than its work, which is less than its
  // chain of dependent steps.
  alignas(32) float multipliers[2][kBatchBlocks];
  const auto take_scales = [&](const uint16_t* batch, int64_t at, uint8_t* to) {
    _mm256_store_ps(multipliers[at / kBatch % 2], encode_scales(block_maxima(batch), outer, to));
  };
  int64_t done = 0;
  if (kBatch <= n) take_scales(x, 0, scales);
  for (; done + kBatch <= n; done += kBatch) {
    const auto* next = reinterpret_cast<const char*>(ahead + done);
#pragma GCC unroll 4
    for (int64_t line = 0; line < kBatch * 2; line += 64)
      _mm_prefetch(next + line, _MM_HINT_T0);
    if (const int64_t at = done + kBatch; at + kBatch <= n) {
      take_scales(x + at, at, scales + at / kBlockSize);
    }
    encode_batch(x + done, multipliers[done / kBatch % 2], codes + done / 2);
  }
  if (done == n) return;
  alignas(32) uint16_t last[kBatch] = {};
  alignas(32) uint8_t last_codes[kBatch / 2];
  alignas(32) uint8_t last_scales[kBatchBlocks];
  std::memcpy(last, x + done, static_cast<size_t>(n - done) * sizeof(uint16_t));
  take_scales(last, 0, last_scales);
  encode_batch(last, multipliers[0], last_codes);
  std::memcpy(codes + done / 2, last_codes, static_cast<size_t>(n - done) / 2);
  std::memcpy(
      scales + done / kBlockSize, last_scales, static_cast<size_t>((n - done) / kBlockSize));
}

// Nibbles 0..7 of every dword -> 0 2 4 6 in the low word, 1 3 5 7 in the high word.
inline __m256i split_parity(__m256i v) {
  const __m256i swap =
      _mm256_and_si256(_mm256_xor_si256(v, _mm256_srli_epi16(v, 4)), _mm256_set1_epi16(0x00F0));
  v = _mm256_xor_si256(v, _mm256_xor_si256(swap, _mm256_slli_epi16(swap, 4)));
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(order));
}

// Scales of one record: 4 bytes of each of 16 rows -> 16 bytes of each block.
inline void pack_scales(const Nvfp4Row* rows, int64_t span, uint8_t* out) {
  __m128i quads[4];
  for (int i = 0; i < 4; ++i) {
    alignas(16) uint8_t bytes[16];
    for (int n = 0; n < 4; ++n)
      std::memcpy(bytes + 4 * n, rows[4 * i + n].scales + 4 * span, 4);
    quads[i] =
        _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)),
                         _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  }
  const __m128i low01 = _mm_unpacklo_epi32(quads[0], quads[1]);
  const __m128i low23 = _mm_unpacklo_epi32(quads[2], quads[3]);
  const __m128i high01 = _mm_unpackhi_epi32(quads[0], quads[1]);
  const __m128i high23 = _mm_unpackhi_epi32(quads[2], quads[3]);
  auto* blocks = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(blocks, _mm_unpacklo_epi64(low01, low23));
  _mm_storeu_si128(blocks + 1, _mm_unpackhi_epi64(low01, low23));
  _mm_storeu_si128(blocks + 2, _mm_unpacklo_epi64(high01, high23));
  _mm_storeu_si128(blocks + 3, _mm_unpackhi_epi64(high01, high23));
}

void pack_group(const Nvfp4Row* rows, int64_t k, uint8_t* group) {
  for (int64_t span = 0; span < k / tiles::kSpan; ++span, group += tiles::kRecordBytes) {
    for (int h = 0; h < 2; ++h) {  // eight rows: half of every chunk
      // columns[q][j]: dwords j (low lane) and 4 + j (high lane) of rows 4 q .. 4 q + 3.
      __m256i columns[2][4];
      for (int q = 0; q < 2; ++q) {
        __m256i r[4];
        for (int n = 0; n < 4; ++n) {
          const uint8_t* codes = rows[8 * h + 4 * q + n].codes + 32 * span;
          r[n] = split_parity(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        }
        const __m256i low01 = _mm256_unpacklo_epi32(r[0], r[1]);
        const __m256i low23 = _mm256_unpacklo_epi32(r[2], r[3]);
        const __m256i high01 = _mm256_unpackhi_epi32(r[0], r[1]);
        const __m256i high23 = _mm256_unpackhi_epi32(r[2], r[3]);
        columns[q][0] = _mm256_unpacklo_epi64(low01, low23);
        columns[q][1] = _mm256_unpackhi_epi64(low01, low23);
        columns[q][2] = _mm256_unpacklo_epi64(high01, high23);
        columns[q][3] = _mm256_unpackhi_epi64(high01, high23);
      }
      for (int j = 0; j < 4; ++j) {
        auto* chunk = reinterpret_cast<__m256i*>(group + 64 * j + 32 * h);
        auto* later = reinterpret_cast<__m256i*>(group + 64 * (4 + j) + 32 * h);
        _mm256_storeu_si256(chunk, _mm256_permute2x128_si256(columns[0][j], columns[1][j], 0x20));
        _mm256_storeu_si256(later, _mm256_permute2x128_si256(columns[0][j], columns[1][j], 0x31));
      }
    }
    pack_scales(rows, span, group + tiles::kScalesAt);
  }
}

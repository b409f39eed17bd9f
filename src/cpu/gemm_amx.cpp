// The AMX-BF16 GEMM. For one pair of groups (32 rows) and up to 256 tokens:
//
//   weights, 4.5 bits          panel, BF16 (L1)            tile unit
//   +-----------------+        +--------------+
//   | span s + 1      | expand | buffer 1 - b |
//   +-----------------+ =====> +--------------+
//                              | buffer b     | =====> 32 tokens x 32 rows, tdpbf16ps
//                              +--------------+          ^ activations as tiles (L2)
//
// A span is 256 k. While the tile unit goes over span s, block after block of 16 rows x 16 k of the
// next span, or of the next pair's first, is expanded among its instructions: about 40 instructions
// a block, that out-of-order execution hides under the 16 cycles of each tdpbf16ps. Results stay in
// tiles from span to span when there are at most 32 tokens, and wait in `c` otherwise.
//
// Expansion to BF16 without a multiply. A scale byte becomes UE5M3 (5 exponent bits, bias 15), in
// which every E4M3 value, subnormals too, is a normal number. Then the BF16 pattern of E2M1 * scale
// is the sum of both patterns, corrected where the E2M1 mantissa bit is set (1.5, 3, 6):
// 1.5 (1 + m/8) = 1 + 1/2 + m/8 + m/16, so the mantissa grows by 8 m of 128, or by 32 - 4 m when
// the product passes 2. Table entries of those three have ones in bits 2 to 4, and the entries of
// the correction table have ones everywhere else: one AND leaves the correction to be added. The
// exponent is biased by 9 in the table so that the scale is always subtracted, and saturation keeps
// zero at zero. A zero scale clears the AND mask.
#include "cpu/gemm_amx.hpp"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>

#include "cpu/amx_tiles.hpp"
#include "format/layout.hpp"

#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((                                                                           \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,amx-tile,amx-bf16")
#endif

namespace hexpert::cpu {
namespace {

namespace tiles = layout::cpu_tiles;

constexpr int64_t kSpan = 256;                                 // k of one panel buffer
constexpr int64_t kStepK = 32;                                 // k of one tile
constexpr int64_t kStepBytes = 2 * kTileBytes;                 // weights of one step: two groups
constexpr int64_t kBlocksPerStep = 4;                          // two groups, two blocks of 16 k
constexpr int64_t kBufferBytes = kSpan / kStepK * kStepBytes;  // 16 KiB

constexpr int kExponentBias = 9 + 15;

// UE5M3 of a non-negative E4M3 byte; 0 for 0.
constexpr std::array<uint8_t, 128> kUe5m3 = [] {
  std::array<uint8_t, 128> table{};
  for (unsigned code = 1; code < 128; ++code) {
    // BF16 has the same mantissa bits on top; its exponent has bias 127.
    const float value = code == kE4M3Nan ? 480.0F : e4m3_value(static_cast<uint8_t>(code));
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    table[code] = static_cast<uint8_t>((bits >> 20) - ((127 - 15) << 3));
  }
  return table;
}();

constexpr std::array<uint16_t, 32> kCodePatterns = [] {
  std::array<uint16_t, 32> table{};
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned code = i % 16;
    if (e2m1_doubled(code) == 0) continue;
    const uint32_t pattern = (std::bit_cast<uint32_t>(e2m1_value(code)) >> 16) + (9U << 7);
    const bool has_mantissa = (pattern & 0x7F) != 0;
    table[i] = static_cast<uint16_t>(pattern | (has_mantissa ? 0x1CU : 0U));
  }
  return table;
}();

constexpr std::array<uint16_t, 32> kCorrections = [] {
  std::array<uint16_t, 32> table{};
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned m = i % 8;
    table[i] = static_cast<uint16_t>(0xFFE0U | std::min(8 * m, 32 - 4 * m));
  }
  return table;
}();

// Held in registers by value: stores through byte pointers could alias anything in memory.
struct Tables {
  __m512i ue5m3_low;
  __m512i ue5m3_high;
  __m512i patterns;
  __m512i corrections;
};

inline Tables load_tables() {
  return {_mm512_loadu_si512(kUe5m3.data()),
          _mm512_loadu_si512(kUe5m3.data() + 64),
          _mm512_loadu_si512(kCodePatterns.data()),
          _mm512_loadu_si512(kCorrections.data())};
}

struct ScaleOperands {
  __m512i subtract;
  __m512i keep;
};

// From E4M3 bytes zero-extended to words.
inline __attribute__((always_inline)) ScaleOperands scale_operands(const Tables& tables,
                                                                   __m512i e4m3) {
  const __m512i scale = _mm512_permutex2var_epi8(tables.ue5m3_low, e4m3, tables.ue5m3_high);
  return {_mm512_sub_epi16(_mm512_set1_epi16(kExponentBias << 7), _mm512_slli_epi16(scale, 4)),
          _mm512_maskz_permutexvar_epi16(
              _mm512_test_epi16_mask(scale, scale), scale, tables.corrections)};
}

// BF16 patterns of the codes in the low nibbles of 32 words.
inline __attribute__((always_inline)) __m512i expand_words(const Tables& tables,
                                                           const ScaleOperands& scale,
                                                           __m512i words) {
  const __m512i pattern = _mm512_permutexvar_epi16(words, tables.patterns);
  return _mm512_subs_epu16(_mm512_and_si512(pattern, scale.keep), scale.subtract);
}

// Block `b` (16 rows x 16 k) of a record -> eight 64-byte rows of a weight tile.
inline __attribute__((always_inline)) void expand_block(const Tables& tables,
                                                        const uint8_t* record,
                                                        int64_t b,
                                                        uint8_t* out) {
  // Words 2n and 2n + 1 get the scale of row n.
  const __m128i bytes =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(record + tiles::kScalesAt + 16 * b));
  const __m512i dwords = _mm512_cvtepu8_epi32(bytes);
  const ScaleOperands scale =
      scale_operands(tables, _mm512_or_si512(dwords, _mm512_slli_epi32(dwords, 16)));
#pragma GCC unroll 2
  for (int64_t chunk = 0; chunk < 2; ++chunk) {
    const __m512i words = _mm512_loadu_si512(record + 128 * b + 64 * chunk);
    uint8_t* rows = out + 256 * chunk;
    _mm512_store_si512(rows, expand_words(tables, scale, words));
    _mm512_store_si512(rows + 64, expand_words(tables, scale, _mm512_srli_epi16(words, 4)));
    _mm512_store_si512(rows + 128, expand_words(tables, scale, _mm512_srli_epi16(words, 8)));
    _mm512_store_si512(rows + 192, expand_words(tables, scale, _mm512_srli_epi16(words, 12)));
  }
}

// Expands one span of a pair block by block, on demand.
class SpanExpander {
 public:
  SpanExpander(const uint8_t* pair, int64_t k, int64_t k0, uint8_t* buffer)
      : pair_(pair), group_bytes_(tiles::group_bytes(k)), k0_(k0), buffer_(buffer) {
    blocks_ = pair == nullptr ? 0 : std::min(kSpan, k - k0) / kStepK * kBlocksPerStep;
  }

  inline __attribute__((always_inline)) void blocks(const Tables& tables, int64_t count) {
    for (const int64_t end = std::min(done_ + count, blocks_); done_ < end; ++done_) {
      const int64_t step = done_ / kBlocksPerStep;
      const int64_t group = done_ % kBlocksPerStep / 2;
      const int64_t half = done_ % 2;
      const int64_t k = k0_ + step * kStepK + half * kBlockSize;
      const uint8_t* record = pair_ + group * group_bytes_ + k / tiles::kSpan * tiles::kRecordBytes;
      const int64_t b = k % tiles::kSpan / kBlockSize;
      // The next pair follows this one: its block is fetched into L2 meanwhile.
      const auto* ahead = reinterpret_cast<const char*>(record + 2 * group_bytes_);
      _mm_prefetch(ahead + 128 * b, _MM_HINT_T1);
      _mm_prefetch(ahead + 128 * b + 64, _MM_HINT_T1);
      if (b == 0) _mm_prefetch(ahead + tiles::kScalesAt, _MM_HINT_T1);
      expand_block(
          tables, record, b, buffer_ + step * kStepBytes + group * kTileBytes + half * 512);
    }
  }
  void rest(const Tables& tables) { blocks(tables, blocks_); }

 private:
  const uint8_t* pair_;
  int64_t group_bytes_;
  int64_t k0_;
  uint8_t* buffer_;
  int64_t blocks_ = 0;
  int64_t done_ = 0;
};

// `steps` tile steps of 16 or 32 tokens, `per_step` blocks of the next span expanded at each.
template <typename Unit, bool kTwo>
inline __attribute__((always_inline)) void multiply_steps(const Tables& tables,
                                                          const uint8_t* weights,
                                                          const uint8_t* activations,
                                                          int64_t second_half,
                                                          int64_t steps,
                                                          int64_t per_step,
                                                          SpanExpander& next) {
  for (int64_t s = 0; s < steps; ++s, weights += kStepBytes, activations += kTileBytes) {
    Unit::multiply_00(activations, weights);
    Unit::multiply_01(weights + kTileBytes);
    if constexpr (kTwo) {
      Unit::multiply_10(activations + second_half);
      Unit::multiply_11();
    }
    next.blocks(tables, per_step);
  }
}

template <typename Unit>
void gemm_pairs(const uint8_t* pairs,
                int64_t num_pairs,
                int64_t k,
                const uint8_t* activations,
                int64_t m,
                float* c,
                uint8_t* panel,
                const PairSink& sink) {
  const Tables tables = load_tables();
  const int64_t pair_bytes = 2 * tiles::group_bytes(k);
  const int64_t token_tiles = (m + 15) / 16;
  const int64_t token_steps = (token_tiles + 1) / 2;
  const int64_t row_tiles = k / kStepK * kTileBytes;  // from 16 tokens to the next 16
  const bool stays_in_tiles = token_steps == 1;
  uint8_t* current = panel;
  uint8_t* other = panel + kBufferBytes;

  SpanExpander(pairs, k, 0, current).rest(tables);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const uint8_t* weights = pairs + pair * pair_bytes;
    for (int64_t k0 = 0; k0 < k; k0 += kSpan) {
      const int64_t steps = std::min(kSpan, k - k0) / kStepK;
      const bool first = k0 == 0;
      const bool last = k0 + kSpan >= k;
      const uint8_t* following = !last                  ? weights
                                 : pair + 1 < num_pairs ? weights + pair_bytes
                                                        : nullptr;
      SpanExpander next(following, k, last ? 0 : k0 + kSpan, other);
      const int64_t total_steps = token_steps * steps;
      const int64_t per_step = (kSpan / kStepK * kBlocksPerStep + total_steps - 1) / total_steps;
      for (int64_t t = 0; t < token_tiles; t += 2) {
        float* result = c + t * 16 * tiles::kPairRows;
        const uint8_t* a = activations + t * row_tiles + k0 / kStepK * kTileBytes;
        const bool two = t + 1 < token_tiles;
        if (first) {
          Unit::zero_first();
          if (two) Unit::zero_second();
        } else if (!stays_in_tiles) {
          Unit::load_first(result);
          if (two) Unit::load_second(result + 16 * tiles::kPairRows);
        }
        if (two) {
          multiply_steps<Unit, true>(tables, current, a, row_tiles, steps, per_step, next);
        } else {
          multiply_steps<Unit, false>(tables, current, a, row_tiles, steps, per_step, next);
        }
        if (last || !stays_in_tiles) {
          Unit::store_first(result);
          if (two) Unit::store_second(result + 16 * tiles::kPairRows);
        }
      }
      next.rest(tables);
      std::swap(current, other);
    }
    sink.finish(sink.context, pair, c);
  }
}

void expand(const Nvfp4Row* rows, int64_t m, int64_t k, uint8_t* out) {
  const Tables tables = load_tables();
  for (int64_t i = 0; i < (m + 15) / 16 * 16; ++i) {
    uint8_t* row = out + i / 16 * (k / kStepK) * kTileBytes + i % 16 * kTileStride;
    for (int64_t step = 0; step < k / kStepK; ++step, row += kTileBytes) {
      if (i >= m) {
        _mm512_store_si512(row, _mm512_setzero_si512());
        continue;
      }
      // Word 2j gets byte j (its low nibble counts), word 2j + 1 the byte shifted right by 4.
      const __m512i bytes = _mm512_cvtepu8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i].codes + 16 * step)));
      const __m512i words = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
      const __m512i e4m3 =
          _mm512_mask_set1_epi32(_mm512_set1_epi32(rows[i].scales[2 * step] * 0x10001),
                                 0xFF00,
                                 rows[i].scales[2 * step + 1] * 0x10001);
      _mm512_store_si512(row, expand_words(tables, scale_operands(tables, e4m3), words));
    }
  }
}

template <typename Unit>
void begin() {
  Unit::configure();
}
template <typename Unit>
void end() {
  Unit::release();
}

template <typename Unit>
constexpr AmxKernels kTable = {begin<Unit>, end<Unit>, expand, gemm_pairs<Unit>, 2 * kBufferBytes};

}  // namespace
}  // namespace hexpert::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace hexpert::cpu {

const AmxKernels* amx_kernels() {
  return cpu_features().amx_bf16 ? &kTable<HardwareTiles> : nullptr;
}

const AmxKernels* emulated_amx_kernels() {
  return cpu_features().avx512_vnni_vbmi ? &kTable<EmulatedTiles> : nullptr;
}

}  // namespace hexpert::cpu

// The AMX-BF16 GEMM. For one pair of groups (32 rows) and up to 256 tokens, span after span of K:
//
//   weights, 4.5 bits          panel, BF16, in L1      tile unit
//   +-----------------+        +--------------+
//   | span s          | expand | 32 rows      | =====> 32 tokens x 32 rows, tdpbf16ps
//   +-----------------+ =====> |  x a span    |          ^ activations as tiles, past L1
//   | span s + 1      |        +--------------+
//   +-----------------+
//
// Passes of 32 tokens go over the panel one after the other. As the last of them has read a piece of
// 16 rows x 16 k, the same piece of the next span, or of the next pair's first, is expanded over it,
// among the instructions of the tile unit. Results stay in tiles from span to span when there are at
// most 32 tokens, and wait in `c` otherwise. Either way a result is added up in the order of k: its
// bits do not depend on the number of tokens.
//
// Budget of 32 rows x 32 k on a Xeon with a tile unit of its own, operands in L1, in ns: products with
// 32 tokens 23.7, expanding 33, both together 44.5, as a product takes the vector ports some cycles.
// A round trip of the results through `c` costs about 60 a pass and span.
//
// Expansion to BF16 without a multiply. A scale byte becomes UE5M3 (5 exponent bits, bias 15), in
// which every E4M3 value, subnormals too, is a normal number. Then the BF16 pattern of E2M1 * scale
// is the sum of both patterns, corrected where the E2M1 mantissa bit is set (1.5, 3, 6):
// 1.5 (1 + m/8) = 1 + 1/2 + m/8 + m/16, so the mantissa grows by 8 m of 128, or by 32 - 4 m when
// the product passes 2. Table entries of those three have ones in bits 2 to 4, and the entries of
// the correction table have ones everywhere else: one AND leaves the correction to be added. The
// exponent is biased by 9 in the table so that the scale is always subtracted, and saturation keeps
// zero at zero. A zero scale subtracts so much that everything becomes zero.
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

// Longest span. Up to 32 tokens the results never leave the tiles, and a short span costs nothing. Above, a
// span costs a round trip of the results; a longer one does not stay in L1 beside them.
constexpr int64_t kSpanInTiles = 256;
constexpr int64_t kSpan = 384;
constexpr int64_t kStepK = 32;                  // k of one tile
constexpr int64_t kStepBytes = 2 * kTileBytes;  // weights of one step: two groups
constexpr int64_t kBlockRowsBytes = 512;
constexpr int64_t kRecordPanelBytes = tiles::kSpan / kStepK * kStepBytes;
constexpr int64_t kPanelBytes = kSpan / kStepK * kStepBytes;

struct Span {
  int64_t first;  // record
  int64_t records;
};

// K in the fewest spans, of nearly equal length.
struct SpanCut {
  int64_t records;
  int64_t spans;
  SpanCut(int64_t k, int64_t longest)
      : records(k / tiles::kSpan), spans((k + longest - 1) / longest) {}
  Span span(int64_t s) const {
    const int64_t first = s * records / spans;
    return {first, (s + 1) * records / spans - first};
  }
};

constexpr int kExponentBias = 9 + 15;
constexpr uint8_t kZeroScale = 0xFF;

// UE5M3 of a non-negative E4M3 byte. Zero becomes a number so large that the difference from the
// bias wraps past every pattern.
constexpr std::array<uint8_t, 128> kUe5m3 = [] {
  std::array<uint8_t, 128> table{kZeroScale};
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

// For each block of 16 k of a record: which of its scales byte 2w of word w wants, that of the word's row.
alignas(64) constexpr std::array<std::array<uint8_t, 64>, 4> kSpread = [] {
  std::array<std::array<uint8_t, 64>, 4> table{};
  for (unsigned b = 0; b < 4; ++b) {
    for (unsigned i = 0; i < 64; ++i)
      table[b][i] = static_cast<uint8_t>(16 * b + i / 4);
  }
  return table;
}();

// Held in registers by value: stores through byte pointers could alias anything in memory.
struct Tables {
  __m512i minus_16;
  __m512i ue5m3_low;
  __m512i ue5m3_high;
  __m512i patterns;
  __m512i corrections;
};

inline Tables load_tables() {
  // The compiler must not know the factor: it would replace the product by shifts.
  __m512i minus_16 = _mm512_set1_epi16(-16);
  asm("" : "+v"(minus_16));
  return {minus_16,
          _mm512_loadu_si512(kUe5m3.data()),
          _mm512_loadu_si512(kUe5m3.data() + 64),
          _mm512_loadu_si512(kCodePatterns.data()),
          _mm512_loadu_si512(kCorrections.data())};
}

struct ScaleOperands {
  __m512i subtract;
  __m512i keep;
};

// From UE5M3 in words. Products, because shifts run on one port only.
inline __attribute__((always_inline)) ScaleOperands scale_operands(const Tables& tables,
                                                                   __m512i ue5m3) {
  return {_mm512_add_epi16(_mm512_mullo_epi16(ue5m3, tables.minus_16),
                           _mm512_set1_epi16(kExponentBias << 7)),
          _mm512_permutexvar_epi16(ue5m3, tables.corrections)};
}

// BF16 patterns of the codes in the low nibbles of 32 words.
inline __attribute__((always_inline)) __m512i expand_words(const Tables& tables,
                                                           const ScaleOperands& scale,
                                                           __m512i words) {
  const __m512i pattern = _mm512_permutexvar_epi16(words, tables.patterns);
  return _mm512_subs_epu16(_mm512_and_si512(pattern, scale.keep), scale.subtract);
}

inline __attribute__((always_inline)) __m512i next_nibbles(__m512i words) {
  return _mm512_mulhi_epu16(words, _mm512_set1_epi16(1 << 12));  // words >> 4, on either port
}

// Block `b` (16 rows x 16 k) of a record -> eight 64-byte rows of a weight tile. `scales`: UE5M3 of the
// record's four blocks.
inline __attribute__((always_inline)) void expand_block(
    const Tables& tables, const uint8_t* record, __m512i scales, int64_t b, uint8_t* rows) {
  // Words 2n and 2n + 1 get the scale of row n.
  const ScaleOperands scale = scale_operands(
      tables,
      _mm512_maskz_permutexvar_epi8(
          0x5555555555555555U, _mm512_load_si512(kSpread[static_cast<size_t>(b)].data()), scales));
#pragma GCC unroll 2
  for (int64_t chunk = 0; chunk < 2; ++chunk, rows += 256) {
    const uint8_t* codes = record + 128 * b + 64 * chunk;
    const __m512i words = _mm512_loadu_si512(codes);
    const __m512i upper = _mm512_loadu_si512(codes + 1);  // words >> 8, in the bits that count
    _mm512_store_si512(rows, expand_words(tables, scale, words));
    _mm512_store_si512(rows + 64, expand_words(tables, scale, next_nibbles(words)));
    _mm512_store_si512(rows + 128, expand_words(tables, scale, upper));
    _mm512_store_si512(rows + 192, expand_words(tables, scale, next_nibbles(upper)));
  }
}

// 32 rows x 64 k of a pair, to be expanded into the panel block by block.
class PairRecord {
 public:
  inline __attribute__((always_inline))
  PairRecord(const Tables& tables, const uint8_t* record, int64_t group_bytes)
      : tables_(tables),
        records_{record, record + group_bytes},
        scales_{ue5m3(records_[0]), ue5m3(records_[1])} {
    for (int64_t g = 0; g < 2; ++g) {
      const uint8_t* ahead = records_[g] + 2 * group_bytes;
      asm("" : "+r"(ahead));  // one register for all lines
      ahead_[g] = ahead;
    }
  }

  // Block b of group g.
  inline __attribute__((always_inline)) void expand(int64_t g, int64_t b, uint8_t* panel) const {
    // The next pair follows this one: its block is fetched into L2 meanwhile.
    const uint8_t* ahead = ahead_[g] + 128 * b;
    _mm_prefetch(ahead, _MM_HINT_T1);
    _mm_prefetch(ahead + 64, _MM_HINT_T1);
    if (b == 3) _mm_prefetch(ahead + 128, _MM_HINT_T1);  // scales
    expand_block(tables_,
                 records_[g],
                 scales_[g],
                 b,
                 panel + b / 2 * kStepBytes + g * kTileBytes + b % 2 * kBlockRowsBytes);
  }
  inline __attribute__((always_inline)) void expand_all(uint8_t* panel) const {
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i)
      expand(i / 4, i % 4, panel);
  }

 private:
  inline __attribute__((always_inline)) __m512i ue5m3(const uint8_t* record) const {
    return _mm512_permutex2var_epi8(
        tables_.ue5m3_low, _mm512_loadu_si512(record + tiles::kScalesAt), tables_.ue5m3_high);
  }

  Tables tables_;
  const uint8_t* records_[2];
  const uint8_t* ahead_[2];
  __m512i scales_[2];
};

struct NoRecord {
  void expand(int64_t, int64_t, uint8_t*) const {}
};

// 64 k of the panel times 16 or 32 tokens. What has been read of the panel is replaced by `next`.
template <typename Unit, bool kTwo, typename Next>
inline __attribute__((always_inline)) void multiply_record(const uint8_t* activations,
                                                           int64_t second_half,
                                                           uint8_t* panel,
                                                           const Next& next) {
#pragma GCC unroll 2
  for (int64_t step = 0; step < 2; ++step, activations += kTileBytes) {
    Unit::load_weights(panel + step * kStepBytes);
    Unit::multiply_00(activations);
    next.expand(0, 2 * step, panel);
    Unit::multiply_01();
    next.expand(0, 2 * step + 1, panel);
    if constexpr (kTwo) Unit::multiply_10(activations + second_half);
    next.expand(1, 2 * step, panel);
    if constexpr (kTwo) Unit::multiply_11();
    next.expand(1, 2 * step + 1, panel);
  }
}

// A pass over the span in the panel; `next_records` records from `next` on take its place.
template <typename Unit, bool kTwo>
inline void multiply_span(const Tables& in_memory,
                          const uint8_t* activations,
                          int64_t second_half,
                          uint8_t* panel,
                          int64_t records,
                          const uint8_t* next,
                          int64_t next_records,
                          int64_t group_bytes) {
  const Tables tables = in_memory;
  int64_t r = 0;
  for (; r < std::min(records, next_records); ++r) {
    multiply_record<Unit, kTwo>(
        activations, second_half, panel, PairRecord(tables, next, group_bytes));
    activations += 2 * kTileBytes;
    panel += kRecordPanelBytes;
    next += tiles::kRecordBytes;
  }
  for (; r < records; ++r) {
    multiply_record<Unit, kTwo>(activations, second_half, panel, NoRecord());
    activations += 2 * kTileBytes;
    panel += kRecordPanelBytes;
  }
  for (; r < next_records; ++r) {
    PairRecord(tables, next, group_bytes).expand_all(panel);
    panel += kRecordPanelBytes;
    next += tiles::kRecordBytes;
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
  constexpr int64_t kTileResults = 16 * tiles::kPairRows;
  const Tables tables = load_tables();
  const int64_t group_bytes = tiles::group_bytes(k);
  const int64_t token_tiles = (m + 15) / 16;
  const int64_t row_tiles = k / kStepK * kTileBytes;  // from 16 tokens to the next 16
  const bool stays_in_tiles = token_tiles <= 2;
  const SpanCut cut(k, stays_in_tiles ? kSpanInTiles : kSpan);

  for (int64_t r = 0; r < cut.span(0).records; ++r) {
    PairRecord(tables, pairs + r * tiles::kRecordBytes, group_bytes)
        .expand_all(panel + r * kRecordPanelBytes);
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair, pairs += 2 * group_bytes) {
    for (int64_t s = 0; s < cut.spans; ++s) {
      const Span span = cut.span(s);
      const bool first = s == 0;
      const bool last = s + 1 == cut.spans;
      const uint8_t* next = pairs;
      int64_t next_records = 0;
      if (!last) {
        next += cut.span(s + 1).first * tiles::kRecordBytes;
        next_records = cut.span(s + 1).records;
      } else if (pair + 1 < num_pairs) {
        next += 2 * group_bytes;
        next_records = cut.span(0).records;
      }
      // Of an odd number the single tile comes first: expanding belongs beside two.
      int64_t width = 2 - token_tiles % 2;
      for (int64_t t = 0; t < token_tiles; t += width, width = 2) {
        float* result = c + t * kTileResults;
        const uint8_t* a = activations + t * row_tiles + 2 * span.first * kTileBytes;
        const bool last_pass = t + width == token_tiles;
        const int64_t replaced = last_pass ? next_records : 0;
        if (first) {
          Unit::zero_first();
          if (width == 2) Unit::zero_second();
        } else if (!stays_in_tiles && t == 0) {
          Unit::load_first(result);
          if (width == 2) Unit::load_second(result + kTileResults);
        }
        if (width == 2) {
          multiply_span<Unit, true>(
              tables, a, row_tiles, panel, span.records, next, replaced, group_bytes);
        } else {
          multiply_span<Unit, false>(
              tables, a, row_tiles, panel, span.records, next, replaced, group_bytes);
        }
        if (stays_in_tiles && !last) continue;
        float* following = result + width * kTileResults;
        if (first || last_pass) {
          Unit::store_first(result);
          if (width == 2) Unit::store_second(result + kTileResults);
        } else if (width == 2) {
          Unit::exchange_first(result, following);
          Unit::exchange_second(result + kTileResults, following + kTileResults);
        } else {
          Unit::exchange_first(result, following);
          Unit::load_second(following + kTileResults);
        }
      }
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
      const __m512i ue5m3 = _mm512_maskz_permutex2var_epi8(
          0x5555555555555555U, tables.ue5m3_low, e4m3, tables.ue5m3_high);
      _mm512_store_si512(row, expand_words(tables, scale_operands(tables, ue5m3), words));
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
constexpr AmxKernels kTable = {begin<Unit>, end<Unit>, expand, gemm_pairs<Unit>, kPanelBytes};

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

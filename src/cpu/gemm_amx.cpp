// The AMX-BF16 GEMM. For one pair of groups (32 rows) and up to 256 tokens:
//
//   weights, 4.5 bits          panel, BF16             tile unit
//   +-----------------+        +--------------+
//   | span s + 1      | expand | buffer 1 - b |
//   +-----------------+ =====> +--------------+
//                              | buffer b     | =====> 32 tokens x 32 rows, tdpbf16ps
//                              +--------------+          ^ activations as tiles (L2)
//
// While the tile unit goes over span s, block after block of 16 rows x 16 k of the next span, or of
// the next pair's first, is expanded among its instructions. Results stay in tiles from span to span
// when there are at most 32 tokens, and wait in `c` otherwise. Either way a result is added up in
// the order of k: its bits do not depend on the number of tokens.
//
// Budget of 32 rows x 32 k on a Xeon with a tile unit of its own, in ns. At 32 tokens the unit needs
// 28 and expanding four blocks 51; together they take 65, so they overlap by little. At 128 tokens the
// unit needs 113 of 206; with spans of 256 k it was 228, of which expanding took 40 and the round
// trips of results between spans 60.
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

// Longest k of one panel buffer, measured on a Xeon with a tile unit of its own. Up to 32 tokens the
// results never leave the tiles, and short spans keep both buffers in L1: 1.2x over 256. Above, each
// span costs a round trip of the results, which outweighs reading the panel from L2: 1.13x over 256
// and 1.05x over 1024 at 128 and 256 tokens.
constexpr int64_t kSpanInTiles = 128;
constexpr int64_t kSpan = 2048;
constexpr int64_t kStepK = 32;                  // k of one tile
constexpr int64_t kStepBytes = 2 * kTileBytes;  // weights of one step: two groups
constexpr int64_t kBlockRowsBytes = 512;
constexpr int64_t kBlocksPerRecord = 8;  // two groups, four blocks of 16 k
constexpr int64_t kBufferBytes = kSpan / kStepK * kStepBytes;

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

// Byte 2w of word w: the row of that word.
constexpr std::array<uint8_t, 64> kSpread = [] {
  std::array<uint8_t, 64> table{};
  for (unsigned i = 0; i < 64; ++i)
    table[i] = static_cast<uint8_t>(i / 4);
  return table;
}();

// Held in registers by value: stores through byte pointers could alias anything in memory.
struct Tables {
  __m512i ue5m3_low;
  __m512i ue5m3_high;
  __m512i patterns;
  __m512i corrections;
  __m512i spread;
};

inline Tables load_tables() {
  return {_mm512_loadu_si512(kUe5m3.data()),
          _mm512_loadu_si512(kUe5m3.data() + 64),
          _mm512_loadu_si512(kCodePatterns.data()),
          _mm512_loadu_si512(kCorrections.data()),
          _mm512_loadu_si512(kSpread.data())};
}

struct ScaleOperands {
  __m512i subtract;
  __m512i keep;
};

// From UE5M3 in words.
inline __attribute__((always_inline)) ScaleOperands scale_operands(const Tables& tables,
                                                                   __m512i ue5m3) {
  return {_mm512_sub_epi16(_mm512_set1_epi16(kExponentBias << 7), _mm512_slli_epi16(ue5m3, 4)),
          _mm512_permutexvar_epi16(ue5m3, tables.corrections)};
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
  const __m512i ue5m3 =
      _mm512_permutex2var_epi8(tables.ue5m3_low, _mm512_castsi128_si512(bytes), tables.ue5m3_high);
  const ScaleOperands scale = scale_operands(
      tables, _mm512_maskz_permutexvar_epi8(0x5555555555555555U, tables.spread, ue5m3));
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

// Expands one span of a pair, block by block on demand: four blocks of a record of the first group,
// of the second, then the next record. Branch-free but for the end.
class Expander {
 public:
  Expander() = default;
  Expander(const uint8_t* pair, int64_t k, Span span, uint8_t* buffer)
      : record_(pair + span.first * tiles::kRecordBytes),
        out_(buffer),
        group_bytes_(tiles::group_bytes(k)),
        blocks_(span.records * kBlocksPerRecord) {}

  int64_t left() const { return blocks_ - done_; }

  inline __attribute__((always_inline)) void block(const Tables& tables) {
    const int64_t b = done_ & 3;
    const int64_t group = done_ >> 2 & 1;
    const int64_t r = done_ >> 3;
    const uint8_t* record = record_ + r * tiles::kRecordBytes + group * group_bytes_;
    uint8_t* out = out_ + r * 2 * kStepBytes + group * kTileBytes + (b >> 1) * kStepBytes +
                   (b & 1) * kBlockRowsBytes;
    // The next pair follows this one: its block is fetched into L2 meanwhile.
    const auto* ahead = reinterpret_cast<const char*>(record + 2 * group_bytes_);
    _mm_prefetch(ahead + 128 * b, _MM_HINT_T1);
    _mm_prefetch(ahead + 128 * b + 64, _MM_HINT_T1);
    _mm_prefetch(ahead + tiles::kScalesAt, _MM_HINT_T1);
    expand_block(tables, record, b, out);
    ++done_;
  }
  void rest(const Tables& tables) {
    while (left() > 0)
      block(tables);
  }

 private:
  const uint8_t* record_ = nullptr;
  uint8_t* out_ = nullptr;
  int64_t group_bytes_ = 0;
  int64_t blocks_ = 0;
  int64_t done_ = 0;
};

// `steps` tile steps of 16 or 32 tokens; at each, kBlocks blocks are expanded between the products.
template <typename Unit, bool kTwo, int kBlocks>
inline __attribute__((always_inline)) void multiply_steps(const Tables& tables,
                                                          const uint8_t* weights,
                                                          const uint8_t* activations,
                                                          int64_t second_half,
                                                          int64_t steps,
                                                          Expander& next) {
  Expander expander = next;  // in registers
  for (int64_t s = 0; s < steps; ++s, weights += kStepBytes, activations += kTileBytes) {
    const bool more = kBlocks > 0 && expander.left() > 0;
    Unit::multiply_00(activations, weights);
    if (kBlocks >= 1 && more) expander.block(tables);
    Unit::multiply_01(weights + kTileBytes);
    if (kBlocks == 4 && more) expander.block(tables);
    if constexpr (kTwo) Unit::multiply_10(activations + second_half);
    if (kBlocks >= 2 && more) expander.block(tables);
    if constexpr (kTwo) Unit::multiply_11();
    if (kBlocks == 4 && more) expander.block(tables);
  }
  next = expander;
}

template <typename Unit, bool kTwo>
inline void multiply_steps(const Tables& tables,
                           const uint8_t* weights,
                           const uint8_t* activations,
                           int64_t second_half,
                           int64_t steps,
                           int64_t blocks_per_step,
                           Expander& next) {
  if (next.left() == 0) {
    multiply_steps<Unit, kTwo, 0>(tables, weights, activations, second_half, steps, next);
  } else if (blocks_per_step <= 1) {
    multiply_steps<Unit, kTwo, 1>(tables, weights, activations, second_half, steps, next);
  } else if (blocks_per_step == 2) {
    multiply_steps<Unit, kTwo, 2>(tables, weights, activations, second_half, steps, next);
  } else {
    multiply_steps<Unit, kTwo, 4>(tables, weights, activations, second_half, steps, next);
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
  const SpanCut cut(k, stays_in_tiles ? kSpanInTiles : kSpan);
  uint8_t* current = panel;
  uint8_t* other = panel + kBufferBytes;

  Expander(pairs, k, cut.span(0), current).rest(tables);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const uint8_t* weights = pairs + pair * pair_bytes;
    for (int64_t s = 0; s < cut.spans; ++s) {
      const Span span = cut.span(s);
      const int64_t steps = 2 * span.records;
      const bool last = s + 1 == cut.spans;
      Expander next;
      if (!last) {
        next = Expander(weights, k, cut.span(s + 1), other);
      } else if (pair + 1 < num_pairs) {
        next = Expander(weights + pair_bytes, k, cut.span(0), other);
      }
      const int64_t total_steps = token_steps * steps;
      const int64_t per_step = (next.left() + total_steps - 1) / total_steps;
      for (int64_t t = 0; t < token_tiles; t += 2) {
        float* result = c + t * 16 * tiles::kPairRows;
        const uint8_t* a = activations + t * row_tiles + 2 * span.first * kTileBytes;
        const bool two = t + 1 < token_tiles;
        if (s == 0) {
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

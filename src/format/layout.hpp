// Every offset of every layout, computed here and nowhere else. docs/format.md sections 4, 5 and 7.
// constexpr, for host and device; ends with static_asserts on known positions.
#pragma once

#include <cstdint>

#include "format/codec.hpp"
#include "hexpert/format.hpp"

namespace hexpert::layout {

// --- block scales: R rows, C = K / 16 scale columns ---

HX_HOST_DEVICE constexpr int64_t linear_offset(int64_t row, int64_t column, int64_t columns) {
  return row * columns + column;
}

HX_HOST_DEVICE constexpr int64_t offset_128x4(int64_t row, int64_t column, int64_t columns) {
  const int64_t column_tiles = (columns + 3) / 4;
  return row / 128 * (512 * column_tiles) + column / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         column % 4;
}

HX_HOST_DEVICE constexpr int64_t offset_8x4(int64_t row, int64_t column, int64_t columns) {
  const int64_t column_tiles = (columns + 3) / 4;
  return row / 8 * (32 * column_tiles) + column / 4 * 32 + row % 8 * 4 + column % 4;
}

HX_HOST_DEVICE constexpr int64_t scale_offset(ScaleLayout scale_layout,
                                              int64_t row,
                                              int64_t column,
                                              int64_t columns) {
  switch (scale_layout) {
    case ScaleLayout::k128x4:
      return offset_128x4(row, column, columns);
    case ScaleLayout::k8x4:
      return offset_8x4(row, column, columns);
    case ScaleLayout::kLinear:
      break;
  }
  return linear_offset(row, column, columns);
}

HX_HOST_DEVICE constexpr int64_t scale_bytes(ScaleLayout scale_layout,
                                             int64_t rows,
                                             int64_t columns) {
  switch (scale_layout) {
    case ScaleLayout::k128x4:
      return round_up(rows, 128) * round_up(columns, 4);
    case ScaleLayout::k8x4:
      return round_up(rows, 8) * round_up(columns, 4);
    case ScaleLayout::kLinear:
      break;
  }
  return rows * columns;
}

// The strided "MMA view" of an expert stack of 128x4 buffers: sizes and strides in bytes of
// [r % 32, r % 128 / 32, r / 128, c % 4, c / 4, expert].
struct MmaView {
  int64_t shape[6];
  int64_t strides[6];
};
HX_HOST_DEVICE constexpr MmaView mma_view(int64_t experts, int64_t rows, int64_t columns) {
  const int64_t row_tiles = (rows + 127) / 128;
  const int64_t column_tiles = (columns + 3) / 4;
  return {{32, 4, row_tiles, 4, column_tiles, experts},
          {16, 4, column_tiles * 512, 1, 512, row_tiles * column_tiles * 512}};
}

// --- gated FC1 rows: up and gate alternate in groups, up first ---

inline constexpr int64_t kCanonicalInterleave = 64;

// Prepared row of feature `feature` of one half.
HX_HOST_DEVICE constexpr int64_t gated_row(bool gate, int64_t feature, int64_t group) {
  return feature / group * (2 * group) + (gate ? group : 0) + feature % group;
}

// --- CPU tiles: the order the CPU kernels read weights in ---
//
// A matrix has its rows in groups of 16 and K in spans of 64; a group is one stream of records, one
// record a span, 576 bytes:
//
//     byte    0 .. 511   eight chunks of 64 bytes, chunk c holds k = 8c .. 8c + 7 of all 16 rows
//     byte  512 .. 575   E4M3 scales, byte 512 + 16 b + n: block b (16 k), row n
//
// In a chunk the 16-bit little-endian word 2n + j belongs to row n; its nibble t (lowest first) is
// k = 8c + 2t + j. Shifting the words right by 4t therefore gives the rows of an AMX-BF16 weight
// tile, and the low and high nibbles of the bytes give the operands of two VNNI steps: dword n of
// the low nibbles is k = 8c + {0, 4, 1, 5}, of the high nibbles k = 8c + {2, 6, 3, 7}.
// Gated FC1 groups alternate up, gate, up, gate, so one task reads both as one stream.
namespace cpu_tiles {
inline constexpr int64_t kGroupRows = 16;
inline constexpr int64_t kPairRows = 32;   // two adjacent groups: what the AMX GEMM takes at a time
inline constexpr int64_t kStripRows = 64;  // four adjacent groups: what the integer GEMM takes
inline constexpr int64_t kSpan = 64;       // K elements of a record
inline constexpr int64_t kRecordBytes = 576;
inline constexpr int64_t kScalesAt = 512;     // offset of the scales in a record
inline constexpr int64_t kSizeMultiple = 64;  // hidden and intermediate size are padded to this

constexpr int64_t group_bytes(int64_t k) {
  return k / kSpan * kRecordBytes;
}
constexpr int64_t matrix_bytes(int64_t rows, int64_t k) {
  return rows / kGroupRows * group_bytes(k);
}
// Byte of a group that holds element (row n, k); the nibble is high when nibble_is_high(k).
constexpr int64_t code_offset(int64_t n, int64_t k) {
  const int64_t in_chunk = k % 8;
  return k / kSpan * kRecordBytes + k % kSpan / 8 * 64 + 2 * (2 * n + in_chunk % 2) + in_chunk / 4;
}
constexpr bool nibble_is_high(int64_t k) {
  return k % 4 >= 2;
}
constexpr int64_t scale_offset(int64_t n, int64_t block) {
  return block / 4 * kRecordBytes + kScalesAt + block % 4 * 16 + n;
}
static_assert(kSizeMultiple % kStripRows == 0 && kSizeMultiple % kSpan == 0);
static_assert(code_offset(0, 0) == 0 && code_offset(0, 1) == 2 && code_offset(0, 4) == 1);
static_assert(code_offset(15, 63) == 511 && code_offset(0, 64) == 576);
static_assert(scale_offset(3, 1) == 512 + 16 + 3 && scale_offset(0, 4) == 576 + 512);
}  // namespace cpu_tiles

// --- Hopper fragments: the order the wgmma kernels read weights in ---
//
// A matrix has its rows in tiles of 128 and K in spans of 64; a row tile is one stream of records,
// one record a span, 4608 bytes:
//
//     byte    0 .. 4095   codes: 16 bytes a thread of two warpgroups, one 32-bit word for each k16
//     byte 4096 .. 4607   E4M3 scales: of each 16-row slab, byte 8 g + 2 b + h is row g + 8 h, block b
//
// A word is what one thread contributes to a register operand of wgmma.m64nNk16: rows g and g + 8
// of a slab at k = 2t, 2t + 1, 2t + 8, 2t + 9, g = lane / 4, t = lane % 4. Even k lie in the low
// half-word and odd k in the high one; of each half the low byte is row g and the high one row g + 8.
// In a byte, sign bit and the three magnitude bits of
//
//     k      at 7 and 3..1        k + 8  at 0 and 6..4
//
// so that a mask leaves two FP16 values of magnitude code * 2^-14, for row g after a shift; and a
// select of two shifted words brings the codes of k + 8 to the places of those of k.
// The rows of a slab are in the order in which the epilogue wants its results: fragment_row().
namespace sm90_fragments {
inline constexpr int64_t kTileRows = 128;
inline constexpr int64_t kSlabRows = 16;
inline constexpr int64_t kSpan = 64;
inline constexpr int64_t kRecordBytes = 4608;
inline constexpr int64_t kScalesAt = 4096;

constexpr int64_t matrix_bytes(int64_t rows, int64_t k) {
  return rows / kTileRows * (k / kSpan) * kRecordBytes;
}
HX_HOST_DEVICE constexpr int64_t record_offset(int64_t row, int64_t k, int64_t columns) {
  return (row / kTileRows * (columns / kSpan) + k / kSpan) * kRecordBytes;
}
// Byte of the 32-bit word, little endian, that holds element (row, k) of a matrix of `columns` K.
HX_HOST_DEVICE constexpr int64_t word_offset(int64_t row, int64_t k, int64_t columns) {
  const int64_t slab = row % kTileRows / kSlabRows;
  const int64_t lane = row % 8 * 4 + k % 8 / 2;
  return record_offset(row, k, columns) + (slab * 32 + lane) * 16 + k % kSpan / 16 * 4;
}
// Bits of the element in its word.
struct CodeBits {
  int sign;
  int magnitude;  // lowest of three
};
HX_HOST_DEVICE constexpr CodeBits code_bits(int64_t row, int64_t k) {
  const int byte = (k % 2 != 0 ? 16 : 0) + (row % kSlabRows >= 8 ? 8 : 0);
  return k % 16 < 8 ? CodeBits{byte + 7, byte + 1} : CodeBits{byte, byte + 4};
}
HX_HOST_DEVICE constexpr int64_t scale_offset(int64_t row, int64_t block, int64_t columns) {
  const int64_t slab = row % kTileRows / kSlabRows;
  return record_offset(row, block * 16, columns) + kScalesAt + slab * 64 + row % 8 * 8 +
         block % 4 * 2 + row % kSlabRows / 8;
}
// Fragment row of a matrix row (FC2, FC1 without a gate). A transposed 8x8 result tile leaves rows
// 2t, 2t + 1 and 2t + 8, 2t + 9 of a slab with one thread: these are four consecutive features.
HX_HOST_DEVICE constexpr int64_t fragment_row(int64_t row) {
  return row / 4 * 4 % kSlabRows / 2 + row % 2 + (row % 4 >= 2 ? 8 : 0) +
         row / kSlabRows * kSlabRows;
}
// Fragment row of feature `feature` of the gate or up half of a gated FC1: of each slab rows 0..7 are
// up and rows 8..15 gate of the same eight features, so that one thread holds both.
HX_HOST_DEVICE constexpr int64_t gated_fragment_row(bool gate, int64_t feature) {
  return gated_row(gate, feature, 8);
}
// The inverse of fragment_row().
HX_HOST_DEVICE constexpr int64_t row_of_fragment(int64_t fragment) {
  return fragment / kSlabRows * kSlabRows + fragment % 8 / 2 * 4 + fragment % 2 +
         (fragment % kSlabRows >= 8 ? 2 : 0);
}
static_assert(row_of_fragment(fragment_row(7)) == 7 && row_of_fragment(fragment_row(26)) == 26);
static_assert(fragment_row(0) == 0 && fragment_row(3) == 9 && fragment_row(4) == 2);
static_assert(fragment_row(15) == 15 && fragment_row(18) == 24);
static_assert(word_offset(0, 0, 64) == 0 && word_offset(1, 2, 64) == 80);
static_assert(word_offset(16, 16, 64) == 512 + 4 && word_offset(128, 64, 128) == 3 * 4608);
static_assert(scale_offset(8, 0, 64) == 4096 + 1 && scale_offset(17, 3, 64) == 4096 + 64 + 8 + 6);
}  // namespace sm90_fragments

static_assert(offset_128x4(1, 0, 4) == 16 && offset_128x4(32, 0, 4) == 4);
static_assert(offset_128x4(0, 4, 8) == 512 && offset_128x4(128, 0, 8) == 1024);
static_assert(offset_8x4(7, 3, 4) == 31 && offset_8x4(8, 0, 8) == 64);
static_assert(gated_row(false, 64, 64) == 128 && gated_row(true, 65, 64) == 193);

}  // namespace hexpert::layout

// Groups of 16 rows of one expert matrix: built from checkpoint-order rows, and read back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/quantize_row.hpp"
#include "format/layout.hpp"
#include "hexpert/weights.hpp"

namespace hexpert {

namespace tiles = layout::cpu_tiles;

inline constexpr uint8_t kZeroScale = 0x00;

// Where a group of 16 rows comes from in checkpoint order.
struct GroupSource {
  bool gate = false;
  int64_t first_row = 0;  // of its projection; rows past the projection's last are zero
};

inline GroupSource fc1_group_source(const ExpertShape& shape, int64_t group) {
  if (!shape.gated) return {false, group * tiles::kGroupRows};
  return {group % 2 == 1, group / 2 * tiles::kGroupRows};
}

// Group that holds row `row` of the gate or up projection.
inline int64_t fc1_group_of(const ExpertShape& shape, bool gate, int64_t row) {
  return shape.gated ? row / tiles::kGroupRows * 2 + (gate ? 1 : 0) : row / tiles::kGroupRows;
}

// 16 quantized rows of `k` elements, filled one by one, then packed into a group.
class GroupBuilder {
 public:
  explicit GroupBuilder(int64_t k)
      : k_(k),
        codes_(static_cast<size_t>(tiles::kGroupRows * k / 2)),
        scales_(static_cast<size_t>(tiles::kGroupRows * k / 16)) {
    for (int64_t n = 0; n < tiles::kGroupRows; ++n)
      rows_[n] = {codes(n), scales(n)};
  }
  // rows_ points into the vectors, whose memory moves along and is not copied along.
  GroupBuilder(GroupBuilder&&) = default;
  GroupBuilder& operator=(GroupBuilder&&) = default;
  uint8_t* codes(int64_t n) { return codes_.data() + n * k_ / 2; }
  uint8_t* scales(int64_t n) { return scales_.data() + n * k_ / 16; }

  // Zeros (or poison) from element `from`, a multiple of 16, to the end of the row.
  void pad(int64_t n, int64_t from, uint8_t scale) {
    std::memset(codes(n) + from / 2, 0, static_cast<size_t>((k_ - from) / 2));
    std::memset(scales(n) + from / 16, scale, static_cast<size_t>((k_ - from) / 16));
  }
  void quantize(
      int64_t n, const uint16_t* x, int64_t size, const OuterScale& outer, const uint16_t* ahead) {
    cpu::quantize_padded_row(cpu::best_kernels(), x, size, k_, outer, codes(n), scales(n), ahead);
  }
  // `size` elements, a multiple of 16, that are quantized already.
  void copy(int64_t n, const uint8_t* row_codes, const uint8_t* row_scales, int64_t size) {
    std::memcpy(codes(n), row_codes, static_cast<size_t>(size / 2));
    std::memcpy(scales(n), row_scales, static_cast<size_t>(size / 16));
    pad(n, size, kZeroScale);
  }
  void store(uint8_t* group) const { cpu::best_kernels().pack_group(rows_, k_, group); }

 private:
  int64_t k_;
  std::vector<uint8_t> codes_;
  std::vector<uint8_t> scales_;
  cpu::Nvfp4Row rows_[tiles::kGroupRows];
};

// Row n of a group back in checkpoint order.
inline void read_row(const uint8_t* group, int64_t n, int64_t k, uint8_t* codes, uint8_t* scales) {
  for (int64_t chunk = 0; chunk < k / 8; ++chunk) {
    uint32_t words =
        0;  // even k in the low half, odd k in the high half, nibble t is k = 2t, 2t + 1
    std::memcpy(&words, group + tiles::code_offset(n, chunk * 8), 4);
    for (int t = 0; t < 4; ++t) {
      codes[chunk * 4 + t] =
          static_cast<uint8_t>((words >> (4 * t) & 15) | (words >> (16 + 4 * t) & 15) << 4);
    }
  }
  for (int64_t block = 0; block < k / 16; ++block) {
    scales[block] = group[tiles::scale_offset(n, block)];
  }
}

}  // namespace hexpert

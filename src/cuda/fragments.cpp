#include "cuda/fragments.hpp"

#include <omp.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "weights/tile_groups.hpp"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

constexpr int64_t kSlabRows = fragments::kSlabRows;
static_assert(kSlabRows == tiles::kGroupRows);

// The four places of a word: row g or g + 8 of the slab, k below or above 8. Each takes one byte of
// packed codes: even k in the low half of the word, odd k in the high one.
constexpr fragments::CodeBits place_bits(int place) {
  return fragments::code_bits(place / 2 * 8, place % 2 * 8);
}
constexpr auto kSpread = [] {
  std::array<std::array<uint32_t, 256>, 4> table{};
  for (int place = 0; place < 4; ++place) {
    const fragments::CodeBits bits = place_bits(place);
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const auto half = [&](uint32_t code) {
        return (code & 7) << bits.magnitude | code >> 3 << bits.sign;
      };
      table[static_cast<size_t>(place)][byte] = half(byte & 15) | half(byte >> 4) << 16;
    }
  }
  return table;
}();

uint8_t gather(uint32_t word, int place) {
  const fragments::CodeBits bits = place_bits(place);
  const auto code = [&](uint32_t half) {
    return (half >> bits.magnitude & 7) | (half >> bits.sign & 1) << 3;
  };
  return static_cast<uint8_t>(code(word) | code(word >> 16) << 4);
}

// One matrix in both orders.
struct Matrix {
  int64_t fragment_rows;
  int64_t tile_rows;
  int64_t k;
  bool gated;

  // Matrix row, in the order of the tiles, of a fragment row: the inverse of fragment_row() and
  // gated_fragment_row(), slab by slab. At least tile_rows for padding.
  int64_t tile_row(int64_t slab, int64_t n) const {
    if (!gated) {
      for (int64_t row = slab * kSlabRows;; ++row) {
        if (fragments::fragment_row(row) == slab * kSlabRows + n) return row;
      }
    }
    const bool gate = n >= 8;
    const int64_t feature = slab * 8 + n % 8;
    return layout::gated_row(gate, feature, tiles::kGroupRows);
  }
  int64_t fragment_row(int64_t tile_row) const {
    if (!gated) return fragments::fragment_row(tile_row);
    const bool gate = tile_row / tiles::kGroupRows % 2 == 1;
    const int64_t feature =
        tile_row / (2 * tiles::kGroupRows) * tiles::kGroupRows + tile_row % tiles::kGroupRows;
    return fragments::gated_fragment_row(gate, feature);
  }
};

// Packed rows with linear scales, 16 of them.
struct Rows {
  explicit Rows(int64_t columns)
      : k(columns),
        codes_(static_cast<size_t>(kSlabRows * k / 2)),
        scales_(static_cast<size_t>(kSlabRows * k / 16)) {}
  uint8_t* codes(int64_t n) { return codes_.data() + n * (k / 2); }
  uint8_t* scales(int64_t n) { return scales_.data() + n * (k / 16); }
  int64_t k;

 private:
  std::vector<uint8_t> codes_;
  std::vector<uint8_t> scales_;
};

// Scratch of every thread, made before the region: an exception must not leave it.
template <typename Scratch>
std::vector<Scratch> scratch_per_thread(int64_t k) {
  std::vector<Scratch> all;
  const auto threads = static_cast<size_t>(omp_get_max_threads());
  all.reserve(threads);
  for (size_t i = 0; i < threads; ++i)
    all.emplace_back(k);
  return all;
}

void store_slab(Rows& rows, int64_t slab, uint8_t* matrix) {
  const int64_t k = rows.k;
  const int64_t first = slab * kSlabRows;
  for (int64_t g = 0; g < 8; ++g) {
    const uint8_t* upper = rows.codes(g);
    const uint8_t* lower = rows.codes(g + 8);
    for (int64_t step = 0; step < k / 16; ++step) {
      for (int64_t t = 0; t < 4; ++t) {
        const int64_t at = step * 8 + t;
        const uint32_t word = kSpread[0][upper[at]] | kSpread[1][upper[at + 4]] |
                              kSpread[2][lower[at]] | kSpread[3][lower[at + 4]];
        std::memcpy(matrix + fragments::word_offset(first + g, step * 16 + 2 * t, k), &word, 4);
      }
      matrix[fragments::scale_offset(first + g, step, k)] = rows.scales(g)[step];
      matrix[fragments::scale_offset(first + g + 8, step, k)] = rows.scales(g + 8)[step];
    }
  }
}

void read_fragment_row(
    const uint8_t* matrix, int64_t row, int64_t k, uint8_t* codes, uint8_t* scales) {
  const int place = row % kSlabRows >= 8 ? 2 : 0;
  for (int64_t step = 0; step < k / 16; ++step) {
    for (int64_t t = 0; t < 4; ++t) {
      uint32_t word = 0;
      std::memcpy(&word, matrix + fragments::word_offset(row, step * 16 + 2 * t, k), 4);
      codes[step * 8 + t] = gather(word, place);
      codes[step * 8 + t + 4] = gather(word, place + 1);
    }
    scales[step] = matrix[fragments::scale_offset(row, step, k)];
  }
}

void matrix_to_fragments(const Matrix& m, const uint8_t* from, uint8_t padding_scale, uint8_t* to) {
  std::vector<Rows> scratch = scratch_per_thread<Rows>(m.k);
#pragma omp parallel for schedule(static)
  for (int64_t slab = 0; slab < m.fragment_rows / kSlabRows; ++slab) {
    Rows& rows = scratch[static_cast<size_t>(omp_get_thread_num())];
    for (int64_t n = 0; n < kSlabRows; ++n) {
      const int64_t row = m.tile_row(slab, n);
      if (row < m.tile_rows) {
        read_row(from + row / tiles::kGroupRows * tiles::group_bytes(m.k),
                 row % tiles::kGroupRows,
                 m.k,
                 rows.codes(n),
                 rows.scales(n));
      } else {
        std::memset(rows.codes(n), 0, static_cast<size_t>(m.k / 2));
        std::memset(rows.scales(n), padding_scale, static_cast<size_t>(m.k / 16));
      }
    }
    store_slab(rows, slab, to);
  }
}

void matrix_to_tiles(const Matrix& m, const uint8_t* from, uint8_t* to) {
  std::vector<GroupBuilder> scratch = scratch_per_thread<GroupBuilder>(m.k);
#pragma omp parallel for schedule(static)
  for (int64_t group = 0; group < m.tile_rows / tiles::kGroupRows; ++group) {
    GroupBuilder& builder = scratch[static_cast<size_t>(omp_get_thread_num())];
    for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
      const int64_t row = m.fragment_row(group * tiles::kGroupRows + n);
      read_fragment_row(from, row, m.k, builder.codes(n), builder.scales(n));
    }
    builder.store(to + group * tiles::group_bytes(m.k));
  }
}

Matrix fc1_of(const ExpertWeights::Storage& s, const FragmentWeights& sizes) {
  return {sizes.fc1_rows, s.fc1_rows, s.hidden, s.shape.gated};
}
Matrix fc2_of(const ExpertWeights::Storage& s, const FragmentWeights& sizes) {
  return {sizes.fc2_rows, s.hidden, s.intermediate, false};
}
// Padding of a poisoned matrix is poisoned.
uint8_t padding_scale(float alpha) {
  return std::isnan(alpha) ? kE4M3Nan : kZeroScale;
}

}  // namespace

void tiles_to_fragments(const ExpertWeights::Storage& one,
                        const FragmentWeights& sizes,
                        uint8_t* fc1,
                        uint8_t* fc2) {
  matrix_to_fragments(
      fc1_of(one, sizes), one.fc1_expert(0), padding_scale(one.fc1_up_alpha[0]), fc1);
  matrix_to_fragments(fc2_of(one, sizes), one.fc2_expert(0), padding_scale(one.fc2_alpha[0]), fc2);
}

void fragments_to_tiles(const uint8_t* fc1,
                        const uint8_t* fc2,
                        const FragmentWeights& sizes,
                        ExpertWeights::Storage& one) {
  matrix_to_tiles(fc1_of(one, sizes), fc1, one.fc1_expert(0));
  matrix_to_tiles(fc2_of(one, sizes), fc2, one.fc2_expert(0));
}

}  // namespace hexpert::cuda

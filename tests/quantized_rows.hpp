// Quantized rows for the tests of the CPU GEMMs.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.hpp"
#include "format/codec.hpp"
#include "support.hpp"

namespace hexpert::test {

// Random codes; scales from `scale(row, block)`.
struct QuantizedRows {
  template <typename Scale>
  QuantizedRows(int64_t rows, int64_t columns, uint64_t seed, const Scale& scale)
      : k(columns), codes(size(rows * k / 2)), scales(size(rows * k / 16)) {
    Random random(seed);
    for (uint8_t& byte : codes)
      byte = static_cast<uint8_t>(random.bits());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < k / 16; ++b)
        scales[size(r * k / 16 + b)] = scale(r, b);
      views.push_back({codes.data() + r * k / 2, scales.data() + r * k / 16});
    }
  }
  static std::size_t size(int64_t n) { return static_cast<std::size_t>(n); }
  float value(int64_t r, int64_t i) const {
    const cpu::Nvfp4Row& row = views[size(r)];
    return e2m1_value(row.codes[i / 2] >> (i % 2 * 4) & 15) * e4m3_value(row.scales[i / 16]);
  }
  int64_t k;
  std::vector<uint8_t> codes, scales;
  std::vector<cpu::Nvfp4Row> views;
};

inline uint8_t any_scale(int64_t row, int64_t block) {
  return static_cast<uint8_t>((row * 37 + block * 11) % 127);
}

}  // namespace hexpert::test

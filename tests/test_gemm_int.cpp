// The integer GEMMs against the definition of their sums, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "format/layout.hpp"
#include "quantized_rows.hpp"
#include "support.hpp"

namespace hexpert::cpu {
namespace {

using test::AlignedVector;
using test::any_scale;
using test::QuantizedRows;
namespace tiles = layout::cpu_tiles;

constexpr int64_t kMaxTokens = 256;

// Blocks in ascending k; of each the exact sum of products, then one FMA.
float expected(const QuantizedRows& weights, int64_t row, const QuantizedRows& tokens, int64_t t) {
  const Nvfp4Row& w = weights.views[static_cast<std::size_t>(row)];
  const Nvfp4Row& a = tokens.views[static_cast<std::size_t>(t)];
  float acc = 0;
  for (int64_t b = 0; b < weights.k / kBlockSize; ++b) {
    int quarters = 0;
    for (int64_t i = 16 * b; i < 16 * b + 16; ++i) {
      const int shift = static_cast<int>(i % 2 * 4);
      quarters +=
          e2m1_doubled(w.codes[i / 2] >> shift & 15) * e2m1_doubled(a.codes[i / 2] >> shift & 15);
    }
    const float term = static_cast<float>(quarters) * 0.25F * e4m3_value(w.scales[b]);
    acc = std::fma(term, e4m3_value(a.scales[b]), acc);
  }
  return acc;
}

class IntGemm : public testing::TestWithParam<const Kernels* (*)()> {};

// Every number of tokens up to the widest tile and beyond, the largest of a pass, and tokens that do
// not know how many others there are.
TEST_P(IntGemm, SumsAreTheDefinitions) {
  const Kernels* kernels = GetParam()();
  if (kernels == nullptr) GTEST_SKIP() << "this machine lacks the instructions";
  std::vector<int64_t> counts;
  for (int64_t m = 1; m <= 68; ++m)
    counts.push_back(m);
  counts.insert(counts.end(), {100, 127, 128, 129, 192, 193, 255, 256});
  constexpr std::array<int64_t, 4> kColumns = {64, 320, 768, 2112};
  for (std::size_t which = 0; which < kColumns.size(); ++which) {
    const int64_t k = kColumns[which];
    const QuantizedRows weights(tiles::kStripRows, k, 1, any_scale);
    const QuantizedRows tokens(
        kMaxTokens, k, 2, [](int64_t r, int64_t b) { return any_scale(7 * r + 3, b); });
    AlignedVector<uint8_t> strip(
        static_cast<std::size_t>(tiles::matrix_bytes(tiles::kStripRows, k)));
    for (int64_t row = 0; row < tiles::kStripRows; row += tiles::kGroupRows) {
      kernels->pack_group(
          weights.views.data() + row, k, strip.data() + tiles::matrix_bytes(row, k));
    }
    AlignedVector<float> definition(kMaxTokens * tiles::kStripRows);
    for (int64_t i = 0; i < kMaxTokens * tiles::kStripRows; ++i) {
      definition[static_cast<std::size_t>(i)] =
          expected(weights, i % tiles::kStripRows, tokens, i / tiles::kStripRows);
    }
    for (std::size_t i = which; i < counts.size(); i += kColumns.size()) {
      const int64_t m = counts[i];
      AlignedVector<uint8_t> tile(static_cast<std::size_t>(int_tile_bytes(m, k)), 0xFF);
      AlignedVector<float> c((kMaxTokens + 1) * tiles::kStripRows, std::nanf(""));
      kernels->expand_int(tokens.views.data(), m, k, tile.data());
      kernels->gemm_int(strip.data(), k, tile.data(), m, c.data());
      for (std::size_t j = 0; j < c.size(); ++j) {
        if (j < static_cast<std::size_t>(m * tiles::kStripRows)) {
          ASSERT_EQ(test::f32_bits(c[j]), test::f32_bits(definition[j]))
              << "tokens " << m << " k " << k << " token " << j / 64 << " row " << j % 64;
        } else {
          ASSERT_TRUE(std::isnan(c[j])) << "tokens " << m << " writes beyond them";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Units,
                         IntGemm,
                         testing::Values(scalar_kernels, avx2_kernels, avx512_vnni_kernels),
                         [](const auto& unit) {
                           return unit.param == scalar_kernels ? "scalar"
                                  : unit.param == avx2_kernels ? "avx2"
                                                               : "avx512_vnni";
                         });

}  // namespace
}  // namespace hexpert::cpu

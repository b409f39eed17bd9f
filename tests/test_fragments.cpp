// Hopper fragments on the host: every code and scale where the layout says, and back again.
#include <gtest/gtest.h>

#include "cuda/fragments.hpp"
#include "support.hpp"

namespace hexpert {
namespace {

namespace fragments = layout::sm90_fragments;

using test::AlignedVector;
using test::Random;

// A projection of random codes and scales in checkpoint order.
struct Projection {
  int64_t rows;
  int64_t cols;
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;

  Projection(int64_t rows_in, int64_t cols_in, uint64_t seed)
      : rows(rows_in),
        cols(cols_in),
        codes(static_cast<size_t>(rows * blocks() * 8)),
        scales(static_cast<size_t>(rows * blocks())) {
    Random random(seed);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < cols; ++k) {
        codes[static_cast<size_t>(r * blocks() * 8 + k / 2)] |=
            static_cast<uint8_t>((random.bits() & 15) << (k % 2 * 4));
      }
    }
    for (uint8_t& scale : scales)
      scale = static_cast<uint8_t>(random.integer(0, 0x7E));
  }
  int64_t blocks() const { return (cols + 15) / 16; }
  unsigned code(int64_t r, int64_t k) const {
    if (r >= rows || k >= cols) return 0;
    return codes[static_cast<size_t>(r * blocks() * 8 + k / 2)] >> (k % 2 * 4) & 15;
  }
  unsigned scale(int64_t r, int64_t block) const {
    return r < rows && block < blocks() ? scales[static_cast<size_t>(r * blocks() + block)] : 0;
  }
  QuantizedProjection view() const { return {codes.data(), scales.data(), 0.5F}; }
};

// Rows `fragment_row(r)` of the fragments hold the rows of `expected`.
template <typename FragmentRow>
void expect_projection(const std::vector<uint8_t>& matrix,
                       const Projection& expected,
                       int64_t padded_rows,
                       int64_t k_padded,
                       const FragmentRow& fragment_row) {
  for (int64_t r = 0; r < padded_rows; ++r) {
    const int64_t row = fragment_row(r);
    for (int64_t k = 0; k < k_padded; ++k) {
      uint32_t word = 0;
      std::memcpy(&word, matrix.data() + fragments::word_offset(row, k, k_padded), 4);
      const fragments::CodeBits bits = fragments::code_bits(row, k);
      const unsigned code = (word >> bits.magnitude & 7) | (word >> bits.sign & 1) << 3;
      ASSERT_EQ(code, expected.code(r, k)) << "row " << r << " k " << k;
    }
    for (int64_t block = 0; block < k_padded / 16; ++block) {
      const auto at = static_cast<size_t>(fragments::scale_offset(row, block, k_padded));
      ASSERT_EQ(matrix[at], expected.scale(r, block)) << "row " << r << " block " << block;
    }
  }
}

struct Fragments {
  cuda::FragmentWeights sizes;
  std::vector<uint8_t> fc1;
  std::vector<uint8_t> fc2;
  explicit Fragments(const ExpertShape& shape)
      : sizes(cuda::fragment_sizes(shape)),
        fc1(static_cast<size_t>(sizes.fc1_bytes()), 0xA5),
        fc2(static_cast<size_t>(sizes.fc2_bytes()), 0xA5) {}
};

class FragmentLayout : public testing::TestWithParam<ExpertShape> {};

TEST_P(FragmentLayout, EveryElementAndBack) {
  const ExpertShape& shape = GetParam();
  const int64_t inter = shape.intermediate_size;
  const int64_t hidden = shape.hidden_size;
  const Projection gate(inter, hidden, 1);
  const Projection up(inter, hidden, 2);
  const Projection down(hidden, inter, 3);
  ExpertWeights weights = ExpertWeights::allocate(shape).value();
  ASSERT_TRUE(
      weights.set_quantized_expert(0, {.gate = gate.view(), .up = up.view(), .down = down.view()})
          .ok());

  Fragments f(shape);
  cuda::tiles_to_fragments(weights.storage(), f.sizes, f.fc1.data(), f.fc2.data());
  if (shape.gated) {
    const auto row_of = [](bool is_gate) {
      return [is_gate](int64_t r) { return fragments::gated_fragment_row(is_gate, r); };
    };
    expect_projection(f.fc1, up, f.sizes.intermediate, f.sizes.hidden, row_of(false));
    expect_projection(f.fc1, gate, f.sizes.intermediate, f.sizes.hidden, row_of(true));
  } else {
    expect_projection(f.fc1, up, f.sizes.fc1_rows, f.sizes.hidden, fragments::fragment_row);
  }
  expect_projection(f.fc2, down, f.sizes.fc2_rows, f.sizes.intermediate, fragments::fragment_row);

  ExpertWeights::Storage back(shape);
  ASSERT_TRUE(back.allocate_tiles());
  std::fill_n(back.fc1.data(), back.fc1.size(), uint8_t{0xA5});
  std::fill_n(back.fc2.data(), back.fc2.size(), uint8_t{0xA5});
  cuda::fragments_to_tiles(f.fc1.data(), f.fc2.data(), f.sizes, back);
  const ExpertWeights::Storage& tiles = weights.storage();
  EXPECT_EQ(std::memcmp(tiles.fc1.data(), back.fc1.data(), static_cast<size_t>(back.fc1.size())),
            0);
  EXPECT_EQ(std::memcmp(tiles.fc2.data(), back.fc2.data(), static_cast<size_t>(back.fc2.size())),
            0);
}

INSTANTIATE_TEST_SUITE_P(Shapes,
                         FragmentLayout,
                         testing::Values(ExpertShape{1, 64, 64, false},
                                         ExpertShape{1, 64, 64, true},
                                         ExpertShape{1, 1, 1, false},
                                         ExpertShape{1, 1, 1, true},
                                         ExpertShape{1, 16, 130, false},
                                         ExpertShape{1, 130, 16, true},
                                         ExpertShape{1, 200, 333, true},
                                         ExpertShape{1, 129, 191, false},
                                         ExpertShape{1, 256, 192, true},
                                         ExpertShape{1, 320, 448, false}),
                         [](const auto& p) {
                           return "H" + std::to_string(p.param.hidden_size) + "_I" +
                                  std::to_string(p.param.intermediate_size) +
                                  (p.param.gated ? "_gated" : "");
                         });

TEST(Fragments, SizesOfModels) {
  const auto bytes = [](const ExpertShape& shape) {
    const cuda::FragmentWeights w = cuda::fragment_sizes(shape);
    return w.fc1_bytes() + w.fc2_bytes();
  };
  EXPECT_EQ(bytes({128, 2048, 768, true}), (1536 * 2048 + 2048 * 768) / 16 * 9);     // Qwen3-30B
  EXPECT_EQ(bytes({128, 2688, 1856, false}), (1920 * 2688 + 2688 * 1856) / 16 * 9);  // Nemotron
}

// The words whose position in a record is drawn in layout.hpp.
TEST(Fragments, BitsOfOneWord) {
  Projection up(16, 64, 1);
  std::fill(up.codes.begin(), up.codes.end(), uint8_t{0});
  up.codes[0] = 0x1F;                            // row 0: k 0 is -6, k 1 is 0.5
  up.codes[4] = 0x09;                            // row 0: k 8 is -0.5
  up.codes[static_cast<size_t>(9 * 32)] = 0x70;  // row 9: k 1 is 6
  const Projection down(64, 16, 2);
  ExpertWeights weights = ExpertWeights::allocate({1, 64, 16, false}).value();
  ASSERT_TRUE(
      weights.set_quantized_expert(0, {.gate = {}, .up = up.view(), .down = down.view()}).ok());
  Fragments f({1, 64, 16, false});
  cuda::tiles_to_fragments(weights.storage(), f.sizes, f.fc1.data(), f.fc2.data());
  uint32_t word = 0;
  std::memcpy(&word, f.fc1.data(), 4);
  // Row 0 is fragment row 0: k 0 at 7 and 3..1, k 8 at 0 and 6..4, k 1 like k 0 two bytes above.
  EXPECT_EQ(word, 0x8EU | 0x11U | (1U << 1 << 16));
  // Row 9 is fragment row 5: the upper half of the slab, lane 20.
  ASSERT_EQ(fragments::fragment_row(9), 5);
  std::memcpy(&word, f.fc1.data() + 20 * 16, 4);
  EXPECT_EQ(word, 7U << 1 << 16);
}

TEST(Fragments, PoisonReachesThePadding) {
  const ExpertShape shape{1, 64, 64, false};
  test::Bf16Vector fc1(64 * 64, 0x3F80);
  fc1[77] = 0x7FC0;
  const test::Bf16Vector fc2(64 * 64, 0x3F80);
  const ExpertWeights weights = ExpertWeights::prepare({fc1.data(), DType::kBF16, {1, 64, 64}},
                                                       {fc2.data(), DType::kBF16, {1, 64, 64}})
                                    .value();
  Fragments f(shape);
  cuda::tiles_to_fragments(weights.storage(), f.sizes, f.fc1.data(), f.fc2.data());
  for (int64_t row = 0; row < 128; ++row) {
    const auto at = static_cast<size_t>(fragments::scale_offset(row, 3, 64));
    EXPECT_EQ(f.fc1[at], 0x7F) << row;
    EXPECT_NE(f.fc2[at], 0x7F) << row;
  }
}

}  // namespace
}  // namespace hexpert

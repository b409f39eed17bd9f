// The AMX route on the emulated tile unit, and on the hardware's where there is one: expansion bit
// by bit, products against exact sums.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/gemm_amx.hpp"
#include "format/layout.hpp"
#include "quantized_rows.hpp"
#include "support.hpp"

namespace hexpert::cpu {
namespace {

using test::AlignedVector;
using test::any_scale;
using test::QuantizedRows;
namespace tiles = layout::cpu_tiles;

uint8_t moderate_scale(int64_t row, int64_t block) {
  return static_cast<uint8_t>(0x38 + (row * 5 + block * 3) % 24);
}

class AmxKernel : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    amx_ = GetParam() ? amx_kernels() : emulated_amx_kernels();
    if (amx_ == nullptr) {
      GTEST_SKIP() << "this machine lacks "
                   << (GetParam() ? cpu_features().amx_missing : cpu_features().avx512_missing);
    }
  }

  AlignedVector<float> multiply(const QuantizedRows& weights, const QuantizedRows& activations) {
    const int64_t k = weights.k;
    const auto m = static_cast<int64_t>(activations.views.size());
    const int64_t pairs = static_cast<int64_t>(weights.views.size()) / tiles::kPairRows;
    AlignedVector<uint8_t> packed(static_cast<std::size_t>(pairs * 2 * tiles::group_bytes(k)));
    for (int64_t g = 0; g < 2 * pairs; ++g) {
      scalar_kernels()->pack_group(weights.views.data() + g * tiles::kGroupRows,
                                   k,
                                   packed.data() + g * tiles::group_bytes(k));
    }
    AlignedVector<uint8_t> tokens(static_cast<std::size_t>(amx_tile_bytes(m, k)), 0xFF);
    AlignedVector<uint8_t> panel(static_cast<std::size_t>(amx_->panel_bytes), 0xFF);
    AlignedVector<float> c(kMaxPassTokens * tiles::kPairRows, std::nanf(""));
    struct Result {
      int64_t m;
      AlignedVector<float> values;
      int64_t next_pair = 0;
    } result{m, AlignedVector<float>(static_cast<std::size_t>(pairs * m * 32)), 0};
    const PairSink sink = {&result, [](void* context, int64_t pair, const float* values) {
                             auto* r = static_cast<Result*>(context);
                             EXPECT_EQ(pair, r->next_pair++);
                             std::copy_n(values, r->m * 32, r->values.begin() + pair * r->m * 32);
                           }};
    amx_->begin();
    amx_->expand(activations.views.data(), m, k, tokens.data());
    amx_->gemm_pairs(packed.data(), pairs, k, tokens.data(), m, c.data(), panel.data(), sink);
    amx_->end();
    EXPECT_EQ(result.next_pair, pairs);
    return result.values;
  }
  static float element(const AlignedVector<float>& c, int64_t m, int64_t row, int64_t token) {
    return c[static_cast<std::size_t>((row / 32 * m + token) * 32 + row % 32)];
  }

  const AmxKernels* amx_ = nullptr;
};

// Activations with a single 1 per row pick weights one by one: every code times every scale.
TEST_P(AmxKernel, WeightsExpandExactly) {
  const int64_t k = 64;
  QuantizedRows weights(
      128, k, 1, [](int64_t r, int64_t) { return static_cast<uint8_t>(r % 127); });
  for (int64_t r = 0; r < 128; ++r) {
    for (int64_t i = 0; i < k / 2; ++i) {
      weights.codes[static_cast<std::size_t>(r * k / 2 + i)] =
          static_cast<uint8_t>((2 * i) % 16 | (2 * i + 1) % 16 << 4);
    }
  }
  QuantizedRows activations(k, k, 1, [](int64_t, int64_t) { return uint8_t{0x38}; });
  std::fill(activations.codes.begin(), activations.codes.end(), uint8_t{0});
  for (int64_t i = 0; i < k; ++i) {
    activations.codes[static_cast<std::size_t>(i * k / 2 + i / 2)] =
        static_cast<uint8_t>(2 << (i % 2 * 4));
  }
  const auto c = multiply(weights, activations);
  for (int64_t r = 0; r < 128; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      ASSERT_EQ(element(c, k, r, i), weights.value(r, i)) << "scale " << r << " code " << i % 16;
    }
  }
}

TEST_P(AmxKernel, ActivationsExpandExactly) {
  const int64_t k = 64;
  const QuantizedRows activations(
      127, k, 2, [](int64_t r, int64_t b) { return static_cast<uint8_t>((r + 31 * b) % 127); });
  AlignedVector<uint8_t> out(static_cast<std::size_t>(amx_tile_bytes(127, k)), 0xFF);
  amx_->expand(activations.views.data(), 127, k, out.data());
  const auto* words = reinterpret_cast<const uint16_t*>(out.data());
  for (int64_t r = 0; r < 128; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t at = (r / 16 * (k / 32) + i / 32) * 512 + r % 16 * 32 + i % 32;
      ASSERT_EQ(bf16_to_f32(words[at]), r < 127 ? activations.value(r, i) : 0.0F);
    }
  }
}

// Every number of tokens up to two tile pairs, then the larger ones; K of one to seventeen spans, equal or not.
TEST_P(AmxKernel, ProductsAreWithinTheSummationBound) {
  std::vector<int64_t> counts;
  for (int64_t m = 1; m <= 65; ++m)
    counts.push_back(m);
  counts.insert(counts.end(), {96, 100, 128, 255, 256});
  for (int64_t m : counts) {
    const int64_t k =
        std::array<int64_t, 5>{64, 320, 768, 2112, 4160}[static_cast<std::size_t>(m % 5)];
    const QuantizedRows weights(96, k, 3, any_scale);
    const QuantizedRows activations(m, k, 4, moderate_scale);
    const auto c = multiply(weights, activations);
    for (int64_t r = 0; r < 96; ++r) {
      for (int64_t t = 0; t < m; t += 1 + t / 8) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double product = double{weights.value(r, i)} * activations.value(t, i);
          sum += product;
          magnitude += std::fabs(product);
        }
        ASSERT_LE(std::fabs(element(c, m, r, t) - sum),
                  magnitude * static_cast<double>(k) * 0x1p-24)
            << "m " << m << " k " << k << " row " << r << " token " << t;
      }
    }
  }
}

// The same k order whatever shares the pass: a token's bits do not depend on the others.
TEST_P(AmxKernel, TokensDoNotDependOnTheirNumber) {
  const int64_t k = 2112;
  const QuantizedRows weights(64, k, 5, any_scale);
  const QuantizedRows all(200, k, 6, any_scale);
  const auto expected = multiply(weights, all);
  for (int64_t m : {1, 9, 17, 33, 64, 130}) {
    QuantizedRows some = all;
    some.views.assign(all.views.begin(), all.views.begin() + m);
    const auto c = multiply(weights, some);
    for (int64_t r = 0; r < 64; ++r) {
      for (int64_t t = 0; t < m; ++t)
        ASSERT_EQ(element(c, m, r, t), element(expected, 200, r, t));
    }
  }
}

// What the emulation shows holds for the hardware, bit for bit.
TEST_P(AmxKernel, EmulationHasTheSameBits) {
  const int64_t k = 2112;
  const QuantizedRows weights(96, k, 7, any_scale);
  const QuantizedRows activations(77, k, 8, any_scale);
  const auto c = multiply(weights, activations);
  amx_ = emulated_amx_kernels();
  const auto expected = multiply(weights, activations);
  ASSERT_EQ(c.size(), expected.size());
  for (std::size_t i = 0; i < c.size(); ++i)
    ASSERT_EQ(test::f32_bits(c[i]), test::f32_bits(expected[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Units, AmxKernel, testing::Bool(), [](const auto& unit) {
  return unit.param ? "Hardware" : "Emulated";
});

}  // namespace
}  // namespace hexpert::cpu

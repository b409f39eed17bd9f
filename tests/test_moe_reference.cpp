// The reference backend against definitions that share no code with it: dense FP64 sums over
// exported weights, analytic sums; and the activations one by one.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "moe/activation.hpp"
#include "moe/reference.hpp"
#include "moe_case.hpp"
#include "quantize/block_quantizer.hpp"

namespace hexpert {
namespace {

using test::kGeGlu;
using test::kOai;
using test::kSiTu;
using test::kSiTuBoth;
using test::kSquaredRelu;
using test::kSwiGlu;
using test::MoeCase;
using test::MoeData;
using test::MoeRun;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double sigmoid(double v) {
  return 1 / (1 + std::exp(-v));
}

// --- activations ---

constexpr Activation kAll[] = {kSquaredRelu, kSwiGlu, kOai, kGeGlu, kSiTu, kSiTuBoth};

TEST(Activation, Formulas) {
  for (double u : {-9.5, -1.25, 0.0, 0.5, 3.0, 11.0}) {
    for (double g : {-30.0, -8.0, -1.5, 0.25, 2.0, 9.0}) {
      const auto value = [&](const Activation& a) {
        return activate(a, static_cast<float>(u), static_cast<float>(g));
      };
      const auto expect_near = [&](double got, double expected) {
        EXPECT_NEAR(got, expected, 1e-12 + 1e-9 * std::fabs(expected)) << "u " << u << " g " << g;
      };
      expect_near(value(kSquaredRelu), u > 0 ? u * u : 0);
      expect_near(value(kSwiGlu), g * sigmoid(g) * u);
      const double og = std::min(g, 7.0);
      const double ou = std::min(std::max(u, -7.0), 7.0);
      const double alpha = static_cast<double>(1.702F);
      expect_near(value(kOai), og * sigmoid(alpha * og) * (ou + 1));
      expect_near(value(kGeGlu),
                  0.5 * g * (1 + std::tanh(0.7978845608 * (g + 0.044715 * g * g * g))) * u);
      expect_near(value(kSiTu), 1.75 * std::tanh(g / 1.75) * sigmoid(g) * u);
      const double b = static_cast<double>(0.8F);
      expect_near(value(kSiTuBoth), b * std::tanh(g / b) * sigmoid(g) * (1.5 * std::tanh(u / 1.5)));
    }
  }
}

TEST(Activation, ZeroGateGivesZero) {
  for (const Activation& a : kAll) {
    for (float u : {0.0F, -0.0F, 5.0F, -5.0F}) {
      if (a.type == ActivationType::kSquaredRelu && u != 0) continue;
      EXPECT_EQ(activate(a, u, 0.0F), 0.0) << to_string(a.type);
      EXPECT_EQ(activate(a, u, -0.0F), 0.0) << to_string(a.type);
    }
  }
}

TEST(Activation, NanPropagates) {
  for (const Activation& a : kAll) {
    EXPECT_TRUE(std::isnan(activate(a, kNan, 1.0F))) << to_string(a.type);
    if (is_gated(a.type)) {
      EXPECT_TRUE(std::isnan(activate(a, 1.0F, kNan))) << to_string(a.type);
    }
  }
}

TEST(Activation, ExponentialMayOverflow) {
  for (const Activation& a : kAll) {
    if (!is_gated(a.type)) continue;
    for (float g : {-800.0F, -1e30F, -FLT_MAX, -kInf}) {
      const double v = activate(a, 2.0F, g);
      EXPECT_EQ(v, 0.0) << to_string(a.type) << " gate " << g;
    }
  }
  EXPECT_EQ(activate(kSwiGlu, 1.0F, kInf), std::numeric_limits<double>::infinity());
  EXPECT_EQ(activate(kSquaredRelu, -kInf, 0.0F), 0.0);
  EXPECT_EQ(activate(kOai, kInf, kInf), activate(kOai, 7.0F, 7.0F));
  EXPECT_EQ(activate(kOai, -kInf, 3.0F), activate(kOai, -7.0F, 3.0F));
  // The tail of the tanh form does not cancel to zero.
  EXPECT_NE(activate(kGeGlu, 1.0F, -6.0F), 0.0);
}

TEST(Activation, NamesAndGates) {
  EXPECT_EQ(to_string(ActivationType::kSquaredRelu), "squared_relu");
  EXPECT_EQ(to_string(ActivationType::kSwiGlu), "swiglu");
  EXPECT_EQ(to_string(ActivationType::kSwiGluOai), "swiglu_oai");
  EXPECT_EQ(to_string(ActivationType::kGeGluTanh), "geglu_tanh");
  EXPECT_EQ(to_string(ActivationType::kSiTu), "situ");
  EXPECT_FALSE(is_gated(ActivationType::kSquaredRelu));
  EXPECT_TRUE(is_gated(ActivationType::kSiTu));
}

// --- exact sums ---

TEST(Reference, LargestSumIsExact) {
  namespace tiles = layout::cpu_tiles;
  constexpr int64_t kColumns = 1 << 20;  // every code 6, every scale 448
  std::vector<uint8_t> group(static_cast<size_t>(tiles::group_bytes(kColumns)), 0x77);
  for (int64_t b = 0; b < kColumns / 16; ++b) {
    for (int64_t n = 0; n < 16; ++n) {
      group[static_cast<size_t>(tiles::scale_offset(n, b))] = n % 2 == 0 ? 0x7E : 0x01;
    }
  }
  std::vector<uint8_t> codes(kColumns / 2, 0x77);
  std::vector<uint8_t> scales(kColumns / 16, 0x7E);
  int64_t sums[16];
  reference::exact_sums({codes.data(), scales.data(), 1}, group.data(), kColumns, sums);
  EXPECT_EQ(sums[0], int64_t{144} * 229376 * 229376 * (kColumns));
  EXPECT_EQ(sums[1], int64_t{144} * 229376 * 1 * kColumns);
  std::fill(codes.begin(), codes.end(), 0xFF);
  reference::exact_sums({codes.data(), scales.data(), 1}, group.data(), kColumns, sums);
  EXPECT_EQ(sums[14], -int64_t{144} * 229376 * 229376 * kColumns);
}

// Every weight code times every activation code, at every pair of positions in a block.
TEST(Reference, EveryPairOfCodes) {
  namespace tiles = layout::cpu_tiles;
  for (int64_t at = 0; at < 64; ++at) {
    for (unsigned w = 0; w < 16; ++w) {
      std::vector<uint8_t> group(static_cast<size_t>(tiles::kRecordBytes), 0);
      const int64_t n = (at + w) % 16;
      group[static_cast<size_t>(tiles::code_offset(n, at))] =
          static_cast<uint8_t>(tiles::nibble_is_high(at) ? w << 4 : w);
      group[static_cast<size_t>(tiles::scale_offset(n, at / 16))] = 0x3C;  // 1.5
      for (unsigned x = 0; x < 16; ++x) {
        std::vector<uint8_t> codes(32, 0);
        std::vector<uint8_t> scales(4, 0x05);  // 5 * 2^-9
        codes[static_cast<size_t>(at / 2)] = static_cast<uint8_t>(at % 2 == 0 ? x : x << 4);
        int64_t sums[16];
        reference::exact_sums({codes.data(), scales.data(), 1}, group.data(), 64, sums);
        const double expected = static_cast<double>(e2m1_value(w)) *
                                static_cast<double>(e2m1_value(x)) * 1.5 * 5 * 0x1p-9;
        for (int64_t row = 0; row < 16; ++row) {
          ASSERT_EQ(static_cast<double>(sums[row]) * 0x1p-20, row == n ? expected : 0.0);
        }
      }
    }
  }
}

TEST(Reference, QuantizedRowIsPaddedWithZeros) {
  const test::Bf16Vector x = test::gaussian_bf16(37, 3);
  std::vector<uint8_t> codes(32, 0xEE);
  std::vector<uint8_t> scales(4, 0xEE);
  reference::QuantizedRow row{codes.data(), scales.data()};
  reference::quantize_row(x.data(), 37, 64, row);
  test::Bf16Vector padded = x;
  padded.resize(64, 0);
  uint16_t amax = 0;
  for (uint16_t v : x)
    amax = std::max<uint16_t>(amax, v & 0x7FFF);
  const OuterScale outer = token_scale(amax);
  EXPECT_EQ(row.token_scale, outer.stored);
  for (size_t b = 0; b < 4; ++b) {
    uint8_t expected[8];
    EXPECT_EQ(scales[b], quantize_block(padded.data() + 16 * b, outer, expected));
    EXPECT_EQ(std::memcmp(expected, codes.data() + 8 * b, 8), 0);
  }
  EXPECT_EQ(scales[3], 0);
}

// --- the whole layer, in FP64, from what the weights and tokens export ---

struct DenseExpert {
  std::vector<double> gate, up, down;
};

std::vector<double> dense_projection(const ExpertWeights& weights,
                                     int64_t expert,
                                     ExpertWeights::Projection projection,
                                     int64_t rows,
                                     int64_t cols) {
  const int64_t blocks = (cols + 15) / 16;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * blocks * 8));
  std::vector<uint8_t> scales(static_cast<size_t>(rows * blocks));
  float alpha = 0;
  EXPECT_TRUE(
      weights.export_projection(expert, projection, codes.data(), scales.data(), &alpha).ok());
  std::vector<double> values(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint8_t byte = codes[static_cast<size_t>(r * blocks * 8 + c / 2)];
      const uint8_t scale = scales[static_cast<size_t>(r * blocks + c / 16)];
      values[static_cast<size_t>(r * cols + c)] =
          static_cast<double>(e2m1_value(c % 2 == 0 ? byte & 15U : byte >> 4)) *
          static_cast<double>(e4m3_value(scale)) * static_cast<double>(alpha);
    }
  }
  return values;
}

std::vector<double> dequantized(const uint16_t* x, int64_t n) {
  const int64_t padded = round_up(n, 16);
  std::vector<uint8_t> codes(static_cast<size_t>(padded / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(padded / 16));
  reference::QuantizedRow row{codes.data(), scales.data()};
  reference::quantize_row(x, n, padded, row);
  std::vector<double> values;
  for (int64_t c = 0; c < n; ++c) {
    const uint8_t byte = codes[static_cast<size_t>(c / 2)];
    values.push_back(static_cast<double>(e2m1_value(c % 2 == 0 ? byte & 15U : byte >> 4)) *
                     static_cast<double>(e4m3_value(scales[static_cast<size_t>(c / 16)])) *
                     static_cast<double>(row.token_scale));
  }
  return values;
}

double dot(const std::vector<double>& matrix, int64_t row, const std::vector<double>& x) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sum += matrix[static_cast<size_t>(row) * x.size() + i] * x[i];
  }
  return sum;
}

void expect_dense_layer(const MoeCase& c) {
  SCOPED_TRACE(testing::Message() << c);
  using Projection = ExpertWeights::Projection;
  const ExpertWeights weights = test::make_weights(c);
  const MoeData data(c);
  const std::unique_ptr<MoeRun> got = test::run("reference", c, weights, data.inputs(c));
  std::vector<DenseExpert> experts;
  for (int64_t e = 0; e < c.local(); ++e) {
    DenseExpert dense;
    const int64_t h = c.hidden_size;
    const int64_t i = c.intermediate_size;
    if (c.gated()) dense.gate = dense_projection(weights, e, Projection::kGate, i, h);
    dense.up = dense_projection(weights, e, Projection::kUp, i, h);
    dense.down = dense_projection(weights, e, Projection::kDown, h, i);
    experts.push_back(std::move(dense));
  }
  int64_t bad_rows = 0;
  for (int64_t token = 0; token < c.tokens; ++token) {
    const std::vector<double> x =
        dequantized(data.hidden_states.data() + token * c.hidden_size, c.hidden_size);
    std::vector<double> expected(static_cast<size_t>(c.hidden_size), 0.0);
    for (int64_t s = 0; s < c.top_k; ++s) {
      const int64_t slot = token * c.top_k + s;
      const int64_t e = data.local_expert(c, slot);
      if (e < 0) continue;
      const DenseExpert& dense = experts[static_cast<size_t>(e)];
      std::vector<uint16_t> h;
      for (int64_t j = 0; j < c.intermediate_size; ++j) {
        const auto up = static_cast<float>(dot(dense.up, j, x));
        const auto gate = c.gated() ? static_cast<float>(dot(dense.gate, j, x)) : 0.0F;
        h.push_back(test::bf16(activate(c.activation, up, gate)));
      }
      const std::vector<double> hq = dequantized(h.data(), c.intermediate_size);
      for (int64_t n = 0; n < c.hidden_size; ++n) {
        const double y = dot(dense.down, n, hq);
        expected[static_cast<size_t>(n)] +=
            static_cast<double>(data.probabilities[static_cast<size_t>(slot)]) *
            static_cast<double>(bf16_to_f32(test::bf16(y)));
      }
    }
    std::vector<float> row(got->out.data() + token * c.hidden_size,
                           got->out.data() + (token + 1) * c.hidden_size);
    const double error = test::relative_l2(row, expected);
    EXPECT_LE(error, 0.12) << "token " << token;
    if (error > 4e-3) ++bad_rows;
  }
  EXPECT_LE(bad_rows, 1 + c.tokens / 20);
}

TEST(Reference, DenseLayer) {
  for (const Activation& activation : kAll) {
    expect_dense_layer({.num_experts = 6,
                        .top_k = 3,
                        .hidden_size = 80,
                        .intermediate_size = 56,
                        .tokens = 12,
                        .num_local_experts = 4,
                        .local_expert_offset = 1,
                        .activation = activation,
                        .seed = 5});
  }
  for (int64_t size : {1, 15, 17, 64, 65}) {
    expect_dense_layer({.num_experts = 3,
                        .top_k = 2,
                        .hidden_size = size,
                        .intermediate_size = 66 - size,
                        .tokens = 5,
                        .activation = kSwiGlu});
  }
}

}  // namespace
}  // namespace hexpert

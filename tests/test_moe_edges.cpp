// Every available backend at the edges: odd sizes, empty slots, bounded rows, special values.
#include <gtest/gtest.h>

#include "moe_case.hpp"
#include "staged.hpp"

namespace hexpert {
namespace {

using test::available_backends;
using test::expect_every_backend;
using test::kGeGlu;
using test::kOai;
using test::kSiTu;
using test::kSiTuBoth;
using test::kSquaredRelu;
using test::kSwiGlu;
using test::make_weights;
using test::MoeCase;
using test::MoeData;
using test::MoeRun;
using test::Routing;

// --- edges ---

TEST(Edges, OddSizes) {
  constexpr int64_t kSizes[][2] = {
      {1, 1}, {16, 16}, {16, 70}, {17, 15}, {33, 100}, {65, 63}, {100, 33}, {130, 250}, {257, 1}};
  for (const auto& [hidden, intermediate] : kSizes) {
    for (const Activation& activation : {kSquaredRelu, kSwiGlu}) {
      expect_every_backend({.num_experts = 3,
                            .top_k = 2,
                            .hidden_size = hidden,
                            .intermediate_size = intermediate,
                            .tokens = 9,
                            .activation = activation});
    }
  }
}

TEST(Edges, TopKAndLocalExperts) {
  const auto layer = [](int64_t experts, int64_t top_k, int64_t local, int64_t offset) {
    return MoeCase{.num_experts = experts,
                   .top_k = top_k,
                   .hidden_size = 48,
                   .intermediate_size = 80,
                   .tokens = 11,
                   .num_local_experts = local,
                   .local_expert_offset = offset,
                   .activation = kSwiGlu};
  };
  expect_every_backend(layer(64, 22, 64, 0));
  expect_every_backend(layer(64, 22, 4, 30));  // k > L
  expect_every_backend(layer(64, 22, 1, 63));  // L = 1, last
  expect_every_backend(layer(1, 1, 1, 0));
  expect_every_backend(layer(4, 9, 4, 0));  // k > E: the rest is -1
  expect_every_backend(layer(16, 4, 8, 4));
}

// More slots a token than a warp has lanes.
TEST(Edges, ManySlots) {
  for (int64_t top_k : {40, 160}) {
    // Distinct experts; any of them in any slot, -1 among them; a third of them local.
    MoeCase c{.num_experts = 192,
              .top_k = top_k,
              .hidden_size = 48,
              .intermediate_size = 32,
              .tokens = 5,
              .activation = kSwiGlu};
    expect_every_backend(c);
    c.routing = Routing::kRepeating;
    expect_every_backend(c);
    c.num_local_experts = 64;
    c.local_expert_offset = 100;
    expect_every_backend(c);

    c.routing = Routing::kImbalanced;
    const ExpertWeights weights = make_weights(c);
    MoeData data(c);
    for (int64_t s = 31; s < top_k; s += 32) {
      data.ids[static_cast<size_t>(s)] = -1;
      data.ids[static_cast<size_t>(top_k + s - 1)] = -1;
    }
    data.sync_ids();
    expect_every_backend(c, weights, data, data.inputs(c));
    expect_every_backend(c, weights, data, data.inputs(c, false));
  }
}

// As many as the routing of a GPU counts.
TEST(Edges, ManyExperts) {
  expect_every_backend({.num_experts = 16384,
                        .top_k = 3,
                        .hidden_size = 16,
                        .intermediate_size = 16,
                        .tokens = 40,
                        .activation = kSwiGlu});
}

// Rows per expert around the widths of the kernels' token tiles and passes.
TEST(Edges, RowsPerExpert) {
  for (int64_t rows : {5, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257}) {
    expect_every_backend({.num_experts = 2,
                          .top_k = 1,
                          .hidden_size = 64,
                          .intermediate_size = 32,
                          .tokens = rows,
                          .activation = rows % 2 == 0 ? kSwiGlu : kSquaredRelu,
                          .routing = Routing::kAllToOne});
  }
}

TEST(Edges, EmptySlots) {
  const MoeCase c{.num_experts = 8,
                  .top_k = 4,
                  .hidden_size = 64,
                  .intermediate_size = 64,
                  .tokens = 16,
                  .num_local_experts = 4,
                  .local_expert_offset = 2,
                  .activation = kSwiGlu};
  const ExpertWeights weights = make_weights(c);
  MoeData data(c);
  for (int64_t token = 0; token < c.tokens; ++token) {  // every pattern of empty slots
    for (int64_t s = 0; s < c.top_k; ++s) {
      data.ids[static_cast<size_t>(token * c.top_k + s)] =
          (token >> s & 1) != 0 ? c.local_expert_offset + s : (s % 2 == 0 ? -1 : 7);
    }
  }
  data.sync_ids();
  expect_every_backend(c, weights, data, data.inputs(c));
  expect_every_backend(c, weights, data, data.inputs(c, false));

  for (int64_t id : {int64_t{-1}, int64_t{0}, int64_t{6}, int64_t{1} << 32 | 3}) {
    std::fill(data.ids.begin(), data.ids.end(), id);
    expect_every_backend(c, weights, data, data.inputs(c));
    for (const std::string& backend : available_backends()) {
      const std::unique_ptr<MoeRun> got = test::run(backend, c, weights, data.inputs(c));
      for (int64_t i = 0; i < got->out.size(); ++i) {
        ASSERT_EQ(test::f32_bits(got->out[i]), 0U) << backend;
        ASSERT_EQ(got->out_bf16[i], 0) << backend;
      }
    }
  }
}

TEST(Edges, BoundedRows) {
  const MoeCase c{.tokens = 6, .activation = kSwiGlu};
  const ExpertWeights weights = make_weights(c);
  const MoeData data(c);
  for (int64_t capacity : {0, 1, 3, 6, 7, 1000}) {
    MoeInputs inputs = data.inputs(c);
    inputs.token_capacity = capacity;
    expect_every_backend(c, weights, data, inputs);  // no effect without use_bounded_rows
    inputs.use_bounded_rows = true;
    expect_every_backend(c, weights, data, inputs);
  }
  MoeInputs unset = data.inputs(c);
  unset.use_bounded_rows = true;
  expect_every_backend(c, weights, data, unset);
}

TEST(Edges, NoTokens) {
  MoeCase c{.tokens = 0};
  const ExpertWeights weights = make_weights(c);
  MoeInputs inputs;
  inputs.hidden_states = {nullptr, DType::kBF16, {0, c.hidden_size}};
  inputs.routing_map = {nullptr, DType::kI32, {0, c.top_k}};
  inputs.probabilities = {nullptr, DType::kF32, {0, c.top_k}};
  for (const std::string& backend : available_backends()) {
    for (int64_t max_tokens : {4, 0}) {
      c.max_tokens = max_tokens;
      test::run(backend, c, weights, inputs);  // throws when a forward fails
    }
  }
}

// --- values ---

// All rows but `row` of the two runs are the same.
void expect_other_rows_same(const MoeCase& c, const MoeRun& a, const MoeRun& b, int64_t row) {
  for (int64_t i = 0; i < a.out.size(); ++i) {
    if (i / c.hidden_size == row) continue;
    ASSERT_EQ(test::f32_bits(a.out[i]), test::f32_bits(b.out[i])) << "row " << i / c.hidden_size;
  }
}

TEST(Values, SpecialTokens) {
  const MoeCase squared{.num_experts = 4,
                        .top_k = 2,
                        .hidden_size = 80,
                        .intermediate_size = 72,
                        .tokens = 20,
                        .routing = Routing::kUniform};
  MoeCase gated = squared;
  gated.activation = kSwiGlu;
  for (const MoeCase& c : {squared, gated}) {
    const ExpertWeights weights = make_weights(c);
    const MoeData clean(c);
    const auto row_of = [&](MoeData& data) {
      return data.hidden_states.data() + 7 * c.hidden_size;
    };

    MoeData zero = clean;
    std::fill_n(row_of(zero), c.hidden_size, uint16_t{0});
    row_of(zero)[3] = 0x8000;
    expect_every_backend(c, weights, zero, zero.inputs(c));
    MoeData nan = clean;
    row_of(nan)[79] = 0x7FC1;
    expect_every_backend(c, weights, nan, nan.inputs(c));
    MoeData infinite = clean;
    row_of(infinite)[5] = 0xFF80;
    expect_every_backend(c, weights, infinite, infinite.inputs(c));

    for (const std::string& backend : available_backends()) {
      SCOPED_TRACE(backend);
      const auto run = [&](const MoeData& data) {
        return test::run(backend, c, weights, data.inputs(c));
      };
      const std::unique_ptr<MoeRun> base = run(clean);
      const std::unique_ptr<MoeRun> with_zero = run(zero);
      const std::unique_ptr<MoeRun> with_nan = run(nan);
      for (int64_t i = 7 * c.hidden_size; i < 8 * c.hidden_size; ++i) {
        ASSERT_EQ(test::f32_bits(with_zero->out[i]), 0U);
        ASSERT_TRUE(std::isnan(with_nan->out[i]));
        ASSERT_TRUE(std::isnan(bf16_to_f32(with_nan->out_bf16[i])));
      }
      expect_other_rows_same(c, *base, *with_zero, 7);
      expect_other_rows_same(c, *base, *with_nan, 7);
      expect_other_rows_same(c, *base, *run(infinite), 7);
    }

    MoeData lost = nan;  // a NaN token without a local expert
    lost.ids[14] = -1;
    lost.ids[15] = -1;
    for (const std::string& backend : available_backends()) {
      const std::unique_ptr<MoeRun> got = test::run(backend, c, weights, lost.inputs(c));
      for (int64_t i = 7 * c.hidden_size; i < 8 * c.hidden_size; ++i) {
        ASSERT_EQ(test::f32_bits(got->out[i]), 0U) << backend;
      }
    }
  }
}

TEST(Values, MagnitudesOfEveryScale) {
  for (const Activation& activation : {kSquaredRelu, kSwiGlu, kOai, kGeGlu}) {
    const MoeCase c{.num_experts = 4,
                    .top_k = 2,
                    .hidden_size = 96,
                    .intermediate_size = 64,
                    .tokens = 48,
                    .activation = activation};
    const ExpertWeights weights = make_weights(c);
    MoeData data(c);
    for (int64_t token = 0; token < c.tokens; ++token) {
      const double scale = std::ldexp(1.0, static_cast<int>(token * 5) - 126);
      const test::Bf16Vector row =
          test::outlier_bf16(c.hidden_size, static_cast<uint64_t>(token), scale);
      std::copy(row.begin(), row.end(), data.hidden_states.begin() + token * c.hidden_size);
    }
    expect_every_backend(c, weights, data, data.inputs(c));
  }
}

TEST(Values, WidePreActivations) {
  // Gates over the whole range where the exponential matters, in steps, and outliers.
  for (const Activation& activation : {kSwiGlu, kOai, kGeGlu, kSiTu, kSiTuBoth, kSquaredRelu}) {
    const MoeCase c{.num_experts = 2,
                    .top_k = 1,
                    .hidden_size = 64,
                    .intermediate_size = 256,
                    .tokens = 64,
                    .activation = activation};
    const ExpertWeights weights = make_weights(c);
    MoeData data(c);
    for (int64_t token = 0; token < c.tokens; ++token) {
      const test::Bf16Vector row =
          test::gaussian_bf16(c.hidden_size,
                              static_cast<uint64_t>(token),
                              0.1 * std::pow(1.2, static_cast<double>(token)));
      std::copy(row.begin(), row.end(), data.hidden_states.begin() + token * c.hidden_size);
    }
    expect_every_backend(c, weights, data, data.inputs(c));
  }
}

using Projection = ExpertWeights::Projection;

// One NVFP4 matrix of an expert.
struct Matrix {
  std::vector<uint8_t> codes, scales;
  float alpha = 1;
};

Matrix export_matrix(const ExpertWeights& weights, int64_t expert, Projection projection) {
  const ExpertShape& shape = weights.shape();
  const bool down = projection == Projection::kDown;
  const int64_t rows = down ? shape.hidden_size : shape.intermediate_size;
  const int64_t blocks = ((down ? shape.intermediate_size : shape.hidden_size) + 15) / 16;
  Matrix m{std::vector<uint8_t>(static_cast<size_t>(rows * blocks * 8)),
           std::vector<uint8_t>(static_cast<size_t>(rows * blocks))};
  const Status status =
      weights.export_projection(expert, projection, m.codes.data(), m.scales.data(), &m.alpha);
  if (!status.ok()) throw Error(status);
  return m;
}

// Pre-activations of both signs past the largest FP32 number, also where the other one is ordinary.
TEST(Values, InfinitePreActivations) {
  for (const Activation& activation : {kSquaredRelu, kSwiGlu, kOai, kGeGlu, kSiTu, kSiTuBoth}) {
    const MoeCase c{.num_experts = 4,
                    .top_k = 2,
                    .hidden_size = 48,
                    .intermediate_size = 40,
                    .tokens = 24,
                    .activation = activation};
    ExpertWeights weights = make_weights(c);
    const Matrix up = export_matrix(weights, 0, Projection::kUp);
    const Matrix gate = export_matrix(weights, 0, c.gated() ? Projection::kGate : Projection::kUp);
    const Matrix down = export_matrix(weights, 0, Projection::kDown);
    constexpr float kHuge = 3e38F;
    const float alphas[][2] = {{kHuge, kHuge}, {kHuge, gate.alpha}, {up.alpha, kHuge}};
    for (size_t e = 0; e < std::size(alphas); ++e) {
      const Status status =
          weights.set_quantized_expert(static_cast<int64_t>(e),
                                       {{gate.codes.data(), gate.scales.data(), alphas[e][1]},
                                        {up.codes.data(), up.scales.data(), alphas[e][0]},
                                        {down.codes.data(), down.scales.data(), down.alpha}});
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    MoeData data(c);
    for (int64_t i = 0; i < 8 * c.hidden_size; ++i) {  // token scales that reach further
      data.hidden_states[static_cast<size_t>(i)] = test::bf16(
          1e4 * static_cast<double>(bf16_to_f32(data.hidden_states[static_cast<size_t>(i)])));
    }
    expect_every_backend(c, weights, data, data.inputs(c));
  }
}

TEST(Values, SpecialExperts) {
  const MoeCase c{.num_experts = 4,
                  .top_k = 2,
                  .hidden_size = 48,
                  .intermediate_size = 40,
                  .tokens = 24,
                  .activation = kSwiGlu};
  const test::ExpertSource source(c);
  ExpertWeights weights = make_weights(c);
  const auto set = [&](int64_t e, const test::Bf16Vector& fc1, const test::Bf16Vector& fc2) {
    ASSERT_TRUE(weights.set_expert(e, source.fc1_view(fc1), source.fc2_view(fc2)).ok());
  };
  test::Bf16Vector zero_fc1 = source.fc1(0);
  std::fill(zero_fc1.begin(), zero_fc1.end(), uint16_t{0});
  set(0, zero_fc1, source.fc2(0));
  test::Bf16Vector nan_fc1 = source.fc1(1);
  nan_fc1[5] = 0x7FC0;
  set(1, nan_fc1, source.fc2(1));
  test::Bf16Vector nan_fc2 = source.fc2(2);
  nan_fc2.back() = 0xFFFF;
  set(2, source.fc1(2), nan_fc2);
  test::Bf16Vector infinite_fc2 = source.fc2(3);
  infinite_fc2[7] = 0x7F80;
  set(3, source.fc1(3), infinite_fc2);

  MoeData data(c);
  expect_every_backend(c, weights, data, data.inputs(c));
  for (const std::string& backend : available_backends()) {
    const std::unique_ptr<MoeRun> got = test::run(backend, c, weights, data.inputs(c));
    for (int64_t token = 0; token < c.tokens; ++token) {
      bool poisoned = false;
      for (int64_t s = 0; s < c.top_k; ++s) {
        const int64_t e = data.local_expert(c, token * c.top_k + s);
        poisoned = poisoned || e == 1 || e == 2;
      }
      for (int64_t n = 0; n < c.hidden_size; ++n) {
        ASSERT_EQ(std::isnan(got->out[token * c.hidden_size + n]), poisoned)
            << backend << " token " << token;
      }
    }
  }
}

TEST(Values, ProbabilitiesAreUsedAsGiven) {
  const MoeCase c{.num_experts = 4, .top_k = 3, .tokens = 8, .activation = kSwiGlu};
  const ExpertWeights weights = make_weights(c);
  MoeData data(c);
  const float special[] = {
      0.0F, -2.5F, 1e-42F, 3e38F, std::numeric_limits<float>::infinity(), 1.0F};
  for (size_t i = 0; i < data.probabilities.size(); ++i) {
    data.probabilities[i] = special[i % std::size(special)];
  }
  data.probabilities[6] = std::numeric_limits<float>::quiet_NaN();
  expect_every_backend(c, weights, data, data.inputs(c));
}

TEST(Values, DifferentScalesOfGateAndUp) {
  const MoeCase c{.num_experts = 3,
                  .top_k = 2,
                  .hidden_size = 70,
                  .intermediate_size = 50,
                  .tokens = 10,
                  .activation = kSwiGlu};
  ExpertWeights weights = make_weights(c);
  const Matrix gate = export_matrix(weights, 1, Projection::kGate);
  const Matrix up = export_matrix(weights, 1, Projection::kUp);
  const Matrix down = export_matrix(weights, 1, Projection::kDown);
  const Status status =
      weights.set_quantized_expert(1,
                                   {{gate.codes.data(), gate.scales.data(), gate.alpha * 10},
                                    {up.codes.data(), up.scales.data(), up.alpha * 0.3F},
                                    {down.codes.data(), down.scales.data(), down.alpha}});
  ASSERT_TRUE(status.ok()) << status.to_string();
  const MoeData data(c);
  expect_every_backend(c, weights, data, data.inputs(c));
}

}  // namespace
}  // namespace hexpert

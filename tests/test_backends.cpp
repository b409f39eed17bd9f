// Every available backend: golden layers bit for bit, conformance shapes stage by stage against the
// reference.
#include <gtest/gtest.h>

#include <numeric>

#include "golden.hpp"
#include "moe_case.hpp"
#include "staged.hpp"

namespace hexpert {
namespace {

using test::available_backends;
using test::expect_every_backend;
using test::golden;
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

// --- golden layers ---

template <typename T>
void expect_rows(const std::string& name,
                 const std::string& array,
                 const std::vector<int64_t>& rows,
                 const test::PoisonedBuffer<T>& got) {
  const test::GoldenArray expected = golden("moe", name, array);
  const int64_t width = expected.count() / expected.shape[0];
  ASSERT_EQ(expected.shape[0], static_cast<int64_t>(rows.size())) << array;
  for (size_t r = 0; r < rows.size(); ++r) {
    const T* expected_row = expected.data<T>() + static_cast<int64_t>(r) * width;
    const T* got_row = got.data() + rows[r] * width;
    for (int64_t i = 0; i < width; ++i) {
      ASSERT_EQ(std::memcmp(expected_row + i, got_row + i, sizeof(T)), 0)
          << array << " row " << r << " column " << i;
    }
  }
}

void expect_golden(const std::string& name, const std::string& weights_name) {
  const test::GoldenArray fc1 = golden("weights", weights_name, "fc1_weight");
  const test::GoldenArray fc2 = golden("weights", weights_name, "fc2_weight");
  const ExpertWeights weights =
      ExpertWeights::prepare(
          {fc1.bytes.data(), DType::kBF16, {fc1.shape[0], fc1.shape[1], fc1.shape[2]}},
          {fc2.bytes.data(), DType::kBF16, {fc2.shape[0], fc2.shape[1], fc2.shape[2]}})
          .value();
  const std::vector<int32_t> config = golden("moe", name, "config").values<int32_t>();
  const test::GoldenArray hidden_states = golden("moe", name, "hidden_states");
  MoeCase c{.num_experts = config[0],
            .top_k = config[3],
            .hidden_size = hidden_states.shape[1],
            .intermediate_size = fc2.shape[2],
            .tokens = hidden_states.shape[0],
            .num_local_experts = config[2],
            .local_expert_offset = config[1],
            .activation = config[4] != 0 ? kSwiGlu : kSquaredRelu};
  MoeData data(c);
  data.hidden_states.assign(hidden_states.data<uint16_t>(),
                            hidden_states.data<uint16_t>() + hidden_states.count());
  const std::vector<int32_t> ids = golden("moe", name, "routing_map").values<int32_t>();
  data.ids.assign(ids.begin(), ids.end());
  data.sync_ids();
  const std::vector<float> probabilities = golden("moe", name, "probabilities").values<float>();
  data.probabilities.assign(probabilities.begin(), probabilities.end());

  std::vector<int64_t> tokens(static_cast<size_t>(c.tokens));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<int64_t> routes;
  const std::vector<int32_t> token_slot = golden("moe", name, "route_token_slot").values<int32_t>();
  for (size_t i = 0; i < token_slot.size(); i += 2) {
    routes.push_back(token_slot[i] * c.top_k + token_slot[i + 1]);
  }
  for (const std::string& backend : available_backends()) {
    for (int num_threads : {1, 2, 3}) {
      for (bool use_i64 : {false, true}) {
        for (bool batch_invariant : {false, true}) {
          SCOPED_TRACE(testing::Message() << name << " " << backend << " threads " << num_threads
                                          << " i64 " << use_i64 << " " << batch_invariant);
          const std::unique_ptr<MoeRun> got =
              test::run(MoeOptions{.backend = backend,
                                   .num_threads = num_threads,
                                   .batch_invariant = batch_invariant},
                        c,
                        weights,
                        data.inputs(c, use_i64),
                        256);
          expect_rows(name, "x_data", tokens, got->x_codes);
          expect_rows(name, "x_scale_linear", tokens, got->x_block_scales);
          expect_rows(name, "x_row_scale", tokens, got->x_token_scale);
          expect_rows(name, "intermediate_bf16", routes, got->intermediate);
          expect_rows(name, "inter_data", routes, got->h_codes);
          expect_rows(name, "inter_scale_linear", routes, got->h_block_scales);
          expect_rows(name, "inter_row_scale", routes, got->h_token_scale);
          expect_rows(name, "route_output_bf16", routes, got->route_output);
          expect_rows(name, "output_bf16", tokens, got->out_bf16);
          for (int64_t i = 0; i < got->out.size(); ++i) {
            ASSERT_EQ(bf16_from_f32(got->out[i]), got->out_bf16[i]);
          }
        }
      }
    }
  }
}

TEST(Golden, Gated) {
  expect_golden("gated", "gated_e2_i192_h80");
}
TEST(Golden, SquaredRelu) {
  expect_golden("relu2", "relu2_e3_i96_h64");
}

// --- conformance shapes: the ones of Megatron's inference tests ---

TEST(Conformance, Megatron) {
  const auto shape = [](int64_t experts,
                        int64_t top_k,
                        int64_t hidden,
                        int64_t intermediate,
                        int64_t tokens,
                        const Activation& activation) {
    return MoeCase{.num_experts = experts,
                   .top_k = top_k,
                   .hidden_size = hidden,
                   .intermediate_size = intermediate,
                   .tokens = tokens,
                   .activation = activation};
  };
  expect_every_backend(shape(4, 1, 64, 64, 1, kSquaredRelu));
  expect_every_backend(shape(8, 2, 128, 128, 8, kSquaredRelu));
  expect_every_backend(shape(8, 6, 128, 128, 32, kSquaredRelu));
  expect_every_backend(shape(8, 6, 128, 256, 32, kSwiGlu));
  expect_every_backend(shape(8, 4, 128, 256, 64, kSquaredRelu));
  for (const Activation& activation : {kSquaredRelu, kSwiGlu}) {
    expect_every_backend(shape(4, 2, 64, 64, 4, activation));
    expect_every_backend(shape(8, 4, 128, 128, 16, activation));
    expect_every_backend(shape(16, 8, 64, 128, 128, activation));
  }
  constexpr int64_t kLocalOffset[][2] = {{4, 0}, {4, 4}, {2, 0}, {2, 6}};
  for (const auto& [local, offset] : kLocalOffset) {
    MoeCase c = shape(8, 4, 128, 128, 32, kSquaredRelu);
    c.num_local_experts = local;
    c.local_expert_offset = offset;
    expect_every_backend(c);
  }
  const MoeCase bounded = shape(8, 4, 128, 128, 16, kSquaredRelu);
  const ExpertWeights weights = make_weights(bounded);
  const MoeData data(bounded);
  for (int64_t valid : {1, 4, 8, 15}) {
    MoeInputs inputs = data.inputs(bounded);
    inputs.use_bounded_rows = true;
    inputs.token_capacity = valid;
    expect_every_backend(bounded, weights, data, inputs);
  }
}

// --- FlashInfer's grid, every axis value present ---

TEST(Conformance, FlashInferAccuracy) {
  MoeCase c{.num_experts = 256, .hidden_size = 256, .intermediate_size = 512};
  const ExpertWeights weights = make_weights(c);
  for (const auto& [top_k, tokens] : {std::pair{1, 128}, {2, 515}, {8, 128}, {1, 1024}}) {
    c.top_k = top_k;
    c.tokens = tokens;
    const MoeData data(c);
    expect_every_backend(c, weights, data, data.inputs(c));
  }
  c.num_experts = 384;
  c.top_k = 2;
  c.tokens = 256;
  c.activation = kSwiGlu;
  expect_every_backend(c);
}

TEST(Conformance, FlashInferPartialTilesAndExtras) {
  for (int64_t hidden : {256, 384}) {
    expect_every_backend({.num_experts = 8,
                          .top_k = 2,
                          .hidden_size = hidden,
                          .intermediate_size = 512,
                          .tokens = 128,
                          .activation = kSquaredRelu});
  }
  MoeCase c{.num_experts = 256,
            .top_k = 2,
            .hidden_size = 256,
            .intermediate_size = 512,
            .tokens = 64,
            .activation = kSwiGlu};
  const ExpertWeights weights = make_weights(c);
  for (const Activation& activation : {kSwiGlu, kOai, kGeGlu, kSiTu, kSiTuBoth}) {
    c.activation = activation;
    const MoeData data(c);
    expect_every_backend(c, weights, data, data.inputs(c));
  }
}

TEST(Conformance, FlashInferExpertParallel) {
  constexpr int64_t kLocalOffset[][2] = {{32, 0}, {32, 128}, {32, 224}, {16, 0}, {8, 0}, {8, 248}};
  for (const auto& [local, offset] : kLocalOffset) {
    expect_every_backend({.num_experts = 256,
                          .top_k = 8,
                          .hidden_size = 256,
                          .intermediate_size = 512,
                          .tokens = 256,
                          .num_local_experts = local,
                          .local_expert_offset = offset,
                          .activation = kSwiGlu});
  }
}

TEST(Conformance, RandomizedSuite) {
  // Tokens over the boundary of every internal chunk; sizes and counts of the suite.
  constexpr int64_t kTokens[] = {1, 2, 3, 7, 17, 64, 127, 129, 256, 1024, 2048, 4095, 4096, 4097};
  constexpr int64_t kTopK[] = {1, 2, 4, 6, 8};
  constexpr int64_t kExperts[] = {8, 72, 160, 512};
  constexpr Routing kRouting[] = {
      Routing::kUniform, Routing::kRepeating, Routing::kImbalanced, Routing::kAllToOne};
  uint64_t seed = 0;
  for (int64_t tokens : kTokens) {
    const bool big = tokens > 256;
    const auto pick = [&](const auto& values) { return values[seed % std::size(values)]; };
    expect_every_backend({.num_experts = pick(kExperts),
                          .top_k = big ? 2 : pick(kTopK),
                          .hidden_size = big ? 32 : 96,
                          .intermediate_size = big ? 48 : 112,
                          .tokens = tokens,
                          .activation = seed % 2 == 0 ? kSwiGlu : kSquaredRelu,
                          .routing = pick(kRouting),
                          .seed = seed});
    ++seed;
  }
  constexpr int64_t kSizes[][2] = {{3072, 256}, {1536, 768}, {256, 1408}, {768, 1536}};
  for (const auto& [hidden, intermediate] : kSizes) {
    expect_every_backend({.num_experts = 8,
                          .top_k = 2,
                          .hidden_size = hidden,
                          .intermediate_size = intermediate,
                          .tokens = 7,
                          .activation = kSwiGlu});
  }
}

}  // namespace
}  // namespace hexpert

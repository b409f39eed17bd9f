// A routed mixture-of-experts layer in NVFP4, from BF16 experts to output. Runs the same tokens on
// the best backend and on the reference, and fails when they disagree.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "hexpert/moe.hpp"
#include "hexpert/weights.hpp"

namespace {

constexpr int64_t kTokens = 4;
constexpr int64_t kTopK = 2;
constexpr int64_t kNumExperts = 8;
constexpr int64_t kHiddenSize = 256;
constexpr int64_t kIntermediateSize = 192;

std::vector<uint16_t> random_bf16(int64_t count, float deviation) {
  static std::mt19937 generator(42);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values)
    value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(generator)) >> 16);
  return values;
}

// The README shows this function.
// [routed_moe]
hexpert::Status run_layer(const std::vector<uint16_t>& fc1,  // [experts, 2 * inter, hidden] bf16
                          const std::vector<uint16_t>& fc2,  // [experts, hidden, inter] bf16
                          const std::vector<uint16_t>& x,    // [tokens, hidden] bf16
                          const std::vector<int32_t>& ids,   // [tokens, top_k]; -1: no expert
                          const std::vector<float>& p,       // [tokens, top_k]
                          const hexpert::MoeOptions& options,
                          std::vector<float>& out) {  // [tokens, hidden]
  using hexpert::DType;
  auto weights = hexpert::ExpertWeights::prepare(
      {fc1.data(), DType::kBF16, {kNumExperts, 2 * kIntermediateSize, kHiddenSize}},
      {fc2.data(), DType::kBF16, {kNumExperts, kHiddenSize, kIntermediateSize}});
  if (!weights.ok()) return weights.status();

  hexpert::MoeProblem problem;  // SwiGLU unless told otherwise
  problem.max_tokens = kTokens;
  problem.top_k = kTopK;
  problem.num_experts = kNumExperts;
  auto layer = hexpert::RoutedMoe::create(problem, *weights, options);
  if (!layer.ok()) return layer.status();
  std::printf("%s\n", layer->plan().c_str());

  hexpert::MoeInputs inputs;
  inputs.hidden_states = {x.data(), DType::kBF16, {kTokens, kHiddenSize}};
  inputs.routing_map = {ids.data(), DType::kI32, {kTokens, kTopK}};
  inputs.probabilities = {p.data(), DType::kF32, {kTokens, kTopK}};
  return layer->forward(inputs, {out.data(), DType::kF32, {kTokens, kHiddenSize}});
}
// [routed_moe]

double relative_l2(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace

int main() {
  const auto fc1 = random_bf16(kNumExperts * 2 * kIntermediateSize * kHiddenSize, 0.06F);
  const auto fc2 = random_bf16(kNumExperts * kHiddenSize * kIntermediateSize, 0.06F);
  const auto x = random_bf16(kTokens * kHiddenSize, 1.0F);
  const std::vector<int32_t> ids = {0, 5, 3, 1, 7, -1, 5, 2};
  const std::vector<float> p = {0.7F, 0.3F, 0.5F, 0.5F, 1.0F, 0.0F, 0.9F, 0.1F};

  std::vector<float> fast(static_cast<size_t>(kTokens * kHiddenSize));
  std::vector<float> reference(fast.size());
  hexpert::MoeOptions exact;
  exact.backend = "reference";
  for (const hexpert::Status& status : {run_layer(fc1, fc2, x, ids, p, {}, fast),
                                        run_layer(fc1, fc2, x, ids, p, exact, reference)}) {
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.to_string().c_str());
      return 1;
    }
  }
  const double error = relative_l2(fast, reference);
  std::printf("relative L2 against the reference: %.1e\n", error);
  return error <= 4e-3 ? 0 : 1;
}

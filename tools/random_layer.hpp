// Random layers of any shape, made in moments: weights, tokens and routes from a seed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "agreement.hpp"
#include "hexpert/moe.hpp"
#include "hexpert/weights.hpp"

namespace hexpert::tools {

// Cheap reproducible random numbers (splitmix64): setting up a benchmark must not take minutes.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  // Mean 0, variance 1, close to Gaussian up to 3.4 sigma.
  float normal() {
    const uint64_t b = bits();
    const auto part = [b](int i) { return static_cast<float>(b >> (16 * i) & 0xFFFFU); };
    return (part(0) + part(1) + part(2) + part(3) - 131070.0F) * (1.0F / 37837.2F);
  }

 private:
  uint64_t state_;
};

std::vector<uint16_t> random_bf16(int64_t count, float sigma, uint64_t seed);

// Random tokens and routes of one call; experts of a token are distinct while top_k allows it.
struct RandomInputs {
  int64_t tokens = 0;
  int64_t top_k = 0;
  int64_t hidden_size = 0;
  std::vector<uint16_t> hidden_states;  // [tokens, hidden_size] bf16
  std::vector<int32_t> routing_map;     // [tokens, top_k]
  std::vector<float> probabilities;     // [tokens, top_k], a token's add up to 1

  MoeInputs view() const;
  // Rows `rows` alone.
  RandomInputs select(std::span<const int64_t> rows) const;
};
RandomInputs random_inputs(
    int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden_size, uint64_t seed);

// BF16 experts for ExpertWeights, all of them views of a few buffers: expert e starts at another
// place of another buffer, so that no two are alike in values or in scale.
class RandomExperts {
 public:
  RandomExperts(const ExpertShape& shape, uint64_t seed);

  ConstTensorView fc1(int64_t expert) const;  // [I or 2 I, H] bf16
  ConstTensorView fc2(int64_t expert) const;  // [H, I] bf16
  Result<ExpertWeights> quantize(const PrepareOptions& options = {}) const;

 private:
  const uint16_t* start(int64_t expert) const;
  ExpertShape shape_;
  std::vector<std::vector<uint16_t>> buffers_;
};

// Runs `rows` of `inputs` on the reference and compares them with the same rows of `out`
// [tokens, H], which a backend made of the whole.
Result<Agreement> compare_with_reference(const MoeProblem& problem,
                                         const ExpertWeights& weights,
                                         const RandomInputs& inputs,
                                         const ConstTensorView& out,
                                         std::span<const int64_t> rows,
                                         int num_threads);

}  // namespace hexpert::tools

// Stacks of random expert weights, and their canonical bytes.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "hexpert/weights.hpp"
#include "support.hpp"

namespace hexpert::test {

// Owned canonical arrays of one stack.
struct Canonical {
  explicit Canonical(const ExpertShape& shape)
      : fc1_data(bytes(shape.num_local_experts * shape.canonical_fc1_rows() *
                       shape.padded_hidden_size() / 2)),
        fc1_scales(fc1_data.size() / 8),
        fc2_data(bytes(shape.num_local_experts * shape.padded_hidden_size() *
                       shape.padded_intermediate_size() / 2)),
        fc2_scales(fc2_data.size() / 8),
        fc1_alpha(bytes(shape.num_local_experts)),
        fc1_gate_alpha(fc1_alpha.size()),
        fc2_alpha(fc1_alpha.size()) {}
  static std::size_t bytes(int64_t n) { return static_cast<std::size_t>(n); }

  CanonicalWeights view() {
    return {fc1_data.data(),
            fc1_scales.data(),
            fc1_alpha.data(),
            fc1_gate_alpha.data(),
            fc2_data.data(),
            fc2_scales.data(),
            fc2_alpha.data()};
  }
  bool operator==(const Canonical& other) const {
    const auto same_bits = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return fc1_data == other.fc1_data && fc1_scales == other.fc1_scales &&
           fc2_data == other.fc2_data && fc2_scales == other.fc2_scales &&
           same_bits(fc1_alpha, other.fc1_alpha) &&
           same_bits(fc1_gate_alpha, other.fc1_gate_alpha) && same_bits(fc2_alpha, other.fc2_alpha);
  }

  std::vector<uint8_t> fc1_data, fc1_scales, fc2_data, fc2_scales;
  std::vector<float> fc1_alpha, fc1_gate_alpha, fc2_alpha;
};

// BF16 stacks of one layer.
struct Stacks {
  Stacks(const ExpertShape& s, uint64_t seed)
      : shape(s),
        fc1(gaussian_bf16(s.num_local_experts * fc1_rows() * s.hidden_size, seed, 0.05)),
        fc2(gaussian_bf16(
            s.num_local_experts * s.hidden_size * s.intermediate_size, seed + 1, 0.05)) {}

  int64_t fc1_rows() const { return shape.intermediate_size * (shape.gated ? 2 : 1); }
  ConstTensorView fc1_view() const {
    return {fc1.data(), DType::kBF16, {shape.num_local_experts, fc1_rows(), shape.hidden_size}};
  }
  ConstTensorView fc2_view() const {
    return {fc2.data(),
            DType::kBF16,
            {shape.num_local_experts, shape.hidden_size, shape.intermediate_size}};
  }
  ExpertWeights prepare(const PrepareOptions& options = {}) const {
    return ExpertWeights::prepare(fc1_view(), fc2_view(), options).value();
  }

  ExpertShape shape;
  Bf16Vector fc1, fc2;
};

inline Canonical exported(const ExpertWeights& weights) {
  Canonical canonical(weights.shape());
  EXPECT_EQ(weights.export_canonical(canonical.view()).to_string(), "ok");
  return canonical;
}

}  // namespace hexpert::test

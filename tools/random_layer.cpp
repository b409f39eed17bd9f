#include "random_layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "format/codec.hpp"

namespace hexpert::tools {

std::vector<uint16_t> random_bf16(int64_t count, float sigma, uint64_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  Random random(seed);
  for (uint16_t& value : values)
    value = bf16_from_f32(sigma * random.normal());
  return values;
}

MoeInputs RandomInputs::view() const {
  MoeInputs inputs;
  inputs.hidden_states = {hidden_states.data(), DType::kBF16, {tokens, hidden_size}};
  inputs.routing_map = {routing_map.data(), DType::kI32, {tokens, top_k}};
  inputs.probabilities = {probabilities.data(), DType::kF32, {tokens, top_k}};
  return inputs;
}

RandomInputs RandomInputs::select(std::span<const int64_t> rows) const {
  RandomInputs result;
  result.tokens = static_cast<int64_t>(rows.size());
  result.top_k = top_k;
  result.hidden_size = hidden_size;
  for (int64_t row : rows) {
    const auto append = [row](auto& to, const auto& from, int64_t width) {
      to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
    };
    append(result.hidden_states, hidden_states, hidden_size);
    append(result.routing_map, routing_map, top_k);
    append(result.probabilities, probabilities, top_k);
  }
  return result;
}

RandomInputs random_inputs(
    int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden_size, uint64_t seed) {
  RandomInputs inputs;
  inputs.tokens = tokens;
  inputs.top_k = top_k;
  inputs.hidden_size = hidden_size;
  inputs.hidden_states = random_bf16(tokens * hidden_size, 1.0F, seed);
  inputs.routing_map.reserve(static_cast<size_t>(tokens * top_k));
  inputs.probabilities.reserve(static_cast<size_t>(tokens * top_k));
  Random random(seed ^ 0x5DEECE66DU);
  std::vector<int32_t> experts(static_cast<size_t>(num_experts));
  for (size_t e = 0; e < experts.size(); ++e)
    experts[e] = static_cast<int32_t>(e);
  for (int64_t i = 0; i < tokens; ++i) {
    float sum = 0;
    for (int64_t s = 0; s < top_k; ++s) {
      const int64_t drawn = s % num_experts;  // a partial Fisher-Yates shuffle per token
      std::swap(experts[static_cast<size_t>(drawn)],
                experts[static_cast<size_t>(drawn + random.below(num_experts - drawn))]);
      inputs.routing_map.push_back(experts[static_cast<size_t>(drawn)]);
      inputs.probabilities.push_back(0.1F + static_cast<float>(random.below(1000)) * 1e-3F);
      sum += inputs.probabilities.back();
    }
    for (auto p = inputs.probabilities.end() - top_k; p != inputs.probabilities.end(); ++p)
      *p /= sum;
  }
  return inputs;
}

RandomExperts::RandomExperts(const ExpertShape& shape, uint64_t seed) : shape_(shape) {
  constexpr int64_t kPeriod = 1048573;  // prime: no row or column repeats another
  const int64_t matrix = shape.hidden_size * shape.intermediate_size * (shape.gated ? 2 : 1);
  const int64_t total = matrix + 8 * shape.num_local_experts;
  const float sigma = 1.0F / std::sqrt(static_cast<float>(shape.hidden_size));
  for (float factor : {1.0F, 1.375F, 0.71F}) {
    std::vector<uint16_t> values = random_bf16(std::min(total, kPeriod), factor * sigma, seed++);
    values.resize(static_cast<size_t>(total));
    for (int64_t i = kPeriod; i < total; i += kPeriod)
      std::copy_n(values.data(), std::min(kPeriod, total - i), values.data() + i);
    buffers_.push_back(std::move(values));
  }
}

const uint16_t* RandomExperts::start(int64_t expert) const {
  // Steps of 8 values keep the 16-byte alignment of the buffers.
  return buffers_[static_cast<size_t>(expert) % buffers_.size()].data() + 8 * expert;
}

ConstTensorView RandomExperts::fc1(int64_t expert) const {
  return {start(expert),
          DType::kBF16,
          {shape_.intermediate_size * (shape_.gated ? 2 : 1), shape_.hidden_size}};
}

ConstTensorView RandomExperts::fc2(int64_t expert) const {
  return {start(shape_.num_local_experts - 1 - expert),
          DType::kBF16,
          {shape_.hidden_size, shape_.intermediate_size}};
}

Result<ExpertWeights> RandomExperts::quantize(const PrepareOptions& options) const {
  Result<ExpertWeights> weights = ExpertWeights::allocate(shape_, options);
  if (!weights.ok()) return weights;
  for (int64_t e = 0; e < shape_.num_local_experts; ++e)
    HX_RETURN_IF_ERROR(weights->set_expert(e, fc1(e), fc2(e)));
  return weights;
}

Result<Agreement> compare_with_reference(const MoeProblem& problem,
                                         const ExpertWeights& weights,
                                         const RandomInputs& inputs,
                                         const ConstTensorView& out,
                                         std::span<const int64_t> rows,
                                         int num_threads) {
  MoeProblem small = problem;
  small.max_tokens = static_cast<int64_t>(rows.size());
  Result<RoutedMoe> reference =
      RoutedMoe::create(small, weights, {.backend = "reference", .num_threads = num_threads});
  if (!reference.ok()) return reference.status();
  const RandomInputs selected = inputs.select(rows);
  const int64_t row_bytes = inputs.hidden_size * size_of(out.dtype);
  std::vector<uint8_t> expected(static_cast<size_t>(small.max_tokens * row_bytes));
  std::vector<uint8_t> candidate(expected.size());
  const TensorView expected_view(
      expected.data(), out.dtype, {small.max_tokens, inputs.hidden_size});
  const TensorView candidate_view(
      candidate.data(), out.dtype, {small.max_tokens, inputs.hidden_size});
  HX_RETURN_IF_ERROR(reference->forward(selected.view(), expected_view));
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(candidate.data() + i * static_cast<size_t>(row_bytes),
                out.as<uint8_t>() + rows[i] * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  return compare(expected_view, candidate_view);
}

}  // namespace hexpert::tools

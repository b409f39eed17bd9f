#include "dense_layer.hpp"

#include <algorithm>
#include <cmath>

#include "format/codec.hpp"
#include "moe/activation.hpp"

namespace hexpert::tools {
namespace {

std::vector<float> to_f32(const ConstTensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = bf16_to_f32(view.as<uint16_t>()[i]);
  return values;
}

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i)
    sum += a[i] * b[i];
  return sum;
}

int64_t expert_of(const ConstTensorView& map, int64_t slot) {
  return map.dtype == DType::kI64 ? map.as<int64_t>()[slot] : map.as<int32_t>()[slot];
}

}  // namespace

Result<std::vector<float>> dense_forward(const Checkpoint& checkpoint,
                                         const MoeLayerInfo& layer,
                                         const Activation& activation,
                                         const MoeInputs& inputs) {
  const int64_t hidden = layer.shape.hidden_size;
  const int64_t intermediate = layer.shape.intermediate_size;
  const int64_t slots = inputs.routing_map.num_elements();
  const int64_t top_k = inputs.routing_map.shape[1];
  const std::vector<float> x = to_f32(inputs.hidden_states);
  std::vector<float> out(x.size(), 0.0F);
  std::vector<float> h(static_cast<size_t>(intermediate));
  for (int64_t expert = 0; expert < layer.shape.num_local_experts; ++expert) {
    Result<DenseExpert> dense = load_dense_expert(checkpoint, layer.prefix, expert);
    if (!dense.ok()) return dense.status();
    const std::vector<float> fc1 = to_f32(dense->fc1.view());
    const std::vector<float> fc2 = to_f32(dense->fc2.view());
    const int64_t up_row = layer.shape.gated ? intermediate : 0;
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (expert_of(inputs.routing_map, slot) != expert) continue;
      const float probability = inputs.probabilities.as<float>()[slot];
      const float* token = x.data() + slot / top_k * hidden;
      float* result = out.data() + slot / top_k * hidden;
#pragma omp parallel
      {
#pragma omp for
        for (int64_t j = 0; j < intermediate; ++j) {
          const float up = dot(fc1.data() + (up_row + j) * hidden, token, hidden);
          const float gate = layer.shape.gated ? dot(fc1.data() + j * hidden, token, hidden) : 0.0F;
          h[static_cast<size_t>(j)] = static_cast<float>(activate(activation, up, gate));
        }
#pragma omp for
        for (int64_t n = 0; n < hidden; ++n)
          result[n] += probability * dot(fc2.data() + n * intermediate, h.data(), intermediate);
      }
    }
  }
  return out;
}

ErrorStats output_error(const std::vector<float>& expected, const uint16_t* output) {
  ErrorStats stats;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto x = static_cast<double>(expected[i]);
    const auto q = static_cast<double>(bf16_to_f32(output[i]));
    ++stats.elements;
    if (!std::isfinite(x) || !std::isfinite(q)) {
      ++stats.nonfinite;
      continue;
    }
    stats.signal += x * x;
    stats.noise += (q - x) * (q - x);
    stats.dot += q * x;
    stats.quantized += q * q;
    stats.max_error = std::max(stats.max_error, std::fabs(q - x));
  }
  return stats;
}

}  // namespace hexpert::tools

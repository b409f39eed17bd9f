// The reference backend: the specification as a program. One token after another, plain loops,
// exact sums, activations in FP64. Every other backend is judged by it, so it shares no kernel and
// no routing sort with them. docs/format.md section 6.
#include "moe/reference.hpp"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "cpu/float_environment.hpp"
#include "format/layout.hpp"
#include "moe/activation.hpp"
#include "moe/stage_dump.hpp"
#include "quantize/block_quantizer.hpp"

namespace hexpert {
namespace reference {
namespace {

namespace tiles = layout::cpu_tiles;

constexpr auto kDoubledE2M1 = [] {
  std::array<int32_t, 16> table{};
  for (unsigned code = 0; code < 16; ++code)
    table[code] = e2m1_doubled(code);
  return table;
}();

// Where the 16 elements of a block lie, counted from its first byte in the row's group.
struct BlockPlaces {
  std::array<int64_t, 16> offset{};
  std::array<int, 16> shift{};
};
constexpr auto kBlockPlaces = [] {
  BlockPlaces places;
  for (int64_t j = 0; j < 16; ++j) {
    places.offset[static_cast<size_t>(j)] = tiles::code_offset(0, j);
    places.shift[static_cast<size_t>(j)] = tiles::nibble_is_high(j) ? 4 : 0;
  }
  return places;
}();

uint16_t round_bf16(double v) {
  return bf16_from_f32(static_cast<float>(v));
}

}  // namespace

void quantize_row(const uint16_t* x, int64_t n, int64_t padded, QuantizedRow& out) {
  uint16_t amax_bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    amax_bits = std::max<uint16_t>(amax_bits, x[i] & 0x7FFF);
  }
  const OuterScale scale = token_scale(amax_bits);
  for (int64_t b = 0; b < padded / 16; ++b) {
    uint16_t block[16] = {};
    for (int64_t j = 0; j < 16 && 16 * b + j < n; ++j)
      block[j] = x[16 * b + j];
    out.block_scales[b] = quantize_block(block, scale, out.codes + 8 * b);
  }
  out.token_scale = scale.stored;
}

void exact_sums(const QuantizedRow& row, const uint8_t* group, int64_t k, int64_t (&sums)[16]) {
  std::fill_n(sums, 16, 0);
  for (int64_t b = 0; b < k / 16; ++b) {
    int32_t x[16];  // doubled, as the weights are: products in units of 1/4
    for (size_t j = 0; j < 16; ++j) {
      const uint8_t byte = row.codes[8 * b + static_cast<int64_t>(j / 2)];
      x[j] = kDoubledE2M1[j % 2 == 0 ? byte & 15 : byte >> 4];
    }
    const int64_t x_scale = e4m3_multiple(row.block_scales[b]);
    for (int64_t n = 0; n < 16; ++n) {
      const uint8_t* codes = group + tiles::code_offset(n, 16 * b);
      int32_t dot = 0;
      for (size_t j = 0; j < 16; ++j) {
        const uint8_t byte = codes[kBlockPlaces.offset[j]];
        dot += x[j] * kDoubledE2M1[byte >> kBlockPlaces.shift[j] & 15];
      }
      sums[n] += dot * x_scale * e4m3_multiple(group[tiles::scale_offset(n, b)]);
    }
  }
}

void fc1(const ExpertWeights::Storage& weights,
         int64_t expert,
         const Activation& activation,
         const QuantizedRow& x,
         uint16_t* intermediate) {
  const auto e = static_cast<size_t>(expert);
  const int64_t group_bytes = tiles::group_bytes(weights.hidden);
  const uint8_t* group = weights.fc1_expert(expert);
  // A NaN scale marks a poisoned token or matrix; it makes every product NaN.
  const float up_scale = weights.fc1_up_alpha[e] * x.token_scale;
  const float gate_scale = weights.shape.gated ? weights.fc1_gate_alpha[e] * x.token_scale : 0.0F;
  int64_t up_sums[16];
  int64_t gate_sums[16] = {};
  for (int64_t feature = 0; feature < weights.intermediate; feature += 16) {
    exact_sums(x, group, weights.hidden, up_sums);
    group += group_bytes;
    if (weights.shape.gated) {
      exact_sums(x, group, weights.hidden, gate_sums);
      group += group_bytes;
    }
    for (int64_t n = 0; n < 16; ++n) {
      const float up = static_cast<float>(up_sums[n]) * kSumUnit * up_scale;
      const float gate = static_cast<float>(gate_sums[n]) * kSumUnit * gate_scale;
      intermediate[feature + n] = round_bf16(activate(activation, up, gate));
    }
  }
}

void fc2(const ExpertWeights::Storage& weights,
         int64_t expert,
         const QuantizedRow& h,
         uint16_t* route_output) {
  const int64_t group_bytes = tiles::group_bytes(weights.intermediate);
  const uint8_t* group = weights.fc2_expert(expert);
  const float scale = weights.fc2_alpha[static_cast<size_t>(expert)] * h.token_scale;
  int64_t sums[16];
  for (int64_t column = 0; column < weights.shape.hidden_size; column += 16) {
    exact_sums(h, group, weights.intermediate, sums);
    group += group_bytes;
    const int64_t columns = std::min<int64_t>(16, weights.shape.hidden_size - column);
    for (int64_t n = 0; n < columns; ++n) {
      const float sum = static_cast<float>(sums[n]) * kSumUnit;
      route_output[column + n] = bf16_from_f32(scale * sum);
    }
  }
}

float combine(const float* probabilities,
              const int64_t* local_experts,
              const uint16_t* route_outputs,
              int64_t stride,
              int64_t top_k) {
  float sum = 0;
  for (int64_t s = 0; s < top_k; ++s) {
    if (local_experts[s] < 0) continue;
    sum = std::fma(probabilities[s], bf16_to_f32(route_outputs[s * stride]), sum);
  }
  return sum;
}

namespace {

// What one thread needs for one token, carved from the workspace.
struct Scratch {
  QuantizedRow x;           // the token
  uint16_t* intermediate;   // [Ip] of the current route
  QuantizedRow h;           // the same, quantized
  uint16_t* route_outputs;  // [top_k, H]
  int64_t* local_experts;   // [top_k]
  int64_t bytes;            // used in all, a multiple of 64
};

Scratch carve(
    std::byte* memory, int64_t hidden, int64_t intermediate, int64_t hidden_size, int64_t top_k) {
  int64_t used = 0;
  const auto take = [&](auto*& array, int64_t count) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + used);
    used += round_up(count * static_cast<int64_t>(sizeof(*array)), 64);
  };
  Scratch scratch{};
  take(scratch.x.codes, hidden / 2);
  take(scratch.x.block_scales, hidden / 16);
  take(scratch.intermediate, intermediate);
  take(scratch.h.codes, intermediate / 2);
  take(scratch.h.block_scales, intermediate / 16);
  take(scratch.route_outputs, top_k * hidden_size);
  take(scratch.local_experts, top_k);
  scratch.bytes = used;
  return scratch;
}

int64_t scratch_bytes(const MoeProblem& problem, const ExpertShape& shape) {
  return carve(nullptr,
               round_up(shape.hidden_size, tiles::kSizeMultiple),
               round_up(shape.intermediate_size, tiles::kSizeMultiple),
               shape.hidden_size,
               problem.top_k)
      .bytes;
}

// The local expert of a slot, or -1.
int64_t local_expert(const ForwardArgs& args, int64_t slot) {
  const int64_t id = args.routing_is_i64 ? static_cast<const int64_t*>(args.routing_map)[slot]
                                         : static_cast<const int32_t*>(args.routing_map)[slot];
  const int64_t first = args.problem->local_expert_offset;
  const bool local = id >= first && id - first < args.weights->shape.num_local_experts;
  return local ? id - first : -1;
}

void forward_token(const ForwardArgs& args, int64_t token, Scratch& scratch) {
  const ExpertWeights::Storage& weights = *args.weights;
  const int64_t hidden_size = weights.shape.hidden_size;
  const int64_t top_k = args.problem->top_k;
  const StageDump no_dump;
  const StageDump& dump = args.dump != nullptr ? *args.dump : no_dump;

  quantize_row(args.hidden_states + token * hidden_size, hidden_size, weights.hidden, scratch.x);
  dump_quantized_row(token,
                     dump.hidden_cols,
                     scratch.x.codes,
                     scratch.x.block_scales,
                     scratch.x.token_scale,
                     weights.hidden,
                     dump.x_codes,
                     dump.x_block_scales,
                     dump.x_token_scale);

  for (int64_t s = 0; s < top_k; ++s) {
    const int64_t route = token * top_k + s;
    const int64_t expert = local_expert(args, route);
    scratch.local_experts[s] = expert;
    if (expert < 0) continue;
    uint16_t* route_output = scratch.route_outputs + s * hidden_size;
    fc1(weights, expert, args.problem->activation, scratch.x, scratch.intermediate);
    quantize_row(scratch.intermediate, weights.intermediate, weights.intermediate, scratch.h);
    fc2(weights, expert, scratch.h, route_output);

    dump_bf16_row(route,
                  dump.intermediate_cols,
                  scratch.intermediate,
                  weights.intermediate,
                  dump.intermediate);
    dump_quantized_row(route,
                       dump.intermediate_cols,
                       scratch.h.codes,
                       scratch.h.block_scales,
                       scratch.h.token_scale,
                       weights.intermediate,
                       dump.h_codes,
                       dump.h_block_scales,
                       dump.h_token_scale);
    dump_bf16_row(route, hidden_size, route_output, hidden_size, dump.route_output);
  }

  for (int64_t c = 0; c < hidden_size; ++c) {
    const float sum = combine(args.probabilities + token * top_k,
                              scratch.local_experts,
                              scratch.route_outputs + c,
                              hidden_size,
                              top_k);
    const int64_t at = token * hidden_size + c;
    if (args.out_is_f32) {
      static_cast<float*>(args.out)[at] = sum;
    } else {
      static_cast<uint16_t*>(args.out)[at] = bf16_from_f32(sum);
    }
  }
}

Status forward(const ForwardArgs& args) {
  const ExpertWeights::Storage& weights = *args.weights;
  const int64_t bytes = scratch_bytes(*args.problem, weights.shape);
#pragma omp parallel num_threads(args.num_threads)
  {
    const cpu::FloatEnvironment environment;
    Scratch scratch = carve(args.workspace + omp_get_thread_num() * bytes,
                            weights.hidden,
                            weights.intermediate,
                            weights.shape.hidden_size,
                            args.problem->top_k);
#pragma omp for schedule(dynamic)
    for (int64_t token = 0; token < args.rows; ++token)
      forward_token(args, token, scratch);
  }
  return Status::success();
}

}  // namespace
}  // namespace reference

const Backend reference_backend = {
    .name = "reference",
    .device = DeviceType::kCpu,
    .available = [](const Device&) { return Support::yes(); },
    .supports = [](const MoeProblem&, const ExpertShape& shape) -> Support {
      const int64_t longest = std::max(shape.hidden_size, shape.intermediate_size);
      if (longest <= reference::kMaxExactK) return Support::yes();
      return Support::no("sums over " + std::to_string(longest) + " elements do not fit int64, " +
                         std::to_string(reference::kMaxExactK) + " do");
    },
    .workspace_bytes =
        [](const MoeProblem& problem, const ExpertShape& shape, const MoeOptions& options) {
          return options.num_threads * reference::scratch_bytes(problem, shape);
        },
    .describe = [](const MoeProblem&, const ExpertShape&, const MoeOptions&) -> std::string {
      return "token by token, exact int64 sums";
    },
    .forward = reference::forward,
};

}  // namespace hexpert

// A whole layer in one kernel, for a few tokens: there time is the latency of launches, and the memory
// must not idle between FC1 and FC2.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/fragment_weights.hpp"
#include "cuda/launch_options.hpp"
#include "hexpert/moe.hpp"
#include "hexpert/status.hpp"

namespace hexpert::cuda {

// A matrix of weights as the copy engine sees it.
struct DecodeMaps {
  CUtensorMap codes;
  CUtensorMap scales;
};
Status decode_maps(DecodeMaps& maps, const uint8_t* data, int64_t bytes);

struct Decode {
  DecodeMaps fc1_maps;
  DecodeMaps fc2_maps;
  const uint16_t* hidden_states = nullptr;  // [rows, hidden_size] bf16
  const void* routing_map = nullptr;        // [rows, top_k]
  bool routing_is_i64 = false;
  const float* probabilities = nullptr;  // [rows, top_k]
  int rows = 0;                          // tokens
  int top_k = 0;
  int64_t local_expert_offset = 0;
  FragmentWeights weights;
  void* out = nullptr;  // [rows, hidden_size]
  bool out_is_f32 = false;

  // Between the phases. Routes are in ascending local expert, those of an expert in slot order.
  uint16_t* intermediate = nullptr;  // [routes, intermediate] bf16
  uint16_t* route_output = nullptr;  // [routes, fc2_rows] bf16
  uint64_t* arrivals = nullptr;      // [1] of the plan, zero before its first launch

  // For a dump; null without.
  struct Stages {
    uint8_t* x_codes = nullptr;               // [rows, hidden / 2]
    uint8_t* x_block_scales = nullptr;        // [rows, hidden / 16]
    float* x_token_scale = nullptr;           // [rows]
    uint8_t* h_codes = nullptr;               // [routes, intermediate / 2]
    uint8_t* h_block_scales = nullptr;        // [routes, intermediate / 16]
    float* h_token_scale = nullptr;           // [routes]
    int32_t* expanded_to_permuted = nullptr;  // [rows, top_k]
    int32_t* num_routes = nullptr;            // [1]
  } stages;
};

// Is the kernel made for `rows` tokens of this problem, and the fastest way? Host arithmetic.
bool can_decode(const MoeProblem& problem, const FragmentWeights& sizes, int64_t rows);

// Once per device, before the first launch.
cudaError_t configure_decode();
// All launches with the same `arrivals` must be on as many multiprocessors, one after the other.
cudaError_t decode(const Decode& args, int multiprocessors, const LaunchOptions& options);

}  // namespace hexpert::cuda

// Weighted sum of the routes of each token, in slot order, in FP32.
#pragma once

#include <cstdint>

#include "cuda/launch_options.hpp"

namespace hexpert::cuda {

struct Combine {
  int64_t rows = 0;  // tokens
  int64_t top_k = 0;
  int64_t cols = 0;                               // hidden size
  const float* probabilities = nullptr;           // [rows, top_k]
  const int32_t* expanded_to_permuted = nullptr;  // [rows, top_k]
  void* out = nullptr;                            // [rows, cols]
  bool out_is_f32 = false;
  int64_t route_cols = 0;                  // row stride of what FC2 left
  const uint16_t* route_output = nullptr;  // [routes, route_cols] bf16

  // Where FC2 left sums instead: they are scaled and rounded to BF16 here.
  struct Partial {
    const float* sums = nullptr;  // [splits, max_routes, route_cols], fragment rows
    int splits = 0;
    int64_t max_routes = 0;
    const int32_t* route_expert = nullptr;  // [max_routes]
    const float* token_scale = nullptr;     // [max_routes]
    const float* alpha = nullptr;           // [experts]
    uint16_t* route_output = nullptr;       // [max_routes, route_cols] bf16, or null
  } partial;
};

// Once per device, before the first launch.
cudaError_t configure_combine();
cudaError_t combine(const Combine& args, const LaunchOptions& options);

}  // namespace hexpert::cuda

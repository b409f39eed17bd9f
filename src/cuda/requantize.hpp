// FC1 results -> NVFP4 rows for FC2, one scale a row.
#pragma once

#include "cuda/launch_options.hpp"
#include "hexpert/moe.hpp"

namespace hexpert::cuda {

struct Requantize {
  int64_t max_routes = 0;               // sizes the grid
  const int32_t* num_routes = nullptr;  // [1] rows in use
  int64_t cols = 0;                     // intermediate size, a multiple of 64
  // BF16 in, FP16 operand out, in place. With `partial` it is output only.
  uint16_t* rows = nullptr;         // [max_routes, cols]
  float* token_scale = nullptr;     // [max_routes]
  uint8_t* codes = nullptr;         // [max_routes, cols / 2], or null
  uint8_t* block_scales = nullptr;  // [max_routes, cols / 16], or null

  // Where FC1 left sums instead of activations: they are scaled and activated here.
  struct Partial {
    const float* sums = nullptr;  // [splits, max_routes, fc1_rows], fragment rows
    int splits = 0;
    int64_t fc1_rows = 0;
    Activation activation;
    const float* route_scale = nullptr;     // [max_routes] of the tokens
    const int32_t* route_expert = nullptr;  // [max_routes]
    const float* up_alpha = nullptr;        // [experts]
    const float* gate_alpha = nullptr;      // [experts]
    uint16_t* intermediate = nullptr;       // [max_routes, cols] bf16, or null
  } partial;
};

// Once per device, before the first launch.
cudaError_t configure_requantize();
cudaError_t requantize(const Requantize& args, const LaunchOptions& options);

}  // namespace hexpert::cuda

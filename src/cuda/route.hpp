// Routing sort on the GPU: slots -> permuted rows in ascending local expert -> row tiles.
// The rows of an expert are in ascending expanded index, without padding between experts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch_options.hpp"

namespace hexpert::cuda {

// A run of permuted rows of one expert that a GEMM tile multiplies at once.
struct alignas(16) RowTile {
  int32_t expert;
  int32_t first_row;
  int32_t rows;  // at most the widest tile of the GEMM
  int32_t unused;
};

struct Routes {
  int32_t* num_tiles = nullptr;             // [1]
  int32_t* num_routes = nullptr;            // [1]
  int32_t* max_width = nullptr;             // [1] rows of a tile at most
  int32_t* items_taken = nullptr;           // [2] zeros, for the GEMMs to count in
  RowTile* tiles = nullptr;                 // [max_row_tiles()]
  int32_t* route_expert = nullptr;          // [rows * top_k] local expert of a permuted row
  int32_t* expanded_to_permuted = nullptr;  // [rows * top_k], -1 when not local
};

struct RouteTokens {
  const void* routing_map = nullptr;  // [rows, top_k]
  bool is_i64 = false;
  int64_t rows = 0;
  int64_t top_k = 0;
  int64_t local_expert_offset = 0;
  int64_t num_local_experts = 0;
  int max_width = 0;  // widest tile of the GEMM
  // Of the GEMM that takes over up to so many routes.
  int narrow_max_width = 0;
  int64_t max_narrow_routes = -1;
  Routes out;
};

// Experts beyond this do not fit the counters in shared memory.
inline constexpr int64_t kMaxRoutedExperts = 16384;

constexpr int64_t max_row_tiles(int64_t slots, int64_t num_local_experts, int64_t max_width) {
  const int64_t experts = slots < num_local_experts ? slots : num_local_experts;
  return experts + slots / max_width;
}

// Once per device, before the first launch.
cudaError_t configure_route();
cudaError_t route_tokens(const RouteTokens& args, const LaunchOptions& options);

}  // namespace hexpert::cuda

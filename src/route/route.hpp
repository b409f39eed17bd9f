// Routing sort: slots of the routing map -> rows in ascending local expert. docs/format.md section 6.
//
// Expanded index x = token * top_k + slot. A slot is local when its id lies in
// [local_expert_offset, local_expert_offset + num_local_experts); every other id, of any value, has
// no row. Rows within an expert are in ascending x, so the order is one and the same everywhere.
// Nothing here allocates. The caller has checked that rows * top_k, or max_tiles * tile, fits int32.
#pragma once

#include <cstdint>

namespace hexpert {

struct CompactRoutes {
  int32_t* expert_offsets = nullptr;        // [L + 1] rows of local expert e: [e] .. [e + 1]
  int32_t* permuted_to_expanded = nullptr;  // [rows * top_k]; only the first expert_offsets[L]
  int32_t* expanded_to_permuted = nullptr;  // [rows * top_k], -1 when not local
};

// Routes without padding between experts.
void route_compact(const void* routing_map,
                   bool is_i64,
                   int64_t rows,
                   int64_t top_k,
                   int64_t local_expert_offset,
                   int64_t num_local_experts,
                   const CompactRoutes& out);

// Upper bound of the row tiles of any routing map of this size.
constexpr int64_t max_route_tiles(int64_t rows,
                                  int64_t top_k,
                                  int64_t num_local_experts,
                                  int64_t tile) {
  const int64_t slots = rows * top_k;
  return slots <= num_local_experts ? slots : (slots + (tile - 1) * num_local_experts) / tile;
}

struct TileRoutes {
  int32_t* expert_ends = nullptr;           // [L] end (exclusive) of the rows of each expert
  int32_t* tile_to_expert = nullptr;        // [max_tiles], 0 past num_tiles
  int32_t* tile_row_limit = nullptr;        // [max_tiles] end (exclusive) of the tile's valid rows
  int32_t* expanded_to_permuted = nullptr;  // [rows * top_k], -1 when not local
  int32_t* permuted_to_expanded = nullptr;  // [max_tiles * tile], -1 in padding rows
};

// Routes with every expert starting at a multiple of `tile` rows. Returns the number of tiles in
// use, at most max_route_tiles().
int64_t route_tokens(const void* routing_map,
                     bool is_i64,
                     int64_t rows,
                     int64_t top_k,
                     int64_t local_expert_offset,
                     int64_t num_local_experts,
                     int64_t tile,
                     const TileRoutes& out);

}  // namespace hexpert

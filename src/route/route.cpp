#include "route/route.hpp"

#include <algorithm>

#include "hexpert/format.hpp"

namespace hexpert {
namespace {

// Counting sort. On return ends[e] is the end of the rows of expert e, whose rows start at the end
// of expert e - 1 rounded up to `tile`.
template <typename Id>
void sort_slots(const Id* ids,
                int64_t slots,
                int64_t first_expert,
                int64_t num_local_experts,
                int64_t tile,
                int32_t* ends,
                int32_t* permuted_to_expanded,
                int32_t* expanded_to_permuted) {
  const auto is_local = [&](int64_t id) {
    return id >= first_expert && id - first_expert < num_local_experts;
  };
  std::fill_n(ends, num_local_experts, 0);
  for (int64_t x = 0; x < slots; ++x) {
    if (is_local(ids[x])) ++ends[ids[x] - first_expert];
  }
  int64_t start = 0;
  for (int64_t e = 0; e < num_local_experts; ++e) {
    const int64_t count = ends[e];
    ends[e] = static_cast<int32_t>(start);
    start = round_up(start + count, tile);
  }
  for (int64_t x = 0; x < slots; ++x) {
    if (!is_local(ids[x])) {
      expanded_to_permuted[x] = -1;
      continue;
    }
    const int32_t row = ends[ids[x] - first_expert]++;
    expanded_to_permuted[x] = row;
    permuted_to_expanded[row] = static_cast<int32_t>(x);
  }
}

void sort_slots(const void* ids,
                bool is_i64,
                int64_t slots,
                int64_t first_expert,
                int64_t num_local_experts,
                int64_t tile,
                int32_t* ends,
                int32_t* permuted_to_expanded,
                int32_t* expanded_to_permuted) {
  const auto sort = [&](const auto* typed_ids) {
    sort_slots(typed_ids,
               slots,
               first_expert,
               num_local_experts,
               tile,
               ends,
               permuted_to_expanded,
               expanded_to_permuted);
  };
  if (is_i64) {
    sort(static_cast<const int64_t*>(ids));
  } else {
    sort(static_cast<const int32_t*>(ids));
  }
}

}  // namespace

void route_compact(const void* routing_map,
                   bool is_i64,
                   int64_t rows,
                   int64_t top_k,
                   int64_t local_expert_offset,
                   int64_t num_local_experts,
                   const CompactRoutes& out) {
  out.expert_offsets[0] = 0;
  // Without padding the end of an expert is the start of the next one.
  sort_slots(routing_map,
             is_i64,
             rows * top_k,
             local_expert_offset,
             num_local_experts,
             1,
             out.expert_offsets + 1,
             out.permuted_to_expanded,
             out.expanded_to_permuted);
}

int64_t route_tokens(const void* routing_map,
                     bool is_i64,
                     int64_t rows,
                     int64_t top_k,
                     int64_t local_expert_offset,
                     int64_t num_local_experts,
                     int64_t tile,
                     const TileRoutes& out) {
  const int64_t tiles = max_route_tiles(rows, top_k, num_local_experts, tile);
  std::fill_n(out.tile_to_expert, tiles, 0);
  std::fill_n(out.tile_row_limit, tiles, 0);
  std::fill_n(out.permuted_to_expanded, tiles * tile, -1);
  sort_slots(routing_map,
             is_i64,
             rows * top_k,
             local_expert_offset,
             num_local_experts,
             tile,
             out.expert_ends,
             out.permuted_to_expanded,
             out.expanded_to_permuted);
  int64_t used = 0;
  for (int64_t e = 0; e < num_local_experts; ++e) {
    const int64_t end = out.expert_ends[e];
    for (; used * tile < end; ++used) {
      out.tile_to_expert[used] = static_cast<int32_t>(e);
      out.tile_row_limit[used] = static_cast<int32_t>(std::min((used + 1) * tile, end));
    }
  }
  return used;
}

}  // namespace hexpert

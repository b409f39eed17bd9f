#include <cooperative_groups.h>

#include <algorithm>
#include <cstddef>

#include "cuda/ptx.cuh"
#include "cuda/route.cuh"
#include "cuda/route.hpp"

namespace hexpert::cuda {
namespace {

namespace groups = cooperative_groups;

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kMaxBlocks = 8;                // of the cluster
constexpr int kLoadsAhead = 8;               // ids in flight a lane
constexpr int64_t kMaxCounters = 48 * 1024;  // of 4 bytes, in shared memory

__device__ int expert_of(const RouteTokens& args, int64_t slot) {
  return local_expert(
      args.routing_map, args.is_i64, slot, args.local_expert_offset, args.num_local_experts);
}

// Calls visit(slot, expert, peers) for every slot of this warp's segment in ascending order, 32 at a
// time; `peers` are the lanes with the same expert. Lanes past the end have expert -1.
template <typename Visit>
__device__ void for_each_slot(const RouteTokens& args, int64_t begin, int64_t end, Visit&& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t base = begin; base < end; base += 32 * kLoadsAhead) {
    int expert[kLoadsAhead];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int64_t slot = base + 32 * i + lane;
      expert[i] = slot < end ? expert_of(args, slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      if (base + 32 * i >= end) break;
      visit(base + 32 * i + lane, expert[i], __match_any_sync(0xFFFFFFFFU, expert[i]));
    }
  }
}

// Exclusive sum over the block of two counts a thread, in thread order; `total` is the sum of all.
__device__ int2 block_exclusive_sum(int2 value, int2* warp_sums, int2& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int2 sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int x = __shfl_up_sync(0xFFFFFFFFU, sum.x, distance);
    const int y = __shfl_up_sync(0xFFFFFFFFU, sum.y, distance);
    if (lane >= distance) sum = {sum.x + x, sum.y + y};
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int2 before = {0, 0};
  total = {0, 0};
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    const int2 s = warp_sums[w];
    if (w < warp) before = {before.x + s.x, before.y + s.y};
    total = {total.x + s.x, total.y + s.y};
  }
  __syncthreads();
  return {before.x + sum.x - value.x, before.y + sum.y - value.y};
}

// One cluster of blocks: a stable counting sort. Every warp counts a run of consecutive slots, so that
// the order within an expert is that of the slots.
__global__ void __launch_bounds__(kMaxThreads) route_kernel(const RouteTokens args) {
  extern __shared__ int shared[];
  __shared__ int2 warp_sums[kMaxWarps];
  __shared__ int block_routes;
  ptx::allow_successor();
  ptx::wait_for_predecessor();

  const groups::cluster_group cluster = groups::this_cluster();
  const int experts = static_cast<int>(args.num_local_experts);
  int* block_counts = shared;        // [experts] of this block, read by the others
  int* counters = shared + experts;  // [warps][experts]
  const int64_t slots = args.rows * args.top_k;
  const int threads = static_cast<int>(blockDim.x);
  const int warps = threads / 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int rank = static_cast<int>(cluster.block_rank());
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int64_t all_warps = int64_t{blocks} * warps;
  const int64_t segment = (slots + 32 * all_warps - 1) / (32 * all_warps) * 32;
  const int64_t begin = min(segment * (rank * warps + thread / 32), slots);
  const int64_t end = min(begin + segment, slots);
  int* own = counters + static_cast<ptrdiff_t>(thread / 32) * experts;

  for (int i = thread; i < warps * experts; i += threads)
    counters[i] = 0;
  if (thread == 0) block_routes = 0;
  __syncthreads();
  int own_routes = 0;
  for_each_slot(args, begin, end, [&](int64_t, int expert, unsigned peers) {
    own_routes += expert >= 0 ? 1 : 0;
    if (expert >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) own[expert] += __popc(peers);
    __syncwarp();
  });
  own_routes = __reduce_add_sync(0xFFFFFFFFU, own_routes);
  if (lane == 0) atomicAdd(&block_routes, own_routes);
  __syncthreads();
  for (int expert = thread; expert < experts; expert += threads) {
    int count = 0;
    for (int w = 0; w < warps; ++w)
      count += counters[w * experts + expert];
    block_counts[expert] = count;
  }
  cluster.sync();

  int num_routes = 0;
  for (int b = 0; b < blocks; ++b)
    num_routes += *cluster.map_shared_rank(&block_routes, b);
  const int width = num_routes <= args.max_narrow_routes ? args.narrow_max_width : args.max_width;
  int2 base = {0, 0};  // rows and tiles of the experts before this round
  for (int first = 0; first < experts; first += threads) {
    const int expert = first + thread;
    int rows = 0;
    int rows_before = 0;  // in the blocks before this one
    if (expert < experts) {
      for (int b = 0; b < blocks; ++b) {
        const int count = *cluster.map_shared_rank(block_counts + expert, b);
        rows += count;
        if (b < rank) rows_before += count;
      }
    }
    const int tiles = (rows + width - 1) / width;
    int2 total;
    const int2 before = block_exclusive_sum({rows, tiles}, warp_sums, total);
    int row = base.x + before.x;
    if (expert < experts) {
      for (int t = rank; t < tiles; t += blocks) {
        args.out.tiles[base.y + before.y + t] = {
            expert, row + t * width, min(width, rows - t * width), 0};
      }
      row += rows_before;
      for (int w = 0; w < warps; ++w) {  // counts become first rows
        const int count = counters[w * experts + expert];
        counters[w * experts + expert] = row;
        row += count;
      }
    }
    base = {base.x + total.x, base.y + total.y};
  }
  if (rank == 0 && thread == 0) {
    *args.out.num_routes = num_routes;
    *args.out.max_width = width;
    *args.out.num_tiles = base.y;
    args.out.items_taken[0] = args.out.items_taken[1] = 0;
  }
  cluster.sync();  // the counts of this block may go

  for_each_slot(args, begin, end, [&](int64_t slot, int expert, unsigned peers) {
    const int ahead = __popc(peers & ((1U << lane) - 1));
    const int row = expert >= 0 ? own[expert] + ahead : -1;
    __syncwarp();
    if (expert >= 0 && ahead == 0) own[expert] += __popc(peers);
    __syncwarp();
    if (slot < end) args.out.expanded_to_permuted[slot] = row;
    if (row >= 0) args.out.route_expert[row] = expert;
  });
}

}  // namespace

cudaError_t configure_route() {
  return configure(route_kernel, kMaxCounters * sizeof(int));
}

cudaError_t route_tokens(const RouteTokens& args, const LaunchOptions& options) {
  const int64_t slots = args.rows * args.top_k;
  const int64_t experts = args.num_local_experts;
  // A warp for every 32 slots, and a thread for every expert, as far as they go.
  int64_t warps = std::max((slots + 31) / 32, std::min<int64_t>((experts + 31) / 32, kMaxWarps));
  int64_t blocks = 1;
  while (blocks < kMaxBlocks && warps > blocks * kMaxWarps)
    blocks *= 2;
  warps = std::min<int64_t>((warps + blocks - 1) / blocks, kMaxWarps);
  while (warps > 1 && (warps + 1) * experts > kMaxCounters)
    warps /= 2;
  const auto shared = static_cast<size_t>((warps + 1) * experts) * sizeof(int);
  return launch(
      route_kernel,
      static_cast<unsigned>(blocks),
      static_cast<unsigned>(32 * warps),
      shared,
      LaunchOptions{options.stream, options.overlap_predecessor, static_cast<int>(blocks)},
      args);
}

}  // namespace hexpert::cuda

#include <cstddef>

#include "cuda/ptx.cuh"
#include "cuda/route.hpp"

namespace hexpert::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kLoadsAhead = 4;               // ids in flight a lane
constexpr int64_t kMaxCounters = 48 * 1024;  // of 4 bytes, in shared memory

__device__ int local_expert(const RouteTokens& args, int64_t slot) {
  const int64_t id = args.is_i64 ? static_cast<const int64_t*>(args.routing_map)[slot]
                                 : static_cast<const int32_t*>(args.routing_map)[slot];
  // Compared before the subtraction, which overflows for the smallest ids.
  if (id < args.local_expert_offset || id >= args.local_expert_offset + args.num_local_experts) {
    return -1;
  }
  return static_cast<int>(id - args.local_expert_offset);
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
      expert[i] = slot < end ? local_expert(args, slot) : -1;
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
  for (int w = 0; w < kWarps; ++w) {
    const int2 s = warp_sums[w];
    if (w < warp) before = {before.x + s.x, before.y + s.y};
    total = {total.x + s.x, total.y + s.y};
  }
  __syncthreads();
  return {before.x + sum.x - value.x, before.y + sum.y - value.y};
}

// One block: a stable counting sort. Each of `segments` warps counts a run of consecutive slots, so
// that the order within an expert is that of the slots.
__global__ void __launch_bounds__(kThreads) route_kernel(const RouteTokens args, int segments) {
  extern __shared__ int counters[];  // [segments][num_local_experts]
  __shared__ int2 warp_sums[kWarps];
  ptx::allow_successor();
  ptx::wait_for_predecessor();

  const int experts = static_cast<int>(args.num_local_experts);
  const int64_t slots = args.rows * args.top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t segment = (slots + int64_t{32} * segments - 1) / (int64_t{32} * segments) * 32;
  const int64_t begin = warp < segments ? min(segment * warp, slots) : slots;
  const int64_t end = min(begin + segment, slots);
  int* own = counters + static_cast<ptrdiff_t>(warp) * experts;

  for (int i = static_cast<int>(threadIdx.x); i < segments * experts; i += kThreads)
    counters[i] = 0;
  __syncthreads();
  for_each_slot(args, begin, end, [&](int64_t, int expert, unsigned peers) {
    if (expert >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) own[expert] += __popc(peers);
    __syncwarp();
  });
  __syncthreads();

  int2 base = {0, 0};  // rows and tiles of the experts before this round
  for (int first = 0; first < experts; first += kThreads) {
    const int expert = first + static_cast<int>(threadIdx.x);
    int rows = 0;
    if (expert < experts) {
      for (int s = 0; s < segments; ++s)
        rows += counters[s * experts + expert];
    }
    const int tiles = (rows + args.max_width - 1) / args.max_width;
    int2 total;
    const int2 before = block_exclusive_sum({rows, tiles}, warp_sums, total);
    int row = base.x + before.x;
    if (expert < experts) {
      for (int t = 0; t < tiles; ++t) {
        const int tile_rows = min(args.max_width, rows - t * args.max_width);
        args.out.tiles[base.y + before.y + t] = {expert, row + t * args.max_width, tile_rows, 0};
      }
      for (int s = 0; s < segments; ++s) {  // counts become first rows
        const int count = counters[s * experts + expert];
        counters[s * experts + expert] = row;
        row += count;
      }
    }
    base = {base.x + total.x, base.y + total.y};
  }
  if (threadIdx.x == 0) {
    *args.out.num_routes = base.x;
    *args.out.num_tiles = base.y;
  }
  __syncthreads();

  for_each_slot(args, begin, end, [&](int64_t slot, int expert, unsigned peers) {
    const int rank = __popc(peers & ((1U << lane) - 1));
    const int row = expert >= 0 ? own[expert] + rank : -1;
    __syncwarp();
    if (expert >= 0 && rank == 0) own[expert] += __popc(peers);
    __syncwarp();
    if (slot < end) args.out.expanded_to_permuted[slot] = row;
    if (row >= 0) {
      args.out.permuted_to_expanded[row] = static_cast<int32_t>(slot);
      args.out.route_expert[row] = expert;
    }
  });
}

}  // namespace

cudaError_t configure_route() {
  return cudaFuncSetAttribute(
      route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxCounters * sizeof(int));
}

cudaError_t route_tokens(const RouteTokens& args, const LaunchOptions& options) {
  const int64_t slots = args.rows * args.top_k;
  int64_t segments = (slots + 31) / 32;
  if (segments > kWarps) segments = kWarps;
  while (segments > 1 && segments * args.num_local_experts > kMaxCounters)
    segments /= 2;
  const auto shared = static_cast<size_t>(segments * args.num_local_experts) * sizeof(int);
  return launch(route_kernel, 1, kThreads, shared, options, args, static_cast<int>(segments));
}

}  // namespace hexpert::cuda

#include "cuda/combine.hpp"
#include "cuda/ptx.cuh"
#include "format/codec.hpp"
#include "format/layout.hpp"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

constexpr int kThreads = 128;
constexpr int kColumns = 8;  // a thread, consecutive

struct Columns {
  float values[kColumns];
};

__device__ __forceinline__ Columns load_bf16(const uint16_t* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
  Columns y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y.values[2 * i] = __uint_as_float(pairs[i] << 16);
    y.values[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000U);
  }
  return y;
}

// With few tokens time is latency, and the rows of kAhead slots are fetched together; with many it is
// bandwidth, and more threads do more than fetching ahead.
template <int kAhead>
__global__ void __launch_bounds__(kThreads) combine_kernel(const Combine args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t token = blockIdx.x;
  const int64_t col = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kColumns;
  if (col >= args.cols) return;
  float sum[kColumns] = {};
  const int32_t* rows = args.expanded_to_permuted + token * args.top_k;
  const float* probabilities = args.probabilities + token * args.top_k;
  for (int64_t first = 0; first < args.top_k; first += kAhead) {
    int64_t row[kAhead];
    Columns y[kAhead];
    float probability[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool exists = first + i < args.top_k;
      row[i] = exists ? rows[first + i] : -1;
      probability[i] = exists ? probabilities[first + i] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row[i] < 0) continue;
      y[i] = load_bf16(args.route_output + row[i] * args.route_cols + col);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row[i] < 0) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        sum[c] = __fmaf_rn(probability[i], y[i].values[c], sum[c]);
    }
  }

  const int64_t at = token * args.cols + col;
  if (args.cols % kColumns == 0) {  // rows start at multiples of 16 bytes
    if (args.out_is_f32) {
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(args.out) + at);
      to[0] = {sum[0], sum[1], sum[2], sum[3]};
      to[1] = {sum[4], sum[5], sum[6], sum[7]};
    } else {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = bf16_from_f32(sum[2 * i]) | static_cast<uint32_t>(bf16_from_f32(sum[2 * i + 1]))
                                                   << 16;
      }
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.out) + at) = {
          pairs[0], pairs[1], pairs[2], pairs[3]};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (col + i >= args.cols) break;
    if (args.out_is_f32) {
      static_cast<float*>(args.out)[at + i] = sum[i];
    } else {
      static_cast<uint16_t*>(args.out)[at + i] = bf16_from_f32(sum[i]);
    }
  }
}

// Eight consecutive columns of what FC2 left of a route as sums: scaled and rounded to BF16.
__device__ __forceinline__ Columns load_partial(const Combine& args, int64_t row, int64_t col) {
  const Combine::Partial& partial = args.partial;
  const int64_t stride = partial.max_routes * args.route_cols;
  // They lie in half a slab: rows 4h..4h+3 and 8+4h..8+4h+3.
  const float* from = partial.sums + row * args.route_cols + fragments::fragment_row(col);
  const float scale = __fmul_rn(partial.alpha[partial.route_expert[row]], partial.token_scale[row]);
  float sums[kColumns];
  for (int s = 0; s < partial.splits; ++s, from += stride) {
    const float4 low = *reinterpret_cast<const float4*>(from);
    const float4 high = *reinterpret_cast<const float4*>(from + 8);
    const float add[kColumns] = {low.x, low.y, high.x, high.y, low.z, low.w, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      sums[i] = s == 0 ? add[i] : __fadd_rn(sums[i], add[i]);
  }
  Columns y;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const uint16_t rounded = bf16_from_f32(__fmul_rn(scale, sums[i]));
    y.values[i] = bf16_to_f32(rounded);
    if (partial.route_output != nullptr) {
      partial.route_output[row * args.route_cols + col + i] = rounded;
    }
  }
  return y;
}

// Every warp has a slot, so that the loads of all are under way together.
constexpr int kPartialSlots = 8;  // at a time
constexpr int kPartialThreads = 32 * kPartialSlots;
constexpr int kPartialColumns = 32 * kColumns;  // of a block

__global__ void __launch_bounds__(kPartialThreads) combine_partial_kernel(const Combine args) {
  __shared__ float values[kPartialSlots][kPartialColumns];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t token = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first_col = int64_t{blockIdx.y} * kPartialColumns;
  const int64_t col = first_col + kColumns * lane;
  const int32_t* rows = args.expanded_to_permuted + token * args.top_k;
  const float* probabilities = args.probabilities + token * args.top_k;
  float sum = 0;
  for (int64_t first = 0; first < args.top_k; first += kPartialSlots) {
    const auto slots = static_cast<int>(min(args.top_k - first, int64_t{kPartialSlots}));
    if (warp < slots && col < args.cols && rows[first + warp] >= 0) {
      const Columns y = load_partial(args, rows[first + warp], col);
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        values[warp][kColumns * lane + i] = y.values[i];
    }
    __syncthreads();
    for (int s = 0; s < slots; ++s) {
      if (rows[first + s] >= 0) {
        sum = __fmaf_rn(probabilities[first + s], values[s][threadIdx.x], sum);
      }
    }
    __syncthreads();
  }
  const int64_t own_col = first_col + threadIdx.x;
  if (own_col >= args.cols) return;
  const int64_t at = token * args.cols + own_col;
  if (args.out_is_f32) {
    static_cast<float*>(args.out)[at] = sum;
  } else {
    static_cast<uint16_t*>(args.out)[at] = bf16_from_f32(sum);
  }
}

}  // namespace

cudaError_t configure_combine() {
  return configure_all(combine_kernel<8>, combine_kernel<1>, combine_partial_kernel);
}

cudaError_t combine(const Combine& args, const LaunchOptions& options) {
  const bool partial = args.partial.splits > 0;
  const int threads = partial ? kPartialThreads : kThreads;
  const int columns = partial ? kPartialColumns : kThreads * kColumns;
  const dim3 grid(static_cast<unsigned>(args.rows),
                  static_cast<unsigned>((args.cols + columns - 1) / columns));
  const bool few = args.rows <= 256;
  auto* kernel = partial ? combine_partial_kernel : few ? combine_kernel<8> : combine_kernel<1>;
  return launch(kernel, grid, threads, 0, options, args);
}

}  // namespace hexpert::cuda

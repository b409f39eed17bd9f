#include "cuda/activation.cuh"
#include "cuda/ptx.cuh"
#include "cuda/quantize_rows.cuh"
#include "cuda/requantize.hpp"
#include "format/layout.hpp"
#include "moe/activation.hpp"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

template <int kWarps>
__device__ __forceinline__ int64_t row_of_thread(const Requantize& args) {
  constexpr int kRows = kQuantizeThreads / (32 * kWarps);
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / (32 * kWarps);
  return row < *args.num_routes ? row : -1;
}

template <int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads)
    requantize_kernel(const Requantize args, const QuantizedRows out) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = row_of_thread<kWarps>(args);
  quantize_row<kWarps>(
      row,
      out,
      [&](int block) {
        const auto* from = reinterpret_cast<const uint4*>(args.rows + row * args.cols + 16 * block);
        const uint4 low = from[0];
        const uint4 high = from[1];
        return Block{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      },
      [] {});
}

// 16 consecutive sums of a row, the splits added in ascending order.
__device__ __forceinline__ void add_splits(const Requantize& args, int64_t at, float (&sums)[16]) {
  const int64_t stride = args.max_routes * args.partial.fc1_rows;
  for (int s = 0; s < args.partial.splits; ++s) {
    const auto* from = reinterpret_cast<const float4*>(args.partial.sums + s * stride + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = from[i];
      const float add[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sums[4 * i + j] = s == 0 ? add[j] : __fadd_rn(sums[4 * i + j], add[j]);
    }
  }
}

template <int kWarps, bool kGated>
__global__ void __launch_bounds__(kQuantizeThreads)
    activate_and_requantize_kernel(const Requantize args, const QuantizedRows out) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const Requantize::Partial& partial = args.partial;
  const int64_t row = row_of_thread<kWarps>(args);
  float up_scale = 0;
  float gate_scale = 0;
  if (row >= 0) {
    const int expert = partial.route_expert[row];
    const float t = partial.route_scale[row];
    up_scale = __fmul_rn(partial.up_alpha[expert], t);
    gate_scale = __fmul_rn(partial.gate_alpha[expert], t);
  }
  const auto activated = [&](float up, float gate) {
    const float u = __fmul_rn(up, up_scale);
    const float g = __fmul_rn(gate, gate_scale);
    if (!kGated) return bf16_from_f32(squared_relu(u));
    if (partial.activation.type == ActivationType::kSwiGlu) return bf16_from_f32(swiglu(g, u));
    return bf16_from_f32(static_cast<float>(activate(partial.activation, u, g)));
  };
  quantize_row<kWarps>(
      row,
      out,
      [&](int block) {
        Block x;
        float sums[16];
        if (kGated) {
      // A slab is up and gate of eight features.
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            add_splits(args, row * partial.fc1_rows + 32 * block + 16 * half, sums);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              x.pairs[4 * half + i] =
                  activated(sums[2 * i], sums[2 * i + 8]) |
                  static_cast<uint32_t>(activated(sums[2 * i + 1], sums[2 * i + 9])) << 16;
            }
          }
        } else {
          add_splits(args, row * partial.fc1_rows + 16 * block, sums);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const uint16_t even = activated(sums[fragments::fragment_row(2 * i)], 0);
            const uint16_t odd = activated(sums[fragments::fragment_row(2 * i + 1)], 0);
            x.pairs[i] = even | static_cast<uint32_t>(odd) << 16;
          }
        }
        if (partial.intermediate != nullptr) {
          auto* to = reinterpret_cast<uint4*>(partial.intermediate + row * args.cols + 16 * block);
          to[0] = {x.pairs[0], x.pairs[1], x.pairs[2], x.pairs[3]};
          to[1] = {x.pairs[4], x.pairs[5], x.pairs[6], x.pairs[7]};
        }
        return x;
      },
      [] {});
}

template <int kWarps>
cudaError_t run(const Requantize& args, const LaunchOptions& options) {
  QuantizedRows out;
  out.cols = args.cols;
  out.codes = args.codes;
  out.block_scales = args.block_scales;
  out.token_scale = args.token_scale;
  out.operand = args.rows;
  constexpr int64_t kRows = kQuantizeThreads / (32 * kWarps);
  const auto grid = static_cast<unsigned>((args.max_routes + kRows - 1) / kRows);
  auto* kernel = requantize_kernel<kWarps>;
  if (args.partial.splits > 0) {
    kernel = is_gated(args.partial.activation.type) ? activate_and_requantize_kernel<kWarps, true>
                                                    : activate_and_requantize_kernel<kWarps, false>;
  }
  return launch(kernel, grid, kQuantizeThreads, 0, options, args, out);
}

}  // namespace

cudaError_t requantize(const Requantize& args, const LaunchOptions& options) {
  switch (warps_per_row(args.cols)) {
    case 1:
      return run<1>(args, options);
    case 2:
      return run<2>(args, options);
    default:
      return run<4>(args, options);
  }
}

}  // namespace hexpert::cuda

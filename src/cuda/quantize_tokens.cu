#include "cuda/launch.hpp"
#include "cuda/launch_options.hpp"
#include "cuda/ptx.cuh"
#include "cuda/quantize_rows.cuh"

namespace hexpert::cuda {
namespace {

template <int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_tokens_kernel(const QuantizeTokens args, const QuantizedRows out, bool aligned) {
  ptx::allow_successor();
  constexpr int kRows = kQuantizeThreads / (32 * kWarps);
  int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / (32 * kWarps);
  if (row >= args.rows) row = -1;
  const uint16_t* source = args.source + row * args.source_stride;
  const auto load = [&](int block) {
    Block x;
    const int64_t first = int64_t{16} * block;
    if (aligned && first + 16 <= args.cols) {
      const auto* from = reinterpret_cast<const uint4*>(source + first);
      const uint4 low = from[0];
      const uint4 high = from[1];
      return Block{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t col = first + 2 * i;
      const uint32_t even = col < args.cols ? source[col] : 0;
      const uint32_t odd = col + 1 < args.cols ? source[col + 1] : 0;
      x.pairs[i] = even | odd << 16;
    }
    return x;
  };
  // The tokens were there before the predecessor, which says where their copies go.
  quantize_row<kWarps>(row, out, load, [] { ptx::wait_for_predecessor(); });
}

}  // namespace

cudaError_t quantize_tokens(const QuantizeTokens& args, const LaunchOptions& options) {
  if (args.rows == 0) return cudaSuccess;
  const QuantizedRows out = {args.padded_cols,
                             args.codes,
                             args.block_scales,
                             args.token_scale,
                             args.operand,
                             args.expanded_to_permuted,
                             static_cast<int>(args.top_k),
                             args.route_scale};
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.source) % 16 == 0 && args.source_stride % 8 == 0;
  const auto run = [&](auto kernel, int warps) {
    const int64_t rows = kQuantizeThreads / (32 * warps);
    const auto grid = static_cast<unsigned>((args.rows + rows - 1) / rows);
    return launch(kernel, grid, kQuantizeThreads, 0, options, args, out, aligned);
  };
  switch (warps_per_row(args.padded_cols)) {
    case 1:
      return run(quantize_tokens_kernel<1>, 1);
    case 2:
      return run(quantize_tokens_kernel<2>, 2);
    default:
      return run(quantize_tokens_kernel<4>, 4);
  }
}

cudaError_t quantize_tokens(const QuantizeTokens& args, cudaStream_t stream) {
  return quantize_tokens(args, LaunchOptions{stream, false});
}

}  // namespace hexpert::cuda

#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"
#include "cuda/quantize_rows.cuh"

namespace hexpert::cuda {
namespace {

// Half block `half` of token `row`; zeros past its end.
__device__ __forceinline__ HalfBlock load_token(const QuantizeTokens& args,
                                                int64_t row,
                                                int half,
                                                bool aligned) {
  const uint16_t* source = args.source + row * args.source_stride;
  const int64_t first = int64_t{kHalfBlock} * half;
  if (aligned && first + kHalfBlock <= args.cols) {
    const auto v = *reinterpret_cast<const uint4*>(source + first);
    return {v.x, v.y, v.z, v.w};
  }
  return load_values<kHalfBlock / 2>(source, first, args.cols);
}
bool aligned_to_16(const QuantizeTokens& args) {
  return reinterpret_cast<uintptr_t>(args.source) % 16 == 0 && args.source_stride % 8 == 0;
}

QuantizedRows rows_of(const QuantizeTokens& args) {
  QuantizedRows out;
  out.cols = args.padded_cols;
  out.codes = args.codes;
  out.block_scales = args.block_scales;
  out.token_scale = args.token_scale;
  out.operand = args.operand;
  out.num_copies = static_cast<int>(args.top_k);
  out.copy_scale = args.route_scale;
  return out;
}

template <int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_tokens_kernel(const QuantizeTokens args, const QuantizedRows out, bool aligned) {
  int64_t row = row_of_thread<kWarps>(blockIdx.x);
  if (row >= args.rows) row = -1;
  quantize_row<kWarps>(
      row,
      out,
      [&](int half) { return load_token(args, row, half, aligned); },
      [&]() -> const int32_t* {
        // The tokens were there before the predecessor, which says where their copies go. From here
        // on the successor, too, knows the routes.
        ptx::wait_for_predecessor();
        ptx::allow_successor();
        const int32_t* copies = args.expanded_to_permuted;
        return copies == nullptr || row < 0 ? nullptr : copies + row * args.top_k;
      });
}

}  // namespace

cudaError_t configure_quantize_tokens() {
  return for_each_warps_per_row(
      [](auto warps) { return configure(quantize_tokens_kernel<warps()>); });
}

cudaError_t quantize_tokens(const QuantizeTokens& args, const LaunchOptions& options) {
  if (args.rows == 0) return cudaSuccess;
  return with_warps_per_row(args.padded_cols, [&](auto warps) {
    return launch(quantize_tokens_kernel<warps()>,
                  blocks_for_rows<warps()>(args.rows),
                  kQuantizeThreads,
                  0,
                  options,
                  args,
                  rows_of(args),
                  aligned_to_16(args));
  });
}

cudaError_t quantize_tokens(const QuantizeTokens& args, cudaStream_t stream) {
  return quantize_tokens(args, LaunchOptions{stream, false});
}

}  // namespace hexpert::cuda

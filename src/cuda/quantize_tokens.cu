#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"
#include "cuda/quantize_rows.cuh"

namespace hexpert::cuda {
namespace {

// Whether rows can be read 16 bytes at a time.
bool in_half_blocks(const QuantizeTokens& args) {
  return reinterpret_cast<uintptr_t>(args.source) % 16 == 0 &&
         (args.source_stride | args.cols) % kHalfBlock == 0;
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

// Without operands it needs so few registers that this many threads of a multiprocessor run at once.
template <bool kOperand>
constexpr int kResidentThreads = kOperand ? 768 : 1280;

template <int kWarps, bool kInHalfBlocks, bool kOperand>
__global__ void __launch_bounds__(kQuantizeThreads<kWarps>,
                                  kResidentThreads<kOperand> / kQuantizeThreads<kWarps>)
    quantize_tokens_kernel(const QuantizeTokens args, const QuantizedRows out) {
  int64_t row = row_of_thread<kWarps>(blockIdx.x);
  if (row >= args.rows) row = -1;
  const uint16_t* source = args.source + row * args.source_stride;
  const int cols = static_cast<int>(args.cols);
  quantize_row<kWarps, kOperand>(
      row,
      out,
      [&](int half) {
        if (!kInHalfBlocks) return load_values<kHalfBlock / 2>(source, kHalfBlock * half, cols);
        if (kHalfBlock * half >= cols) return HalfBlock{};
        const auto v = reinterpret_cast<const uint4*>(source)[half];
        return HalfBlock{v.x, v.y, v.z, v.w};
      },
      [&]() -> const int32_t* {
        // The tokens were there before the predecessor, which says where their copies go. From here
        // on the successor, too, knows the routes.
        ptx::wait_for_predecessor();
        ptx::allow_successor();
        const int32_t* copies = args.expanded_to_permuted;
        return copies == nullptr || row < 0 ? nullptr : copies + row * args.top_k;
      });
}

// Calls run(kWarps, kInHalfBlocks, kOperand as constants).
template <typename Run>
cudaError_t with_variant(const QuantizeTokens& args, Run&& run) {
  const auto with_operand = [&](auto warps, auto in_half_blocks) {
    return args.operand != nullptr ? run(warps, in_half_blocks, std::true_type{})
                                   : run(warps, in_half_blocks, std::false_type{});
  };
  if (!in_half_blocks(args)) {
    return with_operand(std::integral_constant<int, 4>{}, std::false_type{});
  }
  return with_warps_per_row(args.padded_cols,
                            [&](auto warps) { return with_operand(warps, std::true_type{}); });
}

}  // namespace

cudaError_t configure_quantize_tokens() {
  const cudaError_t error = configure_all(quantize_tokens_kernel<4, false, false>,
                                          quantize_tokens_kernel<4, false, true>);
  if (error != cudaSuccess) return error;
  return for_each_warps_per_row([](auto warps) {
    return configure_all(quantize_tokens_kernel<warps(), true, false>,
                         quantize_tokens_kernel<warps(), true, true>);
  });
}

cudaError_t quantize_tokens(const QuantizeTokens& args, const LaunchOptions& options) {
  if (args.rows == 0) return cudaSuccess;
  return with_variant(args, [&](auto warps, auto in_half_blocks, auto operand) {
    return launch(quantize_tokens_kernel<warps(), in_half_blocks(), operand()>,
                  blocks_for_rows<warps()>(args.rows),
                  kQuantizeThreads<warps()>,
                  0,
                  options,
                  args,
                  rows_of(args));
  });
}

cudaError_t quantize_tokens(const QuantizeTokens& args, cudaStream_t stream) {
  return quantize_tokens(args, LaunchOptions{stream, false});
}

}  // namespace hexpert::cuda

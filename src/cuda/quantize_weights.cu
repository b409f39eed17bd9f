#include "cuda/launch.hpp"
#include "cuda/quantize.cuh"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

constexpr int kThreads = 256;
constexpr int kSpans = 4;  // records a block makes: 128 rows x 256 k
constexpr int kRows = static_cast<int>(fragments::kTileRows);

// Row of the source matrix that goes to a fragment row, or -1 for padding.
__device__ __forceinline__ int64_t source_row(const QuantizeWeights& args, int64_t fragment) {
  if (!args.gated) {
    const int64_t row = fragments::row_of_fragment(fragment);
    return row < args.rows ? row : -1;
  }
  const int64_t feature = fragment / fragments::kSlabRows * 8 + fragment % 8;
  if (feature >= args.rows) return -1;
  return fragment % fragments::kSlabRows >= 8 ? feature : args.rows + feature;
}

__global__ void __launch_bounds__(kThreads) amax_kernel(const QuantizeWeights args, bool aligned) {
  const int64_t elements = args.rows * (args.gated ? 2 : 1) * args.cols;
  const uint16_t* source = args.source + int64_t{blockIdx.y} * elements;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  uint32_t amax = 0;  // of both halves
  if (aligned) {
    const auto* from = reinterpret_cast<const uint4*>(source);
#pragma unroll 4
    for (int64_t i = thread; i < elements / 8; i += threads) {
      const uint4 v = from[i];
      const uint32_t low = __vmaxu2(v.x & 0x7FFF7FFFU, v.y & 0x7FFF7FFFU);
      const uint32_t high = __vmaxu2(v.z & 0x7FFF7FFFU, v.w & 0x7FFF7FFFU);
      amax = __vmaxu2(amax, __vmaxu2(low, high));
    }
  } else {
    for (int64_t i = thread; i < elements; i += threads)
      amax = max(amax, static_cast<uint32_t>(source[i] & 0x7FFF));
  }
  amax = __reduce_max_sync(0xFFFFFFFFU, max(amax & 0xFFFFU, amax >> 16));
  if (threadIdx.x % 32 == 0) atomicMax(args.amax + blockIdx.y, amax);
}

using Block = Values<8>;

// 16 values of a source row; zeros past its end.
__device__ __forceinline__ Block load_block(const QuantizeWeights& args,
                                            const uint16_t* row,
                                            int64_t col,
                                            bool aligned) {
  if (aligned && col + 16 <= args.cols) {
    const auto* from = reinterpret_cast<const uint4*>(row + col);
    const uint4 low = from[0];
    const uint4 high = from[1];
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  }
  return load_values<8>(row, col, args.cols);
}

// The word of one thread from two codes each of rows g and g + 8, at k = 2t and k = 2t + 8: their
// bits where spread_codes() puts them, and moved to where there is room.
__device__ __forceinline__ uint32_t fragment_word(uint32_t upper,
                                                  uint32_t upper_8,
                                                  uint32_t lower,
                                                  uint32_t lower_8) {
  constexpr uint32_t kSigns = 0x80008000U;
  constexpr uint32_t kMagnitudes = 0x0E000E00U;
  return upper | lower >> 3 | (upper_8 & kSigns) >> 1 | (upper_8 & kMagnitudes) >> 6 |
         (lower_8 & kSigns) >> 2 | (lower_8 & kMagnitudes) >> 9;
}

// Lane t of four gives words[i] to lane i, which has it as words[t].
__device__ __forceinline__ void transpose4x4(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = (t & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      // Lanes without the bit keep the word without it and trade the other.
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFU, upper ? low : high, distance);
      (upper ? low : high) = got;
    }
  }
}

// A warp makes the fragments of 16 rows: lane 4g + t quantizes rows g and g + 8 of block t of a span.
__global__ void __launch_bounds__(kThreads, 4)
    quantize_weights_kernel(const QuantizeWeights args, bool aligned) {
  // Last first: what amax_kernel read at its end is still in the L2 cache.
  const int64_t expert = args.experts - 1 - blockIdx.z;
  const int64_t tile_row = int64_t{blockIdx.y} * kRows;
  const int64_t source_rows = args.rows * (args.gated ? 2 : 1);
  const uint16_t* source = args.source + expert * source_rows * args.cols;
  const OuterScale outer = matrix_scale(static_cast<uint16_t>(args.amax[expert]));
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    args.alpha[expert] = outer.stored;
    if (args.gate_alpha != nullptr) args.gate_alpha[expert] = outer.stored;
  }
  const int64_t bytes = fragments::matrix_bytes(args.fragment_rows, args.fragment_cols);
  const int slab = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int t = lane % 4;
  int64_t rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    rows[i] = source_row(args, tile_row + fragments::kSlabRows * slab + lane / 4 + 8 * i);

  const int64_t first_col = int64_t{blockIdx.x} * kSpans * fragments::kSpan;
  const int64_t end_col = min(first_col + kSpans * fragments::kSpan, args.fragment_cols);
  for (int64_t col = first_col; col < end_col; col += fragments::kSpan) {
    Block spread[2];
    uint32_t scales = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Block x = {};
      if (rows[i] >= 0 && !outer.poisoned) {
        x = load_block(args, source + rows[i] * args.cols, col + 16 * t, aligned);
      }
      const BlockScale scale = block_scale(larger_half(amax_of_halves(x)), outer);
      scales |= uint32_t{scale.code} << (8 * i);
      spread[i] = spread_codes(quantize_values(x, scale.encode));
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = fragment_word(
          spread[0].pairs[i], spread[0].pairs[i + 4], spread[1].pairs[i], spread[1].pairs[i + 4]);
    }
    transpose4x4(words, t);
    uint8_t* record = args.fragments + expert * bytes +
                      fragments::record_offset(tile_row, col, args.fragment_cols);
    reinterpret_cast<uint4*>(record)[threadIdx.x] = {words[0], words[1], words[2], words[3]};
    reinterpret_cast<uint16_t*>(record + fragments::kScalesAt)[threadIdx.x] =
        static_cast<uint16_t>(scales);
  }
}

}  // namespace

cudaError_t configure_quantize_weights() {
  return configure_all(amax_kernel, quantize_weights_kernel);
}

cudaError_t quantize_weights(const QuantizeWeights& args, cudaStream_t stream) {
  const int64_t elements = args.rows * (args.gated ? 2 : 1) * args.cols;
  const bool aligned = reinterpret_cast<uintptr_t>(args.source) % 16 == 0;
  const auto experts = static_cast<unsigned>(args.experts);
  cudaError_t error =
      cudaMemsetAsync(args.amax, 0, static_cast<size_t>(args.experts) * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  constexpr int64_t kElementsPerBlock = int64_t{kThreads} * 8 * 16;
  const auto parts = static_cast<unsigned>((elements + kElementsPerBlock - 1) / kElementsPerBlock);
  const LaunchOptions options{.stream = stream};
  error = launch(
      amax_kernel, dim3(parts, experts), kThreads, 0, options, args, aligned && elements % 8 == 0);
  if (error != cudaSuccess) return error;
  constexpr int64_t kCols = kSpans * fragments::kSpan;
  const dim3 grid(static_cast<unsigned>((args.fragment_cols + kCols - 1) / kCols),
                  static_cast<unsigned>(args.fragment_rows / kRows),
                  experts);
  return launch(
      quantize_weights_kernel, grid, kThreads, 0, options, args, aligned && args.cols % 8 == 0);
}

}  // namespace hexpert::cuda

#include "cuda/launch.hpp"
#include "cuda/quantize.cuh"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

constexpr int kThreads = 256;
constexpr int kSpans = 4;  // records a block makes: 128 rows x 256 k
constexpr int kBlocks = kSpans * 4;
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
  Block x;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t at = col + 2 * i;
    const uint32_t even = at < args.cols ? row[at] : 0;
    const uint32_t odd = at + 1 < args.cols ? row[at + 1] : 0;
    x.pairs[i] = even | odd << 16;
  }
  return x;
}

// A code at its place in a half-word.
__device__ __forceinline__ uint32_t place(uint32_t code, int sign, int magnitude) {
  return (code >> 3 & 1) << sign | (code & 7) << magnitude;
}

// The word of one thread from two codes each of rows g and g + 8, at k = 2t and k = 2t + 8.
__device__ __forceinline__ uint32_t fragment_word(uint32_t upper,
                                                  uint32_t upper_8,
                                                  uint32_t lower,
                                                  uint32_t lower_8) {
  uint32_t word = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int shift = 4 * half;
    word |= (place(upper >> shift, 15, 9) | place(lower >> shift, 12, 6) |
             place(upper_8 >> shift, 14, 3) | place(lower_8 >> shift, 13, 0))
            << (16 * half);
  }
  return word;
}

__global__ void __launch_bounds__(kThreads)
    quantize_weights_kernel(const QuantizeWeights args, bool aligned) {
  // Rows are padded so that eight of them lie in different banks.
  __shared__ uint2 codes[kRows][kBlocks + 1];
  __shared__ alignas(4) uint8_t scales[kRows][kBlocks + 4];
  const int64_t expert = blockIdx.z;
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const int64_t first_col = int64_t{blockIdx.x} * kSpans * fragments::kSpan;
  const int64_t source_rows = args.rows * (args.gated ? 2 : 1);
  const uint16_t* source = args.source + expert * source_rows * args.cols;
  const OuterScale outer = matrix_scale(static_cast<uint16_t>(args.amax[expert]));
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    args.alpha[expert] = outer.stored;
    if (args.gate_alpha != nullptr) args.gate_alpha[expert] = outer.stored;
  }

#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kBlocks; i += kThreads) {
    const int row = i / kBlocks;
    const int block = i % kBlocks;
    const int64_t from = source_row(args, first_row + row);
    QuantizedBlock q = {0, 0, outer.poisoned ? kE4M3Nan : uint8_t{0}};
    if (from >= 0) {
      q = quantize_block(
          load_block(args, source + from * args.cols, first_col + 16 * block, aligned), outer);
    }
    codes[row][block] = {q.low_codes, q.high_codes};
    scales[row][block] = q.scale;
  }
  __syncthreads();

  const int64_t bytes = fragments::matrix_bytes(args.fragment_rows, args.fragment_cols);
  uint8_t* out = args.fragments + expert * bytes +
                 fragments::record_offset(first_row, first_col, args.fragment_cols);
  const int64_t left = (args.fragment_cols - first_col) / fragments::kSpan;
  const int spans = left < kSpans ? static_cast<int>(left) : kSpans;
  const int slab = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  for (int span = 0; span < spans; ++span) {
    uint32_t words[4];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const uint2 upper = codes[16 * slab + g][4 * span + kk];
      const uint2 lower = codes[16 * slab + g + 8][4 * span + kk];
      words[kk] = fragment_word(
          upper.x >> (8 * t), upper.y >> (8 * t), lower.x >> (8 * t), lower.y >> (8 * t));
    }
    uint8_t* record = out + span * fragments::kRecordBytes;
    reinterpret_cast<uint4*>(record)[threadIdx.x] = {words[0], words[1], words[2], words[3]};
  }
  // Scales of rows g and g + 8 alternate. A thread has four blocks of both.
  static_assert(kThreads == kSpans * kRows / 2);
  const int span = static_cast<int>(threadIdx.x) / 64;
  const int row = static_cast<int>(threadIdx.x) % 64 / 8 * 16 + static_cast<int>(threadIdx.x) % 8;
  if (span < spans) {
    const auto upper = *reinterpret_cast<const uint32_t*>(&scales[row][4 * span]);
    const auto lower = *reinterpret_cast<const uint32_t*>(&scales[row + 8][4 * span]);
    uint8_t* record = out + span * fragments::kRecordBytes + fragments::kScalesAt;
    reinterpret_cast<uint2*>(record)[threadIdx.x % 64] = {__byte_perm(upper, lower, 0x5140),
                                                          __byte_perm(upper, lower, 0x7362)};
  }
}

}  // namespace

cudaError_t quantize_weights(const QuantizeWeights& args, cudaStream_t stream) {
  const int64_t elements = args.rows * (args.gated ? 2 : 1) * args.cols;
  const bool aligned = reinterpret_cast<uintptr_t>(args.source) % 16 == 0;
  const auto experts = static_cast<unsigned>(args.experts);
  cudaError_t error =
      cudaMemsetAsync(args.amax, 0, static_cast<size_t>(args.experts) * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  constexpr int64_t kElementsPerBlock = int64_t{kThreads} * 8 * 16;
  const auto parts = static_cast<unsigned>((elements + kElementsPerBlock - 1) / kElementsPerBlock);
  amax_kernel<<<dim3(parts, experts), kThreads, 0, stream>>>(args, aligned && elements % 8 == 0);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  constexpr int64_t kCols = kSpans * fragments::kSpan;
  const dim3 grid(static_cast<unsigned>((args.fragment_cols + kCols - 1) / kCols),
                  static_cast<unsigned>(args.fragment_rows / kRows),
                  experts);
  quantize_weights_kernel<<<grid, kThreads, 0, stream>>>(args, aligned && args.cols % 8 == 0);
  return cudaGetLastError();
}

}  // namespace hexpert::cuda

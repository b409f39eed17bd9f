#include <algorithm>

#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"
#include "cuda/quantize.cuh"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

constexpr int kThreads = 256;
constexpr int kRows = static_cast<int>(fragments::kTileRows);
constexpr int kSpans = 4;  // records of a tile: 128 rows x 256 k
constexpr int kCols = static_cast<int>(kSpans * fragments::kSpan);

constexpr int kPiece = kThreads * 8 * 32;  // values that a block takes the maximum of

// A block takes the maximum of a piece of an expert, or makes the fragments of a tile. Blocks start in
// the order of a counter: the pieces of expert e, then the tiles of expert e - lag, whose values are
// still in the L2 cache if there is room. So what a block waits for is done or running.
struct Schedule {
  int64_t pieces = 0;  // of an expert
  int64_t tiles = 0;
  int64_t tiles_per_row = 0;
  int64_t lag = 0;  // 0: tiles in descending order, as the last pieces are the ones in the cache
};

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

using Block = Values<8>;

// 16 values of a source row, read for the last time; zeros past its end. With kWholeBlocks it ends with
// a block, aligned to 16 bytes.
template <bool kWholeBlocks>
__device__ __forceinline__ Block load_block(const QuantizeWeights& args,
                                            const uint16_t* row,
                                            int64_t col) {
  if (!kWholeBlocks) return load_values<8>(row, col, args.cols);
  if (col >= args.cols) return {};
  const auto* from = reinterpret_cast<const uint4*>(row + col);
  const uint4 low = __ldcs(from);
  const uint4 high = __ldcs(from + 1);
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

// The word of one thread from two codes each of rows g and g + 8, at k = 2t and k = 2t + 8: their
// bits where spread_codes() puts them, and moved to where there is room.
__device__ __forceinline__ uint32_t fragment_word(uint32_t upper,
                                                  uint32_t upper_8,
                                                  uint32_t lower,
                                                  uint32_t lower_8) {
  const uint32_t codes = upper >> 8 | lower;
  const uint32_t others = upper_8 >> 8 | lower_8;
  return codes | ((others << 3) & 0x70707070U) | ((others >> 7) & 0x01010101U);
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

template <bool kWholeBlocks>
__device__ void take_maximum(const QuantizeWeights& args, int64_t expert, int64_t piece) {
  const int64_t elements = args.rows * (args.gated ? 2 : 1) * args.cols;
  const uint16_t* source = args.source + expert * elements + piece * kPiece;
  const auto count = static_cast<int>(min(int64_t{kPiece}, elements - piece * kPiece));
  uint32_t amax = 0;  // of both halves
  if (kWholeBlocks) {
#pragma unroll 16
    for (int i = 0; i < kPiece / (8 * kThreads); ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at >= count / 8) continue;
      const uint4 v = reinterpret_cast<const uint4*>(source)[at];
      amax = __vmaxu2(amax, amax_of_halves(Values<4>{v.x, v.y, v.z, v.w}));
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
      amax = max(amax, static_cast<uint32_t>(source[i] & 0x7FFF));
  }
  amax = __reduce_max_sync(0xFFFFFFFFU, larger_half(amax));
  if (threadIdx.x % 32 == 0) atomicMax(args.amax + expert, amax);
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(args.progress + 1 + expert, 1);
}

// A warp makes the fragments of 16 rows: lane 4g + t quantizes rows g and g + 8 of block t of each span.
template <bool kWholeBlocks>
__device__ void make_fragments(const QuantizeWeights& args,
                               const Schedule& schedule,
                               int64_t expert,
                               int64_t tile) {
  const OuterScale outer = matrix_scale(static_cast<uint16_t>(__ldcg(args.amax + expert)));
  if (tile == 0 && threadIdx.x == 0) {
    args.alpha[expert] = outer.stored;
    if (args.gate_alpha != nullptr) args.gate_alpha[expert] = outer.stored;
  }
  __shared__ float encodes[128];  // of all scales
  if (threadIdx.x < 128) {
    encodes[threadIdx.x] = block_encode(e4m3_to_half(static_cast<uint8_t>(threadIdx.x)), outer);
  }
  __syncthreads();
  const int64_t first_row = tile / schedule.tiles_per_row * kRows;
  const int64_t first_col = tile % schedule.tiles_per_row * kCols;
  const uint16_t* source = args.source + expert * args.rows * (args.gated ? 2 : 1) * args.cols;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const int64_t slab_row = first_row + fragments::kSlabRows * (static_cast<int>(threadIdx.x) / 32) +
                           static_cast<int>(threadIdx.x) % 32 / 4;
  const int64_t rows[2] = {source_row(args, slab_row), source_row(args, slab_row + 8)};
  const int64_t bytes = fragments::matrix_bytes(args.fragment_rows, args.fragment_cols);
#pragma unroll
  for (int span = 0; span < kSpans; ++span) {
    const int64_t col = first_col + fragments::kSpan * span;
    if (col >= args.fragment_cols) return;
    Block spread[2];
    uint32_t scales = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Block x = {};
      if (rows[i] >= 0 && !outer.poisoned) {
        x = load_block<kWholeBlocks>(args, source + rows[i] * args.cols, col + 16 * t);
      }
      const uint8_t code = block_scale_code(larger_half(amax_of_halves(x)), outer);
      scales |= uint32_t{code} << (8 * i);
      spread[i] = spread_codes(quantize_values(x, encodes[code]));
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = fragment_word(
          spread[0].pairs[i], spread[0].pairs[i + 4], spread[1].pairs[i], spread[1].pairs[i + 4]);
    }
    transpose4x4(words, t);
    uint8_t* record = args.fragments + expert * bytes +
                      fragments::record_offset(first_row, col, args.fragment_cols);
    __stcs(reinterpret_cast<uint4*>(record) + threadIdx.x,
           uint4{words[0], words[1], words[2], words[3]});
    reinterpret_cast<uint16_t*>(record + fragments::kScalesAt)[threadIdx.x] =
        static_cast<uint16_t>(scales);
  }
}

template <bool kWholeBlocks>
__global__ void __launch_bounds__(kThreads, 5)
    quantize_weights_kernel(const QuantizeWeights args, const Schedule schedule) {
  __shared__ int64_t order;
  if (threadIdx.x == 0) order = static_cast<int64_t>(ptx::add_release(args.progress, 1));
  __syncthreads();
  const int64_t steps = schedule.pieces + schedule.tiles;
  const int64_t step = order / steps;
  const int64_t piece = order % steps;
  if (piece < schedule.pieces) {
    if (step < args.experts) take_maximum<kWholeBlocks>(args, step, piece);
    return;
  }
  const int64_t expert = step - schedule.lag;
  if (expert < 0) return;
  if (threadIdx.x == 0) {
    const auto all = static_cast<uint64_t>(schedule.pieces);
    while (ptx::load_acquire(args.progress + 1 + expert) < all)
      __nanosleep(64);
  }
  __syncthreads();
  const int64_t tile = piece - schedule.pieces;
  make_fragments<kWholeBlocks>(
      args, schedule, expert, schedule.lag > 0 ? tile : schedule.tiles - 1 - tile);
}

Schedule schedule_of(const QuantizeWeights& args) {
  constexpr int64_t kBlocksInFlight = 640;
  constexpr int64_t kCacheBytes = 30'000'000;  // a part of the L2 cache
  Schedule schedule;
  schedule.tiles_per_row = (args.fragment_cols + kCols - 1) / kCols;
  schedule.tiles = args.fragment_rows / kRows * schedule.tiles_per_row;
  const int64_t elements = args.rows * (args.gated ? 2 : 1) * args.cols;
  schedule.pieces = (elements + kPiece - 1) / kPiece;
  const int64_t that_fit = kCacheBytes / (2 * elements) - 1;
  const int64_t without_waiting = kBlocksInFlight / (schedule.pieces + schedule.tiles) + 1;
  schedule.lag = std::clamp<int64_t>(std::min(that_fit, without_waiting), 0, args.experts - 1);
  return schedule;
}

}  // namespace

cudaError_t configure_quantize_weights() {
  const cudaError_t error = load(quantize_weights_kernel<false>);
  return error != cudaSuccess ? error : load(quantize_weights_kernel<true>);
}

cudaError_t quantize_weights(const QuantizeWeights& args, cudaStream_t stream) {
  const auto experts = static_cast<size_t>(args.experts);
  cudaError_t error = cudaMemsetAsync(args.amax, 0, experts * sizeof(*args.amax), stream);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(args.progress, 0, (1 + experts) * sizeof(*args.progress), stream);
  if (error != cudaSuccess) return error;
  const Schedule schedule = schedule_of(args);
  const int64_t blocks = (args.experts + schedule.lag) * (schedule.pieces + schedule.tiles);
  const bool whole_blocks =
      reinterpret_cast<uintptr_t>(args.source) % 16 == 0 && args.cols % 16 == 0;
  return launch(whole_blocks ? quantize_weights_kernel<true> : quantize_weights_kernel<false>,
                static_cast<unsigned>(blocks),
                kThreads,
                0,
                LaunchOptions{.stream = stream},
                args,
                schedule);
}

}  // namespace hexpert::cuda

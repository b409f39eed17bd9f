// Rows of BF16 values, wherever they come from, to NVFP4 with one scale a row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/quantize.cuh"

namespace hexpert::cuda {

// Of a block in which `kWarps` warps take a row.
template <int kWarps>
inline constexpr int kQuantizeThreads = 32 * (kWarps < 3 ? 4 : kWarps);

// What a thread handles at a time: half a block, 16 bytes, so that a warp reads and writes
// consecutive addresses. Neighbouring threads share a block.
using HalfBlock = Values<4>;
inline constexpr int kHalfBlock = 8;
inline constexpr int kKept = 4;  // half blocks a thread keeps in registers between its two passes

// Where the quantized rows go; null members are skipped, codes and block scales only beside an operand.
struct QuantizedRows {
  int64_t cols = 0;                 // multiple of 16
  uint8_t* codes = nullptr;         // [rows, cols / 2]
  uint8_t* block_scales = nullptr;  // [rows, cols / 16]
  float* token_scale = nullptr;     // [rows]
  uint16_t* operand = nullptr;      // [rows, cols] fp16, or as many rows as there are copies
  int num_copies = 0;               // of a row
  float* copy_scale = nullptr;      // the token scale of each row of `operand`
};

__device__ __forceinline__ uint4 bits_of(const HalfBlock& x) {
  return {x.pairs[0], x.pairs[1], x.pairs[2], x.pairs[3]};
}

// `kWarps` warps quantize one row; a block may have several such groups, all of which call this
// together. A thread has half blocks `thread`, `thread` + 32 kWarps, ... of the row: load_kept() gives
// the first kKept, zeros past the end of the row, and load(i) half block i of the rest. `row` < 0 takes
// part in the barrier only. With kOperand the operand is made, and codes and block scales where they
// are not null; without it these two alone. The row may be overwritten in place: its maximum is taken
// before anything is stored, and a thread stores only where it alone reads. In between
// copies_of_row() is called; it gives the rows of `operand` to fill, where not negative:
// [num_copies], or null for the row itself.
template <int kWarps, bool kOperand, typename LoadKept, typename Load, typename Copies>
__device__ __forceinline__ void quantize_row(int64_t row,
                                             const QuantizedRows& out,
                                             LoadKept&& load_kept,
                                             Load&& load,
                                             Copies&& copies_of_row) {
  constexpr int kThreads = 32 * kWarps;
  __shared__ uint32_t warp_amax[kQuantizeThreads<kWarps> / 32];
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int halves = row < 0 ? 0 : static_cast<int>(out.cols / kHalfBlock);
  // Half block i of this thread; the loops below have the same trips in all lanes of a warp.
  const auto half_at = [&](int i) { return thread + i * kThreads; };
  const auto in_warp = [&](int i) { return half_at(i) - lane < halves; };

  HalfBlock kept[kKept];
  uint32_t own_amax[kKept];
  uint32_t amax = 0;
  load_kept(kept);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    own_amax[i] = amax_of_halves(kept[i]);
    amax = __vmaxu2(amax, own_amax[i]);
  }
  for (int i = kKept; half_at(i) < halves; ++i)
    amax = __vmaxu2(amax, amax_of_halves(load(half_at(i))));

  amax = __reduce_max_sync(0xFFFFFFFFU, larger_half(amax));
  if constexpr (kWarps > 1) {
    if (lane == 0) warp_amax[warp] = amax;
    __syncthreads();
    const int first = warp / kWarps * kWarps;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      amax = max(amax, warp_amax[first + w]);
  }

  const OuterScale outer = token_scale(static_cast<uint16_t>(amax));
  const int32_t* copies = copies_of_row();
  if (row < 0) return;
  if (thread == 0 && out.token_scale != nullptr) out.token_scale[row] = outer.stored;
  const int num_copies = copies == nullptr ? 0 : out.num_copies;
  for (int i = thread; out.copy_scale != nullptr && i < num_copies; i += kThreads) {
    if (copies[i] >= 0) out.copy_scale[copies[i]] = outer.stored;
  }

  // Half blocks i and i + 1 to operands; stores codes and scales. Two neighbouring lanes hold two blocks
  // between them: each makes the scale of one.
  const bool odd = lane % 2 != 0;
  const bool with_codes = !kOperand || out.codes != nullptr;
  const int64_t first_half = row * halves + thread;
  uint32_t* codes = reinterpret_cast<uint32_t*>(out.codes) + first_half;
  uint8_t* block_scales = out.block_scales + first_half / 2 + (odd ? kThreads / 2 : 0);
  const auto quantize_two =
      [&](int i, HalfBlock& x, HalfBlock& y, uint32_t x_amax, uint32_t y_amax) {
        const uint32_t given = __shfl_xor_sync(0xFFFFFFFFU, odd ? x_amax : y_amax, 1);
        const uint32_t both = __vmaxu2(odd ? y_amax : x_amax, given);
        const BlockScale scale = block_scale(larger_half(both), outer);
        if (with_codes && half_at(odd ? i + 1 : i) < halves) {
          block_scales[i * (kThreads / 2)] = scale.code;
        }
        const float other = __shfl_xor_sync(0xFFFFFFFFU, scale.encode, 1);
        x = quantize_values(x, odd ? other : scale.encode);
        if (in_warp(i + 1)) y = quantize_values(y, odd ? scale.encode : other);
        if (with_codes) {
          if (half_at(i) < halves) codes[i * kThreads] = pack_codes(x);
          if (half_at(i + 1) < halves) codes[(i + 1) * kThreads] = pack_codes(y);
        }
        if constexpr (kOperand) {
          const __half other_value = __shfl_xor_sync(0xFFFFFFFFU, scale.value, 1);
          x = times(x, odd ? other_value : scale.value);
          y = times(y, odd ? scale.value : other_value);
        }
      };
  if (outer.poisoned) {
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      kept[i] = {};
  }
#pragma unroll
  for (int i = 0; i < kKept; i += 2) {
    if (in_warp(i)) quantize_two(i, kept[i], kept[i + 1], own_amax[i], own_amax[i + 1]);
  }
  const auto for_each_copy = [&](auto&& store) {
    if constexpr (!kOperand) return;
    const auto store_to = [&](int64_t to_row) {
      store(reinterpret_cast<uint4*>(out.operand + to_row * out.cols) + thread);
    };
    if (copies == nullptr) return store_to(row);
    for (int first = 0; first < num_copies; first += 32) {
      const int count = min(32, num_copies - first);
      const int32_t own = lane < count ? copies[first + lane] : -1;
      for (int i = 0; i < count; ++i) {
        const int32_t to_row = __shfl_sync(0xFFFFFFFFU, own, i);
        if (to_row >= 0) store_to(int64_t{to_row});
      }
    }
  };
  for_each_copy([&](uint4* to) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (half_at(i) < halves) to[i * kThreads] = bits_of(kept[i]);
    }
  });
  for (int i = kKept; in_warp(i); i += 2) {
    HalfBlock two[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (half_at(i + j) < halves && !outer.poisoned) two[j] = load(half_at(i + j));
    }
    quantize_two(i, two[0], two[1], amax_of_halves(two[0]), amax_of_halves(two[1]));
    for_each_copy([&](uint4* to) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (half_at(i + j) < halves) to[(i + j) * kThreads] = bits_of(two[j]);
      }
    });
  }
}

// The same where load(i) gives all half blocks.
template <int kWarps, bool kOperand, typename Load, typename Copies>
__device__ __forceinline__ void quantize_row(int64_t row,
                                             const QuantizedRows& out,
                                             Load&& load,
                                             Copies&& copies_of_row) {
  const auto load_kept = [&](HalfBlock(&kept)[kKept]) {
    constexpr int kThreads = 32 * kWarps;
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    const int halves = row < 0 ? 0 : static_cast<int>(out.cols / kHalfBlock);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      kept[i] = {};
      if (thread + i * kThreads < halves) kept[i] = load(thread + i * kThreads);
    }
  };
  quantize_row<kWarps, kOperand>(row, out, load_kept, load, copies_of_row);
}

template <int kWarps>
inline constexpr int kRowsOfBlock = kQuantizeThreads<kWarps> / (32 * kWarps);

template <int kWarps>
__device__ __forceinline__ int64_t row_of_thread(int64_t block) {
  return block * kRowsOfBlock<kWarps> + threadIdx.x / (32 * kWarps);
}
template <int kWarps>
unsigned blocks_for_rows(int64_t rows) {
  return static_cast<unsigned>((rows + kRowsOfBlock<kWarps> - 1) / kRowsOfBlock<kWarps>);
}

// Calls run(kWarps as a constant) with the number of warps that take a row of `cols` elements: as many
// half blocks a thread as it keeps in registers, or more in the longest rows.
template <typename Run>
cudaError_t with_warps_per_row(int64_t cols, Run&& run) {
  constexpr int64_t kOfWarp = 32 * kKept * kHalfBlock;
  if (cols <= 1 * kOfWarp) return run(std::integral_constant<int, 1>{});
  if (cols <= 2 * kOfWarp) return run(std::integral_constant<int, 2>{});
  if (cols <= 3 * kOfWarp) return run(std::integral_constant<int, 3>{});
  if (cols <= 4 * kOfWarp) return run(std::integral_constant<int, 4>{});
  return run(std::integral_constant<int, 8>{});
}
// And for each of those numbers, to the first error.
template <typename Run>
cudaError_t for_each_warps_per_row(Run&& run) {
  cudaError_t error = cudaSuccess;
  for (int64_t warps : {1, 2, 3, 4, 8}) {
    if (error == cudaSuccess) error = with_warps_per_row(warps * 32 * kKept * kHalfBlock, run);
  }
  return error;
}

}  // namespace hexpert::cuda

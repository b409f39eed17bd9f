// Rows of BF16 values, wherever they come from, to NVFP4 with one scale a row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/quantize.cuh"

namespace hexpert::cuda {

inline constexpr int kQuantizeThreads = 128;

// What a thread handles at a time: half a block, 16 bytes, so that a warp reads and writes
// consecutive addresses. Neighbouring threads share a block.
using HalfBlock = Values<4>;
inline constexpr int kHalfBlock = 8;

// Where the quantized rows go; null members are skipped.
struct QuantizedRows {
  int64_t cols = 0;                 // multiple of 16
  uint8_t* codes = nullptr;         // [rows, cols / 2]
  uint8_t* block_scales = nullptr;  // [rows, cols / 16]
  float* token_scale = nullptr;     // [rows]
  uint16_t* operand = nullptr;      // [rows, cols] fp16, or as many rows as there are copies
  int num_copies = 0;               // of a row
  float* copy_scale = nullptr;      // the token scale of each row of `operand`
};

__device__ __forceinline__ void store_half(uint16_t* row, int half, const HalfBlock& x) {
  reinterpret_cast<uint4*>(row)[half] = {x.pairs[0], x.pairs[1], x.pairs[2], x.pairs[3]};
}

// `kWarps` warps quantize one row; a block of kQuantizeThreads has several such groups, all of which
// call this together. load(i) gives half block i; `row` < 0 takes part in the barrier only.
// The row may be overwritten in place: its maximum is taken before anything is stored, and a thread
// stores only where it alone reads. In between copies_of_row() is called; it gives the rows of
// `operand` to fill, where not negative: [num_copies], or null for the row itself.
template <int kWarps, typename Load, typename Copies>
__device__ __forceinline__ void quantize_row(int64_t row,
                                             const QuantizedRows& out,
                                             Load&& load,
                                             Copies&& copies_of_row) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kKept = 4;  // half blocks a thread keeps in registers between the two passes
  __shared__ uint32_t warp_amax[kQuantizeThreads / 32];
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int halves = row < 0 ? 0 : static_cast<int>(out.cols / kHalfBlock);
  // Half block i of this thread; the loops below have the same trips in all lanes of a warp.
  const auto half_at = [&](int i) { return thread + i * kThreads; };
  const auto in_warp = [&](int i) { return half_at(i) - lane < halves; };

  HalfBlock kept[kKept];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = {};
    if (half_at(i) < halves) kept[i] = load(half_at(i));
    amax = __vmaxu2(amax, amax_of_halves(kept[i]));
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

  // Stores codes and scale; gives the operand.
  const int64_t first_half = row * halves;
  uint32_t* codes = reinterpret_cast<uint32_t*>(out.codes) + first_half;
  uint8_t* block_scales = out.block_scales + first_half / 2;
  const auto quantize = [&](int half, HalfBlock x) {
    if (outer.poisoned) x = {};
    const uint32_t own = amax_of_halves(x);
    const uint32_t both = __vmaxu2(own, __shfl_xor_sync(0xFFFFFFFFU, own, 1));
    const BlockScale scale = block_scale(larger_half(both), outer);
    const HalfBlock q = quantize_values(x, scale.encode);
    if (out.codes != nullptr && half < halves) codes[half] = pack_codes(q);
    if (out.block_scales != nullptr && half < halves && half % 2 == 0) {
      block_scales[half / 2] = scale.code;
    }
    return times(q, scale.value);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (in_warp(i)) kept[i] = quantize(half_at(i), kept[i]);
  }
  const auto store_kept = [&](int64_t to_row) {
    uint16_t* to = out.operand + to_row * out.cols;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (half_at(i) < halves) store_half(to, half_at(i), kept[i]);
    }
  };
  const auto for_each_copy = [&](auto&& store) {
    if (out.operand == nullptr) return;
    if (copies == nullptr) return store(row);
    for (int first = 0; first < num_copies; first += 32) {
      const int count = min(32, num_copies - first);
      const int32_t own = lane < count ? copies[first + lane] : -1;
      for (int i = 0; i < count; ++i) {
        const int32_t to_row = __shfl_sync(0xFFFFFFFFU, own, i);
        if (to_row >= 0) store(int64_t{to_row});
      }
    }
  };
  for_each_copy(store_kept);
  for (int i = kKept; in_warp(i); ++i) {
    const int half = half_at(i);
    HalfBlock x = {};
    if (half < halves) x = load(half);
    const HalfBlock operand = quantize(half, x);
    for_each_copy([&](int64_t to_row) {
      if (half < halves) store_half(out.operand + to_row * out.cols, half, operand);
    });
  }
}

// Of `kWarps` warps a row in blocks of kQuantizeThreads.
template <int kWarps>
__device__ __forceinline__ int64_t row_of_thread(int64_t block) {
  return block * (kQuantizeThreads / (32 * kWarps)) + threadIdx.x / (32 * kWarps);
}
template <int kWarps>
unsigned blocks_for_rows(int64_t rows) {
  constexpr int64_t kRows = kQuantizeThreads / (32 * kWarps);
  return static_cast<unsigned>((rows + kRows - 1) / kRows);
}

// Calls run(kWarps as a constant) with the number of warps that take a row of `cols` elements: few
// half blocks a thread, and few idle threads.
template <typename Run>
cudaError_t with_warps_per_row(int64_t cols, Run&& run) {
  if (cols <= 16 * 64) return run(std::integral_constant<int, 1>{});
  if (cols <= 16 * 128) return run(std::integral_constant<int, 2>{});
  return run(std::integral_constant<int, 4>{});
}
// And for each of those numbers, to the first error.
template <typename Run>
cudaError_t for_each_warps_per_row(Run&& run) {
  cudaError_t error = run(std::integral_constant<int, 1>{});
  if (error == cudaSuccess) error = run(std::integral_constant<int, 2>{});
  if (error == cudaSuccess) error = run(std::integral_constant<int, 4>{});
  return error;
}

}  // namespace hexpert::cuda

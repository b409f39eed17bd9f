// Rows of BF16 values, wherever they come from, to NVFP4 with one scale a row.
#pragma once

#include <cstdint>

#include "cuda/quantize.cuh"

namespace hexpert::cuda {

inline constexpr int kQuantizeThreads = 128;

// Where the quantized rows go; null members are skipped.
struct QuantizedRows {
  int64_t cols = 0;                 // multiple of 16
  uint8_t* codes = nullptr;         // [rows, cols / 2]
  uint8_t* block_scales = nullptr;  // [rows, cols / 16]
  float* token_scale = nullptr;     // [rows]
  uint16_t* operand = nullptr;      // [rows, cols] fp16
  // Instead of its own row of `operand`, a row fills these, where not negative: [rows, num_copies].
  const int32_t* copies = nullptr;
  int num_copies = 0;
  float* copy_scale = nullptr;  // the token scale of each row of `operand`
};

__device__ __forceinline__ void store_block(const QuantizedRows& out,
                                            int64_t row,
                                            int block,
                                            const QuantizedBlock& q) {
  const int64_t at = row * (out.cols / 16) + block;
  if (out.codes != nullptr) {
    *reinterpret_cast<uint2*>(out.codes + 8 * at) = {q.low_codes, q.high_codes};
  }
  if (out.block_scales != nullptr) out.block_scales[at] = q.scale;
  if (out.operand == nullptr) return;
  const uint4 low = expand_codes(q.low_codes, q.scale);
  const uint4 high = expand_codes(q.high_codes, q.scale);
  const auto store = [&](int64_t to_row) {
    auto* to = reinterpret_cast<uint4*>(out.operand + to_row * out.cols + 16 * block);
    to[0] = low;
    to[1] = high;
  };
  if (out.copies == nullptr) {
    store(row);
  } else {
#pragma unroll 4
    for (int i = 0; i < out.num_copies; ++i) {
      const int32_t to_row = out.copies[row * out.num_copies + i];
      if (to_row >= 0) store(to_row);
    }
  }
}

// `kWarps` warps quantize one row; a block of kQuantizeThreads has several such groups, all of which
// call this together. load(block) gives 16 values; `row` < 0 takes part in the barrier only.
// The row may be overwritten in place: all of it is read before anything is stored, and before_store()
// is called in between.
template <int kWarps, typename Load, typename BeforeStore>
__device__ __forceinline__ void quantize_row(int64_t row,
                                             const QuantizedRows& out,
                                             Load&& load,
                                             BeforeStore&& before_store) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kKept = 4;  // blocks a thread keeps in registers between the two passes
  __shared__ uint32_t warp_amax[kQuantizeThreads / 32];
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int blocks = row < 0 ? 0 : static_cast<int>(out.cols / 16);

  Block kept[kKept];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int block = thread + i * kThreads;
    if (block < blocks) {
      kept[i] = load(block);
      amax = max(amax, amax_bits(kept[i]));
    }
  }
  for (int block = thread + kKept * kThreads; block < blocks; block += kThreads)
    amax = max(amax, amax_bits(load(block)));

  amax = __reduce_max_sync(0xFFFFFFFFU, amax);
  if constexpr (kWarps > 1) {
    if (threadIdx.x % 32 == 0) warp_amax[warp] = amax;
    __syncthreads();
    const int first = warp / kWarps * kWarps;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      amax = max(amax, warp_amax[first + w]);
  }

  const OuterScale outer = token_scale(static_cast<uint16_t>(amax));
  before_store();
  if (row >= 0 && thread == 0 && out.token_scale != nullptr) out.token_scale[row] = outer.stored;
  if (row >= 0 && out.copy_scale != nullptr) {
    for (int i = thread; i < out.num_copies; i += kThreads) {
      const int32_t to_row = out.copies[row * out.num_copies + i];
      if (to_row >= 0) out.copy_scale[to_row] = outer.stored;
    }
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int block = thread + i * kThreads;
    if (block < blocks) store_block(out, row, block, quantize_block(kept[i], outer));
  }
  for (int block = thread + kKept * kThreads; block < blocks; block += kThreads)
    store_block(out, row, block, quantize_block(load(block), outer));
}

// Warps a row of `cols` elements: few blocks a thread, and few idle threads.
inline int warps_per_row(int64_t cols) {
  return cols <= 16 * 64 ? 1 : cols <= 16 * 128 ? 2 : 4;
}

}  // namespace hexpert::cuda

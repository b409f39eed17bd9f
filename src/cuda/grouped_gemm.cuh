// The grouped GEMM kernel. Instantiated by grouped_gemm_<max width>.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/activation.cuh"
#include "cuda/gemm.hpp"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"
#include "format/layout.hpp"

namespace hexpert::cuda::gemm {

namespace fragments = layout::sm90_fragments;

constexpr int kConsumerThreads = 256;  // two warpgroups, 64 weight rows each
constexpr int kProducerThreads = 128;
constexpr int kThreads = kConsumerThreads + kProducerThreads;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kSharedBytes = 227 * 1024;
constexpr int kRecordBytes = static_cast<int>(fragments::kRecordBytes);
constexpr int kSpan = static_cast<int>(fragments::kSpan);
// The operands are E2M1 * 2^-14 * E4M3; this takes the power of two back.
constexpr float kUnscale = 16384.0F;

// Tile widths (tokens) that are compiled, up to the widest of a kernel.
constexpr int kTileWidths[] = {8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256};

template <int kMaxWidth>
struct Shape {
  static constexpr int kSpans = kMaxWidth <= 64 ? 4 : 2;  // 64-k records of a stage
  static constexpr int kXBytes = kMaxWidth * 128;         // tokens of one span
  static constexpr int kStageBytes = kSpans * (kXBytes + kRecordBytes);
  static constexpr int kRowBytes = 2 * kMaxWidth * (4 + 4);
  static constexpr int kBarrierBytes = 512;
  static constexpr int kAlignment = 1024;
  static constexpr int kStages =
      (kSharedBytes - kAlignment - kRowBytes - kBarrierBytes) / kStageBytes;
  static_assert(kStageBytes % kAlignment == 0 && kStages >= 3);
  static_assert((2 * kStages + 4) * 8 <= kBarrierBytes);
};

// Shared memory, carved up.
template <int kMaxWidth>
struct Shared {
  using S = Shape<kMaxWidth>;
  uint8_t* stages;         // [kStages][x of each span, then the records]
  float* row_scale;        // [2][kMaxWidth], alternating with the tiles
  uint32_t* row_chunks;    // [2][kMaxWidth] where a row of x starts, in 16 bytes; producer only
  uint64_t* full;          // [kStages]
  uint64_t* empty;         // [kStages]
  uint64_t* scales_full;   // [2]
  uint64_t* scales_empty;  // [2]

  __device__ explicit Shared(uint8_t* raw) {
    const auto address = reinterpret_cast<uintptr_t>(raw);
    stages = raw + ((S::kAlignment - address % S::kAlignment) % S::kAlignment);
    row_scale = reinterpret_cast<float*>(stages + S::kStages * S::kStageBytes);
    row_chunks = reinterpret_cast<uint32_t*>(row_scale + 2 * kMaxWidth);
    full = reinterpret_cast<uint64_t*>(row_chunks + 2 * kMaxWidth);
    empty = full + S::kStages;
    scales_full = empty + S::kStages;
    scales_empty = scales_full + 2;
  }
  __device__ uint8_t* x(int stage, int span) const {
    return stages + stage * S::kStageBytes + span * S::kXBytes;
  }
  __device__ uint8_t* record(int stage, int span) const {
    return stages + stage * S::kStageBytes + S::kSpans * S::kXBytes + span * kRecordBytes;
  }
};

// Position in a ring of buffers, with the parity of its round.
template <int kCount>
struct Ring {
  int index = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

// A unit of work: a row tile times 128 weight rows over a part of K.
struct Item {
  RowTile tile;
  int row_block;  // of 128 weight rows
  int split;
  int first_span;
  int end_span;
};

// Row tiles outermost: blocks that run together read few experts.
template <int kSpans>
__device__ __forceinline__ Item item_at(const GroupedGemm& args, int index) {
  const int row_blocks = static_cast<int>(args.fragment_rows / fragments::kTileRows);
  const int per_tile = row_blocks * args.splits;
  const int rest = index % per_tile;
  Item item;
  item.tile = args.routes.tiles[index / per_tile];
  item.row_block = rest / args.splits;
  item.split = rest % args.splits;
  const int spans = static_cast<int>(args.k) / kSpan;
  const int stages = (spans + kSpans - 1) / kSpans;
  const int per_split = (stages + args.splits - 1) / args.splits * kSpans;
  item.first_span = item.split * per_split;
  item.end_span = min(spans, item.first_span + per_split);
  return item;
}

const __device__ __forceinline__ uint8_t* records_of(const GroupedGemm& args, const Item& item) {
  return args.weights + item.tile.expert * args.expert_bytes +
         (int64_t{item.row_block} * (args.k / kSpan) + item.first_span) * kRecordBytes;
}

__device__ __forceinline__ int num_items(const GroupedGemm& args) {
  return *args.routes.num_tiles * static_cast<int>(args.fragment_rows / fragments::kTileRows) *
         args.splits;
}

// --- producer ---

// Looks up the rows of a tile, one thread a row.
template <int kMaxWidth>
__device__ __forceinline__ void find_rows(const GroupedGemm& args,
                                          const RowTile& tile,
                                          int thread,
                                          uint32_t* row_chunks,
                                          float* row_scale) {
  for (int i = thread; i < tile.rows; i += kProducerThreads) {
    int row = tile.first_row + i;
    if (args.permuted_to_expanded != nullptr) {
      row = args.permuted_to_expanded[row] / args.top_k;
    }
    row_chunks[i] = static_cast<uint32_t>(row) * static_cast<uint32_t>(args.k / 8);
    if (args.row_scale != nullptr) row_scale[i] = args.row_scale[row];
  }
}

template <int kMaxWidth>
__device__ __forceinline__ void produce(const GroupedGemm& args, const Shared<kMaxWidth>& shared) {
  using S = Shape<kMaxWidth>;
  constexpr int kRowsAtOnce = kProducerThreads / 8;  // a thread copies one 16-byte chunk of a row
  constexpr int kMaxRows = (kMaxWidth + kRowsAtOnce - 1) / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0);  // the swizzle is the same for all rows of a thread
  const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
  const int first_row = thread / 8;
  const uint32_t swizzled = ptx::swizzled(first_row, thread % 8);
  const uint4* x = reinterpret_cast<const uint4*>(args.x) + thread % 8;

  Ring<S::kStages> stage;
  Ring<2> tile;
  const int items = num_items(args);
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const Item item = item_at<S::kSpans>(args, index);
    ptx::mbarrier_wait(shared.scales_empty + tile.index, tile.parity ^ 1);
    uint32_t* row_chunks = shared.row_chunks + tile.index * kMaxWidth;
    find_rows<kMaxWidth>(
        args, item.tile, thread, row_chunks, shared.row_scale + tile.index * kMaxWidth);
    ptx::mbarrier_arrive(shared.scales_full + tile.index);
    ptx::barrier<1, kProducerThreads>();
    tile.advance();

    const uint8_t* records = records_of(args, item);
    for (int span = item.first_span; span < item.end_span; span += S::kSpans) {
      const int spans = min(S::kSpans, item.end_span - span);
      ptx::mbarrier_wait(shared.empty + stage.index, stage.parity ^ 1);
      if (thread == 0) {
        ptx::mbarrier_arrive_expect(shared.full + stage.index, spans * kRecordBytes);
        ptx::bulk_copy(shared.record(stage.index, 0),
                       records,
                       spans * kRecordBytes,
                       shared.full + stage.index);
        records += spans * kRecordBytes;
      }
      // Rows past the tile are not copied: what lies there only reaches columns that nobody reads.
#pragma unroll
      for (int i = 0; i < kMaxRows; ++i) {
        const int row = first_row + i * kRowsAtOnce;
        if (row >= item.tile.rows) break;
        const uint4* from = x + row_chunks[row] + int64_t{span} * (kSpan / 8);
        const uint32_t to =
            ptx::shared_address(shared.x(stage.index, 0)) + swizzled + i * kRowsAtOnce * 128;
#pragma unroll
        for (int s = 0; s < S::kSpans; ++s) {
          if (s < spans) ptx::copy16(to + s * S::kXBytes, from + s * (kSpan / 8));
        }
      }
      ptx::arrive_after_copies(shared.full + stage.index);
      stage.advance();
    }
  }
}

// --- consumers ---

// What a thread needs of 16 rows x 64 k: four words of codes, eight scales.
struct Packed {
  uint4 words;
  uint2 scales;
};

__device__ __forceinline__ Packed load_packed(const uint8_t* record, int slab, int lane) {
  return {
      *reinterpret_cast<const uint4*>(record + (slab * 32 + lane) * 16),
      *reinterpret_cast<const uint2*>(record + fragments::kScalesAt + slab * 64 + lane / 4 * 8)};
}

// 8 codes and the scales of their two rows -> the four registers of a wgmma operand.
__device__ __forceinline__ void expand(uint32_t word, uint32_t scale_pair, uint32_t (&a)[4]) {
  const __half2 scales(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(scale_pair), __NV_E4M3));
  const __half2 upper = __low2half2(scales);
  const __half2 lower = __high2half2(scales);
  const auto times = [](uint32_t codes, __half2 scale) {
    const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&codes), scale);
    return *reinterpret_cast<const uint32_t*>(&product);
  };
  a[0] = times(word & 0x8E008E00U, upper);
  a[1] = times((word << 3) & 0x8E008E00U, lower);
  a[2] = times(ptx::and_or(word << 1, 0x80008000U, (word << 6) & 0x0E000E00U), upper);
  a[3] = times(ptx::and_or(word << 2, 0x80008000U, (word << 9) & 0x0E000E00U), lower);
}

__device__ __forceinline__ void expand(const Packed& packed, uint32_t (&a)[4][4]) {
  expand(packed.words.x, packed.scales.x & 0xFFFFU, a[0]);
  expand(packed.words.y, packed.scales.x >> 16, a[1]);
  expand(packed.words.z, packed.scales.y & 0xFFFFU, a[2]);
  expand(packed.words.w, packed.scales.y >> 16, a[3]);
}

template <int kWidth>
__device__ __forceinline__ void multiply(float (&sums)[kWidth / 2],
                                         const uint32_t (&a)[4][4],
                                         const uint8_t* x) {
  const uint64_t b = ptx::operand_descriptor(ptx::shared_address(x));
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; ++kk)
    Wgmma<kWidth>::multiply(sums, a[kk], b + 2 * kk);
  ptx::wgmma_commit();
}

// Sums over the spans of an item.
template <int kWidth, int kMaxWidth>
__device__ __forceinline__ void accumulate(const Shared<kMaxWidth>& shared,
                                           const Item& item,
                                           Ring<Shape<kMaxWidth>::kStages>& stage,
                                           float (&sums)[kWidth / 2]) {
  using S = Shape<kMaxWidth>;
  const int thread = ptx::thread_index();
  const int slab = thread / 32;
  const int lane = thread % 32;
  // Operands of the span being multiplied and of the one being expanded. The kernel with the widest
  // tiles has registers for one only: there one warpgroup expands while the other multiplies.
  constexpr int kOperands = kMaxWidth > 128 ? 1 : 2;
  uint32_t a[kOperands][4][4];
  int previous = -1;
  const auto release = [&](int index) {
    if (index >= 0 && lane == 0) ptx::mbarrier_arrive(shared.empty + index);
  };
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i)
    sums[i] = 0;

  int span = item.first_span;
  for (; span + S::kSpans <= item.end_span; span += S::kSpans) {
    ptx::mbarrier_wait(shared.full + stage.index, stage.parity);
    ptx::fence_async_proxy();
    Packed packed[S::kSpans];
#pragma unroll
    for (int s = 0; s < S::kSpans; ++s)
      packed[s] = load_packed(shared.record(stage.index, s), slab, lane);
#pragma unroll
    for (int s = 0; s < S::kSpans; ++s) {
      expand(packed[s], a[s % kOperands]);
      multiply<kWidth>(sums, a[s % kOperands], shared.x(stage.index, s));
      ptx::wgmma_wait<kOperands - 1>();
      if (s == 0) release(previous);
    }
    previous = stage.index;
    stage.advance();
  }
  if (span < item.end_span) {  // a stage that is not full
    ptx::mbarrier_wait(shared.full + stage.index, stage.parity);
    ptx::fence_async_proxy();
    ptx::wgmma_wait<0>();
    release(previous);
    for (int s = 0; span + s < item.end_span; ++s) {
      expand(load_packed(shared.record(stage.index, s), slab, lane), a[0]);
      multiply<kWidth>(sums, a[0], shared.x(stage.index, s));
      ptx::wgmma_wait<0>();
    }
    previous = stage.index;
    stage.advance();
  }
  ptx::wgmma_wait<0>();
  release(previous);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Scales, activates and stores the sums of a tile. A warp has 16 weight rows and all tokens.
template <Epilogue kEpilogue, int kWidth>
__device__ __forceinline__ void store(const GroupedGemm& args,
                                      const Item& item,
                                      const float* row_scale,
                                      float (&sums)[kWidth / 2]) {
  const int thread = ptx::thread_index();
  const int slab = thread / 32;
  const int lane = thread % 32;
  const int64_t first_fragment = int64_t{item.row_block} * fragments::kTileRows + 16 * slab;

  if constexpr (kEpilogue == Epilogue::kPartial) {
    float* out = static_cast<float*>(args.out) +
                 (item.split * args.max_routes + item.tile.first_row) * args.fragment_rows +
                 first_fragment + lane / 4;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * j + lane % 4 * 2 + i;
        if (token < item.tile.rows) {
          out[token * args.fragment_rows] = __fmul_rn(sums[4 * j + i], kUnscale);
          out[token * args.fragment_rows + 8] = __fmul_rn(sums[4 * j + 2 + i], kUnscale);
        }
      }
    }
  } else {
    constexpr bool kGated = kEpilogue == Epilogue::kSwiGlu;
    const int64_t first_feature = kGated ? first_fragment / 2 : first_fragment;
    if (first_feature >= args.out_cols) return;
    const float up_alpha = args.up_alpha[item.tile.expert];
    const float gate_alpha = kGated ? args.gate_alpha[item.tile.expert] : 0;
    // After the transposition a thread has token 8 j + lane / 4 and neighbouring features.
    uint16_t* out = static_cast<uint16_t*>(args.out) +
                    int64_t{item.tile.first_row + lane / 4} * args.out_cols + first_feature +
                    lane % 4 * (kGated ? 2 : 4);
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j, out += 8 * args.out_cols) {
      const float2 t = *reinterpret_cast<const float2*>(row_scale + 8 * j + lane % 4 * 2);
      float upper[2];
      float lower[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = __fmul_rn(up_alpha, i == 0 ? t.x : t.y);
        upper[i] = __fmul_rn(__fmul_rn(sums[4 * j + i], kUnscale), scale);
        lower[i] = __fmul_rn(sums[4 * j + 2 + i], kUnscale);
        if constexpr (kGated) {
          lower[i] = __fmul_rn(lower[i], __fmul_rn(gate_alpha, i == 0 ? t.x : t.y));
          upper[i] = swiglu(lower[i], upper[i]);
        } else {
          lower[i] = __fmul_rn(lower[i], scale);
          if constexpr (kEpilogue == Epilogue::kSquaredRelu) {
            upper[i] = squared_relu(upper[i]);
            lower[i] = squared_relu(lower[i]);
          }
        }
      }
      const uint32_t first = ptx::transpose8x8(pack_bf16(upper[0], upper[1]));
      const bool valid = 8 * j + lane / 4 < item.tile.rows;
      if constexpr (kGated) {
        if (valid) *reinterpret_cast<uint32_t*>(out) = first;
      } else {
        const uint32_t second = ptx::transpose8x8(pack_bf16(lower[0], lower[1]));
        if (valid) *reinterpret_cast<uint2*>(out) = {first, second};
      }
    }
  }
}

// Of the compiled widths from index kAt on, the first that the tile fits. Comparisons one by one: an
// indirect branch would keep the assembler from overlapping wgmma with other work.
template <Epilogue kEpilogue, int kMaxWidth, int kAt = 0>
__device__ __forceinline__ void run_tile_of_width(const GroupedGemm& args,
                                                  const Shared<kMaxWidth>& shared,
                                                  const Item& item,
                                                  Ring<Shape<kMaxWidth>::kStages>& stage,
                                                  const float* row_scale,
                                                  uint64_t* scales_full,
                                                  uint32_t parity) {
  constexpr int kWidth = kTileWidths[kAt];
  if constexpr (kWidth < kMaxWidth) {
    if (item.tile.rows > kWidth) {
      return run_tile_of_width<kEpilogue, kMaxWidth, kAt + 1>(
          args, shared, item, stage, row_scale, scales_full, parity);
    }
  }
  float sums[kWidth / 2];
  accumulate<kWidth, kMaxWidth>(shared, item, stage, sums);
  ptx::mbarrier_wait(scales_full, parity);
  store<kEpilogue, kWidth>(args, item, row_scale, sums);
}

template <Epilogue kEpilogue, int kMaxWidth>
__device__ __forceinline__ void consume(const GroupedGemm& args, const Shared<kMaxWidth>& shared) {
  using S = Shape<kMaxWidth>;
  Ring<S::kStages> stage;
  Ring<2> tile;
  const int items = num_items(args);
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const Item item = item_at<S::kSpans>(args, index);
    const float* row_scale = shared.row_scale + tile.index * kMaxWidth;
    uint64_t* scales_full = shared.scales_full + tile.index;
    run_tile_of_width<kEpilogue, kMaxWidth>(
        args, shared, item, stage, row_scale, scales_full, tile.parity);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.scales_empty + tile.index);
    tile.advance();
  }
}

// Brings the weights of this block's first items into the L2 cache while the predecessor runs.
template <int kMaxWidth>
__device__ __forceinline__ void prefetch_first_items(const GroupedGemm& args) {
  using S = Shape<kMaxWidth>;
  int budget = S::kStages * S::kSpans * kRecordBytes;
  const int items = num_items(args);
  for (int index = static_cast<int>(blockIdx.x); index < items && budget > 0;
       index += static_cast<int>(gridDim.x)) {
    const Item item = item_at<S::kSpans>(args, index);
    const int bytes = min(budget, (item.end_span - item.first_span) * kRecordBytes);
    ptx::prefetch_to_l2(records_of(args, item), bytes);
    budget -= bytes;
  }
}

template <Epilogue kEpilogue, int kMaxWidth>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_kernel(const GroupedGemm args) {
  using S = Shape<kMaxWidth>;
  extern __shared__ uint8_t raw[];
  const Shared<kMaxWidth> shared(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      // Of the weights one arrival, of the tokens one of every producer thread.
      ptx::mbarrier_init(shared.full + i, 1 + kProducerThreads);
      ptx::mbarrier_init(shared.empty + i, kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.scales_full + i, kProducerThreads);
      ptx::mbarrier_init(shared.scales_empty + i, kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::allow_successor();
  if (args.prefetch_weights && threadIdx.x == kConsumerThreads) {
    prefetch_first_items<kMaxWidth>(args);
  }
  ptx::wait_for_predecessor();
  if (threadIdx.x >= kConsumerThreads) {
    ptx::give_registers<24>();
    produce<kMaxWidth>(args, shared);
  } else {
    ptx::take_registers<240>();
    consume<kEpilogue, kMaxWidth>(args, shared);
  }
}

// --- host ---

template <int kMaxWidth>
auto* kernel_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kSquaredRelu:
      return grouped_gemm_kernel<Epilogue::kSquaredRelu, kMaxWidth>;
    case Epilogue::kSwiGlu:
      return grouped_gemm_kernel<Epilogue::kSwiGlu, kMaxWidth>;
    case Epilogue::kScale:
      return grouped_gemm_kernel<Epilogue::kScale, kMaxWidth>;
    case Epilogue::kPartial:
      break;
  }
  return grouped_gemm_kernel<Epilogue::kPartial, kMaxWidth>;
}

template <int kMaxWidth>
GemmVariant variant() {
  GemmVariant v;
  v.max_width = kMaxWidth;
  v.stage_k = Shape<kMaxWidth>::kSpans * kSpan;
  v.configure = [] {
    for (Epilogue epilogue :
         {Epilogue::kSquaredRelu, Epilogue::kSwiGlu, Epilogue::kScale, Epilogue::kPartial}) {
      const cudaError_t error = cudaFuncSetAttribute(kernel_of<kMaxWidth>(epilogue),
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     kSharedBytes);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
  v.launch =
      [](const GroupedGemm& args, Epilogue epilogue, int num_blocks, const LaunchOptions& options) {
        return launch(kernel_of<kMaxWidth>(epilogue),
                      static_cast<unsigned>(num_blocks),
                      kThreads,
                      kSharedBytes,
                      options,
                      args);
      };
  return v;
}

}  // namespace hexpert::cuda::gemm

// The grouped GEMM kernel. Instantiated by grouped_gemm_<max width>.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>
#include <utility>

#include "cuda/activation.cuh"
#include "cuda/expand.cuh"
#include "cuda/gemm_items.cuh"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"

namespace hexpert::cuda::gemm {

// --- producers ---

const __device__ __forceinline__ uint8_t* records_of(const GroupedGemm& args,
                                                     const Item& item,
                                                     int row_block) {
  return args.weights + item.tile.expert * args.expert_bytes +
         (int64_t{item.row_block + row_block} * (args.k / kSpan) + item.first_span) * kRecordBytes;
}

// Of the compiled widths, the first that `rows` fit in, and its index.
template <int kMaxWidth>
__device__ __forceinline__ int2 width_of(int rows) {
  int2 found = {tile_width<kMaxWidth>(0), 0};
#pragma unroll
  for (int i = 1; i < num_widths<kMaxWidth>(); ++i)
    if (rows > tile_width<kMaxWidth>(i - 1)) found = {tile_width<kMaxWidth>(i), i};
  return found;
}

// Brings the weights of this block's first items into the L2 cache while the predecessor runs.
template <int kMaxWidth>
__device__ __forceinline__ void prefetch_first_items(const GroupedGemm& args) {
  using S = Shape<kMaxWidth>;
  const Items<kMaxWidth> items(args);
  int budget = S::kStages * S::kSpans;  // spans of an item's rows
  int index = static_cast<int>(blockIdx.x);
  for (int i = 0; i < 2 && items.has(index) && budget > 0; ++i) {
    const Item item = items.item(index, items.tile(index));
    const int spans = min(budget, item.end_span - item.first_span);
    for (int row_block = 0; row_block < item.row_blocks; ++row_block)
      ptx::prefetch_to_l2(records_of(args, item, row_block), spans * kRecordBytes);
    budget -= spans;
    index += static_cast<int>(gridDim.x);
  }
}

// Weights and tokens of an item, by one thread.
template <int kMaxWidth>
__device__ __forceinline__ void copy_operands(const GroupedGemm& args,
                                              const Shared<kMaxWidth>& shared,
                                              const Item& item,
                                              Ring<Shape<kMaxWidth>::kStages>& stage) {
  using S = Shape<kMaxWidth>;
  constexpr int kHalf = S::kSpans / 2;
  const uint8_t* records[S::kRowBlocks];
#pragma unroll
  for (int i = 0; i < S::kRowBlocks; ++i)
    records[i] = records_of(args, item, i);
  // A tile is as wide as its box: the last rows may be other experts', zeros or memory that
  // nobody wrote, and only reach columns nobody reads. So may the last spans, which nobody multiplies.
  const auto [width, index] = width_of<kMaxWidth>(item.tile.rows);
  const int half_bytes = kHalf * width * kXRowBytes;
  for (int span = item.first_span; span < item.end_span; span += S::kSpans) {
    const int record_bytes = min(S::kSpans, item.end_span - span) * kRecordBytes;
    uint64_t* full = shared.full + stage.index;
    ptx::mbarrier_wait(shared.empty + stage.index, stage.parity ^ 1);
    ptx::mbarrier_arrive_expect(full, item.row_blocks * record_bytes + 2 * half_bytes);
#pragma unroll
    for (int i = 0; i < S::kRowBlocks; ++i) {
      if (i < item.row_blocks) {
        ptx::bulk_copy(shared.record(stage.index, i, 0), records[i], record_bytes, full);
      }
      records[i] += record_bytes;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* to = shared.x(stage.index, 0, width) + half * half_bytes;
      const int first_span = span + half * kHalf;
      if (!item.same_tokens) {
        ptx::tensor_copy(to, &args.x.of_width[index], 0, item.tile.first_row, first_span, full);
      } else if (half == static_cast<int>(blockIdx.x % 2)) {
        ptx::tensor_copy_to_both(
            to, &args.x.of_width[index], 0, item.tile.first_row, first_span, full);
      }
    }
    stage.advance();
  }
}

// What the consumers need of an item beside its operands, by a warp that does not wait for it.
template <int kMaxWidth>
__device__ __forceinline__ void announce(const GroupedGemm& args,
                                         const Shared<kMaxWidth>& shared,
                                         const Item& item,
                                         int slot,
                                         int lane) {
  const RowTile& tile = item.tile;
  ConsumerItem* to = shared.items + slot;
  for (int i = lane; args.row_scale != nullptr && i < tile.rows; i += 32)
    ptx::async_copy4(shared.row_scale + slot * kMaxWidth + i, args.row_scale + tile.first_row + i);
  if (lane == 0) {
    to->rows = tile.rows;
    to->stored_rows = item.surplus ? 0 : tile.rows;
    to->first_row = tile.first_row;
    to->row_block = item.row_block;
    to->row_blocks = item.row_blocks;
    to->split = item.split;
    to->first_span = item.first_span;
    to->end_span = item.end_span;
    if (args.up_alpha != nullptr) ptx::async_copy4(&to->up_alpha, args.up_alpha + tile.expert);
    if (args.gate_alpha != nullptr) {
      ptx::async_copy4(&to->gate_alpha, args.gate_alpha + tile.expert);
    }
    ptx::mbarrier_arrive(shared.item_full + slot);
  }
  ptx::mbarrier_arrive_after_copies(shared.item_full + slot);
}

// A warp fetches all items, as far ahead of the consumers as the rings go.
template <int kMaxWidth>
__device__ __forceinline__ void produce(const GroupedGemm& args,
                                        const Shared<kMaxWidth>& shared,
                                        int lane) {
  using S = Shape<kMaxWidth>;
  Ring<S::kStages> stage;
  Ring<S::kItems> slot;
  const Items<kMaxWidth> items(args);
  Turns<kMaxWidth> turns(args, shared);
  int next = turns.next();
  for (RowTile tile = items.tile(next); items.has(next);) {
    const Item item = items.item(next, tile);
    next = turns.next();
    tile = items.tile(next);
    ptx::mbarrier_wait(shared.item_empty + slot.index, slot.parity ^ 1);
    announce(args, shared, item, slot.index, lane);
    if (lane == 0) copy_operands(args, shared, item, stage);
    __syncwarp();
    slot.advance();
  }
  ptx::mbarrier_wait(shared.item_empty + slot.index, slot.parity ^ 1);
  if (lane == 0) shared.items[slot.index].rows = 0;
  __syncwarp();
  ptx::mbarrier_arrive(shared.item_full + slot.index);
  if (lane == 0) ptx::mbarrier_arrive(shared.item_full + slot.index);
}

// --- consumers ---

__device__ __forceinline__ Packed load_packed(const uint8_t* record, int slab, int lane) {
  return cuda::load_packed(
      record + slab * kSlabCodes, record + fragments::kScalesAt + slab * kSlabScales, lane);
}

template <int kWidth, int kFirst, int kSteps>
__device__ __forceinline__ void multiply(float (&sums)[kWidth / 2],
                                         const uint32_t (&a)[kSteps][4],
                                         uint64_t x) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    Wgmma<kWidth>::multiply(sums, a[i], x + ptx::operand_offset(16 * 2 * (kFirst + i)));
  ptx::wgmma_commit();
}

// Gives a stage back to those who fill it.
template <int kMaxWidth>
__device__ __forceinline__ void release(const Shared<kMaxWidth>& shared,
                                        int cluster_blocks,
                                        int stage) {
  const int lane = ptx::thread_index() % 32;
  if constexpr (Shape<kMaxWidth>::kClusterBlocks == 1) {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty + stage);
  } else if (lane < cluster_blocks) {
    ptx::mbarrier_arrive_at(shared.empty + stage, lane);
  }
}

// Sums over the spans of an item.
template <int kWidth, int kMaxWidth>
__device__ __forceinline__ void accumulate(const Shared<kMaxWidth>& shared,
                                           int cluster_blocks,
                                           const ConsumerItem& item,
                                           Ring<Shape<kMaxWidth>::kStages>& stage,
                                           float (&sums)[kWidth / 2]) {
  using S = Shape<kMaxWidth>;
  constexpr int kSteps = S::kSteps;
  const int thread = ptx::thread_index();
  const int row_block = thread / 256;
  const int slab = thread / 32 % 8;
  const int lane = thread % 32;
  uint32_t a[2][kSteps][4];
  int previous = -1;
  const auto release_previous = [&] {
    if (previous >= 0) release(shared, cluster_blocks, previous);
  };
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i)
    sums[i] = 0;

  // Expands and multiplies a span, some steps at a time, while those before them are multiplied.
  const auto add_span = [&](const Packed& packed, uint64_t x, auto odd, bool first) {
    const auto add_part = [&](auto part) {
      constexpr int kFirst = part() * kSteps;
      uint32_t(&operand)[kSteps][4] = a[kSteps == 4 ? odd() : part() % 2];
      expand<kFirst>(packed, operand);
      multiply<kWidth, kFirst>(sums, operand, x);
      ptx::wgmma_wait<1>();
      if (kFirst == 0 && first) release_previous();
    };
    [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
      (add_part(std::integral_constant<int, kPart>()), ...);
    }
    (std::make_integer_sequence<int, 4 / kSteps>());
  };
  constexpr std::integral_constant<int, 0> kEven;
  constexpr std::integral_constant<int, 1> kOdd;

  int spans = item.end_span - item.first_span;
  for (; spans >= S::kSpans; spans -= S::kSpans) {
    ptx::mbarrier_wait(shared.full + stage.index, stage.parity);
    Packed packed[S::kSpans];
    const uint64_t x = ptx::operand_descriptor(shared.x(stage.index, 0, kWidth));
    const auto add = [&](int s, auto odd) {
      if (s % S::kLoads == 0) {
#pragma unroll
        for (int i = s; i < s + S::kLoads; ++i)
          packed[i] = load_packed(shared.record(stage.index, row_block, i), slab, lane);
      }
      add_span(packed[s], x + ptx::operand_offset(s * kWidth * kXRowBytes), odd, s == 0);
    };
#pragma unroll
    for (int s = 0; s < S::kSpans; s += 2) {
      add(s, kEven);
      add(s + 1, kOdd);
    }
    previous = stage.index;
    stage.advance();
  }
  if (spans > 0) {  // a stage that is not full
    ptx::mbarrier_wait(shared.full + stage.index, stage.parity);
    uint64_t x = ptx::operand_descriptor(shared.x(stage.index, 0, kWidth));
    for (int s = 0; s < spans; ++s) {
      if constexpr (kSteps == 4) ptx::wgmma_wait<0>();  // a[0] may be in use
      add_span(load_packed(shared.record(stage.index, row_block, s), slab, lane), x, kEven, s == 0);
      x += ptx::operand_offset(kWidth * kXRowBytes);
    }
    previous = stage.index;
    stage.advance();
  }
  ptx::wgmma_wait<0>();
  release_previous();
}

// For warps whose rows the matrix does not have.
template <int kMaxWidth>
__device__ __forceinline__ void skip(const Shared<kMaxWidth>& shared,
                                     int cluster_blocks,
                                     const ConsumerItem& item,
                                     Ring<Shape<kMaxWidth>::kStages>& stage) {
  for (int span = item.first_span; span < item.end_span; span += Shape<kMaxWidth>::kSpans) {
    ptx::mbarrier_wait(shared.full + stage.index, stage.parity);
    release(shared, cluster_blocks, stage.index);
    stage.advance();
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Scales, activates and stores the sums of a tile. A warp has 16 weight rows and all tokens.
template <Epilogue kEpilogue, int kWidth>
__device__ __forceinline__ void store(const GroupedGemm& args,
                                      const ConsumerItem& item,
                                      const float* row_scale,
                                      float (&sums)[kWidth / 2]) {
  const int thread = ptx::thread_index();
  const int slab = thread / 32;  // of all rows of the item
  const int lane = thread % 32;
  const int64_t first_fragment = int64_t{item.row_block} * fragments::kTileRows + 16 * slab;

  if constexpr (kEpilogue == Epilogue::kPartial) {
    float* out = static_cast<float*>(args.out) +
                 (item.split * args.max_routes + item.first_row) * args.fragment_rows +
                 first_fragment + lane / 4;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * j + lane % 4 * 2 + i;
        if (token < item.stored_rows) {
          out[token * args.fragment_rows] = __fmul_rn(sums[4 * j + i], kUnscale);
          out[token * args.fragment_rows + 8] = __fmul_rn(sums[4 * j + 2 + i], kUnscale);
        }
      }
    }
  } else {
    constexpr bool kGated = kEpilogue == Epilogue::kSwiGlu;
    const int64_t first_feature = kGated ? first_fragment / 2 : first_fragment;
    if (first_feature >= args.out_cols) return;
    // After the transposition a thread has token 8 j + lane / 4 and neighbouring features.
    uint16_t* out = static_cast<uint16_t*>(args.out) +
                    int64_t{item.first_row + lane / 4} * args.out_cols + first_feature +
                    lane % 4 * (kGated ? 2 : 4);
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j, out += 8 * args.out_cols) {
      const float2 t = *reinterpret_cast<const float2*>(row_scale + 8 * j + lane % 4 * 2);
      float upper[2];
      float lower[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = __fmul_rn(item.up_alpha, i == 0 ? t.x : t.y);
        upper[i] = __fmul_rn(__fmul_rn(sums[4 * j + i], kUnscale), scale);
        lower[i] = __fmul_rn(sums[4 * j + 2 + i], kUnscale);
        if constexpr (kGated) {
          lower[i] = __fmul_rn(lower[i], __fmul_rn(item.gate_alpha, i == 0 ? t.x : t.y));
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
      const bool valid = 8 * j + lane / 4 < item.stored_rows;
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
__device__ __forceinline__ void run_item(const GroupedGemm& args,
                                         const Shared<kMaxWidth>& shared,
                                         int cluster_blocks,
                                         const ConsumerItem& item,
                                         const float* row_scale,
                                         Ring<Shape<kMaxWidth>::kStages>& stage) {
  constexpr int kWidth = tile_width<kMaxWidth>(kAt);
  if constexpr (kWidth < kMaxWidth) {
    if (item.rows > kWidth) {
      return run_item<kEpilogue, kMaxWidth, kAt + 1>(
          args, shared, cluster_blocks, item, row_scale, stage);
    }
  }
  float sums[kWidth / 2];
  accumulate<kWidth, kMaxWidth>(shared, cluster_blocks, item, stage, sums);
  store<kEpilogue, kWidth>(args, item, row_scale, sums);
}

template <Epilogue kEpilogue, int kMaxWidth>
__device__ __forceinline__ void consume(const GroupedGemm& args,
                                        const Shared<kMaxWidth>& shared,
                                        int cluster_blocks) {
  using S = Shape<kMaxWidth>;
  const int row_block = ptx::warp_index() / 8;
  Ring<S::kStages> stage;
  Ring<S::kItems> slot;
  for (;; slot.advance()) {
    ptx::mbarrier_wait(shared.item_full + slot.index, slot.parity);
    const ConsumerItem& item = shared.items[slot.index];
    if (item.rows == 0) break;
    if (S::kRowBlocks > 1 && row_block >= item.row_blocks) {
      skip(shared, cluster_blocks, item, stage);
    } else {
      run_item<kEpilogue, kMaxWidth>(
          args, shared, cluster_blocks, item, shared.row_scale + slot.index * kMaxWidth, stage);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.item_empty + slot.index);
  }
}

template <Epilogue kEpilogue, int kMaxWidth>
__global__ void __launch_bounds__(Shape<kMaxWidth>::kThreads, Shape<kMaxWidth>::kBlocks)
    grouped_gemm_kernel(const __grid_constant__ GroupedGemm args) {
  using S = Shape<kMaxWidth>;
  extern __shared__ uint8_t raw[];
  const Shared<kMaxWidth> shared(raw);
  if (args.one_of_two && *args.routes.max_width != kMaxWidth) {
    ptx::allow_successor();
    ptx::wait_for_predecessor();  // whose results the successor may want
    return;
  }
  const int cluster_blocks = S::kClusterBlocks == 1 ? 1 : ptx::cluster_blocks();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::mbarrier_init(shared.full + i, 1);
      ptx::mbarrier_init(shared.empty + i, S::kConsumerWarps * cluster_blocks);
    }
    for (int i = 0; i < S::kItems; ++i) {
      ptx::mbarrier_init(shared.item_full + i, 33);
      ptx::mbarrier_init(shared.item_empty + i, S::kConsumerWarps);
    }
    for (int i = 0; i < S::kTold; ++i)
      ptx::mbarrier_init(shared.told_full + i, 1);
    ptx::fence_mbarrier_init();
  }
  if (cluster_blocks > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  ptx::allow_successor();
  if (threadIdx.x == S::kConsumerThreads) prefetch_first_items<kMaxWidth>(args);
  ptx::wait_for_predecessor();
  if (ptx::warp_index() >= S::kConsumerWarps) {
    if constexpr (S::kMovesRegisters) ptx::give_registers<S::kProducerRegisters>();
    if (ptx::warp_index() == S::kConsumerWarps) {
      produce(args, shared, static_cast<int>(threadIdx.x) % 32);
    }
  } else {
    if constexpr (S::kMovesRegisters) ptx::take_registers<S::kConsumerRegisters>();
    consume<kEpilogue>(args, shared, cluster_blocks);
  }
  // The other block may still have copies or arrivals under way to here.
  if (cluster_blocks > 1) ptx::cluster_sync();
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
  static_assert(num_widths<kMaxWidth>() <= kMaxWidths);
  v.item_rows = Shape<kMaxWidth>::kRowBlocks * fragments::kTileRows;
  v.num_widths = num_widths<kMaxWidth>();
  for (int i = 0; i < v.num_widths; ++i)
    v.widths[i] = tile_width<kMaxWidth>(i);
  v.configure = [] {
    for (Epilogue epilogue :
         {Epilogue::kSquaredRelu, Epilogue::kSwiGlu, Epilogue::kScale, Epilogue::kPartial}) {
      const cudaError_t error =
          configure(kernel_of<kMaxWidth>(epilogue), Shape<kMaxWidth>::kBlockBytes);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
  v.launch = [](const GroupedGemm& args,
                Epilogue epilogue,
                int multiprocessors,
                const LaunchOptions& options) {
    using S = Shape<kMaxWidth>;
    LaunchOptions clustered = options;
    clustered.cluster_blocks = args.splits == 1 ? S::kClusterBlocks : 1;
    const int blocks = multiprocessors * S::kBlocks;
    return launch(kernel_of<kMaxWidth>(epilogue),
                  static_cast<unsigned>(blocks - blocks % S::kClusterBlocks),
                  S::kThreads,
                  S::kBlockBytes,
                  clustered,
                  args);
  };
  return v;
}

}  // namespace hexpert::cuda::gemm

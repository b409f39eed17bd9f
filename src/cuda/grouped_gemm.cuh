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
constexpr int kProducerThreads = 128;  // one thread copies, one warp announces the items
constexpr int kThreads = kConsumerThreads + kProducerThreads;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kSharedBytes = 227 * 1024;  // of all blocks of a multiprocessor
constexpr int kReservedBytes = 1024;      // of each block, by the system
constexpr int kRecordBytes = static_cast<int>(fragments::kRecordBytes);
constexpr int kSpan = static_cast<int>(fragments::kSpan);
// The operands are E2M1 * 2^-14 * E4M3; this takes the power of two back.
constexpr float kUnscale = 16384.0F;

// Tile widths (tokens) that are compiled, up to the widest of a kernel. With more than eight branches
// the assembler gives up overlapping wgmma with other work (it says so: C7512).
template <int kMaxWidth>
inline constexpr int kTileWidths[6] = {8, 16, 24, 32, 48, 64};
template <>
inline constexpr int kTileWidths<128>[6] = {16, 32, 48, 64, 96, 128};
template <>
inline constexpr int kTileWidths<256>[8] = {32, 64, 96, 128, 160, 192, 224, 256};

template <int kMaxWidth>
struct Shape {
  static constexpr int kSpans = kMaxWidth <= 64 ? 4 : 2;  // 64-k records of a stage
  static constexpr int kXBytes = kMaxWidth * 128;         // tokens of one span
  // Narrow tiles leave registers for two blocks: one works while the other begins or ends a tile.
  static constexpr int kBlocks = kMaxWidth <= 16 ? 2 : 1;  // of a multiprocessor
  // Of a thread. Launched with 80 or 168, and what the consumers take must be there to take: a warp
  // waits forever for registers that the block does not have.
  static constexpr int kLaunchRegisters = kBlocks == 2 ? 80 : 168;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = kBlocks == 2 ? 96 : 232;
  static_assert(kConsumerThreads * kConsumerRegisters + kProducerThreads * kProducerRegisters <=
                kThreads * kLaunchRegisters);
  static constexpr int kBlockBytes =
      kBlocks == 2 ? kSharedBytes / 2 - kReservedBytes : kSharedBytes;
  static constexpr int kStageBytes = kSpans * (kXBytes + kRecordBytes);
  static constexpr int kBoxRows = kMaxWidth <= 16 ? 8 : kMaxWidth <= 32 ? 16 : 32;
  // Steps of 16 k that are expanded while those before them are multiplied. Wide tiles have no
  // registers for more than two.
  static constexpr int kSteps = kMaxWidth <= 128 ? 4 : 2;
  static constexpr int kItems = kMaxWidth <= 128 ? 4 : 2;  // that the producers are ahead
  static constexpr int kItemBytes = kItems * (kMaxWidth * 4 + 32);
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;
  static constexpr int kStages =
      (kBlockBytes - kAlignment - kItemBytes - kBarrierBytes) / kStageBytes;
  static_assert(kStageBytes % kAlignment == 0 && kStages >= 3);
  static_assert((2 * kStages + 2 * kItems) * 8 <= kBarrierBytes);
};

// A unit of work: a row tile times 128 weight rows over a part of K.
struct Item {
  RowTile tile;
  int row_block;  // of 128 weight rows
  int split;
  int first_span;
  int end_span;
};

// What the consumers need of an item, in shared memory.
struct alignas(16) ConsumerItem {
  int rows;
  int first_row;
  int row_block;
  int split;
  int first_span;
  int end_span;
  float up_alpha;
  float gate_alpha;
};
static_assert(sizeof(ConsumerItem) == 32);

// Shared memory, carved up.
template <int kMaxWidth>
struct Shared {
  using S = Shape<kMaxWidth>;
  uint8_t* stages;       // [kStages][x of each span, then the records]
  ConsumerItem* items;   // [kItems]
  float* row_scale;      // [kItems][kMaxWidth]
  uint64_t* full;        // [kStages]
  uint64_t* empty;       // [kStages]
  uint64_t* item_full;   // [kItems]
  uint64_t* item_empty;  // [kItems]

  __device__ explicit Shared(uint8_t* raw) {
    const auto address = reinterpret_cast<uintptr_t>(raw);
    stages = raw + ((S::kAlignment - address % S::kAlignment) % S::kAlignment);
    items = reinterpret_cast<ConsumerItem*>(stages + S::kStages * S::kStageBytes);
    row_scale = reinterpret_cast<float*>(items + S::kItems);
    full = reinterpret_cast<uint64_t*>(row_scale + S::kItems * kMaxWidth);
    empty = full + S::kStages;
    item_full = empty + S::kStages;
    item_empty = item_full + S::kItems;
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

// The items of this block, one after the other. Row tiles are outermost, so that blocks that run
// together read few experts. The tile of the next item is fetched early.
template <int kSpans>
class ItemLoop {
 public:
  __device__ explicit ItemLoop(const GroupedGemm& args)
      : args_(args),
        per_tile_(static_cast<int>(args.fragment_rows / fragments::kTileRows) * args.splits),
        items_(*args.routes.num_tiles * per_tile_),
        index_(static_cast<int>(blockIdx.x)) {
    fetch();
  }
  __device__ bool done() const { return index_ >= items_; }
  __device__ void advance() { index_ += static_cast<int>(gridDim.x); }
  // Of the present item, once.
  __device__ Item take() {
    const int spans = static_cast<int>(args_.k) / kSpan;
    const int stages = (spans + kSpans - 1) / kSpans;
    const int per_split = (stages + args_.splits - 1) / args_.splits * kSpans;
    const int rest = index_ % per_tile_;
    Item item;
    item.tile = next_;
    item.row_block = rest / args_.splits;
    item.split = rest % args_.splits;
    item.first_span = item.split * per_split;
    item.end_span = min(spans, item.first_span + per_split);
    advance();
    fetch();
    return item;
  }

 private:
  __device__ void fetch() {
    if (!done()) next_ = args_.routes.tiles[index_ / per_tile_];
  }

  const GroupedGemm& args_;
  int per_tile_;
  int items_;
  int index_;  // of next_
  RowTile next_ = {};
};

// --- producers ---

const __device__ __forceinline__ uint8_t* records_of(const GroupedGemm& args, const Item& item) {
  return args.weights + item.tile.expert * args.expert_bytes +
         (int64_t{item.row_block} * (args.k / kSpan) + item.first_span) * kRecordBytes;
}

// One thread copies weights and tokens of all items.
template <int kMaxWidth>
__device__ __forceinline__ void copy_stages(const GroupedGemm& args,
                                            const Shared<kMaxWidth>& shared) {
  using S = Shape<kMaxWidth>;
  constexpr int kBoxBytes = S::kBoxRows * 128;
  Ring<S::kStages> stage;
  for (ItemLoop<S::kSpans> loop(args); !loop.done();) {
    const Item item = loop.take();
    const uint8_t* records = records_of(args, item);
    // The last box may hold rows of other experts, or zeros: they only reach columns nobody reads.
    const int boxes = (item.tile.rows + S::kBoxRows - 1) / S::kBoxRows;
    for (int span = item.first_span; span < item.end_span; span += S::kSpans) {
      const int spans = min(S::kSpans, item.end_span - span);
      uint64_t* full = shared.full + stage.index;
      ptx::mbarrier_wait(shared.empty + stage.index, stage.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, spans * (kRecordBytes + boxes * kBoxBytes));
      ptx::bulk_copy(shared.record(stage.index, 0), records, spans * kRecordBytes, full);
      records += spans * kRecordBytes;
      for (int s = 0; s < spans; ++s) {
        uint8_t* x = shared.x(stage.index, s);
        for (int box = 0; box < boxes; ++box) {
          ptx::tensor_copy(x + box * kBoxBytes,
                           &args.x,
                           (span + s) * kSpan,
                           item.tile.first_row + box * S::kBoxRows,
                           full);
        }
      }
      stage.advance();
    }
  }
}

// Brings the weights of this block's first items into the L2 cache while the predecessor runs.
template <int kMaxWidth>
__device__ __forceinline__ void prefetch_first_items(const GroupedGemm& args) {
  using S = Shape<kMaxWidth>;
  int budget = S::kStages * S::kSpans * kRecordBytes;
  for (ItemLoop<S::kSpans> loop(args); !loop.done() && budget > 0;) {
    const Item item = loop.take();
    const int bytes = min(budget, (item.end_span - item.first_span) * kRecordBytes);
    ptx::prefetch_to_l2(records_of(args, item), bytes);
    budget -= bytes;
  }
}

// A warp gives the consumers what they need beside the operands.
template <int kMaxWidth>
__device__ __forceinline__ void announce_items(const GroupedGemm& args,
                                               const Shared<kMaxWidth>& shared,
                                               int lane) {
  using S = Shape<kMaxWidth>;
  Ring<S::kItems> slot;
  for (ItemLoop<S::kSpans> loop(args); !loop.done();) {
    const Item item = loop.take();
    ptx::mbarrier_wait(shared.item_empty + slot.index, slot.parity ^ 1);
    for (int i = lane; args.row_scale != nullptr && i < item.tile.rows; i += 32)
      shared.row_scale[slot.index * kMaxWidth + i] = args.row_scale[item.tile.first_row + i];
    if (lane == 0) {
      const auto alpha = [&](const float* of) {
        return of == nullptr ? 0.0F : of[item.tile.expert];
      };
      shared.items[slot.index] = {item.tile.rows,
                                  item.tile.first_row,
                                  item.row_block,
                                  item.split,
                                  item.first_span,
                                  item.end_span,
                                  alpha(args.up_alpha),
                                  alpha(args.gate_alpha)};
    }
    ptx::mbarrier_arrive(shared.item_full + slot.index);
    slot.advance();
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

// Steps kFirst .. kFirst + kSteps - 1 of the four 16-k steps of a span.
template <int kFirst, int kSteps>
__device__ __forceinline__ void expand(const Packed& packed, uint32_t (&a)[kSteps][4]) {
  const uint32_t words[4] = {packed.words.x, packed.words.y, packed.words.z, packed.words.w};
  const uint32_t scales[4] = {packed.scales.x & 0xFFFFU,
                              packed.scales.x >> 16,
                              packed.scales.y & 0xFFFFU,
                              packed.scales.y >> 16};
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    expand(words[kFirst + i], scales[kFirst + i], a[i]);
}

template <int kWidth, int kFirst, int kSteps>
__device__ __forceinline__ void multiply(float (&sums)[kWidth / 2],
                                         const uint32_t (&a)[kSteps][4],
                                         const uint8_t* x) {
  const uint64_t b = ptx::operand_descriptor(ptx::shared_address(x));
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    Wgmma<kWidth>::multiply(sums, a[i], b + 2 * (kFirst + i));
  ptx::wgmma_commit();
}

// Sums over the spans of an item.
template <int kWidth, int kMaxWidth>
__device__ __forceinline__ void accumulate(const Shared<kMaxWidth>& shared,
                                           const ConsumerItem& item,
                                           Ring<Shape<kMaxWidth>::kStages>& stage,
                                           float (&sums)[kWidth / 2]) {
  using S = Shape<kMaxWidth>;
  constexpr int kSteps = S::kSteps;
  const int thread = ptx::thread_index();
  const int slab = thread / 32;
  const int lane = thread % 32;
  uint32_t a[2][kSteps][4];
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
    Packed packed[S::kSpans];
#pragma unroll
    for (int s = 0; s < S::kSpans; ++s)
      packed[s] = load_packed(shared.record(stage.index, s), slab, lane);
#pragma unroll
    for (int s = 0; s < S::kSpans; ++s) {
      const uint8_t* x = shared.x(stage.index, s);
      if constexpr (kSteps == 4) {
        expand<0>(packed[s], a[s % 2]);
        multiply<kWidth, 0>(sums, a[s % 2], x);
        ptx::wgmma_wait<1>();
        if (s == 0) release(previous);
      } else {
        expand<0>(packed[s], a[0]);
        multiply<kWidth, 0>(sums, a[0], x);
        ptx::wgmma_wait<1>();
        if (s == 0) release(previous);
        expand<2>(packed[s], a[1]);
        multiply<kWidth, 2>(sums, a[1], x);
        ptx::wgmma_wait<1>();
      }
    }
    previous = stage.index;
    stage.advance();
  }
  if (span < item.end_span) {  // a stage that is not full
    ptx::mbarrier_wait(shared.full + stage.index, stage.parity);
    ptx::wgmma_wait<0>();
    release(previous);
    for (int s = 0; span + s < item.end_span; ++s) {
      const Packed packed = load_packed(shared.record(stage.index, s), slab, lane);
      const uint8_t* x = shared.x(stage.index, s);
      expand<0>(packed, a[0]);
      multiply<kWidth, 0>(sums, a[0], x);
      if constexpr (kSteps == 2) {
        expand<2>(packed, a[1]);
        multiply<kWidth, 2>(sums, a[1], x);
      }
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
                                      const ConsumerItem& item,
                                      const float* row_scale,
                                      float (&sums)[kWidth / 2]) {
  const int thread = ptx::thread_index();
  const int slab = thread / 32;
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
        if (token < item.rows) {
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
      const bool valid = 8 * j + lane / 4 < item.rows;
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
                                         const ConsumerItem& item,
                                         const float* row_scale,
                                         Ring<Shape<kMaxWidth>::kStages>& stage) {
  constexpr int kWidth = kTileWidths<kMaxWidth>[kAt];
  if constexpr (kWidth < kMaxWidth) {
    if (item.rows > kWidth) {
      return run_item<kEpilogue, kMaxWidth, kAt + 1>(args, shared, item, row_scale, stage);
    }
  }
  float sums[kWidth / 2];
  accumulate<kWidth, kMaxWidth>(shared, item, stage, sums);
  store<kEpilogue, kWidth>(args, item, row_scale, sums);
}

template <Epilogue kEpilogue, int kMaxWidth>
__device__ __forceinline__ void consume(const GroupedGemm& args, const Shared<kMaxWidth>& shared) {
  using S = Shape<kMaxWidth>;
  Ring<S::kStages> stage;
  Ring<S::kItems> slot;
  for (ItemLoop<S::kSpans> loop(args); !loop.done(); loop.advance()) {
    ptx::mbarrier_wait(shared.item_full + slot.index, slot.parity);
    const ConsumerItem item = shared.items[slot.index];
    run_item<kEpilogue, kMaxWidth>(
        args, shared, item, shared.row_scale + slot.index * kMaxWidth, stage);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.item_empty + slot.index);
    slot.advance();
  }
}

template <Epilogue kEpilogue, int kMaxWidth>
__global__ void __launch_bounds__(kThreads, Shape<kMaxWidth>::kBlocks)
    grouped_gemm_kernel(const __grid_constant__ GroupedGemm args) {
  using S = Shape<kMaxWidth>;
  extern __shared__ uint8_t raw[];
  const Shared<kMaxWidth> shared(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::mbarrier_init(shared.full + i, 1);
      ptx::mbarrier_init(shared.empty + i, kConsumerWarps);
    }
    for (int i = 0; i < S::kItems; ++i) {
      ptx::mbarrier_init(shared.item_full + i, 32);
      ptx::mbarrier_init(shared.item_empty + i, kConsumerWarps);
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
    ptx::give_registers<S::kProducerRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
    if (thread == 0) {
      copy_stages<kMaxWidth>(args, shared);
    } else if (thread / 32 == 1) {
      announce_items<kMaxWidth>(args, shared, thread % 32);
    }
  } else {
    ptx::take_registers<S::kConsumerRegisters>();
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
  v.box_rows = Shape<kMaxWidth>::kBoxRows;
  v.configure = [] {
    for (Epilogue epilogue :
         {Epilogue::kSquaredRelu, Epilogue::kSwiGlu, Epilogue::kScale, Epilogue::kPartial}) {
      const cudaError_t error = cudaFuncSetAttribute(kernel_of<kMaxWidth>(epilogue),
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     Shape<kMaxWidth>::kBlockBytes);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
  v.launch = [](const GroupedGemm& args,
                Epilogue epilogue,
                int multiprocessors,
                const LaunchOptions& options) {
    return launch(kernel_of<kMaxWidth>(epilogue),
                  static_cast<unsigned>(multiprocessors * Shape<kMaxWidth>::kBlocks),
                  kThreads,
                  Shape<kMaxWidth>::kBlockBytes,
                  options,
                  args);
  };
  return v;
}

}  // namespace hexpert::cuda::gemm

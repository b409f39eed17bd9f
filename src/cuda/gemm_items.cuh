// What a block of the grouped GEMM works on: tile widths and sizes of each kernel, shared memory, the items
// of a launch and who takes which.
#pragma once

#include <cstdint>

#include "cuda/gemm.hpp"
#include "cuda/ptx.cuh"
#include "format/layout.hpp"

namespace hexpert::cuda::gemm {

namespace fragments = layout::sm90_fragments;

constexpr int kSharedBytes = 227 * 1024;  // of all blocks of a multiprocessor
constexpr int kReservedBytes = 1024;      // of each block, by the system
constexpr int kRecordBytes = static_cast<int>(fragments::kRecordBytes);
constexpr int kSpan = static_cast<int>(fragments::kSpan);
constexpr int kXRowBytes = kSpan * 2;  // a token's, in a span

// Tile widths (tokens) that are compiled, ascending to the widest of a kernel. With more than eight
// branches, or four to six where registers are scarce, the assembler gives up overlapping wgmma with
// other work (it says so: C7512).
template <int kMaxWidth>
__host__ __device__ constexpr int tile_width(int index) {
  if constexpr (kMaxWidth == 112) {
    return index < 2 ? 32 * (index + 1) : index == 2 ? 80 : 112;
  } else if constexpr (kMaxWidth == 160) {
    return index == 0 ? 32 : 80 + 16 * index;
  } else {
    constexpr int kUnit = kMaxWidth <= 32 ? 8 : kMaxWidth == 64 ? 16 : 32;
    return kUnit * (index + 1);
  }
}
template <int kMaxWidth>
__host__ __device__ constexpr int num_widths() {
  int index = 0;
  while (tile_width<kMaxWidth>(index) < kMaxWidth)
    ++index;
  return index + 1;
}

// What differs from kernel to kernel.
struct Tuning {
  // Rows of weights of an item, in units of 128: each has two warpgroups of consumers. The more rows, the
  // fewer tokens are fetched and the more warps hide each other's waits; the sums of the widest tiles
  // leave registers for one.
  int row_blocks;
  // Of a multiprocessor. Narrow tiles leave registers for two: one works while the other begins or ends
  // a tile.
  int blocks;
  // Wide tiles: two blocks that multiply the same tokens fetch half of them each, for both.
  int cluster_blocks;
  int spans;  // 64-k records of a stage
  // Steps of 16 k that are expanded while those before them are multiplied. More of them wait less for
  // each other and take more registers.
  int steps;
  int loads;               // spans whose codes are loaded at once
  int items;               // that the producer is ahead
  int consumer_registers;  // where a block has a multiprocessor to itself
};

constexpr Tuning tuning(int max_width) {
  switch (max_width) {  // in the order of the members
    case 8:
      return {1, 2, 1, 4, 4, 2, 4, 0};
    case 16:
    case 32:
      return {1, 2, 1, 4, 2, 4, 4, 0};
    case 64:
      return {2, 1, 1, 4, 2, 2, 4, 104};
    case 112:
      return {2, 1, 1, 2, 1, 1, 4, 112};
    case 160:
      return {1, 1, 2, 2, 4, 2, 2, 224};
    default:  // 256
      return {1, 1, 2, 2, 2, 2, 2, 232};
  }
}

template <int kMaxWidth>
struct Shape {
  static constexpr Tuning kTuning = tuning(kMaxWidth);
  static constexpr int kRowBlocks = kTuning.row_blocks;
  static constexpr int kConsumerWarps = 8 * kRowBlocks;
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kBlocks = kTuning.blocks;
  static constexpr int kClusterBlocks = kTuning.cluster_blocks;
  // A warp fetches. Where a block has all registers, three more join it that only give theirs away:
  // the assembler wants to be told that the consumers have more than all threads could have. Three
  // warpgroups start with 168 registers a thread, five with 96.
  static constexpr bool kMovesRegisters = kBlocks == 1;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);
  static constexpr int kConsumerRegisters = kTuning.consumer_registers;
  static constexpr int kProducerRegisters =
      (kRowBlocks == 2 ? 5 * 96 : 3 * 168) - 2 * kRowBlocks * kConsumerRegisters;
  static constexpr int kSpans = kTuning.spans;
  static constexpr int kSteps = kTuning.steps;
  static constexpr int kLoads = kTuning.loads;
  static constexpr int kItems = kTuning.items;
  static constexpr int kXBytes = kMaxWidth * kXRowBytes;  // tokens of one span
  static constexpr int kStageBytes = kSpans * (kXBytes + kRowBlocks * kRecordBytes);
  static constexpr int kItemBytes = kItems * (kMaxWidth * 4 + 48);
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;
  static constexpr int kBlockBytes =
      kBlocks == 2 ? kSharedBytes / 2 - kReservedBytes : kSharedBytes;
  static constexpr int kStages =
      (kBlockBytes - kAlignment - kItemBytes - kBarrierBytes) / kStageBytes;
  static_assert(kStageBytes % kAlignment == 0 && kStages >= 3);
  // Items that the first block of a cluster has told the second. It is not further ahead than the
  // stages go, which both have to give back, and two items.
  static constexpr int kTold = kClusterBlocks == 1 ? 0 : kStages + 3;
  static_assert((2 * kStages + 2 * kItems + kTold) * 8 + kTold * 4 <= kBarrierBytes);
};

// A unit of work: a row tile times 128 or 256 weight rows over a part of K.
struct Item {
  RowTile tile;
  int row_block;   // the first, of 128 weight rows
  int row_blocks;  // fewer at the end of a matrix
  int split;       // part of K
  int first_span;
  int end_span;
  bool same_tokens;  // as the other block of the cluster
  bool surplus;      // the other block's item, to keep it company: nothing is stored
};

// What the consumers need of an item, in shared memory.
struct alignas(16) ConsumerItem {
  int rows;  // 0: there are no more items
  int stored_rows;
  int first_row;
  int row_block;
  int row_blocks;
  int split;
  int first_span;
  int end_span;
  float up_alpha;
  float gate_alpha;
};
static_assert(sizeof(ConsumerItem) == 48);

// Shared memory, carved up.
template <int kMaxWidth>
struct Shared {
  using S = Shape<kMaxWidth>;
  uint8_t* stages;       // [kStages][records, then the tokens of each span: width rows]
  ConsumerItem* items;   // [kItems]
  float* row_scale;      // [kItems][kMaxWidth]
  uint64_t* full;        // [kStages]
  uint64_t* empty;       // [kStages]
  uint64_t* item_full;   // [kItems]
  uint64_t* item_empty;  // [kItems]
  uint64_t* told_full;   // [kTold]
  int* told;             // [kTold]

  __device__ explicit Shared(uint8_t* raw) {
    const auto address = reinterpret_cast<uintptr_t>(raw);
    stages = raw + ((S::kAlignment - address % S::kAlignment) % S::kAlignment);
    items = reinterpret_cast<ConsumerItem*>(stages + S::kStages * S::kStageBytes);
    row_scale = reinterpret_cast<float*>(items + S::kItems);
    full = reinterpret_cast<uint64_t*>(row_scale + S::kItems * kMaxWidth);
    empty = full + S::kStages;
    item_full = empty + S::kStages;
    item_empty = item_full + S::kItems;
    told_full = item_empty + S::kItems;
    told = reinterpret_cast<int*>(told_full + S::kTold);
  }
  __device__ uint8_t* record(int stage, int row_block, int span) const {
    return stages + stage * S::kStageBytes + (row_block * S::kSpans + span) * kRecordBytes;
  }
  __device__ uint8_t* x(int stage, int span, int width) const {
    return record(stage, S::kRowBlocks, 0) + span * width * kXRowBytes;
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

// All items of a launch. Row tiles are outermost, so that blocks that run together read few experts;
// the blocks of a cluster have consecutive items.
template <int kMaxWidth>
class Items {
 public:
  using S = Shape<kMaxWidth>;

  __device__ explicit Items(const GroupedGemm& args)
      : args_(args),
        row_blocks_(static_cast<int>(args.fragment_rows / fragments::kTileRows)),
        per_split_((row_blocks_ + S::kRowBlocks - 1) / S::kRowBlocks),
        per_tile_(per_split_ * args.splits),
        items_(*args.routes.num_tiles * per_tile_),
        pair_(S::kClusterBlocks == 1 ? 0 : ptx::cluster_blocks() - 1) {}
  // The blocks of a cluster are done together.
  __device__ bool has(int index) const { return (index & ~pair_) < items_; }
  __device__ RowTile tile(int index) const {
    return has(index) ? args_.routes.tiles[min(index, items_ - 1) / per_tile_] : RowTile{};
  }
  __device__ Item item(int index, const RowTile& tile) const {
    const int spans = static_cast<int>(args_.k) / kSpan;
    const int stages = (spans + S::kSpans - 1) / S::kSpans;
    const int split_spans = (stages + args_.splits - 1) / args_.splits * S::kSpans;
    const int own = min(index, items_ - 1);
    const int other = min(index ^ pair_, items_ - 1);
    const int rest = own % per_tile_;
    Item item;
    item.tile = tile;
    item.row_block = rest % per_split_ * S::kRowBlocks;
    item.row_blocks = min(S::kRowBlocks, row_blocks_ - item.row_block);
    item.split = rest / per_split_;
    item.first_span = item.split * split_spans;
    item.end_span = min(spans, item.first_span + split_spans);
    item.same_tokens = pair_ == 1 && other / per_tile_ == own / per_tile_;
    item.surplus = index >= items_;
    return item;
  }

 private:
  const GroupedGemm& args_;
  int row_blocks_;
  int per_split_;  // items of a part of K of a row tile
  int per_tile_;
  int items_;
  int pair_;  // 1: in clusters of two
};

// Which items are this block's: the first two by its number, then whichever are next when it is ready,
// so that a block with short items does more of them. Results do not depend on it. It asks for one item
// more than it knows, so that the answer is there when it is wanted; in a cluster the first block asks
// and tells both. For a warp.
template <int kMaxWidth>
class Turns {
 public:
  using S = Shape<kMaxWidth>;

  __device__ Turns(const GroupedGemm& args, const Shared<kMaxWidth>& shared)
      : args_(args), shared_(shared) {
    ask();
  }
  __device__ int next() {
    const int grid = static_cast<int>(gridDim.x);
    if (!kAsks || own_ < 2 * grid) {
      const int index = own_;
      own_ += grid;
      return index;
    }
    int taken;
    if (S::kClusterBlocks == 1 || ptx::cluster_blocks() == 1) {
      taken = __shfl_sync(0xFFFFFFFFU, answer_, 0);
      ask();
    } else {
      uint64_t* full = shared_.told_full + slot_.index;
      int* told = shared_.told + slot_.index;
      if (asks()) {
        for (int rank = 0; rank < S::kClusterBlocks; ++rank)
          ptx::send_to(told, answer_, full, rank);
      }
      ask();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect(full, sizeof(int));
      ptx::mbarrier_wait(full, slot_.parity);
      taken = *told + ptx::cluster_rank();
      slot_.advance();
    }
    return 2 * grid + taken;
  }

 private:
  static constexpr bool kAsks = kMaxWidth > 8;  // 2 % slower for the narrowest tiles, few a block

  static __device__ bool asks() {
    return threadIdx.x % 32 == 0 && (S::kClusterBlocks == 1 || ptx::cluster_rank() == 0);
  }
  __device__ void ask() {
    if (kAsks && asks()) {
      answer_ = atomicAdd(args_.items_taken, S::kClusterBlocks == 1 ? 1 : ptx::cluster_blocks());
    }
  }

  const GroupedGemm& args_;
  const Shared<kMaxWidth>& shared_;
  int own_ = static_cast<int>(blockIdx.x);
  int answer_ = 0;
  Ring<S::kTold> slot_;
};

}  // namespace hexpert::cuda::gemm

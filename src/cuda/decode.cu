#include "cuda/decode.hpp"

#include "cuda/activation.cuh"
#include "cuda/expand.cuh"
#include "cuda/gemm.hpp"
#include "cuda/launch.hpp"
#include "cuda/quantize_rows.cuh"
#include "cuda/route.cuh"
#include "format/layout.hpp"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

// A block has a warp that fetches weights and 16 that multiply. Its unit of work is 64 weight rows
// times the rows of a tile: four slabs of 16 rows, and four parts of K for each.
constexpr int kWarps = 16;
constexpr int kConsumerThreads = 32 * kWarps;
constexpr int kThreads = kConsumerThreads + 32;
constexpr int kSlabs = 4;
constexpr int kParts = kWarps / kSlabs;
constexpr int kUnitRows = kSlabs * static_cast<int>(fragments::kSlabRows);
constexpr int kUnitsPerRecord = static_cast<int>(fragments::kTileRows) / kUnitRows;
constexpr int kRecordBytes = static_cast<int>(fragments::kRecordBytes);
constexpr int kSpan = static_cast<int>(fragments::kSpan);
constexpr int kScalesAt = static_cast<int>(fragments::kScalesAt);

// A stage of weights: each warp has two spans of it.
constexpr int kSpansPerWarp = 2;
constexpr int kStageSpans = kSpansPerWarp * kParts;
constexpr int kCodes = kSlabs * kSlabCodes;    // bytes of a span
constexpr int kScales = kSlabs * kSlabScales;  // bytes of a span
constexpr int kStages = 5;

constexpr int kTileRows = 8;   // columns of an MMA
constexpr int kMaxTokens = 2;  // with more the GEMM's wide tiles are faster
constexpr int kMaxSlots = 128;
static_assert(kMaxSlots <= kConsumerThreads && kMaxTokens <= kTileRows && kTileRows <= kWarps);
// Rows of FP16, as the MMA wants them. An odd multiple of 64 bytes apart: free of bank conflicts.
constexpr int kOperandBytes = 115 * 1024;
__host__ __device__ constexpr int64_t operand_row_bytes(int64_t k) {
  return 2 * k + 64;
}
__host__ __device__ constexpr int64_t operand_rows(int64_t k) {
  return kOperandBytes / operand_row_bytes(k);
}

struct Tile {
  int expert;
  int first_route;
  int rows;
};

struct Shared {
  alignas(128) uint8_t codes[kStages][kStageSpans * kCodes];
  alignas(128) uint8_t scales[kStages][kStageSpans * kScales];
  alignas(128) uint8_t operand[kOperandBytes];
  float4 sums[2][kParts][kSlabs][32];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int num_tiles;
  Tile tiles[kMaxSlots];
  int expert_of_slot[kMaxSlots];  // -1: none here
  int route_of_slot[kMaxSlots];   // -1: none
  int slot_of_route[kMaxSlots];
  int token_of_route[kMaxSlots];
  int tile_at_route[kMaxSlots];  // rows of the tile that begins there, or 0
  float probability[kMaxSlots];
  uint32_t warp_amax[kWarps];
  float token_scale[kTileRows];  // of the rows of `operand`
};
static_assert(sizeof(Shared) <= 227 * 1024);

// The weights of a phase, cut into units.
struct Matrix {
  const uint8_t* data;
  const DecodeMaps* maps;
  int64_t expert_bytes;
  int spans;
  int units;  // of a tile
};
__device__ __forceinline__ Matrix fc1_matrix(const Decode& args) {
  const FragmentWeights& w = args.weights;
  return {w.fc1,
          &args.fc1_maps,
          w.fc1_bytes(),
          static_cast<int>(w.hidden) / kSpan,
          // Rows that are only padding are left out.
          static_cast<int>((w.shape.gated ? 2 : 1) * w.intermediate + kUnitRows - 1) / kUnitRows};
}
__device__ __forceinline__ Matrix fc2_matrix(const Decode& args) {
  const FragmentWeights& w = args.weights;
  return {w.fc2,
          &args.fc2_maps,
          w.fc2_bytes(),
          static_cast<int>(w.intermediate) / kSpan,
          static_cast<int>(w.shape.hidden_size + kUnitRows - 1) / kUnitRows};
}

// Position in the ring of stages, with the parity of its round.
struct Ring {
  int index = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Units in the order of tiles; a block has consecutive ones, so that it seldom changes the tile.
struct Units {
  int next;
  int end;
};
__device__ __forceinline__ Units units_of_block(int tiles, const Matrix& matrix) {
  const int64_t total = int64_t{tiles} * matrix.units;
  const int64_t block = blockIdx.x;
  return {static_cast<int>(total * block / gridDim.x),
          static_cast<int>(total * (block + 1) / gridDim.x)};
}

// --- producer ---

// Sorts the slots by expert and cuts the routes into tiles; every block for itself, by a warp.
__device__ void route(const Decode& args, Shared& shared) {
  const int tile_rows =
      static_cast<int>(min(int64_t{kTileRows}, operand_rows(args.weights.intermediate)));
  const int slots = args.rows * args.top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int slot = lane; slot < slots; slot += 32) {
    shared.expert_of_slot[slot] = local_expert(args.routing_map,
                                               args.routing_is_i64,
                                               slot,
                                               args.local_expert_offset,
                                               args.weights.shape.num_local_experts);
    shared.tile_at_route[slot] = 0;
  }
  __syncwarp();
  for (int slot = lane; slot < slots; slot += 32) {
    const int expert = shared.expert_of_slot[slot];
    int less = 0;     // routes of experts before this one
    int same = 0;     // routes of this expert
    int earlier = 0;  // those of slots before this one
#pragma unroll 4
    for (int i = 0; i < slots; ++i) {
      const int other = shared.expert_of_slot[i];
      less += static_cast<unsigned>(other) < static_cast<unsigned>(expert) ? 1 : 0;
      same += other == expert ? 1 : 0;
      if (i < slot) earlier += other == expert ? 1 : 0;
    }
    const int route = expert < 0 ? -1 : less + earlier;
    shared.route_of_slot[slot] = route;
    if (route < 0) continue;
    shared.slot_of_route[route] = slot;
    shared.token_of_route[route] = slot / args.top_k;
    if (earlier % tile_rows == 0) shared.tile_at_route[route] = min(tile_rows, same - earlier);
  }
  __syncwarp();
  int tiles = 0;
  for (int first = 0; first < slots; first += 32) {
    const int route = first + lane;
    const int rows = route < slots ? shared.tile_at_route[route] : 0;
    const unsigned begins = __ballot_sync(0xFFFFFFFFU, rows > 0);
    if (rows > 0) {
      shared.tiles[tiles + __popc(begins & ((1U << lane) - 1))] = {
          shared.expert_of_slot[shared.slot_of_route[route]], route, rows};
    }
    tiles += __popc(begins);
  }
  if (lane == 0) shared.num_tiles = tiles;
  __syncwarp();
}

// One thread's work: the copies of a stage are all ordered by its wait for the empty stage.
__device__ void fetch_weights(const Matrix& matrix, Ring& stage, Shared& shared) {
  for (Units units = units_of_block(shared.num_tiles, matrix); units.next < units.end;
       ++units.next) {
    const int rows = units.next % matrix.units;
    const int part = rows % kUnitsPerRecord;
    const int64_t record =
        shared.tiles[units.next / matrix.units].expert * (matrix.expert_bytes / kRecordBytes) +
        int64_t{rows / kUnitsPerRecord} * matrix.spans;
    for (int first = 0; first < matrix.spans; first += kStageSpans) {
      const int spans = min(kStageSpans, matrix.spans - first);
      uint64_t* full = shared.full + stage.index;
      uint8_t* codes = shared.codes[stage.index];
      uint8_t* scales = shared.scales[stage.index];
      ptx::mbarrier_wait(shared.empty + stage.index, stage.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, spans * (kCodes + kScales));
      if (spans == kStageSpans) {
        const int from = static_cast<int>(record + first);
        ptx::tensor_copy(codes, &matrix.maps->codes, part * (kCodes / 8), from, full);
        ptx::tensor_copy(
            scales, &matrix.maps->scales, (kScalesAt + part * kScales) / 8, from, full);
      } else {  // a box would reach into other rows
        const uint8_t* from = matrix.data + (record + first) * kRecordBytes;
        for (int span = 0; span < spans; ++span, from += kRecordBytes) {
          ptx::bulk_copy(codes + span * kCodes, from + part * kCodes, kCodes, full);
          ptx::bulk_copy(scales + span * kScales, from + kScalesAt + part * kScales, kScales, full);
        }
      }
      stage.advance();
    }
  }
}

// --- consumers ---

// Barriers of a block: 2 and on are those of the slabs.
constexpr int kRouted = 0;
constexpr int kConsumers = 1;
constexpr int kSlabSums = 2;

__device__ __forceinline__ void consumers_sync() {
  ptx::barrier_sync(kConsumers, kConsumerThreads);
}

// Waits for the consumers of all blocks: what they stored is visible.
__device__ void grid_sync(uint64_t* arrivals) {
  consumers_sync();
  if (threadIdx.x == 0) {
    const uint64_t blocks = gridDim.x;
    const uint64_t all = (ptx::add_release(arrivals, 1) / blocks + 1) * blocks;
    while (ptx::load_acquire(arrivals) < all) {
    }
  }
  consumers_sync();
}

// Quantizes `rows` rows of k values into `operand`. load(row, half) gives a half block. The consumers
// have left the operand before.
template <typename Load>
__device__ __forceinline__ void quantize_operand(
    Shared& shared, int rows, int64_t k, const QuantizedRows& dump, Load&& load) {
  constexpr int kKept = 5;  // half blocks a thread keeps in registers between the two passes
  int group_warps = kWarps;
  while (group_warps * rows > kWarps)
    group_warps /= 2;
  const int threads = 32 * group_warps;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / threads;
  const int first = static_cast<int>(threadIdx.x) % threads;
  const int halves = row < rows ? static_cast<int>(k / kHalfBlock) : 0;
  const auto half_at = [&](int i) { return first + i * threads; };
  const auto in_warp = [&](int i) { return half_at(i) - lane < halves; };

  HalfBlock kept[kKept];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = {};
    if (half_at(i) < halves) kept[i] = load(row, half_at(i));
    amax = __vmaxu2(amax, amax_of_halves(kept[i]));
  }
  for (int i = kKept; half_at(i) < halves; ++i)
    amax = __vmaxu2(amax, amax_of_halves(load(row, half_at(i))));
  amax = __reduce_max_sync(0xFFFFFFFFU, larger_half(amax));
  if (lane == 0) shared.warp_amax[warp] = amax;
  consumers_sync();
  for (int w = 0; w < group_warps; ++w)
    amax = max(amax, shared.warp_amax[warp / group_warps * group_warps + w]);

  const OuterScale outer = token_scale(static_cast<uint16_t>(amax));
  if (row < rows && first == 0) {
    shared.token_scale[row] = outer.stored;
    if (dump.token_scale != nullptr) dump.token_scale[row] = outer.stored;
  }
  uint8_t* to = shared.operand + row * operand_row_bytes(k);
  const auto quantize = [&](int half, HalfBlock x) {
    if (outer.poisoned) x = {};
    const uint32_t own = amax_of_halves(x);
    const uint32_t both = __vmaxu2(own, __shfl_xor_sync(0xFFFFFFFFU, own, 1));
    const BlockScale scale = block_scale(larger_half(both), outer);
    const HalfBlock q = quantize_values(x, scale.encode);
    if (half >= halves) return;
    if (dump.codes != nullptr) {
      reinterpret_cast<uint32_t*>(dump.codes)[row * halves + half] = pack_codes(q);
      if (half % 2 == 0) dump.block_scales[(row * halves + half) / 2] = scale.code;
    }
    // 32 k are 64 bytes, 16 of a lane: its two values of each of the four half blocks.
    const HalfBlock operand = times(q, scale.value);
    auto* words = reinterpret_cast<uint32_t*>(to + half / 4 * 64) + half % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[4 * i] = operand.pairs[i];
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (in_warp(i)) quantize(half_at(i), kept[i]);
  }
  for (int i = kKept; in_warp(i); ++i)
    quantize(half_at(i), half_at(i) < halves ? load(row, half_at(i)) : HalfBlock{});
  consumers_sync();
}

// What a warp has of a stage.
struct StagePart {
  Packed spans[kSpansPerWarp];
};

// The weights of this warp, a stage ahead of the multiplications.
class Weights {
 public:
  __device__ explicit Weights(Shared& shared)
      : shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}
  // Waits for the next stage and leaves it to the producer again.
  __device__ __forceinline__ StagePart take() {
    const int slab = warp_ % kSlabs;
    const int part = warp_ / kSlabs;
    ptx::mbarrier_wait(shared_.full + stage_.index, stage_.parity);
    const uint8_t* codes = shared_.codes[stage_.index] + slab * kSlabCodes + part * kCodes;
    const uint8_t* scales = shared_.scales[stage_.index] + slab * kSlabScales + part * kScales;
    StagePart taken;
#pragma unroll
    for (int i = 0; i < kSpansPerWarp; ++i) {
      taken.spans[i] =
          load_packed(codes + i * kParts * kCodes, scales + i * kParts * kScales, lane_);
    }
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(shared_.empty + stage_.index);
    stage_.advance();
    return taken;
  }

 private:
  Shared& shared_;
  int warp_;
  int lane_;
  Ring stage_;
};

// 16 rows x 64 k times the tokens; the two halves of K have sums of their own.
__device__ __forceinline__ void multiply(const Packed& packed,
                                         const uint4 (&tokens)[2],
                                         float (&sums)[2][4]) {
  uint32_t a[4][4];
  expand<0>(packed, a);
  ptx::mma(sums[0], a[0], tokens[0].x, tokens[0].y);
  ptx::mma(sums[1], a[1], tokens[0].z, tokens[0].w);
  ptx::mma(sums[0], a[2], tokens[1].x, tokens[1].y);
  ptx::mma(sums[1], a[3], tokens[1].z, tokens[1].w);
}

// All units of this block. begin_tile(tile, row) is called by all consumers and gives the offset of the
// tile's row in the operand; load_alphas(expert) gives what store(tile, alphas, slab, sums), by a warp
// that has all of K, will need.
template <typename BeginTile, typename LoadAlphas, typename Store>
__device__ __forceinline__ void multiply_units(const Matrix& matrix,
                                               Weights& weights,
                                               int& buffer,
                                               Shared& shared,
                                               BeginTile&& begin_tile,
                                               LoadAlphas&& load_alphas,
                                               Store&& store) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int slab = warp % kSlabs;
  const int part = warp / kSlabs;
  int former_tile = -1;
  Tile tile = {};
  float2 alphas = {};
  const uint8_t* operand = nullptr;
  Units units = units_of_block(shared.num_tiles, matrix);
  StagePart next;
  if (units.next < units.end) next = weights.take();
  for (; units.next < units.end; ++units.next) {
    const int index = units.next / matrix.units;
    if (index != former_tile) {
      former_tile = index;
      tile = shared.tiles[index];
      alphas = load_alphas(tile.expert);
      // Lanes of no token take the first one's: their columns are not stored.
      operand =
          shared.operand + begin_tile(tile, lane / 4 < tile.rows ? lane / 4 : 0) + lane % 4 * 16;
    }
    float sums[2][4] = {};
    for (int first = 0; first < matrix.spans; first += kStageSpans) {
      const StagePart now = next;
      if (first + kStageSpans < matrix.spans || units.next + 1 < units.end) next = weights.take();
      const uint8_t* at = operand + (first + part) * 128;
      uint4 tokens[kSpansPerWarp][2];
#pragma unroll
      for (int i = 0; i < kSpansPerWarp; ++i) {
        // Past the end of K there may be anything, and it is not multiplied.
        tokens[i][0] = *reinterpret_cast<const uint4*>(at + i * kParts * 128);
        tokens[i][1] = *reinterpret_cast<const uint4*>(at + i * kParts * 128 + 64);
      }
      if (first + kStageSpans <= matrix.spans) {
#pragma unroll
        for (int i = 0; i < kSpansPerWarp; ++i)
          multiply(now.spans[i], tokens[i], sums);
      } else {
#pragma unroll
        for (int i = 0; i < kSpansPerWarp; ++i) {
          if (first + part + i * kParts < matrix.spans) multiply(now.spans[i], tokens[i], sums);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[0][i] = __fadd_rn(sums[0][i], sums[1][i]);
    // Two buffers: when this one is written again all have passed the barrier of the other.
    auto& parts = shared.sums[buffer];
    buffer ^= 1;
    parts[part][slab][lane] = {sums[0][0], sums[0][1], sums[0][2], sums[0][3]};
    ptx::barrier_sync(kSlabSums + slab, 32 * kParts);
    if (part == units.next % kParts) {  // in turns
      float4 sum = parts[0][slab][lane];
#pragma unroll
      for (int p = 1; p < kParts; ++p) {
        const float4 add = parts[p][slab][lane];
        sum = {__fadd_rn(sum.x, add.x),
               __fadd_rn(sum.y, add.y),
               __fadd_rn(sum.z, add.z),
               __fadd_rn(sum.w, add.w)};
      }
      const float unscaled[4] = {__fmul_rn(sum.x, kUnscale),
                                 __fmul_rn(sum.y, kUnscale),
                                 __fmul_rn(sum.z, kUnscale),
                                 __fmul_rn(sum.w, kUnscale)};
      store(tile, alphas, units.next % matrix.units * kSlabs + slab, unscaled);
    }
  }
}

__device__ __forceinline__ HalfBlock load_token(const Decode& args,
                                                int token,
                                                int half,
                                                bool aligned) {
  const int64_t cols = args.weights.shape.hidden_size;
  const uint16_t* source = args.hidden_states + token * cols;
  const int64_t first = int64_t{kHalfBlock} * half;
  if (aligned && first + kHalfBlock <= cols) {
    const auto v = *reinterpret_cast<const uint4*>(source + first);
    return {v.x, v.y, v.z, v.w};
  }
  HalfBlock x;
#pragma unroll
  for (int i = 0; i < kHalfBlock / 2; ++i) {
    const int64_t col = first + 2 * i;
    const uint32_t even = col < cols ? source[col] : 0;
    const uint32_t odd = col + 1 < cols ? source[col + 1] : 0;
    x.pairs[i] = even | odd << 16;
  }
  return x;
}

// FC1 and activation -> `intermediate`.
template <bool kGated>
__device__ __forceinline__ void fc1(const Decode& args,
                                    Weights& weights,
                                    int& buffer,
                                    Shared& shared) {
  const FragmentWeights& w = args.weights;
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.hidden_states) % 16 == 0 && w.shape.hidden_size % 8 == 0;
  QuantizedRows dump;
  if (blockIdx.x == 0) {
    dump.codes = args.stages.x_codes;
    dump.block_scales = args.stages.x_block_scales;
    dump.token_scale = args.stages.x_token_scale;
  }
  quantize_operand(shared, args.rows, w.hidden, dump, [&](int row, int half) {
    return load_token(args, row, half, aligned);
  });
  ptx::barrier_sync(kRouted, kThreads);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto token_of = [&](const Tile& tile, int row) {
    return shared.token_of_route[tile.first_route + row];
  };
  multiply_units(
      fc1_matrix(args),
      weights,
      buffer,
      shared,
      [&](const Tile& tile, int row) { return token_of(tile, row) * operand_row_bytes(w.hidden); },
      [&](int expert) {
        return float2{w.fc1_up_alpha[expert], w.fc1_gate_alpha[expert]};
      },
      [&](const Tile& tile, float2 alphas, int slab, const float(&sums)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = lane % 4 * 2 + i;
          if (row >= tile.rows) continue;
          const float t = shared.token_scale[token_of(tile, row)];
          const float up = __fmul_rn(sums[i], __fmul_rn(alphas.x, t));
          uint16_t* to = args.intermediate + (tile.first_route + row) * w.intermediate;
          if constexpr (kGated) {
            const float gate = __fmul_rn(sums[i + 2], __fmul_rn(alphas.y, t));
            to[slab * 8 + lane / 4] = bf16_from_f32(swiglu(gate, up));
          } else {
            const float lower = __fmul_rn(sums[i + 2], __fmul_rn(alphas.x, t));
            const int64_t feature =
                fragments::row_of_fragment(slab * fragments::kSlabRows + lane / 4);
            to[feature] = bf16_from_f32(squared_relu(up));
            to[feature + 2] = bf16_from_f32(squared_relu(lower));
          }
        }
      });
}

// Requantization and FC2 -> `route_output`.
__device__ __forceinline__ void fc2(const Decode& args,
                                    Weights& weights,
                                    int& buffer,
                                    Shared& shared) {
  const FragmentWeights& w = args.weights;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  multiply_units(
      fc2_matrix(args),
      weights,
      buffer,
      shared,
      [&](const Tile& tile, int row) {
        QuantizedRows dump;
        if (args.stages.h_codes != nullptr) {
          dump.codes = args.stages.h_codes + tile.first_route * (w.intermediate / 2);
          dump.block_scales = args.stages.h_block_scales + tile.first_route * (w.intermediate / 16);
          dump.token_scale = args.stages.h_token_scale + tile.first_route;
        }
        const uint16_t* rows = args.intermediate + tile.first_route * w.intermediate;
        quantize_operand(shared, tile.rows, w.intermediate, dump, [&](int r, int half) {
          const uint4 v = __ldcg(reinterpret_cast<const uint4*>(rows + r * w.intermediate) + half);
          return HalfBlock{v.x, v.y, v.z, v.w};
        });
        return row * operand_row_bytes(w.intermediate);
      },
      [&](int expert) {
        return float2{w.fc2_alpha[expert], 0};
      },
      [&](const Tile& tile, float2 alphas, int slab, const float(&sums)[4]) {
        const int64_t feature = fragments::row_of_fragment(slab * fragments::kSlabRows + lane / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = lane % 4 * 2 + i;
          if (row >= tile.rows) continue;
          const float scale = __fmul_rn(alphas.x, shared.token_scale[row]);
          uint16_t* to = args.route_output + (tile.first_route + row) * w.fc2_rows + feature;
          to[0] = bf16_from_f32(__fmul_rn(sums[i], scale));
          to[2] = bf16_from_f32(__fmul_rn(sums[i + 2], scale));
        }
      });
}

// The weighted sum of a token's routes, in slot order.
__device__ __forceinline__ void combine(const Decode& args, const Shared& shared) {
  const int64_t cols = args.weights.shape.hidden_size;
  const int64_t step = int64_t{gridDim.x} * kConsumerThreads;
  for (int64_t at = int64_t{blockIdx.x} * kConsumerThreads + threadIdx.x; at < args.rows * cols;
       at += step) {
    const int first = static_cast<int>(at / cols) * args.top_k;
    const int64_t col = at % cols;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < args.top_k; ++i) {
      const int route = shared.route_of_slot[first + i];
      if (route < 0) continue;
      const uint16_t y = __ldcg(args.route_output + route * args.weights.fc2_rows + col);
      sum = __fmaf_rn(shared.probability[first + i], bf16_to_f32(y), sum);
    }
    if (args.out_is_f32) {
      static_cast<float*>(args.out)[at] = sum;
    } else {
      static_cast<uint16_t*>(args.out)[at] = bf16_from_f32(sum);
    }
  }
}

template <bool kGated>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ Decode args) {
  extern __shared__ __align__(128) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (ptx::warp_index() == kWarps) {
    if (threadIdx.x == kConsumerThreads) {
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(shared.full + i, 1);
        ptx::mbarrier_init(shared.empty + i, kWarps);
      }
      ptx::fence_mbarrier_init();
    }
    route(args, shared);
    ptx::barrier_arrive(kRouted, kThreads);
    if (threadIdx.x % 32 != 0) return;
    Ring stage;
    fetch_weights(fc1_matrix(args), stage, shared);
    fetch_weights(fc2_matrix(args), stage, shared);
    return;
  }
  const int slots = args.rows * args.top_k;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < slots) shared.probability[thread] = args.probabilities[thread];
  Weights weights(shared);
  int buffer = 0;
  fc1<kGated>(args, weights, buffer, shared);
  if (args.stages.expanded_to_permuted != nullptr && blockIdx.x == 0) {
    if (thread < slots) args.stages.expanded_to_permuted[thread] = shared.route_of_slot[thread];
    if (thread == 0) {
      int routes = 0;
      for (int i = 0; i < shared.num_tiles; ++i)
        routes += shared.tiles[i].rows;
      *args.stages.num_routes = routes;
    }
  }
  grid_sync(args.arrivals);
  fc2(args, weights, buffer, shared);
  grid_sync(args.arrivals);
  combine(args, shared);
}

auto* kernel_of(bool gated) {
  return gated ? decode_kernel<true> : decode_kernel<false>;
}

}  // namespace

bool can_decode(const MoeProblem& problem, const FragmentWeights& sizes, int64_t rows) {
  const ActivationType type = problem.activation.type;
  return rows <= kMaxTokens && rows * problem.top_k <= kMaxSlots &&
         rows <= operand_rows(sizes.hidden) && operand_rows(sizes.intermediate) > 0 &&
         (type == ActivationType::kSquaredRelu || type == ActivationType::kSwiGlu);
}

Status decode_maps(DecodeMaps& maps, const uint8_t* data, int64_t bytes) {
  const int64_t records = bytes / kRecordBytes;
  HX_RETURN_IF_ERROR(record_map(maps.codes, data, records, kCodes, kStageSpans));
  return record_map(maps.scales, data, records, kScales, kStageSpans);
}

cudaError_t configure_decode() {
  const cudaError_t error = configure(kernel_of(false), sizeof(Shared));
  return error != cudaSuccess ? error : configure(kernel_of(true), sizeof(Shared));
}

cudaError_t decode(const Decode& args, int multiprocessors, const LaunchOptions& options) {
  LaunchOptions cooperative = options;
  cooperative.cooperative = true;
  return launch(kernel_of(args.weights.shape.gated),
                static_cast<unsigned>(multiprocessors),
                kThreads,
                sizeof(Shared),
                cooperative,
                args);
}

}  // namespace hexpert::cuda

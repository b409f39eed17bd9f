// Grouped GEMM: every row tile of an expert times that expert's NVFP4 matrix.
//
//   sum[row, n] = sum over k of x[row, k] * e2m1(n, k) * e4m3(n, k / 16)       FP32, exact products
//
// The weights are the register operand of wgmma and the tokens the shared-memory one, so a tile may
// be as narrow as 8 tokens. A block loops over tiles: one warp fills a ring of stages, two or four
// warpgroups expand the weights and multiply.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/launch_options.hpp"
#include "cuda/route.hpp"
#include "hexpert/status.hpp"

namespace hexpert::cuda {

// What becomes of the sums.
enum class Epilogue : uint8_t {
  kSquaredRelu,  // out = bf16(max(s, 0)^2),        s = sum * up scale
  kSwiGlu,       // out = bf16(g sigmoid(g) u),     features: half as many as rows
  kScale,        // out = bf16(sum * up scale)
  kPartial,      // out = sums of this part of K, FP32, in fragment row order
};

// Widths of tile that a kernel is compiled for, at most.
inline constexpr int kMaxWidths = 8;

// Rows of FP16 values as the copy engine sees them, for each width of tile that a kernel has.
struct OperandMaps {
  CUtensorMap of_width[kMaxWidths];
};

// The predecessor in the stream may let this start early, but not before `routes` is complete.
struct GroupedGemm {
  const uint8_t* weights = nullptr;  // [experts, expert_bytes] sm90 fragments
  int64_t expert_bytes = 0;
  int64_t fragment_rows = 0;  // multiple of 128
  int64_t k = 0;              // multiple of 64

  OperandMaps x;                      // [permuted rows, k] fp16
  const float* row_scale = nullptr;   // [permuted rows]
  const float* up_alpha = nullptr;    // [experts]
  const float* gate_alpha = nullptr;  // [experts]

  Routes routes;
  // Another kernel is launched for the same GEMM: the one for tiles of `routes.max_width` does the work.
  bool one_of_two = false;
  int32_t* items_taken = nullptr;  // [1] zero before every launch; blocks count the items they take
  void* out =
      nullptr;  // [permuted rows, out_cols] bf16, or [splits, max_routes, fragment_rows] f32
  int64_t out_cols = 0;  // multiple of 16: features past it are dropped
  int64_t max_routes = 0;
  int splits = 1;  // parts of K; more than one with kPartial only
};

// The kernels for tiles of at most `max_width` tokens: narrower tiles leave room for more of K in flight.
struct GemmVariant {
  int max_width = 0;
  int64_t stage_k = 0;    // K elements of a pipeline stage; K is split at multiples of it
  int64_t item_rows = 0;  // weight rows that a block multiplies at once
  int num_widths = 0;
  int widths[kMaxWidths] = {};  // of tiles that are compiled, ascending
  cudaError_t (*configure)();   // once per device, before the first launch
  cudaError_t (*launch)(const GroupedGemm& args,
                        Epilogue epilogue,
                        int multiprocessors,
                        const LaunchOptions& options);
};
// Describes `rows` rows of `k` values at `data`, FP16, to a kernel.
Status operand_maps(
    OperandMaps& maps, const GemmVariant& variant, const uint16_t* data, int64_t rows, int64_t k);

// Describes the records of a matrix of weights: boxes of `bytes` of each of `spans` records.
Status record_map(CUtensorMap& map, const uint8_t* data, int64_t records, int bytes, int spans);

extern const GemmVariant gemm_width8;
extern const GemmVariant gemm_width16;
extern const GemmVariant gemm_width32;
extern const GemmVariant gemm_width64;
extern const GemmVariant gemm_width112;
extern const GemmVariant gemm_width160;
extern const GemmVariant gemm_width256;

}  // namespace hexpert::cuda

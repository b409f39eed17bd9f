// Host side of the kernels that are useful by themselves. All enqueue on `stream`, allocate nothing
// and return the launch error; every pointer is device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/fragment_weights.hpp"
#include "cuda/launch_options.hpp"

namespace hexpert::cuda {

// BF16 matrices of `experts` consecutive experts, quantized into fragments.
struct QuantizeWeights {
  const uint16_t* source = nullptr;  // [experts, rows or 2 rows, cols] bf16; gated: gate, then up
  int64_t experts = 0;
  int64_t rows = 0;  // of one projection: I for FC1, H for FC2
  int64_t cols = 0;
  bool gated = false;
  int64_t fragment_rows = 0;     // padded
  int64_t fragment_cols = 0;     // padded
  uint8_t* fragments = nullptr;  // [experts, matrix_bytes(fragment_rows, fragment_cols)]
  float* alpha = nullptr;        // [experts]
  float* gate_alpha = nullptr;   // [experts], the same values; null: skipped
  uint32_t* amax = nullptr;      // [experts] scratch; afterwards the amax bits, NaN > 0x7F80
  uint64_t* progress =
      nullptr;  // [1 + experts] scratch: blocks that started, pieces done by expert
};

// Once per device, before the first launch.
cudaError_t configure_quantize_weights();
cudaError_t quantize_weights(const QuantizeWeights& args, cudaStream_t stream);

// BF16 rows -> NVFP4, per-token scales. Codes and block scales may be null only with an operand.
struct QuantizeTokens {
  const uint16_t* source = nullptr;  // [rows, source_stride] bf16
  int64_t rows = 0;
  int64_t cols = 0;                 // of the source
  int64_t source_stride = 0;        // elements
  int64_t padded_cols = 0;          // of the outputs, multiple of 16
  uint8_t* codes = nullptr;         // [rows, padded_cols / 2]
  uint8_t* block_scales = nullptr;  // [rows, padded_cols / 16]
  float* token_scale = nullptr;     // [rows]

  // FP16 e2m1 * e4m3, exactly, for the GEMM: a copy of the row for each of its routes.
  uint16_t* operand = nullptr;                    // [routes, padded_cols]
  const int32_t* expanded_to_permuted = nullptr;  // [rows, top_k], -1: no route
  int64_t top_k = 0;
  float* route_scale = nullptr;  // [routes] token_scale of the route's token
};

// Once per device, before the first launch.
cudaError_t configure_quantize_tokens();
cudaError_t quantize_tokens(const QuantizeTokens& args, cudaStream_t stream);
// With overlap_predecessor `source` is read before the predecessor has finished: it must be complete
// when the predecessor starts. In a forward that is the routing, which waits for all that came before.
cudaError_t quantize_tokens(const QuantizeTokens& args, const LaunchOptions& options);

}  // namespace hexpert::cuda

// Small kernels of the benchmark: random data made where it is used, and a pure read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace hexpert::tools {

// All enqueue on `stream` and return the launch error.

// BF16 values of mean 0, variance sigma^2.
cudaError_t fill_bf16(uint16_t* to, int64_t count, float sigma, uint64_t seed, cudaStream_t stream);
// Hopper fragments: any code, block scales between 0.5 and 3.75. `bytes` is a multiple of a record.
cudaError_t fill_fragments(uint8_t* to, int64_t bytes, uint64_t seed, cudaStream_t stream);
cudaError_t fill_f32(float* to, int64_t count, float value, cudaStream_t stream);
// Reads `bytes`, a multiple of 16; `sink` is one word.
cudaError_t read_all(const void* from, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace hexpert::tools

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
// Read or copy `bytes`, a multiple of 16, in one of several ways: which is fastest depends on the GPU.
// `sink` is one word.
inline constexpr int kStreamVariants = 12;
cudaError_t read_all(
    const void* from, int64_t bytes, uint32_t* sink, int variant, cudaStream_t stream);
cudaError_t copy_all(const void* from, void* to, int64_t bytes, int variant, cudaStream_t stream);

}  // namespace hexpert::tools

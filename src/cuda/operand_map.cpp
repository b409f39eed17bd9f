#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/gemm.hpp"

namespace hexpert::cuda {

CUresult operand_map(
    CUtensorMap& map, const uint16_t* data, int64_t rows, int64_t k, int box_rows) {
  // From the driver that is loaded, so that the library does not link against it.
  constexpr unsigned kVersion = 12000;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &entry, kVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return CUDA_ERROR_NOT_FOUND;
  }
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(k) * sizeof(uint16_t)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  return encode(&map,
                CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                2,
                const_cast<uint16_t*>(data),
                sizes,
                row_bytes,
                box,
                steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace hexpert::cuda

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/device_memory.hpp"
#include "cuda/gemm.hpp"
#include "format/layout.hpp"

namespace hexpert::cuda {
namespace {

constexpr const char* kEncode = "cuTensorMapEncodeTiled";

// From the driver that is loaded, so that the library does not link against it.
Result<void*> find_encode() {
  constexpr unsigned kVersion = 12000;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  HX_RETURN_IF_ERROR(
      check(cudaGetDriverEntryPointByVersion(kEncode, &entry, kVersion, cudaEnableDefault, &found),
            kEncode));
  // The driver's error numbers are the runtime's.
  if (found != cudaDriverEntryPointSuccess) {
    return check(static_cast<cudaError_t>(CUDA_ERROR_NOT_FOUND), kEncode);
  }
  return entry;
}

}  // namespace

Status operand_maps(
    OperandMaps& maps, const GemmVariant& variant, const uint16_t* data, int64_t rows, int64_t k) {
  static const Result<void*> found = find_encode();
  if (!found.ok()) return found.status();
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(*found);
  // [k / span][rows][span], so that a box holds the rows of a tile for each span in turn. Half a
  // stage: the blocks of a cluster fetch a half each.
  constexpr cuuint64_t kSpan = layout::sm90_fragments::kSpan;
  const auto columns = static_cast<cuuint64_t>(k);
  const cuuint64_t sizes[] = {kSpan, static_cast<cuuint64_t>(rows), columns / kSpan};
  const cuuint64_t strides[] = {columns * sizeof(uint16_t), kSpan * sizeof(uint16_t)};
  const auto spans = static_cast<cuuint32_t>(variant.stage_k / layout::sm90_fragments::kSpan / 2);
  const cuuint32_t steps[] = {1, 1, 1};
  for (int i = 0; i < variant.num_widths; ++i) {
    const cuuint32_t box[] = {
        static_cast<cuuint32_t>(kSpan), static_cast<cuuint32_t>(variant.widths[i]), spans};
    const CUresult result = encode(&maps.of_width[i],
                                   CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                   3,
                                   const_cast<uint16_t*>(data),
                                   sizes,
                                   strides,
                                   box,
                                   steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    HX_RETURN_IF_ERROR(check(static_cast<cudaError_t>(result), kEncode));
  }
  return {};
}

}  // namespace hexpert::cuda

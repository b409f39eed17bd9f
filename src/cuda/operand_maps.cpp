#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <span>

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

Status encode(CUtensorMap& map,
              CUtensorMapDataType type,
              std::span<const cuuint64_t> sizes,
              const cuuint64_t* strides,
              const cuuint32_t* box,
              CUtensorMapSwizzle swizzle,
              const void* data) {
  static const Result<void*> found = find_encode();
  if (!found.ok()) return found.status();
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(*found)(
      &map,
      type,
      static_cast<cuuint32_t>(sizes.size()),
      const_cast<void*>(data),
      sizes.data(),
      strides,
      box,
      steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return check(static_cast<cudaError_t>(result), kEncode);
}

}  // namespace

Status operand_maps(
    OperandMaps& maps, const GemmVariant& variant, const uint16_t* data, int64_t rows, int64_t k) {
  // [k / span][rows][span], so that a box holds the rows of a tile for each span in turn. Half a
  // stage: the blocks of a cluster fetch a half each.
  constexpr cuuint64_t kSpan = layout::sm90_fragments::kSpan;
  const auto columns = static_cast<cuuint64_t>(k);
  const cuuint64_t sizes[] = {kSpan, static_cast<cuuint64_t>(rows), columns / kSpan};
  const cuuint64_t strides[] = {columns * sizeof(uint16_t), kSpan * sizeof(uint16_t)};
  const auto spans = static_cast<cuuint32_t>(variant.stage_k / layout::sm90_fragments::kSpan / 2);
  for (int i = 0; i < variant.num_widths; ++i) {
    const cuuint32_t box[] = {
        static_cast<cuuint32_t>(kSpan), static_cast<cuuint32_t>(variant.widths[i]), spans};
    HX_RETURN_IF_ERROR(encode(maps.of_width[i],
                              CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                              sizes,
                              strides,
                              box,
                              CU_TENSOR_MAP_SWIZZLE_128B,
                              data));
  }
  return {};
}

Status record_map(CUtensorMap& map, const uint8_t* data, int64_t records, int bytes, int spans) {
  // In words of eight bytes: a box has at most 256 of them a row.
  constexpr cuuint64_t kRecordBytes = layout::sm90_fragments::kRecordBytes;
  const cuuint64_t sizes[] = {kRecordBytes / 8, static_cast<cuuint64_t>(records)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes / 8), static_cast<cuuint32_t>(spans)};
  return encode(map,
                CU_TENSOR_MAP_DATA_TYPE_INT64,
                sizes,
                &kRecordBytes,
                box,
                CU_TENSOR_MAP_SWIZZLE_NONE,
                data);
}

}  // namespace hexpert::cuda

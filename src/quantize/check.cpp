#include "quantize/check.hpp"

#include <fmt/format.h>

#include "core/overlap.hpp"

namespace hexpert {
namespace {

// Room for the padding of tiled scales as well, and for byte offsets of FP32 values.
constexpr int64_t kMaxElements = int64_t{1} << 56;

bool product_fits(int64_t a, int64_t b) {
  int64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && product <= kMaxElements;
}

// Bytes of the parts of a quantized matrix.
struct Nvfp4Bytes {
  int64_t codes;
  int64_t block_scales;
  int64_t outer;
};

Nvfp4Bytes bytes_of(const ConstNvfp4View& view) {
  const int64_t elements = view.rows * view.cols;
  return {elements / 2,
          elements == 0 ? 0 : block_scale_bytes(view.scale_layout, view.rows, view.cols),
          (view.per_row    ? view.rows
           : elements == 0 ? 0
                           : 1) *
              4};
}

// Of a matrix with strided rows, the gaps between them included.
int64_t extent_bytes(const ConstTensorView& view) {
  const int64_t rows = view.shape[0];
  if (rows == 0) return 0;
  const int64_t last_row = rows == 1 ? 0 : (rows - 1) * view.strides[0];
  return (last_row + view.shape[1]) * size_of(view.dtype);
}

}  // namespace

Status check_pointer(const char* name, const void* pointer, int64_t bytes, int64_t alignment) {
  if (bytes == 0) return {};
  if (pointer == nullptr) {
    return {ErrorCode::kNullPointer, fmt::format("{}: expected {} bytes, got null", name, bytes)};
  }
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % static_cast<uintptr_t>(alignment) != 0) {
    return {
        ErrorCode::kMisaligned,
        fmt::format(
            "{}: expected an address aligned to {} bytes, got {:#x}", name, alignment, address)};
  }
  return {};
}

Status check_bf16_matrix(const char* name,
                         const ConstTensorView& view,
                         bool rows_may_be_zero,
                         const Device& device) {
  if (view.rank != 2) {
    return {ErrorCode::kInvalidShape,
            fmt::format("{}: expected rank 2, got rank {}", name, view.rank)};
  }
  const int64_t rows = view.shape[0];
  const int64_t cols = view.shape[1];
  if (rows < (rows_may_be_zero ? 0 : 1) || cols < 1) {
    return {ErrorCode::kInvalidShape,
            fmt::format("{}: expected at least {} rows and 1 column, got [{}, {}]",
                        name,
                        rows_may_be_zero ? 0 : 1,
                        rows,
                        cols)};
  }
  if (view.dtype != DType::kBF16) {
    return {ErrorCode::kInvalidDtype,
            fmt::format("{}: expected bf16, got {}", name, to_string(view.dtype))};
  }
  if (cols > 1 && view.strides[1] != 1) {
    return {ErrorCode::kNotContiguous,
            fmt::format("{}: expected a column stride of 1, got {}", name, view.strides[1])};
  }
  if (rows > 1 && view.strides[0] < 0) {
    return {ErrorCode::kNotContiguous,
            fmt::format("{}: expected a row stride of at least 0, got {}", name, view.strides[0])};
  }
  if (!product_fits(rows, cols) || (rows > 1 && !product_fits(rows, view.strides[0]))) {
    return {ErrorCode::kInvalidShape,
            fmt::format("{}: expected at most 2^56 elements, got [{}, {}] with a row stride of {}",
                        name,
                        rows,
                        cols,
                        view.strides[0])};
  }
  if (view.device != device) {
    return {
        ErrorCode::kDeviceMismatch,
        fmt::format(
            "{}: expected memory of {}, got {}", name, to_string(device), to_string(view.device))};
  }
  return check_pointer(name, view.data, rows * cols * 2, kBf16Alignment);
}

Status check_nvfp4(const char* name, const ConstNvfp4View& view, bool aligned) {
  if (view.rows < 0 || view.cols < 0 || view.cols % kBlockSize != 0 ||
      !product_fits(view.rows, view.cols)) {
    return {ErrorCode::kInvalidShape,
            fmt::format("{}: expected columns in multiples of {} and at most 2^56 elements, "
                        "got [{}, {}]",
                        name,
                        kBlockSize,
                        view.rows,
                        view.cols)};
  }
  const Nvfp4Bytes bytes = bytes_of(view);
  const auto pointer = [&](const char* member, const void* data, int64_t size, int64_t alignment) {
    return check_pointer(fmt::format("{}.{}", name, member).c_str(), data, size, alignment);
  };
  HX_RETURN_IF_ERROR(
      pointer("codes", view.codes, bytes.codes, aligned ? kCodesAlignment : kNoAlignment));
  HX_RETURN_IF_ERROR(pointer("block_scales",
                             view.block_scales,
                             bytes.block_scales,
                             aligned ? kScaleAlignment : kNoAlignment));
  return pointer("outer", view.outer, bytes.outer, kOuterAlignment);
}

Status check_quantize_overlap(const char* name,
                              const ConstTensorView& input,
                              const Nvfp4View& out) {
  const Nvfp4Bytes bytes = bytes_of(as_const(out));
  const MemoryRange parts[] = {{"out.codes", out.codes, bytes.codes},
                               {"out.block_scales", out.block_scales, bytes.block_scales},
                               {"out.outer", out.outer, bytes.outer}};
  const MemoryRange read{name, input.data, extent_bytes(input)};
  for (const MemoryRange& part : parts)
    HX_RETURN_IF_ERROR(check_no_overlap(part, read, "input"));
  return check_outputs_apart(parts);
}

Status check_dequantize_overlap(const ConstNvfp4View& in, const TensorView& out) {
  const Nvfp4Bytes bytes = bytes_of(in);
  const MemoryRange written{"out", out.data, extent_bytes(out)};
  for (const MemoryRange& part :
       {MemoryRange{"in.codes", in.codes, bytes.codes},
        MemoryRange{"in.block_scales", in.block_scales, bytes.block_scales},
        MemoryRange{"in.outer", in.outer, bytes.outer}}) {
    HX_RETURN_IF_ERROR(check_no_overlap(written, part, "input"));
  }
  return Status::success();
}

}  // namespace hexpert

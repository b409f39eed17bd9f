#include "quantize/check.hpp"

#include <fmt/format.h>

namespace hexpert {
namespace {

// Room for the padding of tiled scales as well, and for byte offsets of FP32 values.
constexpr int64_t kMaxElements = int64_t{1} << 56;

bool product_fits(int64_t a, int64_t b) {
  int64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && product <= kMaxElements;
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
  const int64_t elements = view.rows * view.cols;
  const int64_t scale_bytes =
      elements == 0 ? 0 : block_scale_bytes(view.scale_layout, view.rows, view.cols);
  const int64_t outer_count = view.per_row ? view.rows : elements == 0 ? 0 : 1;
  const auto pointer = [&](const char* member, const void* data, int64_t bytes, int64_t alignment) {
    return check_pointer(fmt::format("{}.{}", name, member).c_str(), data, bytes, alignment);
  };
  HX_RETURN_IF_ERROR(
      pointer("codes", view.codes, elements / 2, aligned ? kCodesAlignment : kNoAlignment));
  HX_RETURN_IF_ERROR(pointer(
      "block_scales", view.block_scales, scale_bytes, aligned ? kScaleAlignment : kNoAlignment));
  return pointer("outer", view.outer, outer_count * 4, kOuterAlignment);
}

}  // namespace hexpert

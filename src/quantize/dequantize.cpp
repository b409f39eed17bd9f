#include <fmt/format.h>
#include <omp.h>

#include "cpu/float_environment.hpp"
#include "format/layout.hpp"
#include "hexpert/quantize.hpp"
#include "quantize/check.hpp"

namespace hexpert {
namespace {

void store(float value, float* out) {
  *out = value;
}
void store(float value, uint16_t* out) {
  *out = bf16_from_f32(value);
}

template <typename T>
void dequantize_row(const ConstNvfp4View& in, int64_t row, T* out) {
  const int64_t columns = in.cols / kBlockSize;
  const uint8_t* codes = in.codes + row * (in.cols / 2);
  const float outer = in.outer[in.per_row ? row : 0];
  for (int64_t column = 0; column < columns; ++column) {
    const float scale =
        e4m3_value(in.block_scales[layout::scale_offset(in.scale_layout, row, column, columns)]);
    T values[16];
    for (unsigned code = 0; code < 16; ++code)
      store(e2m1_value(code) * scale * outer, &values[code]);
    for (int64_t j = 0; j < kBlockSize / 2; ++j, out += 2) {
      const uint8_t byte = *codes++;
      out[0] = values[byte & 15];
      out[1] = values[byte >> 4];
    }
  }
}

template <typename T>
void dequantize_rows(const ConstNvfp4View& in, T* out) {
#pragma omp parallel if (in.rows * in.cols > (1 << 15))
  {
    const cpu::FloatEnvironment environment;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < in.rows; ++row)
      dequantize_row(in, row, out + row * in.cols);
  }
}

}  // namespace

Status dequantize(const ConstNvfp4View& in, const TensorView& out) {
  HX_RETURN_IF_ERROR(check_nvfp4("in", in, false));
  if (out.rank != 2 || out.shape[0] != in.rows || out.shape[1] != in.cols) {
    return {ErrorCode::kShapeMismatch,
            fmt::format("out: expected [{}, {}], got {}", in.rows, in.cols, describe(out))};
  }
  if (out.dtype != DType::kF32 && out.dtype != DType::kBF16) {
    return {ErrorCode::kInvalidDtype,
            fmt::format("out: expected f32 or bf16, got {}", to_string(out.dtype))};
  }
  if (!out.is_contiguous()) {
    return {ErrorCode::kNotContiguous,
            fmt::format(
                "out: expected packed rows, got strides [{}, {}]", out.strides[0], out.strides[1])};
  }
  if (out.device != Device::cpu()) {
    return {ErrorCode::kDeviceMismatch,
            fmt::format("out: expected memory of cpu, got {}", to_string(out.device))};
  }
  if (in.rows == 0 || in.cols == 0) return {};
  const int64_t element = size_of(out.dtype);
  HX_RETURN_IF_ERROR(check_pointer("out", out.data, in.rows * in.cols * element, element));
  HX_RETURN_IF_ERROR(check_dequantize_overlap(in, out));
  if (out.dtype == DType::kF32) {
    dequantize_rows(in, out.as<float>());
  } else {
    dequantize_rows(in, out.as<uint16_t>());
  }
  return {};
}

}  // namespace hexpert

#include "hexpert/quantize.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "backend/backend.hpp"
#include "core/threads.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/kernels.hpp"
#include "cpu/quantize_row.hpp"
#include "format/layout.hpp"
#include "quantize/check.hpp"
#include "quantize/four_over_six.hpp"

namespace hexpert {
namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kElementsPerThread = 1 << 15;

int threads_for(int64_t elements, int requested) {
  return static_cast<int>(
      std::clamp<int64_t>(elements / kElementsPerThread, 1, threads_or_default(requested)));
}

Status check_options(const QuantizeOptions& options) {
  HX_RETURN_IF_ERROR(check_num_threads("num_threads", options.num_threads));
  if (options.four_over_six.has_value()) {
    const float e4m3_max = options.four_over_six->e4m3_max;
    if (e4m3_max != 448.0F && e4m3_max != 256.0F) {
      return {ErrorCode::kInvalidArgument,
              fmt::format("e4m3_max: expected 448 or 256, got {}", e4m3_max)};
    }
  }
  return {};
}

Status check_out(const Nvfp4View& out, int64_t rows, int64_t cols, bool per_row) {
  if (out.rows != rows || out.cols != cols) {
    return {ErrorCode::kInvalidShape,
            fmt::format("out: expected [{}, {}], got [{}, {}]", rows, cols, out.rows, out.cols)};
  }
  if (out.per_row != per_row) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("out.per_row: expected {}, got {}", per_row, out.per_row)};
  }
  return check_nvfp4("out", as_const(out), true);
}

// Any number of rows of one matrix.
struct Source {
  const uint16_t* data;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  const uint16_t* row(int64_t r) const { return data + r * stride; }
};

Source source_of(const ConstTensorView& view) {
  return {view.as<uint16_t>(), view.shape[0], view.shape[1], view.strides[0]};
}

// `size` values, then zeros up to `padded`.
void quantize_span(const cpu::Kernels& kernels,
                   const uint16_t* x,
                   int64_t size,
                   int64_t padded,
                   const FourOverSixScale& scale,
                   bool four_over_six,
                   uint8_t* codes,
                   uint8_t* scales) {
  if (!four_over_six) {
    const uint16_t* ahead = x + cpu::kRowsAhead * size;
    cpu::quantize_padded_row(kernels, x, size, padded, scale.outer, codes, scales, ahead);
    return;
  }
  for (int64_t begin = 0; begin < padded; begin += kBlockSize) {
    uint16_t block[kBlockSize] = {};
    if (begin < size) std::copy_n(x + begin, std::min(kBlockSize, size - begin), block);
    scales[begin / kBlockSize] = quantize_block(block, scale, codes + begin / 2);
  }
}

void quantize_row(const cpu::Kernels& kernels,
                  const Source& source,
                  int64_t row,
                  const FourOverSixScale& scale,
                  bool four_over_six,
                  const Nvfp4View& out) {
  const uint16_t* x = source.row(row);
  uint8_t* codes = out.codes + row * (out.cols / 2);
  const int64_t columns = out.cols / kBlockSize;
  if (out.scale_layout == ScaleLayout::kLinear) {
    quantize_span(kernels,
                  x,
                  source.cols,
                  out.cols,
                  scale,
                  four_over_six,
                  codes,
                  out.block_scales + row * columns);
    return;
  }
  // Scales of a tiled layout are scattered; they pass through a small buffer.
  constexpr int64_t kSpan = 4096;
  uint8_t scales[kSpan / kBlockSize];
  for (int64_t begin = 0; begin < out.cols; begin += kSpan) {
    const int64_t padded = std::min(kSpan, out.cols - begin);
    const int64_t size = std::clamp<int64_t>(source.cols - begin, 0, padded);
    quantize_span(
        kernels, x + begin, size, padded, scale, four_over_six, codes + begin / 2, scales);
    for (int64_t i = 0; i < padded / kBlockSize; ++i) {
      const int64_t column = begin / kBlockSize + i;
      out.block_scales[layout::scale_offset(out.scale_layout, row, column, columns)] = scales[i];
    }
  }
}

void clear_padding(const Nvfp4View& out) {
  if (out.scale_layout == ScaleLayout::kLinear || out.rows == 0) return;
  std::memset(out.block_scales,
              0,
              static_cast<size_t>(block_scale_bytes(out.scale_layout, out.rows, out.cols)));
}

FourOverSixScale scale_of(const QuantizeOptions& options, bool per_row, uint16_t amax_bits) {
  if (options.four_over_six.has_value()) {
    return four_over_six_scale(*options.four_over_six, per_row, amax_bits);
  }
  FourOverSixScale scale;
  scale.outer = per_row ? token_scale(amax_bits) : matrix_scale(amax_bits);
  return scale;
}

// The backend that quantizes tokens in memory of `device`.
Result<const Backend*> device_quantizer(const Device& device) {
  Result<const Backend*> backend = find_backend("", device);
  if (backend.ok() && (*backend)->quantize_tokens == nullptr) {
    return Status(ErrorCode::kUnsupportedDevice,
                  fmt::format("hidden_states: {} does not quantize tokens", (*backend)->name));
  }
  return backend;
}

// On another device than the CPU; everything is checked but what only that device can tell.
Status quantize_tokens_there(const ConstTensorView& hidden_states,
                             const Nvfp4View& out,
                             const QuantizeOptions& options) {
  if (options.four_over_six.has_value()) {
    return {ErrorCode::kUnsupported,
            fmt::format("four_over_six: expected none on {}, only the cpu has it",
                        to_string(hidden_states.device))};
  }
  if (out.scale_layout != ScaleLayout::kLinear) {
    return {
        ErrorCode::kUnsupported,
        fmt::format("out.scale_layout: expected linear scales on {}, only the cpu writes others",
                    to_string(hidden_states.device))};
  }
  const Result<const Backend*> backend = device_quantizer(hidden_states.device);
  if (!backend.ok()) return backend.status();
  if (hidden_states.shape[0] == 0) return {};
  if ((*backend)->check_memory != nullptr) {
    const auto check = [&](std::string_view name, const void* data) {
      return (*backend)->check_memory(name, data, hidden_states.device);
    };
    HX_RETURN_IF_ERROR(check("hidden_states", hidden_states.data));
    HX_RETURN_IF_ERROR(check("out.codes", out.codes));
    HX_RETURN_IF_ERROR(check("out.block_scales", out.block_scales));
    HX_RETURN_IF_ERROR(check("out.outer", out.outer));
  }
  return (*backend)->quantize_tokens(hidden_states, out, options.stream);
}

}  // namespace

Status quantize_tokens(const ConstTensorView& hidden_states,
                       int64_t padded_hidden_size,
                       const Nvfp4View& out,
                       const QuantizeOptions& options) {
  HX_RETURN_IF_ERROR(check_bf16_matrix("hidden_states", hidden_states, true, hidden_states.device));
  if (padded_hidden_size < hidden_states.shape[1] || padded_hidden_size % kBlockSize != 0) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("padded_hidden_size: expected a multiple of {} and at least {}, got {}",
                        kBlockSize,
                        hidden_states.shape[1],
                        padded_hidden_size)};
  }
  HX_RETURN_IF_ERROR(check_options(options));
  HX_RETURN_IF_ERROR(check_out(out, hidden_states.shape[0], padded_hidden_size, true));
  HX_RETURN_IF_ERROR(check_quantize_overlap("hidden_states", hidden_states, out));
  if (hidden_states.device != Device::cpu()) {
    return quantize_tokens_there(hidden_states, out, options);
  }

  const Source source = source_of(hidden_states);
  const cpu::Kernels& kernels = cpu::best_kernels();
  const bool four_over_six = options.four_over_six.has_value();
  clear_padding(out);
#pragma omp parallel num_threads(threads_for(source.rows* source.cols, options.num_threads))
  {
    const cpu::FloatEnvironment environment;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < source.rows; ++row) {
      const FourOverSixScale scale =
          scale_of(options, true, kernels.amax_bits(source.row(row), source.cols));
      quantize_row(kernels, source, row, scale, four_over_six, out);
      out.outer[row] = scale.outer.stored;
    }
  }
  return {};
}

Status quantize_matrix(const ConstTensorView& matrix,
                       const Nvfp4View& out,
                       const QuantizeOptions& options) {
  HX_RETURN_IF_ERROR(check_bf16_matrix("matrix", matrix, false));
  if (matrix.shape[1] % kBlockSize != 0) {
    return {
        ErrorCode::kInvalidShape,
        fmt::format(
            "matrix: expected columns in multiples of {}, got {}", kBlockSize, matrix.shape[1])};
  }
  HX_RETURN_IF_ERROR(check_options(options));
  HX_RETURN_IF_ERROR(check_out(out, matrix.shape[0], matrix.shape[1], false));
  HX_RETURN_IF_ERROR(check_quantize_overlap("matrix", matrix, out));

  const Source source = source_of(matrix);
  const cpu::Kernels& kernels = cpu::best_kernels();
  const bool four_over_six = options.four_over_six.has_value();
  // NOLINTNEXTLINE(clang-analyzer-deadcode.DeadStores): only the OpenMP clauses read it
  const int threads = threads_for(source.rows * source.cols, options.num_threads);
  uint16_t amax_bits = 0;
#pragma omp parallel for num_threads(threads) reduction(max : amax_bits) schedule(static)
  for (int64_t row = 0; row < source.rows; ++row) {
    amax_bits = std::max(amax_bits, kernels.amax_bits(source.row(row), source.cols));
  }
  FourOverSixScale scale;
  {
    const cpu::FloatEnvironment environment;
    scale = scale_of(options, false, amax_bits);
  }
  clear_padding(out);
#pragma omp parallel num_threads(threads)
  {
    const cpu::FloatEnvironment environment;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < source.rows; ++row)
      quantize_row(kernels, source, row, scale, four_over_six, out);
  }
  out.outer[0] = scale.outer.stored;
  return {};
}

}  // namespace hexpert

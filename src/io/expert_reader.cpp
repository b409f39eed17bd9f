#include "io/expert_reader.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/threads.hpp"
#include "format/codec.hpp"
#include "format/layout.hpp"
#include "io/io_support.hpp"
#include "io/mapped_file.hpp"

namespace hexpert::io {
namespace {

constexpr uint16_t kBf16Infinity = 0x7F80;

uint16_t to_bf16(const uint8_t* element, DType dtype) {
  uint16_t half = 0;
  float single = 0;
  switch (dtype) {
    case DType::kF32:
      std::memcpy(&single, element, sizeof(single));
      return bf16_from_f32(single);
    case DType::kF16:
      std::memcpy(&half, element, sizeof(half));
      return bf16_from_f32(f16_to_f32(half));
    default:
      std::memcpy(&half, element, sizeof(half));
      return half;
  }
}

// A tile of rows [first, last) of a matrix, rounded to BF16. Tiles keep a transposed source in
// cache.
void convert_rows(const ProjectionSource& source,
                  DType dtype,
                  int64_t first,
                  int64_t last,
                  uint16_t* out,
                  int64_t stride) {
  constexpr int64_t kTile = 64;
  const int64_t width = size_of(dtype);
  if (source.col_stride == 1) {
    for (int64_t r = first; r < last; ++r) {
      const uint8_t* row = source.weights + r * source.row_stride * width;
      if (dtype == DType::kBF16) {
        std::memcpy(out + r * stride, row, static_cast<std::size_t>(source.cols * width));
        continue;
      }
      for (int64_t c = 0; c < source.cols; ++c)
        out[r * stride + c] = to_bf16(row + c * width, dtype);
    }
    return;
  }
  for (int64_t begin = 0; begin < source.cols; begin += kTile) {
    const int64_t end = std::min(begin + kTile, source.cols);
    for (int64_t c = begin; c < end; ++c) {
      const uint8_t* column = source.weights + c * source.col_stride * width;
      for (int64_t r = first; r < last; ++r) {
        out[r * stride + c] = to_bf16(column + r * source.row_stride * width, dtype);
      }
    }
  }
}

bool all_finite(const uint16_t* values, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, static_cast<uint16_t>(values[i] & 0x7FFF));
  return largest < kBf16Infinity;
}

// Why the first value that is not finite in BF16 is refused.
std::string nonfinite_text(const ProjectionSource& source,
                           DType dtype,
                           const uint16_t* values,
                           int64_t stride) {
  for (int64_t i = 0; i < source.rows * source.cols; ++i) {
    const int64_t r = i / source.cols;
    const int64_t c = i % source.cols;
    const uint16_t value = values[r * stride + c] & 0x7FFF;
    if (value < kBf16Infinity) continue;
    std::string text =
        "[" + std::to_string(r) + ", " + std::to_string(c) + "]: expected finite, got ";
    if (value > kBf16Infinity) return text + "NaN";
    if (dtype == DType::kF32) {
      float single = 0;
      std::memcpy(&single, source.weights + (r * source.row_stride + c * source.col_stride) * 4, 4);
      if (std::isfinite(single)) return text + std::to_string(single) + ", past the largest BF16";
    }
    return text + "infinity";
  }
  return {};
}

// Source rows -> BF16 rows of `stride`, zero past the columns.
Status read_matrix(
    const ProjectionSource& source, DType dtype, int num_threads, uint16_t* out, int64_t stride) {
  constexpr int64_t kRowsPerTask = 64;
  const int64_t tasks = (source.rows + kRowsPerTask - 1) / kRowsPerTask;
  bool finite = true;
  // A small matrix is read before a second thread has woken.
#pragma omp parallel for num_threads(num_threads) if (tasks > 4) reduction(&& : finite)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t first = task * kRowsPerTask;
    const int64_t last = std::min(first + kRowsPerTask, source.rows);
    convert_rows(source, dtype, first, last, out, stride);
    for (int64_t r = first; r < last; ++r)
      std::fill(out + r * stride + source.cols, out + (r + 1) * stride, uint16_t{0});
    finite = finite && all_finite(out + first * stride, (last - first) * stride);
  }
  if (finite) return Status::success();
  return {ErrorCode::kNonFiniteWeights, nonfinite_text(source, dtype, out, stride)};
}

void release_matrix(const ProjectionSource& source, int64_t width) {
  // The bytes of a transposed matrix lie among those of the other half: all of them go.
  const int64_t count =
      (source.rows - 1) * source.row_stride + (source.cols - 1) * source.col_stride + 1;
  release_pages(source.weights, count * width);
}

// Canonical order -> checkpoint order.
void gather_canonical(const ProjectionSource& source,
                      const ExpertShape& shape,
                      bool fc2,
                      uint8_t* codes,
                      uint8_t* scales) {
  const int64_t padded = fc2 ? shape.padded_intermediate_size() : shape.padded_hidden_size();
  const int64_t blocks = round_up(source.cols, kBlockSize) / kBlockSize;
  for (int64_t r = 0; r < source.rows; ++r) {
    const int64_t prepared =
        fc2 || !shape.gated ? r
                            : layout::gated_row(source.gate_rows, r, layout::kCanonicalInterleave);
    std::memcpy(codes + r * blocks * 8,
                source.weights + prepared * padded / 2,
                static_cast<std::size_t>(blocks * 8));
    for (int64_t b = 0; b < blocks; ++b) {
      scales[r * blocks + b] =
          source.block_scales[layout::offset_128x4(prepared, b, padded / kBlockSize)];
    }
  }
}

// Codes past the last column, up to the end of its block, must be zeros.
bool padding_is_zero(const uint8_t* codes, int64_t rows, int64_t cols) {
  const int64_t stored = round_up(cols, kBlockSize);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = cols; c < stored; ++c) {
      const uint8_t pair = codes[(r * stored + c) / 2];
      if (((c % 2 == 0 ? pair : pair >> 4) & 7) != 0) return false;
    }
  }
  return true;
}

}  // namespace

ExpertReader::ExpertReader(const LayerSource& layer, int num_threads)
    : layer_(layer), num_threads_(threads_or_default(num_threads)) {}

Status ExpertReader::read_dense(int64_t expert, int64_t column_multiple, DenseView* out) {
  const MoeLayerInfo& info = layer_.info;
  const std::optional<DType> dtype = dense_dtype(info.format);
  if (!dtype) {
    return {ErrorCode::kUnsupported,
            place_of(info.prefix) + "expected BF16, F16 or F32 weights, got " +
                std::string(to_string(info.format))};
  }
  const int64_t hidden = info.shape.hidden_size;
  const int64_t intermediate = info.shape.intermediate_size;
  const int64_t halves = info.shape.gated ? 2 : 1;
  const int64_t stride1 = round_up(hidden, column_multiple);
  const int64_t stride2 = round_up(intermediate, column_multiple);
  fc1_.resize(static_cast<std::size_t>(halves * intermediate * stride1));
  fc2_.resize(static_cast<std::size_t>(hidden * stride2));
  const ExpertSource& source = layer_.experts[static_cast<std::size_t>(expert)];
  const auto read = [&](const ProjectionSource& projection,
                        const char* name,
                        uint16_t* to,
                        int64_t stride) -> Status {
    Status done = read_matrix(projection, *dtype, num_threads_, to, stride);
    if (done.ok()) return done;
    return {done.code(), place_of(info.prefix, expert, name) + done.message()};
  };
  uint16_t* up = fc1_.data();
  if (info.shape.gated) {
    HX_RETURN_IF_ERROR(read(source.gate, "gate", fc1_.data(), stride1));
    up += intermediate * stride1;
  }
  HX_RETURN_IF_ERROR(read(source.up, "up", up, stride1));
  HX_RETURN_IF_ERROR(read(source.down, "down", fc2_.data(), stride2));
  release(expert);
  out->fc1 = ConstTensorView(fc1_.data(), DType::kBF16, {halves * intermediate, stride1});
  out->fc2 = ConstTensorView(fc2_.data(), DType::kBF16, {hidden, stride2});
  return Status::success();
}

Status ExpertReader::read_quantized(int64_t expert, QuantizedExpert* out) {
  return is_nvfp4(layer_.info.format) ? take_quantized(expert, out) : quantize(expert, out);
}

// Gate and up rows are quantized as one matrix: they share amax by definition.
Status ExpertReader::quantize(int64_t expert, QuantizedExpert* out) {
  DenseView dense;
  HX_RETURN_IF_ERROR(read_dense(expert, kBlockSize, &dense));
  const ConstTensorView* matrices[] = {&dense.fc1, &dense.fc2};
  for (std::size_t i = 0; i < 2; ++i) {
    const int64_t rows = matrices[i]->shape[0];
    const int64_t cols = matrices[i]->shape[1];
    codes_[i].resize(static_cast<std::size_t>(rows * cols / 2));
    scales_[i].resize(static_cast<std::size_t>(rows * cols / kBlockSize));
    const Nvfp4View view{codes_[i].data(), scales_[i].data(), &alpha_[i], rows, cols, false};
    QuantizeOptions options;
    options.num_threads = num_threads_;
    HX_RETURN_IF_ERROR(quantize_matrix(*matrices[i], view, options));
  }
  const int64_t half = layer_.info.shape.gated ? layer_.info.shape.intermediate_size : 0;
  const int64_t cols = dense.fc1.shape[1];
  out->gate = {codes_[0].data(), scales_[0].data(), alpha_[0]};
  out->up = {
      codes_[0].data() + half * cols / 2, scales_[0].data() + half * cols / kBlockSize, alpha_[0]};
  out->down = {codes_[1].data(), scales_[1].data(), alpha_[1]};
  return Status::success();
}

Result<ErrorStats> ExpertReader::error() const {
  const ExpertShape& shape = layer_.info.shape;
  const int64_t rows[] = {shape.intermediate_size * (shape.gated ? 2 : 1), shape.hidden_size};
  const int64_t cols[] = {shape.hidden_size, shape.intermediate_size};
  const uint16_t* values[] = {fc1_.data(), fc2_.data()};
  ErrorStats total;
  for (std::size_t i = 0; i < 2; ++i) {
    const int64_t stored = round_up(cols[i], kBlockSize);
    ConstTensorView original(values[i], DType::kBF16, {rows[i], cols[i]});
    original.strides[0] = stored;
    const ConstNvfp4View view{
        codes_[i].data(), scales_[i].data(), &alpha_[i], rows[i], stored, false};
    const Result<ErrorStats> part = error_stats(original, view);
    if (!part.ok()) return part.status();
    total.merge(*part);
  }
  return total;
}

Status ExpertReader::take_projection(int64_t expert,
                                     const char* name,
                                     const ProjectionSource& source,
                                     Buffer<uint8_t>* codes,
                                     Buffer<uint8_t>* scales,
                                     QuantizedProjection* out) {
  const MoeLayerInfo& info = layer_.info;
  const std::string place = place_of(info.prefix, expert, name);
  const int64_t blocks = round_up(source.cols, kBlockSize) / kBlockSize;
  out->codes = source.weights;
  out->block_scales = source.block_scales;
  if (info.format == WeightFormat::kCanonical) {
    codes->resize(static_cast<std::size_t>(source.rows * blocks * 8));
    scales->resize(static_cast<std::size_t>(source.rows * blocks));
    const bool fc2 = codes == &codes_[2];
    gather_canonical(source, info.shape, fc2, codes->data(), scales->data());
    out->codes = codes->data();
    out->block_scales = scales->data();
  }
  std::memcpy(&out->alpha, source.outer, sizeof(float));
  const float stored = out->alpha;
  if (info.format == WeightFormat::kCompressedTensors) out->alpha = 1.0F / stored;
  if (!std::isfinite(stored) || !std::isfinite(out->alpha) || out->alpha < 0) {
    return {ErrorCode::kNonFiniteWeights,
            place + "expected a finite global scale, not negative, got " + std::to_string(stored)};
  }
  for (int64_t i = 0; i < source.rows * blocks; ++i) {
    const uint8_t scale = out->block_scales[i];
    if (scale < kE4M3Nan) continue;
    return {ErrorCode::kNonFiniteWeights,
            place + "block scale [" + std::to_string(i / blocks) + ", " +
                std::to_string(i % blocks) + "]: expected 0x00..0x7E, got byte " +
                std::to_string(scale) + ((scale & 0x7F) == kE4M3Nan ? " (NaN)" : " (negative)")};
  }
  if (!padding_is_zero(out->codes, source.rows, source.cols)) {
    return {ErrorCode::kInvalidFile,
            place + "expected zeros past column " + std::to_string(source.cols)};
  }
  return Status::success();
}

Status ExpertReader::take_quantized(int64_t expert, QuantizedExpert* out) {
  const ExpertSource& source = layer_.experts[static_cast<std::size_t>(expert)];
  if (layer_.info.shape.gated) {
    HX_RETURN_IF_ERROR(
        take_projection(expert, "gate", source.gate, &codes_[0], &scales_[0], &out->gate));
  }
  HX_RETURN_IF_ERROR(take_projection(expert, "up", source.up, &codes_[1], &scales_[1], &out->up));
  return take_projection(expert, "down", source.down, &codes_[2], &scales_[2], &out->down);
}

void ExpertReader::release(int64_t expert) const {
  const ExpertSource& source = layer_.experts[static_cast<std::size_t>(expert)];
  const std::optional<DType> dtype = dense_dtype(layer_.info.format);
  for (const ProjectionSource* projection : {&source.gate, &source.up, &source.down}) {
    if (projection->weights == nullptr) continue;
    if (dtype) {
      release_matrix(*projection, size_of(*dtype));
    } else {
      const int64_t blocks =
          projection->rows * (round_up(projection->cols, kBlockSize) / kBlockSize);
      release_pages(projection->weights, blocks * 8);
      release_pages(projection->block_scales, blocks);
    }
  }
}

}  // namespace hexpert::io

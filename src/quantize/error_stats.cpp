#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/float_environment.hpp"
#include "format/layout.hpp"
#include "hexpert/quantize.hpp"
#include "quantize/check.hpp"

namespace hexpert {
namespace {

// NaN wins, and stays.
double largest(double a, double b) {
  return b > a || std::isnan(b) ? b : a;
}

// One block: `count` values of it exist, the rest is padding.
void add_block(const uint16_t* x,
               int64_t count,
               const uint8_t* codes,
               uint8_t scale_code,
               float outer,
               ErrorStats& stats) {
  const float scale = e4m3_value(scale_code);
  double values[16];
  for (unsigned code = 0; code < 16; ++code)
    values[code] = static_cast<double>(e2m1_value(code) * scale * outer);
  bool any_nonzero = false;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = x[i] & 0x7FFF;
    any_nonzero = any_nonzero || magnitude != 0;
    if (magnitude >= 0x7F80) {
      ++stats.nonfinite;
      continue;
    }
    const double original = static_cast<double>(bf16_to_f32(x[i]));
    const double quantized = values[codes[i / 2] >> (i % 2 * 4) & 15];
    const double error = quantized - original;
    stats.signal += original * original;
    stats.noise += error * error;
    stats.dot += quantized * original;
    stats.quantized += quantized * quantized;
    stats.max_error = largest(stats.max_error, std::fabs(error));
    stats.nonzero += magnitude != 0 ? 1 : 0;
    stats.rounded_to_zero += magnitude != 0 && quantized == 0 ? 1 : 0;
  }
  stats.elements += count;
  stats.blocks += 1;
  stats.zero_scales += scale_code == 0 && any_nonzero ? 1 : 0;
  stats.saturated_scales += scale_code == kE4M3MaxCode ? 1 : 0;
}

void add_row(
    const uint16_t* x, int64_t cols, const ConstNvfp4View& q, int64_t row, ErrorStats& stats) {
  const int64_t columns = q.cols / kBlockSize;
  const uint8_t* codes = q.codes + row * (q.cols / 2);
  const float outer = q.outer[q.per_row ? row : 0];
  for (int64_t begin = 0; begin < cols; begin += kBlockSize) {
    const int64_t offset = layout::scale_offset(q.scale_layout, row, begin / kBlockSize, columns);
    add_block(x + begin,
              std::min(kBlockSize, cols - begin),
              codes + begin / 2,
              q.block_scales[offset],
              outer,
              stats);
  }
}

}  // namespace

double ErrorStats::snr_db() const {
  if (noise == 0) return std::numeric_limits<double>::infinity();
  return 10.0 * std::log10(signal / noise);
}

double ErrorStats::relative_l2() const {
  return noise == 0 ? 0.0 : std::sqrt(noise / signal);
}

double ErrorStats::cosine() const {
  if (signal == 0 && quantized == 0) return 1.0;
  if (signal == 0 || quantized == 0) return 0.0;
  return dot / (std::sqrt(signal) * std::sqrt(quantized));
}

void ErrorStats::merge(const ErrorStats& other) {
  elements += other.elements;
  signal += other.signal;
  noise += other.noise;
  max_error = largest(max_error, other.max_error);
  dot += other.dot;
  quantized += other.quantized;
  nonzero += other.nonzero;
  rounded_to_zero += other.rounded_to_zero;
  blocks += other.blocks;
  zero_scales += other.zero_scales;
  saturated_scales += other.saturated_scales;
  nonfinite += other.nonfinite;
}

Result<ErrorStats> error_stats(const ConstTensorView& original, const ConstNvfp4View& quantized) {
  HX_RETURN_IF_ERROR(check_bf16_matrix("original", original, true));
  HX_RETURN_IF_ERROR(check_nvfp4("quantized", quantized, false));
  const int64_t rows = original.shape[0];
  const int64_t cols = original.shape[1];
  if (quantized.rows != rows || quantized.cols < cols) {
    return Status(ErrorCode::kShapeMismatch,
                  fmt::format("quantized: expected {} rows and at least {} columns to match "
                              "original, got [{}, {}]",
                              rows,
                              cols,
                              quantized.rows,
                              quantized.cols));
  }
  // Sums depend on their order: parts of a fixed size are merged in order, whatever the threads.
  const int64_t rows_per_part = std::max<int64_t>(1, (1 << 16) / cols);
  const int64_t parts = (rows + rows_per_part - 1) / rows_per_part;
  const auto* x = original.as<uint16_t>();
  ErrorStats total;
#pragma omp parallel if (parts > 1)
  {
    const cpu::FloatEnvironment environment;
#pragma omp for ordered schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) {
      ErrorStats stats;
      const int64_t end = std::min(rows, (part + 1) * rows_per_part);
      for (int64_t row = part * rows_per_part; row < end; ++row)
        add_row(x + row * original.strides[0], cols, quantized, row, stats);
#pragma omp ordered
      total.merge(stats);
    }
  }
  return total;
}

}  // namespace hexpert

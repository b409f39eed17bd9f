#include "agreement.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

#include "format/codec.hpp"

namespace hexpert::tools {
namespace {

// Position on the line of representable values: adjacent values differ by 1, both zeros are 0.
int64_t ordinal(uint32_t bits, int width) {
  const uint32_t sign = 1U << (width - 1);
  const auto magnitude = static_cast<int64_t>(bits & (sign - 1));
  return (bits & sign) != 0 ? -magnitude : magnitude;
}

}  // namespace

bool Agreement::ok() const {
  const int64_t outliers = rows - rows_within;
  const int64_t allowed = rows < 20 ? 1 : rows / 20;
  return outliers <= allowed && worst_row_l2 <= kWorstRow && wrong_zero_rows == 0 &&
         nan_mismatches == 0 && (rows < 64 || relative_l2 <= kWhole);
}

double Agreement::equal_share() const {
  return elements == 0 ? 1.0 : static_cast<double>(equal) / static_cast<double>(elements);
}

std::string Agreement::describe() const {
  std::string text = fmt::format("relative L2 {:.1e}, worst row {:.1e}", relative_l2, worst_row_l2);
  if (worst_row >= 0) text += fmt::format(" (row {})", worst_row);
  text +=
      fmt::format(", {:.2f} % equal, largest difference {} ulp", 100 * equal_share(), largest_ulp);
  if (wrong_zero_rows > 0) text += fmt::format(", {} rows should be zero", wrong_zero_rows);
  if (nan_mismatches > 0) text += fmt::format(", {} NaN or infinity mismatches", nan_mismatches);
  return text;
}

Agreement compare(const ConstTensorView& reference, const ConstTensorView& candidate) {
  const int64_t rows = reference.shape[0];
  const int64_t cols = reference.shape[1];
  const bool f32 = reference.dtype == DType::kF32;
  const auto bits_at = [f32](const ConstTensorView& view, int64_t i) -> uint32_t {
    return f32 ? view.as<uint32_t>()[i] : view.as<uint16_t>()[i];
  };
  const auto value_of = [f32](uint32_t bits) {
    return f32 ? std::bit_cast<float>(bits) : bf16_to_f32(static_cast<uint16_t>(bits));
  };
  Agreement a;
  a.elements = rows * cols;
  double all_noise = 0;
  double all_signal = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double noise = 0;
    double signal = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
      const uint32_t expected_bits = bits_at(reference, i);
      const uint32_t got_bits = bits_at(candidate, i);
      const float expected = value_of(expected_bits);
      const float got = value_of(got_bits);
      a.equal += static_cast<int64_t>(expected_bits == got_bits);
      if (!std::isfinite(expected) || !std::isfinite(got)) {
        const bool same = expected == got || (std::isnan(expected) && std::isnan(got));
        a.nan_mismatches += static_cast<int64_t>(!same);
        continue;
      }
      const int width = f32 ? 32 : 16;
      a.largest_ulp = std::max(a.largest_ulp,
                               std::abs(ordinal(expected_bits, width) - ordinal(got_bits, width)));
      const double difference = static_cast<double>(got) - static_cast<double>(expected);
      noise += difference * difference;
      signal += static_cast<double>(expected) * static_cast<double>(expected);
    }
    all_noise += noise;
    all_signal += signal;
    if (signal == 0) {
      a.wrong_zero_rows += static_cast<int64_t>(noise != 0);
      continue;
    }
    const double l2 = std::sqrt(noise / signal);
    ++a.rows;
    a.rows_within += static_cast<int64_t>(l2 <= Agreement::kRowL2);
    if (l2 > a.worst_row_l2 || a.worst_row < 0) {
      a.worst_row_l2 = l2;
      a.worst_row = r;
    }
  }
  a.relative_l2 = all_signal == 0 ? 0 : std::sqrt(all_noise / all_signal);
  return a;
}

}  // namespace hexpert::tools

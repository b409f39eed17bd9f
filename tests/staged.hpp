// Judges a backend stage by stage: each stage of the reference is fed the backend's own previous
// result, so that one rounding flip neither hides nor excuses anything.
//
//   quantized rows      bytes and token scales equal
//   FC1 + activation    >= 99.9 % of the BF16 values equal, all within 1 BF16 step of what the exact
//                       sum gives when it moves by 2^-20 * scale * sum |block terms|
//   FC2                 likewise
//   combine             bits equal
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <vector>

#include "format/layout.hpp"
#include "moe/activation.hpp"
#include "moe/reference.hpp"
#include "moe_case.hpp"

namespace hexpert::test {

// Sum and sum of magnitudes of the block terms of one weight row times one activation row.
struct BlockSums {
  double sum = 0;
  double magnitude = 0;
};
inline BlockSums block_sums(const reference::QuantizedRow& row,
                            const uint8_t* group,
                            int64_t n,
                            int64_t k) {
  namespace tiles = layout::cpu_tiles;
  BlockSums sums;
  for (int64_t block = 0; block < k / 16; ++block) {
    double dot = 0;
    for (int64_t i = 16 * block; i < 16 * block + 16; ++i) {
      const uint8_t w = group[tiles::code_offset(n, i)];
      const unsigned w_code = tiles::nibble_is_high(i) ? w >> 4 : w & 15U;
      const unsigned x_code = i % 2 == 0 ? row.codes[i / 2] & 15U : row.codes[i / 2] >> 4;
      dot += static_cast<double>(e2m1_value(w_code)) * static_cast<double>(e2m1_value(x_code));
    }
    const double term = dot * static_cast<double>(e4m3_value(row.block_scales[block])) *
                        static_cast<double>(e4m3_value(group[tiles::scale_offset(n, block)]));
    sums.sum += term;
    sums.magnitude += std::fabs(term);
  }
  return sums;
}

// Range of BF16 values that an FP32 computation may give.
struct Bf16Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  void add(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  bool accepts(uint16_t value) const {
    const auto ordered = [](double v) {
      const uint16_t bits = bf16(v);
      return (bits & 0x8000) != 0 ? -static_cast<int>(bits & 0x7FFF) : static_cast<int>(bits);
    };
    const int v = ordered(static_cast<double>(bf16_to_f32(value)));
    return v >= ordered(low) - 1 && v <= ordered(high) + 1;
  }
};

class StagedCheck {
 public:
  StagedCheck(const MoeCase& c, const ExpertWeights& weights, const MoeData& data, int64_t rows)
      : case_(c), storage_(weights.storage()), data_(data), rows_(rows) {}

  // `exact` is the reference's run of the same inputs, `actual` the backend's.
  void expect(MoeRun& exact, MoeRun& actual) {
    for (int64_t token = 0; token < rows_; ++token)
      expect_quantized_token(exact, actual, token);
    if (::testing::Test::HasFailure()) return;
    int64_t elements = 0;
    int64_t fc1_differ = 0;
    int64_t fc2_differ = 0;
    for (int64_t route = 0; route < rows_ * case_.top_k; ++route) {
      const int64_t expert = data_.local_expert(case_, route);
      if (expert < 0) continue;
      elements += case_.intermediate_size;
      fc1_differ += expect_fc1(exact, actual, route, expert);
      expect_requantized(actual, route);
      fc2_differ += expect_fc2(exact, actual, route, expert);
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_LE(fc1_differ, 2 + elements / 1000) << "of " << elements;
    EXPECT_LE(fc2_differ, 2 + elements / case_.intermediate_size * case_.hidden_size / 1000);
    for (int64_t token = 0; token < rows_; ++token)
      expect_combined(actual, token);
    expect_rest_poisoned(actual);
  }

 private:
  static reference::QuantizedRow x_row(MoeRun& r, int64_t token) {
    return {r.x_codes.data() + token * r.hidden_cols / 2,
            r.x_block_scales.data() + token * r.hidden_cols / 16,
            r.x_token_scale[token]};
  }
  static reference::QuantizedRow h_row(MoeRun& r, int64_t route) {
    return {r.h_codes.data() + route * r.intermediate_cols / 2,
            r.h_block_scales.data() + route * r.intermediate_cols / 16,
            r.h_token_scale[route]};
  }
  static bool same_row(const reference::QuantizedRow& a,
                       const reference::QuantizedRow& b,
                       int64_t cols) {
    return std::memcmp(a.codes, b.codes, static_cast<std::size_t>(cols / 2)) == 0 &&
           std::memcmp(a.block_scales, b.block_scales, static_cast<std::size_t>(cols / 16)) == 0 &&
           f32_bits(a.token_scale) == f32_bits(b.token_scale);
  }
  // Equal, or both NaN.
  static bool same_value(uint16_t a, uint16_t b) {
    return a == b || (std::isnan(bf16_to_f32(a)) && std::isnan(bf16_to_f32(b)));
  }

  void expect_quantized_token(MoeRun& exact, MoeRun& actual, int64_t token) {
    EXPECT_TRUE(same_row(x_row(exact, token), x_row(actual, token), exact.hidden_cols))
        << "quantized token " << token;
  }

  int64_t expect_fc1(MoeRun& exact, MoeRun& actual, int64_t route, int64_t expert) {
    int64_t differ = 0;
    for (int64_t j = 0; j < actual.intermediate_cols; ++j) {
      const int64_t at = route * actual.intermediate_cols + j;
      if (same_value(exact.intermediate[at], actual.intermediate[at])) continue;
      ++differ;
      EXPECT_TRUE(fc1_range(actual, route, expert, j).accepts(actual.intermediate[at]))
          << "FC1 of slot " << route << " feature " << j << ": expected "
          << bf16_to_f32(exact.intermediate[at]) << ", got "
          << bf16_to_f32(actual.intermediate[at]);
    }
    return differ;
  }
  Bf16Range fc1_range(MoeRun& actual, int64_t route, int64_t expert, int64_t feature) {
    const reference::QuantizedRow x = x_row(actual, route / case_.top_k);
    const int64_t bytes = layout::cpu_tiles::group_bytes(storage_.hidden);
    const int64_t groups = case_.gated() ? 2 : 1;
    const uint8_t* group = storage_.fc1_expert(expert) + feature / 16 * groups * bytes;
    const auto e = static_cast<std::size_t>(expert);
    const auto scaled = [&](float alpha, const uint8_t* rows) {
      const double scale = static_cast<double>(alpha * x.token_scale);
      BlockSums sums = block_sums(x, rows, feature % 16, storage_.hidden);
      return BlockSums{sums.sum * scale, sums.magnitude * scale * 0x1p-20};
    };
    const BlockSums up = scaled(storage_.fc1_up_alpha[e], group);
    const BlockSums gate =
        case_.gated() ? scaled(storage_.fc1_gate_alpha[e], group + bytes) : BlockSums{};
    Bf16Range range;
    for (int du : {-1, 0, 1}) {
      for (int dg : {-1, 0, 1}) {
        range.add(activate(case_.activation,
                           static_cast<float>(up.sum + du * up.magnitude),
                           static_cast<float>(gate.sum + dg * gate.magnitude)));
      }
    }
    return range;
  }

  void expect_requantized(MoeRun& actual, int64_t route) {
    const int64_t cols = actual.intermediate_cols;
    std::vector<uint8_t> codes(static_cast<std::size_t>(cols / 2));
    std::vector<uint8_t> scales(static_cast<std::size_t>(cols / 16));
    reference::QuantizedRow expected{codes.data(), scales.data()};
    reference::quantize_row(actual.intermediate.data() + route * cols, cols, cols, expected);
    EXPECT_TRUE(same_row(expected, h_row(actual, route), cols)) << "requantized slot " << route;
  }

  int64_t expect_fc2(MoeRun& exact, MoeRun& actual, int64_t route, int64_t expert) {
    const int64_t hidden_size = case_.hidden_size;
    const reference::QuantizedRow h = h_row(actual, route);
    std::vector<uint16_t> recomputed(static_cast<std::size_t>(hidden_size));
    const uint16_t* expected = exact.route_output.data() + route * hidden_size;
    if (!same_row(h_row(exact, route), h, actual.intermediate_cols)) {
      reference::fc2(storage_, expert, h, recomputed.data());
      expected = recomputed.data();
    }
    const uint16_t* got = actual.route_output.data() + route * hidden_size;
    const int64_t bytes = layout::cpu_tiles::group_bytes(storage_.intermediate);
    int64_t differ = 0;
    for (int64_t n = 0; n < hidden_size; ++n) {
      if (same_value(expected[n], got[n])) continue;
      ++differ;
      const uint8_t* group = storage_.fc2_expert(expert) + n / 16 * bytes;
      const double scale =
          static_cast<double>(storage_.fc2_alpha[static_cast<std::size_t>(expert)] * h.token_scale);
      const BlockSums sums = block_sums(h, group, n % 16, storage_.intermediate);
      Bf16Range range;
      for (int d : {-1, 1})
        range.add(scale * (sums.sum + d * 0x1p-20 * sums.magnitude));
      EXPECT_TRUE(range.accepts(got[n]))
          << "FC2 of slot " << route << " column " << n << ": expected " << bf16_to_f32(expected[n])
          << ", got " << bf16_to_f32(got[n]);
    }
    return differ;
  }

  void expect_combined(MoeRun& actual, int64_t token) {
    const int64_t hidden_size = case_.hidden_size;
    std::vector<int64_t> experts;
    for (int64_t s = 0; s < case_.top_k; ++s) {
      experts.push_back(data_.local_expert(case_, token * case_.top_k + s));
    }
    for (int64_t n = 0; n < hidden_size; ++n) {
      const float expected =
          reference::combine(data_.probabilities.data() + token * case_.top_k,
                             experts.data(),
                             actual.route_output.data() + token * case_.top_k * hidden_size + n,
                             hidden_size,
                             case_.top_k);
      const int64_t at = token * hidden_size + n;
      const bool nan = std::isnan(expected);
      ASSERT_TRUE(nan ? std::isnan(actual.out[at]) : f32_bits(expected) == f32_bits(actual.out[at]))
          << "f32 output [" << token << ", " << n << "]: expected " << expected << ", got "
          << actual.out[at];
      ASSERT_TRUE(same_value(bf16_from_f32(expected), actual.out_bf16[at]))
          << "bf16 output [" << token << ", " << n << "]: expected " << expected << ", got "
          << bf16_to_f32(actual.out_bf16[at]);
    }
  }

  // Rows past the active ones, and intermediate results of slots that are not local.
  void expect_rest_poisoned(const MoeRun& actual) {
    const int64_t hidden_size = case_.hidden_size;
    for (int64_t at = rows_ * hidden_size; at < actual.out.size(); ++at) {
      ASSERT_EQ(f32_bits(actual.out[at]), MoeRun::kUnwritten);
      ASSERT_EQ(actual.out_bf16[at], MoeRun::kUnwrittenBf16);
    }
    for (int64_t route = 0; route < case_.tokens * case_.top_k; ++route) {
      if (route < rows_ * case_.top_k && data_.local_expert(case_, route) >= 0) continue;
      ASSERT_EQ(f32_bits(actual.h_token_scale[route]), 0xA5A5A5A5U) << "slot " << route;
      ASSERT_EQ(actual.route_output[route * hidden_size], 0xA5A5) << "slot " << route;
      ASSERT_EQ(actual.intermediate[route * actual.intermediate_cols], 0xA5A5) << "slot " << route;
    }
  }

  MoeCase case_;
  const ExpertWeights::Storage& storage_;
  const MoeData& data_;
  int64_t rows_;
};

inline int reference_threads() {
  return tested_device.type == DeviceType::kCpu ? 2 : omp_get_max_threads();
}

// Runs every available backend on the case and judges it against the reference. Backends that
// promise the same bits as each other are compared bit for bit.
inline void expect_every_backend(const MoeCase& c,
                                 const ExpertWeights& weights,
                                 const MoeData& data,
                                 const MoeInputs& inputs) {
  std::ostringstream title;
  title << c;
  SCOPED_TRACE(title.str());
  int64_t rows = c.tokens;
  if (inputs.use_bounded_rows && inputs.token_capacity) {
    rows = std::min(rows, *inputs.token_capacity);
  }
  const std::unique_ptr<MoeRun> exact = run("reference", c, weights, inputs, reference_threads());
  StagedCheck check(c, weights, data, rows);
  std::unique_ptr<MoeRun> integer;  // of the first backend that adds integer block sums
  for (const std::string& backend : available_backends()) {
    SCOPED_TRACE(backend);
    if (backend == "reference") {  // its combine, and the rows it must not write
      check.expect(*exact, *exact);
      continue;
    }
    std::unique_ptr<MoeRun> actual = run(backend, c, weights, inputs);
    check.expect(*exact, *actual);
    if (tested_device.type != DeviceType::kCpu) {
      check.expect(
          *exact,
          *run(MoeOptions{.backend = backend, .batch_invariant = true}, c, weights, inputs));
      continue;
    }
    if (backend == "cpu-amx") continue;
    if (integer) {
      expect_same_bits(*integer, *actual);
    } else {
      integer = std::move(actual);
    }
  }
}

inline void expect_every_backend(const MoeCase& c) {
  const ExpertWeights weights = make_weights(c);
  const MoeData data(c);
  expect_every_backend(c, weights, data, data.inputs(c));
}

}  // namespace hexpert::test

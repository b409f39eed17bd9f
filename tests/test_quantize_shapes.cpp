// Quantizers at every conformance shape, pattern and layout, against the scalar definition; and
// what must not change a byte: the caller's floating-point mode.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cpu/kernels.hpp"
#include "format/layout.hpp"
#include "hexpert/quantize.hpp"
#include "hexpert/weights.hpp"
#include "quantize/block_quantizer.hpp"
#include "support.hpp"

namespace hexpert::test {
namespace {

struct Shape {
  int64_t rows;
  int64_t cols;
};
constexpr Shape kShapes[] = {{1, 64},
                             {1, 1024},
                             {3, 128},
                             {16, 64},
                             {64, 128},
                             {128, 64},
                             {256, 128},
                             {512, 256},
                             {128, 1024},
                             {1024, 2048},
                             {128, 16384}};

struct Pattern {
  const char* name;
  std::function<Bf16Vector(const Shape&)> make;
};

// Points of a ramp -12..12, each approached from both sides.
Bf16Vector boundary(const Shape& shape) {
  Bf16Vector x;
  const int64_t pairs = shape.rows * shape.cols / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const double point = -12 + 24.0 * static_cast<double>(i) / static_cast<double>(pairs - 1);
    x.push_back(bf16(point - 1e-3));
    x.push_back(bf16(point + 1e-3));
  }
  return x;
}

const Pattern kPatterns[] = {
    {"random",
     [](const Shape& s) {
       Bf16Vector x = gaussian_bf16(s.rows * s.cols, 77);
       std::fill_n(x.begin(), s.cols, uint16_t{0});
       return x;
     }},
    {"boundary", boundary},
    {"zeros", [](const Shape& s) { return Bf16Vector(static_cast<size_t>(s.rows * s.cols)); }},
    {"maxima",
     [](const Shape& s) {
       Random random(3);
       return make_bf16(s.rows * s.cols,
                        [&] { return static_cast<uint16_t>(0x7F7F | (random.bits() & 0x8000)); });
     }},
};

// The definition, block after block; scales linear.
struct Expected {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<float> outer;
};

uint16_t amax_of(const uint16_t* x, int64_t count) {
  uint16_t amax = 0;
  for (int64_t i = 0; i < count; ++i)
    amax = std::max(amax, static_cast<uint16_t>(x[i] & 0x7FFF));
  return amax;
}

Expected define(const Bf16Vector& x, const Shape& s, bool per_row) {
  Expected e{std::vector<uint8_t>(x.size() / 2), std::vector<uint8_t>(x.size() / 16), {}};
  for (int64_t r = 0; r < s.rows; ++r) {
    const uint16_t* row = x.data() + r * s.cols;
    const OuterScale outer = per_row ? token_scale(amax_of(row, s.cols))
                                     : matrix_scale(amax_of(x.data(), s.rows * s.cols));
    if (per_row || r == 0) e.outer.push_back(outer.stored);
    for (int64_t b = 0; b < s.cols / 16; ++b) {
      const int64_t block = r * s.cols / 16 + b;
      e.scales[static_cast<size_t>(block)] =
          quantize_block(row + 16 * b, outer, e.codes.data() + block * 8);
    }
  }
  return e;
}

struct Quantized {
  PoisonedBuffer<uint8_t> codes;
  PoisonedBuffer<uint8_t> scales;
  PoisonedBuffer<float> outer;
  Nvfp4View view;

  Quantized(const Shape& s, bool per_row, ScaleLayout layout)
      : codes(s.rows * s.cols / 2),
        scales(block_scale_bytes(layout, s.rows, s.cols)),
        outer(per_row ? s.rows : 1),
        view{codes.data(), scales.data(), outer.data(), s.rows, s.cols, per_row, layout} {}
};

Status quantize(const Bf16Vector& x, const Shape& s, const Quantized& q) {
  const ConstTensorView view(x.data(), DType::kBF16, {s.rows, s.cols});
  return q.view.per_row ? quantize_tokens(view, s.cols, q.view) : quantize_matrix(view, q.view);
}

std::vector<uint32_t> bits_of(const float* values, size_t count) {
  std::vector<uint32_t> bits;
  for (size_t i = 0; i < count; ++i)
    bits.push_back(f32_bits(values[i]));
  return bits;
}

void expect_bytes(const Expected& e, const Shape& s, const Quantized& q) {
  EXPECT_TRUE(q.codes.to_vector() == e.codes);
  EXPECT_EQ(bits_of(q.outer.data(), e.outer.size()), bits_of(e.outer.data(), e.outer.size()));
  const int64_t columns = s.cols / 16;
  std::vector<uint8_t> scales(static_cast<size_t>(q.scales.size()));  // padding is zero
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      scales[static_cast<size_t>(layout::scale_offset(q.view.scale_layout, r, c, columns))] =
          e.scales[static_cast<size_t>(r * columns + c)];
    }
  }
  EXPECT_TRUE(q.scales.to_vector() == scales);
  EXPECT_TRUE(q.codes.guards_intact() && q.scales.guards_intact() && q.outer.guards_intact());
}

// Every instruction set on its own, row by row.
void expect_kernels(const Expected& e, const Bf16Vector& x, const Shape& s, bool per_row) {
  for (const cpu::Kernels* kernels :
       {cpu::scalar_kernels(), cpu::avx2_kernels(), cpu::avx512_vnni_kernels()}) {
    if (kernels == nullptr) continue;
    SCOPED_TRACE(kernels->name);
    std::vector<uint8_t> codes(e.codes.size());
    std::vector<uint8_t> scales(e.scales.size());
    const uint16_t amax = kernels->amax_bits(x.data(), s.rows * s.cols);
    for (int64_t r = 0; r < s.rows; ++r) {
      const uint16_t* row = x.data() + r * s.cols;
      const OuterScale outer =
          per_row ? token_scale(kernels->amax_bits(row, s.cols)) : matrix_scale(amax);
      kernels->quantize_row(row,
                            s.cols,
                            outer,
                            codes.data() + r * s.cols / 2,
                            scales.data() + r * s.cols / 16,
                            row + s.cols);
    }
    EXPECT_TRUE(codes == e.codes);
    EXPECT_TRUE(scales == e.scales);
  }
}

TEST(QuantizeShapes, EveryLayoutAndKernelEqualsTheDefinition) {
  for (const Shape& s : kShapes) {
    for (const Pattern& pattern : kPatterns) {
      const Bf16Vector x = pattern.make(s);
      for (const bool per_row : {false, true}) {
        SCOPED_TRACE(std::to_string(s.rows) + " x " + std::to_string(s.cols) + " " + pattern.name +
                     (per_row ? " per token" : " per matrix"));
        const Expected e = define(x, s, per_row);
        expect_kernels(e, x, s, per_row);
        for (const ScaleLayout layout :
             {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
          const Quantized q(s, per_row, layout);
          ASSERT_TRUE(quantize(x, s, q).ok());
          expect_bytes(e, s, q);
        }
      }
    }
  }
}

// Rounded to BF16, a maximum of 12 and its neighbours must still decode within half a step.
TEST(QuantizeShapes, BoundaryValuesDecodeWithinHalfAStep) {
  const Shape s{64, 128};
  const Bf16Vector x = boundary(s);
  const Quantized q(s, true, ScaleLayout::k128x4);
  ASSERT_TRUE(quantize(x, s, q).ok());
  std::vector<float> values(x.size());
  const ConstNvfp4View in{
      q.codes.data(), q.scales.data(), q.outer.data(), s.rows, s.cols, true, ScaleLayout::k128x4};
  ASSERT_TRUE(dequantize(in, {values.data(), DType::kF32, {s.rows, s.cols}}).ok());
  for (size_t block = 0; block < x.size(); block += 16) {
    float bmax = 0;
    for (size_t i = block; i < block + 16; ++i)
      bmax = std::max(bmax, std::fabs(bf16_to_f32(x[i])));
    // The largest step is that from 4 to 6 of 6; the block scale adds 1/16.
    for (size_t i = block; i < block + 16; ++i)
      ASSERT_LE(std::fabs(values[i] - bf16_to_f32(x[i])), bmax * (1.0F / 6 + 1.0F / 16)) << i;
  }
}

// --- the caller's floating-point mode ---

// Flush to zero, denormals are zero, and rounding down.
class HostileMode {
 public:
  HostileMode() { _mm_setcsr(saved_ | 0x8040U | 0x2000U); }
  ~HostileMode() { _mm_setcsr(saved_); }
  HostileMode(const HostileMode&) = delete;
  HostileMode& operator=(const HostileMode&) = delete;

 private:
  unsigned saved_ = _mm_getcsr();
};

TEST(FloatingPointMode, DoesNotReachQuantizedBytes) {
  const Shape s{512, 256};  // more than one thread works on it
  for (const int low : {-133, -126, 100}) {
    const Bf16Vector x = log_uniform_bf16(s.rows * s.cols, 6, low, low + 20);
    for (const bool per_row : {false, true}) {
      const Expected e = define(x, s, per_row);
      const Quantized q(s, per_row, ScaleLayout::k128x4);
      PoisonedBuffer<float> values(s.rows * s.cols);
      PoisonedBuffer<float> calm(s.rows * s.cols);
      const ConstNvfp4View in{q.view.codes,
                              q.view.block_scales,
                              q.view.outer,
                              s.rows,
                              s.cols,
                              per_row,
                              ScaleLayout::k128x4};
      const ConstTensorView original(x.data(), DType::kBF16, {s.rows, s.cols});
      double noise = 0;
      {
        const HostileMode mode;
        const unsigned before = _mm_getcsr();
        ASSERT_TRUE(quantize(x, s, q).ok());
        ASSERT_TRUE(dequantize(in, {values.data(), DType::kF32, {s.rows, s.cols}}).ok());
        noise = error_stats(original, in)->noise;
        EXPECT_EQ(_mm_getcsr() & 0xFFC0U, before & 0xFFC0U) << "the caller's mode was changed";
      }
      expect_bytes(e, s, q);
      ASSERT_TRUE(dequantize(in, {calm.data(), DType::kF32, {s.rows, s.cols}}).ok());
      EXPECT_EQ(bits_of(values.data(), x.size()), bits_of(calm.data(), x.size()));
      EXPECT_EQ(noise, error_stats(original, in)->noise);
    }
  }
}

TEST(FloatingPointMode, DoesNotReachPreparedWeights) {
  const ExpertShape shape{2, 80, 48, true};
  const Bf16Vector fc1 = log_uniform_bf16(2 * 96 * 80, 1, -133, -115);
  const Bf16Vector fc2 = log_uniform_bf16(2 * 80 * 48, 2, -133, -115);
  const ConstTensorView fc1_view(fc1.data(), DType::kBF16, {2, 96, 80});
  const ConstTensorView fc2_view(fc2.data(), DType::kBF16, {2, 80, 48});
  const auto exported = [&](const ExpertWeights& weights) {
    std::vector<uint8_t> bytes;
    for (int64_t e = 0; e < 2; ++e) {
      for (const auto projection : {ExpertWeights::Projection::kGate,
                                    ExpertWeights::Projection::kUp,
                                    ExpertWeights::Projection::kDown}) {
        std::vector<uint8_t> codes(80 * 48);
        std::vector<uint8_t> scales(80 * 48);
        float alpha = 0;
        EXPECT_TRUE(
            weights.export_projection(e, projection, codes.data(), scales.data(), &alpha).ok());
        bytes.insert(bytes.end(), codes.begin(), codes.end());
        bytes.insert(bytes.end(), scales.begin(), scales.end());
        for (int shift = 0; shift < 32; shift += 8)
          bytes.push_back(static_cast<uint8_t>(f32_bits(alpha) >> shift));
      }
    }
    return bytes;
  };
  const ExpertWeights expected = ExpertWeights::prepare(fc1_view, fc2_view).value();
  ExpertWeights refreshed = ExpertWeights::allocate(shape).value();
  ExpertWeights streamed = ExpertWeights::allocate(shape).value();
  const HostileMode mode;
  EXPECT_TRUE(exported(ExpertWeights::prepare(fc1_view, fc2_view).value()) == exported(expected));
  ASSERT_TRUE(refreshed.refresh(fc1_view, fc2_view).ok());
  EXPECT_TRUE(exported(refreshed) == exported(expected));
  for (int64_t e = 0; e < 2; ++e) {
    ASSERT_TRUE(streamed
                    .set_expert(e,
                                {fc1.data() + e * 96 * 80, DType::kBF16, {96, 80}},
                                {fc2.data() + e * 80 * 48, DType::kBF16, {80, 48}})
                    .ok());
  }
  EXPECT_TRUE(exported(streamed) == exported(expected));
}

}  // namespace
}  // namespace hexpert::test

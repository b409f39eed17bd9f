// Dequantizing and error statistics: every refusal with its words, and cases with known numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "hexpert/quantize.hpp"
#include "support.hpp"

namespace hexpert::test {
namespace {

constexpr int64_t kRows = 4;
constexpr int64_t kCols = 32;

struct Matrix {
  AlignedVector<uint8_t> codes = AlignedVector<uint8_t>(kRows * kCols / 2, 0x21);
  AlignedVector<uint8_t> scales = AlignedVector<uint8_t>(kRows * kCols / 16, 0x38);
  AlignedVector<float> outer = AlignedVector<float>(kRows, 2.0F);
  ConstNvfp4View view{codes.data(), scales.data(), outer.data(), kRows, kCols, true};
};

void expect_status(const Status& status, ErrorCode code, const std::string& message) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_EQ(status.message(), message);
}

void expect_begins(const Status& status, ErrorCode code, const std::string& message) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_EQ(status.message().rfind(message, 0), 0U) << status.message();
}

// What both calls say of a bad quantized matrix under the name they have for it.
template <typename Call>
void expect_bad_views(const std::string& name, const Call& call) {
  const Matrix m;
  ConstNvfp4View view = m.view;
  view.rows = -1;
  expect_begins(
      call(view),
      ErrorCode::kInvalidShape,
      name + ": expected columns in multiples of 16 and at most 2^56 elements, got [-1, ");
  view = m.view;
  view.cols = 24;
  expect_begins(call(view), ErrorCode::kInvalidShape, name + ": expected columns in multiples");
  view = m.view;
  view.rows = std::numeric_limits<int64_t>::max();
  expect_begins(call(view), ErrorCode::kInvalidShape, name + ": expected columns in multiples");
  view = m.view;
  view.codes = nullptr;
  expect_status(call(view), ErrorCode::kNullPointer, name + ".codes: expected 64 bytes, got null");
  view = m.view;
  view.block_scales = nullptr;
  expect_status(
      call(view), ErrorCode::kNullPointer, name + ".block_scales: expected 8 bytes, got null");
  view = m.view;
  view.scale_layout = ScaleLayout::k128x4;
  view.block_scales = nullptr;
  expect_status(
      call(view), ErrorCode::kNullPointer, name + ".block_scales: expected 512 bytes, got null");
  view = m.view;
  view.outer = nullptr;
  expect_status(call(view), ErrorCode::kNullPointer, name + ".outer: expected 16 bytes, got null");
  view.per_row = false;
  expect_status(call(view), ErrorCode::kNullPointer, name + ".outer: expected 4 bytes, got null");
  view = m.view;
  view.outer = reinterpret_cast<const float*>(m.codes.data() + 2);
  expect_begins(call(view),
                ErrorCode::kMisaligned,
                name + ".outer: expected an address aligned to 4 bytes, got 0x");
}

TEST(Dequantize, RefusesBadViewsAndWritesNothing) {
  PoisonedBuffer<float> out(kRows * kCols);
  const Matrix m;
  expect_bad_views("in", [&](const ConstNvfp4View& view) {
    return dequantize(view, {out.data(), DType::kF32, {kRows, kCols}});
  });
  const auto call = [&](const TensorView& to) { return dequantize(m.view, to); };
  expect_status(call({out.data(), DType::kF32, {kRows, kCols, 1}}),
                ErrorCode::kShapeMismatch,
                "out: expected [4, 32], got [4, 32, 1] f32");
  expect_status(call({out.data(), DType::kF32, {kRows, kCols + 16}}),
                ErrorCode::kShapeMismatch,
                "out: expected [4, 32], got [4, 48] f32");
  expect_status(call({out.data(), DType::kF16, {kRows, kCols}}),
                ErrorCode::kInvalidDtype,
                "out: expected f32 or bf16, got f16");
  TensorView strided{out.data(), DType::kF32, {kRows, kCols}};
  strided.strides[0] = 40;
  expect_status(
      call(strided), ErrorCode::kNotContiguous, "out: expected packed rows, got strides [40, 1]");
  expect_status(call({out.data(), DType::kF32, {kRows, kCols}, Device::cuda(2)}),
                ErrorCode::kDeviceMismatch,
                "out: expected memory of cpu, got cuda:2");
  expect_status(call({nullptr, DType::kBF16, {kRows, kCols}}),
                ErrorCode::kNullPointer,
                "out: expected 256 bytes, got null");
  expect_begins(call({reinterpret_cast<uint8_t*>(out.data()) + 1, DType::kBF16, {kRows, kCols}}),
                ErrorCode::kMisaligned,
                "out: expected an address aligned to 2 bytes, got 0x");
  EXPECT_TRUE(out.untouched());
}

TEST(Dequantize, RefusesOutOverItsInput) {
  constexpr int64_t kOutBytes = kRows * kCols * 4;
  PoisonedBuffer<float> out(kRows * kCols + 128);
  auto* const bytes = reinterpret_cast<uint8_t*>(out.data());
  const Matrix m;
  const auto call = [&](const ConstNvfp4View& in) {
    return dequantize(in, {out.data(), DType::kF32, {kRows, kCols}});
  };
  const auto expect = [&](const ConstNvfp4View& in, const std::string& name) {
    const Status status = call(in);
    expect_begins(
        status, ErrorCode::kInvalidOutput, "out: expected memory that overlaps no input, got [0x");
    EXPECT_NE(status.message().find(" over in." + name + " at [0x"), std::string::npos)
        << status.message();
  };
  for (const int64_t offset : {int64_t{0}, kOutBytes - 4}) {
    ConstNvfp4View in = m.view;
    in.codes = bytes + offset;
    expect(in, "codes");
    in = m.view;
    in.block_scales = bytes + offset;
    expect(in, "block_scales");
    in = m.view;
    in.outer = reinterpret_cast<const float*>(bytes + offset);
    expect(in, "outer");
  }
  EXPECT_TRUE(out.untouched());

  // Touching is not overlapping, and parts that are only read may share memory.
  ConstNvfp4View in = m.view;
  in.codes = in.block_scales = bytes + kOutBytes;
  EXPECT_EQ(call(in).to_string(), "ok");
}

TEST(Dequantize, ToBf16RoundsToNearestEven) {
  Matrix m;
  m.outer.assign(kRows, 1.00390625F);  // 1 + 2^-8: half a BF16 step above 1
  m.outer[1] = 1.01171875F;            // 1 + 3 * 2^-8
  PoisonedBuffer<uint16_t> out(kRows * kCols);
  ASSERT_TRUE(dequantize(m.view, {out.data(), DType::kBF16, {kRows, kCols}}).ok());
  EXPECT_EQ(out[1], 0x3F80);          // code 2 is 1: ties to the even mantissa
  EXPECT_EQ(out[kCols + 1], 0x3F82);  // here upwards
  EXPECT_TRUE(out.guards_intact());
}

TEST(Dequantize, NothingToDo) {
  EXPECT_TRUE(
      dequantize({nullptr, nullptr, nullptr, 0, 32, true}, {nullptr, DType::kF32, {0, 32}}).ok());
  EXPECT_TRUE(
      dequantize({nullptr, nullptr, nullptr, 4, 0, false}, {nullptr, DType::kF32, {4, 0}}).ok());
}

TEST(ErrorStats, RefusesBadArguments) {
  const Bf16Vector x(kRows * kCols, 0x3F80);
  const Matrix m;
  const ConstTensorView original(x.data(), DType::kBF16, {kRows, kCols});
  expect_bad_views("quantized", [&](const ConstNvfp4View& view) {
    return error_stats(original, view).status();
  });
  const auto call = [&](const ConstTensorView& from) { return error_stats(from, m.view).status(); };
  expect_status(call({x.data(), DType::kBF16, {kRows * kCols}}),
                ErrorCode::kInvalidShape,
                "original: expected rank 2, got rank 1");
  expect_status(call({x.data(), DType::kF32, {kRows, kCols}}),
                ErrorCode::kInvalidDtype,
                "original: expected bf16, got f32");
  expect_status(
      call({x.data(), DType::kBF16, {kRows - 1, kCols}}),
      ErrorCode::kShapeMismatch,
      "quantized: expected 3 rows and at least 32 columns to match original, got [4, 32]");
  expect_status(
      call({x.data(), DType::kBF16, {kRows, kCols + 1}}),
      ErrorCode::kShapeMismatch,
      "quantized: expected 4 rows and at least 33 columns to match original, got [4, 32]");
  ConstTensorView strided = original;
  strided.strides[1] = 2;
  expect_status(
      call(strided), ErrorCode::kNotContiguous, "original: expected a column stride of 1, got 2");
  expect_status(call({nullptr, DType::kBF16, {kRows, kCols}}),
                ErrorCode::kNullPointer,
                "original: expected 256 bytes, got null");
  expect_begins(call({x.data() + 1, DType::kBF16, {kRows, kCols}}),
                ErrorCode::kMisaligned,
                "original: expected an address aligned to 16 bytes, got 0x");
  expect_status(call({x.data(), DType::kBF16, {kRows, kCols}, Device::cuda(0)}),
                ErrorCode::kDeviceMismatch,
                "original: expected memory of cpu, got cuda:0");
}

// Every value decodes to 1 (code 2) or 2 (code 4 at scale 0.5) and so on: sums known by hand.
TEST(ErrorStats, KnownNumbers) {
  Matrix m;
  m.codes.assign(m.codes.size(), 0x22);  // 1 * 1 * 2
  m.scales[0] = 0x00;                    // block 0 decodes to 0
  m.scales[1] = 0x7E;                    // block 1 to 2 * 448
  Bf16Vector x(kRows * kCols, bf16(2.0));
  x[16] = 0x7F80;
  x[17] = 0xFFC1;
  x[18] = 0;
  const ErrorStats s =
      error_stats(ConstTensorView(x.data(), DType::kBF16, {kRows, kCols}), m.view).value();
  EXPECT_EQ(s.elements, 128);
  EXPECT_EQ(s.nonfinite, 2);
  EXPECT_EQ(s.nonzero, 125);
  EXPECT_EQ(s.rounded_to_zero, 16);
  EXPECT_EQ(s.blocks, 8);
  EXPECT_EQ(s.zero_scales, 1);
  EXPECT_EQ(s.saturated_scales, 1);
  EXPECT_EQ(s.signal, 125 * 4.0);
  EXPECT_EQ(s.noise, 16 * 4.0 + 13 * 894.0 * 894.0 + 896.0 * 896.0);
  EXPECT_EQ(s.max_error, 896.0);
  EXPECT_EQ(s.dot, 96 * 4.0 + 13 * 2 * 896.0);
  EXPECT_EQ(s.quantized, 96 * 4.0 + 14 * 896.0 * 896.0);
  ErrorStats twice = s;
  twice.merge(s);
  EXPECT_EQ(twice.noise, 2 * s.noise);
  EXPECT_EQ(twice.elements, 256);
  EXPECT_EQ(twice.max_error, 896.0);
  EXPECT_EQ(twice.relative_l2(), s.relative_l2());
  const ErrorStats none;
  EXPECT_EQ(none.relative_l2(), 0.0);
  EXPECT_EQ(none.cosine(), 1.0);
  EXPECT_TRUE(std::isinf(none.snr_db()));
}

}  // namespace
}  // namespace hexpert::test

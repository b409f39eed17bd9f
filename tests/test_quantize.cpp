// Quantizers: every instruction set against the scalar oracle, golden vectors, edge cases, errors.
#include "hexpert/quantize.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.hpp"
#include "format/layout.hpp"
#include "golden.hpp"
#include "support.hpp"

namespace hexpert::test {
namespace {

std::vector<const cpu::Kernels*> vector_kernels() {
  std::vector<const cpu::Kernels*> list;
  for (const cpu::Kernels* k : {cpu::avx2_kernels(), cpu::avx512_vnni_kernels()}) {
    if (k != nullptr) list.push_back(k);
  }
  return list;
}

void expect_same_as_scalar(const uint16_t* x, int64_t n, const OuterScale& outer) {
  const cpu::Kernels& scalar = *cpu::scalar_kernels();
  PoisonedBuffer<uint8_t> codes(n / 2);
  PoisonedBuffer<uint8_t> scales(n / 16);
  scalar.quantize_row(x, n, outer, codes.data(), scales.data(), x + n);
  for (const cpu::Kernels* kernels : vector_kernels()) {
    PoisonedBuffer<uint8_t> other_codes(n / 2);
    PoisonedBuffer<uint8_t> other_scales(n / 16);
    kernels->quantize_row(x, n, outer, other_codes.data(), other_scales.data(), x + n);
    ASSERT_EQ(other_scales.to_vector(), scales.to_vector()) << kernels->name << " n " << n;
    ASSERT_EQ(other_codes.to_vector(), codes.to_vector()) << kernels->name << " n " << n;
    ASSERT_TRUE(other_codes.guards_intact() && other_scales.guards_intact()) << kernels->name;
  }
}

TEST(Kernels, AmaxOfEveryLengthAndPosition) {
  for (int64_t n = 0; n <= 300; ++n) {
    Bf16Vector x = uniform_bf16(n, 7, -1, 1);
    if (n > 0) x[static_cast<size_t>(n * 31 % n)] = 0xC080;
    if (n > 2) x[static_cast<size_t>(n - 1)] = 0xFFC1;
    const uint16_t expected = cpu::scalar_kernels()->amax_bits(x.data(), n);
    for (const cpu::Kernels* kernels : vector_kernels())
      ASSERT_EQ(kernels->amax_bits(x.data(), n), expected) << kernels->name << " n " << n;
  }
}

// Every finite BF16 pattern and infinity, under encode scales of many rows.
TEST(Kernels, EveryPatternEqualsScalar) {
  Bf16Vector x;
  for (uint32_t bits = 0; bits <= 0x7F80; ++bits) {
    x.push_back(static_cast<uint16_t>(bits));
    x.push_back(static_cast<uint16_t>(bits | 0x8000));
  }
  while (x.size() % 16 != 0)
    x.push_back(0x8000);
  for (int amax : {0x0001, 0x0080, 0x0123, 0x2000, 0x3F80, 0x3FAB, 0x4321, 0x7F7F, 0x7F80}) {
    expect_same_as_scalar(
        x.data(), static_cast<int64_t>(x.size()), token_scale(static_cast<uint16_t>(amax)));
  }
}

TEST(Kernels, RandomRowsOfAllMagnitudesEqualScalar) {
  const cpu::Kernels& scalar = *cpu::scalar_kernels();
  Random random(11);
  for (int trial = 0; trial < 3000; ++trial) {
    const int64_t n = 16 * random.integer(1, 40);
    const int low = static_cast<int>(random.integer(-133, 127));
    const int high = static_cast<int>(random.integer(low, std::min(127, low + 30)));
    Bf16Vector x = log_uniform_bf16(n, random.bits(), low, high);
    if (trial % 3 == 0) x[static_cast<size_t>(random.integer(0, n - 1))] = 0x8000;
    if (trial % 50 == 0) x[static_cast<size_t>(random.integer(0, n - 1))] = 0xFF80;
    if (trial % 51 == 0) x[static_cast<size_t>(random.integer(0, n - 1))] = 0x7FC0;
    const uint16_t amax = scalar.amax_bits(x.data(), n);
    expect_same_as_scalar(x.data(), n, token_scale(amax));
    expect_same_as_scalar(x.data(), n, matrix_scale(amax));
  }
}

TEST(Kernels, PackGroupEqualsScalar) {
  for (int64_t k : {64, 128, 192, 1024, 2688}) {
    Random random(static_cast<uint64_t>(k));
    std::vector<uint8_t> codes(static_cast<size_t>(16 * k / 2));
    std::vector<uint8_t> scales(static_cast<size_t>(16 * k / 16));
    for (uint8_t& byte : codes)
      byte = static_cast<uint8_t>(random.bits());
    for (uint8_t& byte : scales)
      byte = static_cast<uint8_t>(random.bits());
    cpu::Nvfp4Row rows[16];
    for (int64_t n = 0; n < 16; ++n)
      rows[n] = {codes.data() + n * k / 2, scales.data() + n * k / 16};
    PoisonedBuffer<uint8_t> expected(layout::cpu_tiles::group_bytes(k));
    cpu::scalar_kernels()->pack_group(rows, k, expected.data());
    for (const cpu::Kernels* kernels : vector_kernels()) {
      PoisonedBuffer<uint8_t> group(layout::cpu_tiles::group_bytes(k));
      kernels->pack_group(rows, k, group.data());
      ASSERT_EQ(group.to_vector(), expected.to_vector()) << kernels->name << " k " << k;
      ASSERT_TRUE(group.guards_intact()) << kernels->name;
    }
  }
}

struct Quantized {
  PoisonedBuffer<uint8_t> codes;
  PoisonedBuffer<uint8_t> scales;
  PoisonedBuffer<float> outer;
  Nvfp4View view;

  Quantized(int64_t rows, int64_t cols, bool per_row, ScaleLayout layout = ScaleLayout::kLinear)
      : codes(rows * cols / 2),
        scales(block_scale_bytes(layout, rows, cols)),
        outer(per_row ? rows : 1),
        view{codes.data(), scales.data(), outer.data(), rows, cols, per_row, layout} {}
  bool guards_intact() const {
    return codes.guards_intact() && scales.guards_intact() && outer.guards_intact();
  }
  bool untouched() const { return codes.untouched() && scales.untouched() && outer.untouched(); }
};

ConstNvfp4View as_const(const Nvfp4View& v) {
  return {v.codes, v.block_scales, v.outer, v.rows, v.cols, v.per_row, v.scale_layout};
}

ConstTensorView bf16_view(const void* data, int64_t rows, int64_t cols) {
  return {data, DType::kBF16, {rows, cols}};
}

std::vector<uint32_t> bits_of(const PoisonedBuffer<float>& values) {
  std::vector<uint32_t> bits;
  for (int64_t i = 0; i < values.size(); ++i)
    bits.push_back(f32_bits(values[i]));
  return bits;
}

void check_golden(const std::string& group,
                  const std::string& name,
                  const QuantizeOptions& options) {
  SCOPED_TRACE(group + "/" + name);
  const Golden& all = Golden::instance();
  const GoldenArray x = golden(group, name, "x");
  const bool per_row = all.has(group, name, "row_scale");
  const int64_t rows = x.shape[0];
  const int64_t cols = golden(group, name, "data").shape[1] * 2;
  const std::pair<ScaleLayout, const char*> layouts[] = {{ScaleLayout::kLinear, "scale_linear"},
                                                         {ScaleLayout::k128x4, "scale_128x4"},
                                                         {ScaleLayout::k8x4, "scale_8x4"}};
  for (const auto& [layout, array] : layouts) {
    if (!all.has(group, name, array)) continue;
    Quantized q(rows, cols, per_row, layout);
    const ConstTensorView view = bf16_view(x.data<uint16_t>(), rows, x.shape[1]);
    const Status status = per_row ? quantize_tokens(view, cols, q.view, options)
                                  : quantize_matrix(view, q.view, options);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(q.codes.to_vector(), golden(group, name, "data").values<uint8_t>());
    EXPECT_EQ(q.scales.to_vector(), golden(group, name, array).values<uint8_t>()) << array;
    if (per_row || all.has(group, name, "alpha")) {
      EXPECT_EQ(bits_of(q.outer),
                golden(group, name, per_row ? "row_scale" : "alpha").values<uint32_t>());
    } else {
      const float encode = golden(group, name, "encode_scale").values<float>()[0];
      EXPECT_EQ(f32_bits(q.outer[0]), f32_bits(1.0F / encode));
    }
    EXPECT_TRUE(q.guards_intact());
  }
}

TEST(QuantizeGolden, Definition) {
  for (const char* group : {"per_tensor", "per_token", "nonfinite"}) {
    for (const std::string& name : Golden::instance().cases(group))
      check_golden(group, name, {});
  }
}

TEST(QuantizeGolden, FourOverSix) {
  for (const std::string& name : Golden::instance().cases("four_over_six")) {
    FourOverSix options;
    options.error = name.rfind("mse", 0) == 0 ? FourOverSix::Error::kMse : FourOverSix::Error::kMae;
    options.e4m3_max = name.find("256") != std::string::npos ? 256.0F : 448.0F;
    check_golden("four_over_six", name, {options, 0});
  }
}

TEST(Quantize, ThreadsAndStridesChangeNothing) {
  constexpr int64_t kRows = 67;
  constexpr int64_t kCols = 1000;
  constexpr int64_t kStride = 1037;
  constexpr int64_t kPadded = 1024;
  const Bf16Vector x = outlier_bf16(kRows * kStride, 3);
  ConstTensorView strided = bf16_view(x.data(), kRows, kCols);
  strided.strides[0] = kStride;
  Bf16Vector packed;
  for (int64_t r = 0; r < kRows; ++r)
    packed.insert(packed.end(), x.begin() + r * kStride, x.begin() + r * kStride + kCols);
  for (ScaleLayout layout : {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
    Quantized expected(kRows, kPadded, true, layout);
    ASSERT_TRUE(
        quantize_tokens(
            bf16_view(packed.data(), kRows, kCols), kPadded, expected.view, {std::nullopt, 1})
            .ok());
    for (int threads : {1, 2, 3}) {
      Quantized q(kRows, kPadded, true, layout);
      ASSERT_TRUE(quantize_tokens(strided, kPadded, q.view, {std::nullopt, threads}).ok());
      EXPECT_EQ(q.codes.to_vector(), expected.codes.to_vector());
      EXPECT_EQ(q.scales.to_vector(), expected.scales.to_vector());
      EXPECT_EQ(bits_of(q.outer), bits_of(expected.outer));
      EXPECT_TRUE(q.guards_intact());
    }
  }
}

TEST(Quantize, NoTokensIsLegal) {
  EXPECT_TRUE(
      quantize_tokens(bf16_view(nullptr, 0, 64), 64, {nullptr, nullptr, nullptr, 0, 64}).ok());
}

TEST(Quantize, DequantizeGivesCodesTimesScales) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kCols = 96;
  const Bf16Vector x = gaussian_bf16(kRows * kCols, 5);
  for (ScaleLayout layout : {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
    Quantized q(kRows, kCols, true, layout);
    ASSERT_TRUE(quantize_tokens(bf16_view(x.data(), kRows, kCols), kCols, q.view).ok());
    PoisonedBuffer<float> out(kRows * kCols);
    ASSERT_TRUE(dequantize(as_const(q.view), {out.data(), DType::kF32, {kRows, kCols}}).ok());
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kCols; ++c) {
        const unsigned code = q.codes[(r * kCols + c) / 2] >> (c % 2 * 4) & 15;
        const uint8_t scale = q.scales[layout::scale_offset(layout, r, c / 16, kCols / 16)];
        ASSERT_EQ(f32_bits(out[r * kCols + c]),
                  f32_bits(e2m1_value(code) * e4m3_value(scale) * q.outer[r]));
      }
    }
  }
}

TEST(Quantize, ErrorStatsAgreeWithDequantizedValues) {
  constexpr int64_t kRows = 200;
  constexpr int64_t kCols = 1000;
  constexpr int64_t kPadded = 1008;
  const Bf16Vector x = outlier_bf16(kRows * kCols, 9);
  Quantized q(kRows, kPadded, true);
  ASSERT_TRUE(quantize_tokens(bf16_view(x.data(), kRows, kCols), kPadded, q.view).ok());
  PoisonedBuffer<float> values(kRows * kPadded);
  ASSERT_TRUE(dequantize(as_const(q.view), {values.data(), DType::kF32, {kRows, kPadded}}).ok());
  double noise = 0;
  double signal = 0;
  int64_t to_zero = 0;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; ++c) {
      const double original = bf16_to_f32(x[static_cast<size_t>(r * kCols + c)]);
      const double value = values[r * kPadded + c];
      noise += (value - original) * (value - original);
      signal += original * original;
      to_zero += original != 0 && value == 0 ? 1 : 0;
    }
  }
  const Result<ErrorStats> stats = error_stats(bf16_view(x.data(), kRows, kCols), as_const(q.view));
  ASSERT_TRUE(stats.ok());
  EXPECT_NEAR(stats->noise, noise, 1e-9 * noise);
  EXPECT_NEAR(stats->signal, signal, 1e-9 * signal);
  EXPECT_EQ(stats->rounded_to_zero, to_zero);
  EXPECT_EQ(stats->elements, kRows * kCols);
  EXPECT_EQ(stats->blocks, kRows * kPadded / 16);
  EXPECT_EQ(stats->nonfinite, 0);
  EXPECT_GT(stats->snr_db(), 15.0);
}

struct BadCall {
  const char* what;
  ErrorCode code;
  std::string message;  // must be part of the message
  Status status;
};

TEST(Quantize, BadArgumentsAreNamedAndNothingIsWritten) {
  const Bf16Vector x = gaussian_bf16(4 * 64 + 16, 1);
  const ConstTensorView in = bf16_view(x.data(), 4, 64);
  Quantized q(4, 64, true);
  const auto tokens =
      [&](auto change_in, auto change_out, int64_t padded = 64, QuantizeOptions options = {}) {
        ConstTensorView input = in;
        Nvfp4View out = q.view;
        change_in(input);
        change_out(out);
        return quantize_tokens(input, padded, out, options);
      };
  const auto same = [](auto&) {};
  const BadCall calls[] = {
      {"rank",
       ErrorCode::kInvalidShape,
       "hidden_states: expected rank 2, got rank 3",
       tokens([](auto& v) { v.rank = 3; }, same)},
      {"no columns",
       ErrorCode::kInvalidShape,
       "got [4, 0]",
       tokens([](auto& v) { v.shape[1] = 0; }, same)},
      {"dtype",
       ErrorCode::kInvalidDtype,
       "hidden_states: expected bf16, got f32",
       tokens([](auto& v) { v.dtype = DType::kF32; }, same)},
      {"columns",
       ErrorCode::kNotContiguous,
       "column stride of 1, got 2",
       tokens([](auto& v) { v.strides[1] = 2; }, same)},
      {"rows",
       ErrorCode::kNotContiguous,
       "row stride of at least 0, got -64",
       tokens([](auto& v) { v.strides[0] = -64; }, same)},
      {"huge",
       ErrorCode::kInvalidShape,
       "at most 2^56 elements",
       tokens([](auto& v) { v.shape[0] = INT64_MAX / 2; }, same)},
      {"matrix on a device",
       ErrorCode::kDeviceMismatch,
       "matrix: expected memory of cpu, got cuda:1",
       quantize_matrix({x.data(), DType::kBF16, {4, 64}, Device::cuda(1)}, q.view)},
      {"four over six on a device",
       ErrorCode::kUnsupported,
       "four_over_six: expected none on cuda:1",
       tokens([](auto& v) { v.device = Device::cuda(1); },
              same,
              64,
              {.four_over_six = FourOverSix{}})},
      {"tiled scales on a device",
       ErrorCode::kUnsupported,
       "out.scale_layout: expected linear scales on cuda:1",
       tokens([](auto& v) { v.device = Device::cuda(1); },
              [](auto& v) { v.scale_layout = ScaleLayout::k8x4; })},
      {"null",
       ErrorCode::kNullPointer,
       "hidden_states: expected 512 bytes, got null",
       tokens([](auto& v) { v.data = nullptr; }, same)},
      {"alignment",
       ErrorCode::kMisaligned,
       "hidden_states: expected an address aligned to 16",
       tokens([](auto& v) { v.data = v.template as<uint16_t>() + 1; }, same)},
      {"padded too small",
       ErrorCode::kInvalidArgument,
       "padded_hidden_size: expected",
       tokens(same, same, 48)},
      {"padded odd", ErrorCode::kInvalidArgument, "got 72", tokens(same, same, 72)},
      {"threads",
       ErrorCode::kInvalidArgument,
       "num_threads: expected 0..1024, got -1",
       tokens(same, same, 64, {std::nullopt, -1})},
      {"e4m3_max",
       ErrorCode::kInvalidArgument,
       "expected 448 or 256, got 300",
       tokens(same, same, 64, {FourOverSix{FourOverSix::Error::kMae, 300.0F}, 0})},
      {"out rows",
       ErrorCode::kInvalidShape,
       "out: expected [4, 64], got [3, 64]",
       tokens(same, [](auto& v) { v.rows = 3; })},
      {"out per_row",
       ErrorCode::kInvalidArgument,
       "out.per_row: expected true, got false",
       tokens(same, [](auto& v) { v.per_row = false; })},
      {"codes null",
       ErrorCode::kNullPointer,
       "out.codes",
       tokens(same, [](auto& v) { v.codes = nullptr; })},
      {"codes alignment",
       ErrorCode::kMisaligned,
       "out.codes: expected an address aligned to 32",
       tokens(same, [](auto& v) { v.codes += 16; })},
      {"scales alignment",
       ErrorCode::kMisaligned,
       "out.block_scales: expected an address aligned to 16",
       tokens(same, [](auto& v) { v.block_scales += 8; })},
      {"outer null",
       ErrorCode::kNullPointer,
       "out.outer",
       tokens(same, [](auto& v) { v.outer = nullptr; })},
      {"matrix cols",
       ErrorCode::kInvalidShape,
       "matrix: expected columns in multiples of 16, got 60",
       quantize_matrix(bf16_view(x.data(), 4, 60), q.view)},
      {"matrix rows",
       ErrorCode::kInvalidShape,
       "at least 1 rows",
       quantize_matrix(bf16_view(x.data(), 0, 64), q.view)},
  };
  for (const BadCall& call : calls) {
    EXPECT_EQ(call.status.code(), call.code) << call.what << ": " << call.status.to_string();
    EXPECT_NE(call.status.message().find(call.message), std::string::npos)
        << call.what << ": " << call.status.to_string();
  }
  EXPECT_TRUE(q.untouched());
}

TEST(Quantize, OverlapsAreRefusedAndNothingIsWritten) {
  constexpr int64_t kRows = 4;
  constexpr int64_t kCols = 64;
  constexpr int64_t kStride = 128;
  constexpr int64_t kInputBytes = ((kRows - 1) * kStride + kCols) * 2;
  // The input, and room before and behind it for a part of the output.
  PoisonedBuffer<uint8_t> memory(kInputBytes + 2 * 512);
  uint8_t* const input = memory.data() + 512;
  for (const bool per_row : {true, false}) {
    Quantized q(kRows, kCols, per_row);
    const auto quantize = [&](int64_t rows, const Nvfp4View& out) {
      ConstTensorView view = bf16_view(input, rows, kCols);
      view.strides[0] = kStride;
      return per_row ? quantize_tokens(view, kCols, out) : quantize_matrix(view, out);
    };
    const std::string name = per_row ? "hidden_states" : "matrix";
    const auto expect =
        [&](const Status& status, const std::string& part, const std::string& over) {
          const std::string kind = over == name ? "input" : "other output";
          EXPECT_EQ(status.code(), ErrorCode::kInvalidOutput) << status.to_string();
          EXPECT_EQ(status.message().rfind(
                        part + ": expected memory that overlaps no " + kind + ", got [0x", 0),
                    0U)
              << status.message();
          EXPECT_NE(status.message().find(" over " + over + " at [0x"), std::string::npos)
              << status.message();
        };
    // At the first bytes of the input, between two of its rows, and at the last ones.
    for (const int64_t offset : {int64_t{0}, kCols * 2, kInputBytes - 32}) {
      Nvfp4View out = q.view;
      out.codes = input + offset;
      expect(quantize(kRows, out), "out.codes", name);
      out = q.view;
      out.block_scales = input + offset;
      expect(quantize(kRows, out), "out.block_scales", name);
      out = q.view;
      out.outer = reinterpret_cast<float*>(input + offset);
      expect(quantize(kRows, out), "out.outer", name);
    }
    Nvfp4View out = q.view;
    out.block_scales = q.codes.data() + kRows * kCols / 2 - 16;
    expect(quantize(kRows, out), "out.codes", "out.block_scales");
    out = q.view;
    out.outer = reinterpret_cast<float*>(q.codes.data() + kRows * kCols / 2 - 4);
    expect(quantize(kRows, out), "out.codes", "out.outer");
    out = q.view;
    out.outer = reinterpret_cast<float*>(q.scales.data() + kRows * kCols / 16 - 4);
    expect(quantize(kRows, out), "out.block_scales", "out.outer");
    // The padding of tiled scales is written too.
    out = q.view;
    out.scale_layout = ScaleLayout::k128x4;
    out.block_scales = input - 512 + 16;
    expect(quantize(kRows, out), "out.block_scales", name);
    EXPECT_TRUE(q.untouched() && memory.untouched());
  }
  // Touching is not overlapping; the stride of a single row means nothing.
  std::memset(memory.data(), 0, static_cast<size_t>(memory.size()));
  Quantized q(kRows, kCols, true);
  ConstTensorView view = bf16_view(input, kRows, kCols);
  view.strides[0] = kStride;
  Nvfp4View out = q.view;
  out.codes = input + kInputBytes;
  out.block_scales = input - 16;
  EXPECT_EQ(quantize_tokens(view, kCols, out).to_string(), "ok");
  view = bf16_view(input, 1, kCols);
  view.strides[0] = kStride;
  out.rows = 1;
  out.codes = input + kCols * 2;
  EXPECT_EQ(quantize_tokens(view, kCols, out).to_string(), "ok");
}

}  // namespace
}  // namespace hexpert::test

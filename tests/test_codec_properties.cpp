// Properties of codecs, layouts and quantizers.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu/kernels.hpp"
#include "format/layout.hpp"
#include "hexpert/quantize.hpp"
#include "support.hpp"
#include "weights/tile_groups.hpp"

namespace hexpert::test {
namespace {

TEST(CodecProperty, DecodeThenEncodeIsIdentity) {
  for (unsigned code = 0; code < 16; ++code)
    EXPECT_EQ(e2m1_encode(e2m1_value(code)), code);
  for (unsigned code = 0; code < 256; ++code) {
    if ((code & 0x7F) == kE4M3Nan) continue;
    EXPECT_EQ(e4m3_encode(e4m3_value(static_cast<uint8_t>(code))), code);
  }
}

RC_GTEST_PROP(CodecProperty, E2M1IsNearest, (uint32_t bits)) {
  const float v = std::bit_cast<float>(bits);
  RC_PRE(std::isfinite(v));
  const double error = std::fabs(static_cast<double>(e2m1_value(e2m1_encode(v))) - v);
  for (unsigned code = 0; code < 16; ++code)
    RC_ASSERT(error <= std::fabs(static_cast<double>(e2m1_value(code)) - v));
}

RC_GTEST_PROP(CodecProperty, E4M3IsNearest, (uint32_t bits)) {
  const float v = std::bit_cast<float>(bits);
  RC_PRE(std::isfinite(v));
  const double error = std::fabs(static_cast<double>(e4m3_value(e4m3_encode(v))) - v);
  for (unsigned code = 0; code < 256; ++code) {
    if ((code & 0x7F) == kE4M3Nan) continue;
    RC_ASSERT(error <= std::fabs(static_cast<double>(e4m3_value(static_cast<uint8_t>(code))) - v));
  }
}

RC_GTEST_PROP(LayoutProperty, ScaleOffsetsAreDistinctAndInside, ()) {
  const int64_t rows = *rc::gen::inRange<int64_t>(1, 300);
  const int64_t columns = *rc::gen::inRange<int64_t>(1, 40);
  for (ScaleLayout scale_layout : {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
    std::vector<bool> taken(
        static_cast<size_t>(block_scale_bytes(scale_layout, rows, columns * kBlockSize)));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const auto offset = static_cast<size_t>(layout::scale_offset(scale_layout, r, c, columns));
        RC_ASSERT(offset < taken.size());
        RC_ASSERT(!taken[offset]);
        taken[offset] = true;
      }
    }
  }
}

RC_GTEST_PROP(LayoutProperty, UnpackUndoesPack, ()) {
  const int64_t k = 64 * *rc::gen::inRange<int64_t>(1, 20);
  Random random(*rc::gen::arbitrary<uint64_t>());
  std::vector<uint8_t> codes(static_cast<size_t>(16 * k / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(16 * k / 16));
  std::generate(codes.begin(), codes.end(), [&] { return static_cast<uint8_t>(random.bits()); });
  std::generate(scales.begin(), scales.end(), [&] { return static_cast<uint8_t>(random.bits()); });
  cpu::Nvfp4Row rows[16];
  for (int64_t n = 0; n < 16; ++n)
    rows[n] = {codes.data() + n * k / 2, scales.data() + n * k / 16};
  std::vector<uint8_t> group(static_cast<size_t>(layout::cpu_tiles::group_bytes(k)));
  cpu::best_kernels().pack_group(rows, k, group.data());
  std::vector<uint8_t> back_codes(static_cast<size_t>(k / 2));
  std::vector<uint8_t> back_scales(static_cast<size_t>(k / 16));
  for (int64_t n = 0; n < 16; ++n) {
    read_row(group.data(), n, k, back_codes.data(), back_scales.data());
    RC_ASSERT(std::equal(back_codes.begin(), back_codes.end(), rows[n].codes));
    RC_ASSERT(std::equal(back_scales.begin(), back_scales.end(), rows[n].scales));
  }
}

struct QuantizedRow {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  OuterScale outer;
  bool operator==(const QuantizedRow& o) const { return codes == o.codes && scales == o.scales; }
};

QuantizedRow quantize_with(const Bf16Vector& x, const OuterScale& outer) {
  QuantizedRow q{std::vector<uint8_t>(x.size() / 2), std::vector<uint8_t>(x.size() / 16), outer};
  cpu::best_kernels().quantize_row(
      x.data(), static_cast<int64_t>(x.size()), outer, q.codes.data(), q.scales.data(), x.data());
  return q;
}

QuantizedRow quantize_own(const Bf16Vector& x) {
  const auto n = static_cast<int64_t>(x.size());
  return quantize_with(x, token_scale(cpu::best_kernels().amax_bits(x.data(), n)));
}

RC_GTEST_PROP(QuantizeProperty, RequantizingWithOwnScalesChangesNothing, ()) {
  const int64_t n = 16 * *rc::gen::inRange<int64_t>(1, 40);
  const QuantizedRow q = quantize_own(outlier_bf16(n, *rc::gen::arbitrary<uint64_t>()));
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    const uint8_t scale = q.scales[i / 16];
    if (scale == 0) continue;  // the values are gone
    const unsigned code = q.codes[i / 2] >> (i % 2 * 4) & 15;
    const float value = e2m1_value(code) * e4m3_value(scale) * q.outer.decode;
    RC_ASSERT(e2m1_encode(value * block_encode(scale, q.outer.decode)) == code);
  }
}

RC_GTEST_PROP(QuantizeProperty, PowersOfTwoMoveTheOuterScaleOnly, ()) {
  const int64_t n = 16 * *rc::gen::inRange<int64_t>(1, 40);
  const int exponent = *rc::gen::inRange(-40, 40);
  const Bf16Vector x = gaussian_bf16(n, *rc::gen::arbitrary<uint64_t>());
  Bf16Vector scaled = x;
  for (uint16_t& value : scaled)
    value = bf16(std::ldexp(static_cast<double>(bf16_to_f32(value)), exponent));
  const QuantizedRow a = quantize_own(x);
  const QuantizedRow b = quantize_own(scaled);
  RC_ASSERT(a == b);
  RC_ASSERT(b.outer.stored == std::ldexp(a.outer.stored, exponent));
}

RC_GTEST_PROP(QuantizeProperty, BlocksAreIndependent, ()) {
  const int64_t n = 16 * *rc::gen::inRange<int64_t>(2, 40);
  const Bf16Vector x = gaussian_bf16(n, *rc::gen::arbitrary<uint64_t>());
  const QuantizedRow whole = quantize_own(x);
  const int64_t block = *rc::gen::inRange<int64_t>(0, n / 16);
  const QuantizedRow one =
      quantize_with(Bf16Vector(x.begin() + 16 * block, x.begin() + 16 * block + 16), whole.outer);
  RC_ASSERT(one.scales[0] == whole.scales[static_cast<size_t>(block)]);
  RC_ASSERT(std::equal(one.codes.begin(), one.codes.end(), whole.codes.begin() + 8 * block));
}

}  // namespace
}  // namespace hexpert::test

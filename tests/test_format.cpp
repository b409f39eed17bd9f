// Codecs and layouts against golden vectors.
#include "hexpert/format.hpp"

#include <gtest/gtest.h>

#include <set>

#include "format/codec.hpp"
#include "format/layout.hpp"
#include "golden.hpp"

namespace hexpert::test {
namespace {

TEST(Codec, E2M1Tables) {
  const std::vector<uint32_t> decoded = golden("tables", "e2m1", "decode").values<uint32_t>();
  for (unsigned code = 0; code < 16; ++code) {
    EXPECT_EQ(f32_bits(e2m1_value(code)), decoded[code]) << code;
    EXPECT_EQ(static_cast<float>(e2m1_doubled(code)), 2 * e2m1_value(code)) << code;
  }
  const GoldenArray codes = golden("tables", "e2m1", "encode_all_bf16");
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = bf16_to_f32(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;  // the quantizers never encode one
    ASSERT_EQ(e2m1_encode(value), codes.data<uint8_t>()[bits]) << bits;
  }
}

TEST(Codec, E4M3Tables) {
  const std::vector<uint32_t> decoded = golden("tables", "e4m3", "decode").values<uint32_t>();
  for (unsigned code = 0; code < 256; ++code) {
    const float value = e4m3_value(static_cast<uint8_t>(code));
    EXPECT_EQ(f32_bits(value), decoded[code]) << code;
    if (std::isnan(value)) continue;
    EXPECT_EQ(static_cast<float>(e4m3_multiple(static_cast<uint8_t>(code))), value * 512) << code;
  }
  const std::vector<float> input = golden("tables", "e4m3", "encode_input").values<float>();
  const std::vector<uint8_t> codes = golden("tables", "e4m3", "encode_code").values<uint8_t>();
  for (size_t i = 0; i < input.size(); ++i)
    EXPECT_EQ(e4m3_encode(input[i]), codes[i]) << input[i];
}

TEST(Codec, Bf16Rounding) {
  const std::vector<float> input = golden("tables", "bf16", "round_input").values<float>();
  const std::vector<uint16_t> output = golden("tables", "bf16", "round_output").values<uint16_t>();
  for (size_t i = 0; i < input.size(); ++i)
    EXPECT_EQ(bf16_from_f32(input[i]), output[i]) << input[i];
  EXPECT_EQ(bf16_from_f32(std::bit_cast<float>(0xFF800001U)), 0xFFC0);  // NaN, never infinity
}

TEST(Codec, F16Values) {
  EXPECT_EQ(f16_to_f32(0x3C00), 1.0F);
  EXPECT_EQ(f16_to_f32(0x0001), 0x1p-24F);
  EXPECT_EQ(f16_to_f32(0x7BFF), 65504.0F);
  EXPECT_EQ(f32_bits(f16_to_f32(0x8000)), 0x80000000U);
  EXPECT_TRUE(std::isinf(f16_to_f32(0xFC00)));
  EXPECT_TRUE(std::isnan(f16_to_f32(0x7C01)));
}

TEST(Layout, SwizzlesOfGoldenMatrices) {
  for (const std::string& name : Golden::instance().cases("layout")) {
    if (!Golden::instance().has("layout", name, "linear")) continue;
    SCOPED_TRACE(name);
    const GoldenArray linear = golden("layout", name, "linear");
    const int64_t rows = linear.shape[0];
    const int64_t columns = linear.shape[1];
    const std::pair<ScaleLayout, std::string> layouts[] = {{ScaleLayout::k128x4, "128x4"},
                                                           {ScaleLayout::k8x4, "8x4"}};
    for (const auto& [scale_layout, suffix] : layouts) {
      const std::vector<uint8_t> bytes =
          golden("layout", name, "bytes_" + suffix).values<uint8_t>();
      ASSERT_EQ(block_scale_bytes(scale_layout, rows, columns * 16),
                static_cast<int64_t>(bytes.size()));
      std::vector<uint8_t> swizzled(bytes.size());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t offset = layout::scale_offset(scale_layout, r, c, columns);
          swizzled[static_cast<size_t>(offset)] = linear.data<uint8_t>()[r * columns + c];
        }
      }
      EXPECT_EQ(swizzled, bytes) << suffix;
    }
  }
}

TEST(Layout, GoldenOffsets) {
  for (const std::string& name : Golden::instance().cases("layout")) {
    if (!Golden::instance().has("layout", name, "offset_128x4")) continue;
    const GoldenArray tall = golden("layout", name, "offset_128x4");
    const GoldenArray flat = golden("layout", name, "offset_8x4");
    const int64_t columns = tall.shape[1];
    for (int64_t r = 0; r < tall.shape[0]; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t i = r * columns + c;
        ASSERT_EQ(layout::offset_128x4(r, c, columns), tall.data<uint32_t>()[i]) << name;
        ASSERT_EQ(layout::offset_8x4(r, c, columns), flat.data<uint32_t>()[i]) << name;
      }
    }
  }
}

TEST(Layout, GoldenMmaView) {
  const std::string name = "mma6d_e3_n384_kb20";
  constexpr int64_t kRows = 384;
  constexpr int64_t kColumns = 20;
  const layout::MmaView view = layout::mma_view(3, kRows, kColumns);
  const GoldenArray shape = golden("layout", name, "shape");
  const GoldenArray stride = golden("layout", name, "stride");
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(view.shape[i], shape.data<int32_t>()[i]) << i;
    EXPECT_EQ(view.strides[i], stride.data<int32_t>()[i]) << i;
  }
  const GoldenArray place = golden("layout", name, "expert_row_block");
  const GoldenArray index = golden("layout", name, "index6");
  const std::vector<uint32_t> offsets = golden("layout", name, "offset").values<uint32_t>();
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int32_t* p = place.data<int32_t>() + 3 * i;
    int64_t through_view = 0;
    for (int d = 0; d < 6; ++d)
      through_view += index.data<int32_t>()[6 * i + static_cast<size_t>(d)] * view.strides[d];
    EXPECT_EQ(through_view, offsets[i]);
    EXPECT_EQ(p[0] * kRows * kColumns + layout::offset_128x4(p[1], p[2], kColumns), offsets[i]);
  }
}

TEST(Layout, GoldenGatedRows) {
  int cases = 0;
  for (const std::string& name : Golden::instance().cases("layout")) {
    if (!Golden::instance().has("layout", name, "source_row")) continue;
    ++cases;
    const int64_t size = std::stoll(name.substr(name.rfind('i') + 1));
    const std::vector<int32_t> source = golden("layout", name, "source_row").values<int32_t>();
    ASSERT_EQ(static_cast<int64_t>(source.size()), 2 * round_up(size, kPaddingMultiple));
    std::vector<int32_t> rows(source.size(), -1);
    for (int64_t feature = 0; feature < size; ++feature) {
      for (const bool gate : {false, true}) {
        const int64_t row = layout::gated_row(gate, feature, layout::kCanonicalInterleave);
        rows[static_cast<size_t>(row)] = static_cast<int32_t>(gate ? feature : size + feature);
      }
    }
    EXPECT_EQ(rows, source) << name;
  }
  EXPECT_EQ(cases, 6);
}

// Each scale has a place of its own inside the buffer, and the place tells the scale.
TEST(Layout, SwizzlesAreInvertible) {
  const std::pair<int64_t, int64_t> shapes[] = {
      {128, 64}, {256, 128}, {120, 64}, {200, 256}, {2048, 2048}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t padded = round_up(columns, 4);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t tall = layout::offset_128x4(r, c, columns);
        const int64_t tile = tall / 512;
        const int64_t in = tall % 512;
        ASSERT_EQ(tile / (padded / 4) * 128 + in % 16 / 4 * 32 + in / 16, r);
        ASSERT_EQ(tile % (padded / 4) * 4 + in % 4, c);
        const int64_t flat = layout::offset_8x4(r, c, columns);
        ASSERT_EQ(flat / 32 / (padded / 4) * 8 + flat % 32 / 4, r);
        ASSERT_EQ(flat / 32 % (padded / 4) * 4 + flat % 4, c);
        ASSERT_LT(tall, block_scale_bytes(ScaleLayout::k128x4, rows, columns * 16));
        ASSERT_LT(flat, block_scale_bytes(ScaleLayout::k8x4, rows, columns * 16));
      }
    }
  }
}

TEST(Layout, OffsetsBeyond32Bits) {
  EXPECT_EQ(block_scale_bytes(ScaleLayout::kLinear, int64_t{1} << 30, 1024), int64_t{1} << 36);
  EXPECT_EQ(layout::linear_offset(int64_t{1} << 33, 5, 64), (int64_t{1} << 39) + 5);
  EXPECT_EQ(layout::offset_128x4(int64_t{1} << 33, 4, 8), (int64_t{1} << 36) + 512);
}

TEST(Layout, CpuTilesHoldEveryNibbleOnce) {
  constexpr int64_t kCols = 128;
  std::set<int64_t> places;
  for (int64_t n = 0; n < 16; ++n) {
    for (int64_t k = 0; k < kCols; ++k) {
      const int64_t byte = layout::cpu_tiles::code_offset(n, k);
      EXPECT_TRUE(places.insert(2 * byte + (layout::cpu_tiles::nibble_is_high(k) ? 1 : 0)).second);
    }
    for (int64_t b = 0; b < kCols / 16; ++b) {
      EXPECT_TRUE(places.insert(2 * layout::cpu_tiles::scale_offset(n, b)).second);
      EXPECT_TRUE(places.insert(2 * layout::cpu_tiles::scale_offset(n, b) + 1).second);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(places.size()), 2 * layout::cpu_tiles::group_bytes(kCols));
  EXPECT_EQ(*places.rbegin(), 2 * layout::cpu_tiles::group_bytes(kCols) - 1);
}

}  // namespace
}  // namespace hexpert::test

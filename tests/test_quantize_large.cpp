// Rows past 2^31 elements: offsets need 64 bits.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "hexpert/quantize.hpp"
#include "support.hpp"

namespace hexpert::test {
namespace {

TEST(QuantizeLarge, ConstantRowsPast2To31Elements) {
  constexpr int64_t kRows = 798848 + 192;
  constexpr int64_t kCols = 2688;
  constexpr int64_t kNeeded = kRows * kCols * 5 / 2 + (int64_t{2} << 30);
  if (sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE) < kNeeded) {
    GTEST_SKIP() << "needs " << (kNeeded >> 30) << " GiB of free memory";
  }
  Bf16Vector x(static_cast<size_t>(kRows * kCols));
  for (int64_t r = 0; r < kRows; ++r)
    std::fill_n(x.begin() + r * kCols, kCols, bf16(static_cast<double>(1 + r % 7)));
  AlignedVector<uint8_t> codes(static_cast<size_t>(kRows * kCols / 2));
  AlignedVector<uint8_t> scales(static_cast<size_t>(kRows * kCols / 16));
  std::vector<float> outer(static_cast<size_t>(kRows));
  ASSERT_TRUE(quantize_tokens({x.data(), DType::kBF16, {kRows, kCols}},
                              kCols,
                              {codes.data(), scales.data(), outer.data(), kRows, kCols, true})
                  .ok());
  EXPECT_EQ(std::count(codes.begin(), codes.end(), 0x77), kRows * kCols / 2);
  EXPECT_EQ(std::count(scales.begin(), scales.end(), 0x7E), kRows * kCols / 16);
  for (int64_t r = 0; r < kRows; ++r) {
    const float expected = 1.0F / (2688.0F / static_cast<float>(1 + r % 7));
    ASSERT_EQ(outer[static_cast<size_t>(r)], expected) << "row " << r;
  }
}

}  // namespace
}  // namespace hexpert::test

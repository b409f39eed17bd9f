// quantize_tokens() on the GPU: byte for byte what the CPU gives.
#include "cuda_case.hpp"
#include "golden.hpp"
#include "hexpert/quantize.hpp"

namespace hexpert::test {
namespace {

struct Quantized {
  std::vector<uint8_t> codes, scales;
  std::vector<uint32_t> outer;  // bits
  bool operator==(const Quantized&) const = default;
};

Quantized on_cpu(const Bf16Vector& x, int64_t rows, int64_t cols, int64_t stride, int64_t padded) {
  AlignedVector<uint8_t> codes(static_cast<size_t>(rows * padded / 2));
  AlignedVector<uint8_t> scales(static_cast<size_t>(rows * padded / 16));
  AlignedVector<float> outer(static_cast<size_t>(rows));
  ConstTensorView view(x.data(), DType::kBF16, {rows, cols});
  view.strides[0] = stride;
  const Status status = quantize_tokens(
      view, padded, {codes.data(), scales.data(), outer.data(), rows, padded, true});
  if (!status.ok()) throw Error(status);
  Quantized q{{codes.begin(), codes.end()}, {scales.begin(), scales.end()}, {}};
  for (float t : outer)
    q.outer.push_back(f32_bits(t));
  return q;
}

Quantized on_gpu(const Bf16Vector& x, int64_t rows, int64_t cols, int64_t stride, int64_t padded) {
  const auto source = DeviceBuffer<uint16_t>::copy_of(x);
  const DeviceBuffer<uint8_t> codes(rows * padded / 2);
  const DeviceBuffer<uint8_t> scales(rows * padded / 16);
  const DeviceBuffer<float> outer(rows);
  ConstTensorView view(source.data(), DType::kBF16, {rows, cols}, kGpu);
  view.strides[0] = stride;
  const TestStream stream;
  QuantizeOptions options;
  options.stream = stream.view();
  const Status status = quantize_tokens(
      view, padded, {codes.data(), scales.data(), outer.data(), rows, padded, true}, options);
  if (!status.ok()) throw Error(status);
  stream.wait();
  EXPECT_TRUE(codes.fences_intact() && scales.fences_intact() && outer.fences_intact() &&
              source.fences_intact());
  Quantized q{codes.to_vector(), scales.to_vector(), {}};
  for (float t : outer.to_vector())
    q.outer.push_back(f32_bits(t));
  return q;
}

void expect_same(const Bf16Vector& x, int64_t rows, int64_t cols, int64_t stride, int64_t padded) {
  SCOPED_TRACE(testing::Message() << "[" << rows << ", " << cols << "] stride " << stride
                                  << " padded to " << padded);
  const Quantized expected = on_cpu(x, rows, cols, stride, padded);
  const Quantized actual = on_gpu(x, rows, cols, stride, padded);
  EXPECT_TRUE(actual.outer == expected.outer) << "token scales";
  EXPECT_TRUE(actual.scales == expected.scales) << "block scales";
  EXPECT_TRUE(actual.codes == expected.codes) << "codes";
}

TEST(CudaTokens, GoldenBytes) {
  for (const char* group : {"per_token", "nonfinite"}) {
    for (const std::string& name : Golden::instance().cases(group)) {
      if (!Golden::instance().has(group, name, "row_scale")) continue;
      SCOPED_TRACE(name);
      const GoldenArray x = golden(group, name, "x");
      const GoldenArray data = golden(group, name, "data");
      const Bf16Vector values(x.data<uint16_t>(), x.data<uint16_t>() + x.count());
      const Quantized actual =
          on_gpu(values, x.shape[0], x.shape[1], x.shape[1], data.shape[1] * 2);
      EXPECT_EQ(actual.codes, data.values<uint8_t>());
      EXPECT_EQ(actual.scales, golden(group, name, "scale_linear").values<uint8_t>());
      EXPECT_EQ(actual.outer, golden(group, name, "row_scale").values<uint32_t>());
    }
  }
}

TEST(CudaTokens, ConformanceShapes) {
  constexpr int64_t kShapes[][2] = {{1, 64},
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
  for (const auto& [rows, cols] : kShapes) {
    const auto size = static_cast<size_t>(rows * cols);
    Bf16Vector random = outlier_bf16(rows * cols, 7);
    std::fill_n(random.begin(), cols, uint16_t{0});
    expect_same(random, rows, cols, cols, cols);
    Bf16Vector ramp(size);
    for (size_t i = 0; i < size; ++i) {
      const double base = -12.0 + 24.0 * static_cast<double>(i / 2) / static_cast<double>(size / 2);
      ramp[i] = bf16(base + (i % 2 == 0 ? -1e-3 : 1e-3));
    }
    expect_same(ramp, rows, cols, cols, cols);
    expect_same(Bf16Vector(size, 0), rows, cols, cols, cols);
    expect_same(Bf16Vector(size, 0x7F7F), rows, cols, cols, cols);
  }
}

// Rows that start at any 2-byte boundary, padding of every length.
TEST(CudaTokens, OddSizesAndStrides) {
  for (int64_t cols : {1, 2, 7, 15, 16, 17, 31, 63, 65, 100, 255, 1000, 2687, 2688, 2689, 7167}) {
    for (int64_t stride : {cols, cols + 1, cols + 5}) {
      const int64_t rows = 13;
      const Bf16Vector x = gaussian_bf16(rows * stride, static_cast<uint64_t>(cols + stride));
      expect_same(x, rows, cols, stride, round_up(cols, 16));
      expect_same(x, rows, cols, stride, round_up(cols, 256) + 256);
    }
  }
}

// Every finite pattern under token scales of every size, subnormals, infinities and NaN in any place.
TEST(CudaTokens, SpecialValues) {
  constexpr int64_t kCols = 4096;
  Bf16Vector x;
  for (uint32_t bits = 0; bits <= 0x7F80; ++bits) {
    x.push_back(static_cast<uint16_t>(bits));
    x.push_back(static_cast<uint16_t>(bits | 0x8000));
  }
  x.resize(static_cast<size_t>(round_up(static_cast<int64_t>(x.size()), kCols)), 0x8000);
  expect_same(x, static_cast<int64_t>(x.size()) / kCols, kCols, kCols, kCols);
  expect_same(any_bf16(257 * 96, 3), 257, 96, 96, 128);
  for (int exponent = -133; exponent < 127; exponent += 4) {
    Bf16Vector rows =
        log_uniform_bf16(5 * 272, static_cast<uint64_t>(exponent + 200), exponent - 20, exponent);
    rows[271] = 0x8000;
    rows[272 + 17] = 0xFF80;
    rows[2 * 272 + 270] = 0x7FC0;
    expect_same(rows, 5, 272, 272, 320);
  }
}

TEST(CudaTokens, RowsPast2To31Elements) {
  constexpr int64_t kCols = 2688;
  for (int64_t rows : {int64_t{798848}, int64_t{799040}}) {
    const DeviceBuffer<uint16_t> x(rows * kCols, 0xFF);
    constexpr int64_t kChunk = 70000;
    Bf16Vector chunk(static_cast<size_t>(kChunk * kCols));
    for (int64_t r = 0; r < kChunk; ++r)
      std::fill_n(chunk.begin() + r * kCols, kCols, bf16(static_cast<double>(1 + r % 7)));
    for (int64_t first = 0; first < rows; first += kChunk) {  // 7 divides the chunk
      cuda_ok(cudaMemcpy(x.data() + first * kCols,
                         chunk.data(),
                         static_cast<size_t>(std::min(kChunk, rows - first) * kCols * 2),
                         cudaMemcpyDefault));
    }
    const DeviceBuffer<uint8_t> codes(rows * kCols / 2);
    const DeviceBuffer<uint8_t> scales(rows * kCols / 16);
    const DeviceBuffer<float> outer(rows);
    ASSERT_TRUE(quantize_tokens({x.data(), DType::kBF16, {rows, kCols}, kGpu},
                                kCols,
                                {codes.data(), scales.data(), outer.data(), rows, kCols, true})
                    .ok());
    cuda_ok(cudaDeviceSynchronize());
    const std::vector<uint8_t> all = codes.to_vector();
    EXPECT_EQ(std::count(all.begin(), all.end(), 0x77), rows * kCols / 2);
    const std::vector<uint8_t> all_scales = scales.to_vector();
    EXPECT_EQ(std::count(all_scales.begin(), all_scales.end(), 0x7E), rows * kCols / 16);
    const std::vector<float> t = outer.to_vector();
    for (int64_t r = 0; r < rows; ++r) {
      ASSERT_EQ(t[static_cast<size_t>(r)], 1.0F / (2688.0F / static_cast<float>(1 + r % 7)))
          << "row " << r;
    }
  }
}

TEST(CudaTokens, IsCapturedInAGraph) {
  const int64_t rows = 9;
  const int64_t cols = 144;
  const Bf16Vector first = gaussian_bf16(rows * cols, 1);
  const Bf16Vector second = gaussian_bf16(rows * cols, 2);
  auto source = DeviceBuffer<uint16_t>::copy_of(first);
  const DeviceBuffer<uint8_t> codes(rows * cols / 2);
  const DeviceBuffer<uint8_t> scales(rows * cols / 16);
  const DeviceBuffer<float> outer(rows);
  const TestStream stream;
  QuantizeOptions options;
  options.stream = stream.view();
  Status status;
  const TestGraph graph(stream, [&] {
    status = quantize_tokens({source.data(), DType::kBF16, {rows, cols}, kGpu},
                             cols,
                             {codes.data(), scales.data(), outer.data(), rows, cols, true},
                             options);
  });
  ASSERT_EQ(status.to_string(), "ok");
  for (const Bf16Vector* x : {&first, &second}) {
    source.upload(x->data());
    graph.replay(stream);
    EXPECT_TRUE(codes.to_vector() == on_cpu(*x, rows, cols, cols, cols).codes);
  }
}

TEST(CudaTokens, WrongMemoryIsRefused) {
  const Bf16Vector host = gaussian_bf16(4 * 64, 1);
  const auto x = DeviceBuffer<uint16_t>::copy_of(host);
  const DeviceBuffer<uint8_t> codes(4 * 32);
  const DeviceBuffer<uint8_t> scales(4 * 4);
  const DeviceBuffer<float> outer(4);
  alignas(64) uint8_t host_codes[4 * 32];
  const Nvfp4View good{codes.data(), scales.data(), outer.data(), 4, 64, true};
  Nvfp4View bad = good;
  bad.codes = host_codes;
  const ConstTensorView view(x.data(), DType::kBF16, {4, 64}, kGpu);
  EXPECT_EQ(quantize_tokens(view, 64, bad).code(), ErrorCode::kDeviceMismatch);
  const ConstTensorView liar(host.data(), DType::kBF16, {4, 64}, kGpu);
  EXPECT_EQ(quantize_tokens(liar, 64, good).code(), ErrorCode::kDeviceMismatch);
  EXPECT_EQ(quantize_tokens(view, 64, good, {.four_over_six = FourOverSix{}}).code(),
            ErrorCode::kUnsupported);
  EXPECT_TRUE(quantize_tokens({nullptr, DType::kBF16, {0, 64}, kGpu},
                              64,
                              {nullptr, nullptr, nullptr, 0, 64, true})
                  .ok());
}

}  // namespace
}  // namespace hexpert::test

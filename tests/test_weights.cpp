// Weight preparation: golden bytes, round trips, refresh in place, refusals.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <limits>

#include "golden.hpp"
#include "hexpert/weights.hpp"
#include "support.hpp"
#include "weights/storage.hpp"
#include "weights_case.hpp"

namespace hexpert::test {
namespace {

template <typename T>
std::vector<T> golden_values(const std::string& name, const std::string& array) {
  return golden("weights", name, array).values<T>();
}

class GoldenWeights : public testing::TestWithParam<const char*> {};

TEST_P(GoldenWeights, ExportIsTheCanonicalBytes) {
  const std::string name = GetParam();
  const GoldenArray fc1 = golden("weights", name, "fc1_weight");
  const GoldenArray fc2 = golden("weights", name, "fc2_weight");
  const ConstTensorView fc1_view(
      fc1.data<uint16_t>(), DType::kBF16, {fc1.shape[0], fc1.shape[1], fc1.shape[2]});
  const ConstTensorView fc2_view(
      fc2.data<uint16_t>(), DType::kBF16, {fc2.shape[0], fc2.shape[1], fc2.shape[2]});
  for (int threads : {1, 2, 3}) {
    PrepareOptions options;
    options.num_threads = threads;
    const ExpertWeights weights = ExpertWeights::prepare(fc1_view, fc2_view, options).value();
    const Canonical canonical = exported(weights);
    EXPECT_EQ(canonical.fc1_data, golden_values<uint8_t>(name, "fc1_data"));
    EXPECT_EQ(canonical.fc1_scales, golden_values<uint8_t>(name, "fc1_scale_swizzled"));
    EXPECT_EQ(canonical.fc2_data, golden_values<uint8_t>(name, "fc2_data"));
    EXPECT_EQ(canonical.fc2_scales, golden_values<uint8_t>(name, "fc2_scale_swizzled"));
    EXPECT_EQ(canonical.fc1_alpha, golden_values<float>(name, "fc1_alpha"));
    EXPECT_EQ(canonical.fc1_gate_alpha, golden_values<float>(name, "fc1_alpha"));
    EXPECT_EQ(canonical.fc2_alpha, golden_values<float>(name, "fc2_alpha"));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         GoldenWeights,
                         testing::Values("gated_e2_i192_h80", "relu2_e3_i96_h64"));

RC_GTEST_PROP(Weights, CanonicalRoundTrip, ()) {
  const ExpertShape shape{*rc::gen::inRange<int64_t>(1, 4),
                          *rc::gen::inRange<int64_t>(1, 300),
                          *rc::gen::inRange<int64_t>(1, 300),
                          *rc::gen::arbitrary<bool>()};
  const Stacks stacks(shape, *rc::gen::arbitrary<uint64_t>());
  Canonical first = exported(stacks.prepare());
  ExpertWeights copy = ExpertWeights::allocate(shape, {}).value();
  RC_ASSERT(copy.import_canonical(first.view()).ok());
  RC_ASSERT(exported(copy) == first);
}

RC_GTEST_PROP(Weights, ProjectionRoundTrip, ()) {
  const ExpertShape shape{2,
                          *rc::gen::inRange<int64_t>(1, 200),
                          *rc::gen::inRange<int64_t>(1, 200),
                          *rc::gen::arbitrary<bool>()};
  const ExpertWeights weights = Stacks(shape, *rc::gen::arbitrary<uint64_t>()).prepare();
  ExpertWeights copy = ExpertWeights::allocate(shape, {}).value();
  using P = ExpertWeights::Projection;
  for (int64_t e = 0; e < shape.num_local_experts; ++e) {
    struct Buffers {
      std::vector<uint8_t> codes, scales;
      float alpha = 0;
    } buffers[3];
    for (P p : {P::kGate, P::kUp, P::kDown}) {
      if (p == P::kGate && !shape.gated) continue;
      const int64_t rows = p == P::kDown ? shape.hidden_size : shape.intermediate_size;
      const int64_t cols = p == P::kDown ? shape.intermediate_size : shape.hidden_size;
      Buffers& b = buffers[static_cast<int>(p)];
      b.codes.resize(static_cast<std::size_t>(rows * round_up(cols, 16) / 2));
      b.scales.resize(static_cast<std::size_t>(rows * round_up(cols, 16) / 16));
      RC_ASSERT(weights.export_projection(e, p, b.codes.data(), b.scales.data(), &b.alpha).ok());
    }
    const auto projection = [&](P p) {
      const Buffers& b = buffers[static_cast<int>(p)];
      return QuantizedProjection{b.codes.data(), b.scales.data(), b.alpha};
    };
    RC_ASSERT(copy.set_quantized_expert(
                      e, {projection(P::kGate), projection(P::kUp), projection(P::kDown)})
                  .ok());
  }
  RC_ASSERT(exported(copy) == exported(weights));
}

TEST(Weights, RefreshKeepsAddressesAndEqualsAFreshPrepare) {
  const ExpertShape shape{3, 80, 48, true};
  ExpertWeights weights = Stacks(shape, 1).prepare();
  const uint8_t* fc1 = weights.storage().fc1.data();
  const uint8_t* fc2 = weights.storage().fc2.data();
  const Stacks next(shape, 7);
  ASSERT_TRUE(weights.refresh(next.fc1_view(), next.fc2_view()).ok());
  EXPECT_EQ(weights.storage().fc1.data(), fc1);
  EXPECT_EQ(weights.storage().fc2.data(), fc2);
  EXPECT_TRUE(exported(weights) == exported(next.prepare()));
}

TEST(Weights, OneExpertAtATimeEqualsTheStack) {
  const ExpertShape shape{4, 72, 40, false};
  const Stacks stacks(shape, 3);
  ExpertWeights streamed = ExpertWeights::allocate(shape, {}).value();
  for (int64_t e = 0; e < shape.num_local_experts; ++e) {
    // Each expert from memory of its own: views into a stack need not be aligned.
    const int64_t n = shape.intermediate_size * shape.hidden_size;
    const Bf16Vector fc1(stacks.fc1.begin() + e * n, stacks.fc1.begin() + (e + 1) * n);
    const Bf16Vector fc2(stacks.fc2.begin() + e * n, stacks.fc2.begin() + (e + 1) * n);
    ASSERT_TRUE(streamed
                    .set_expert(e,
                                {fc1.data(), DType::kBF16, {shape.intermediate_size, 72}},
                                {fc2.data(), DType::kBF16, {72, shape.intermediate_size}})
                    .ok());
  }
  EXPECT_TRUE(exported(streamed) == exported(stacks.prepare()));
}

TEST(Weights, RefreshOfAnotherShapeWritesNothing) {
  const ExpertShape shape{2, 64, 32, true};
  ExpertWeights weights = Stacks(shape, 1).prepare();
  const Canonical before = exported(weights);
  struct Case {
    ExpertShape given;
    const char* message;
  };
  for (const Case& c : {
           Case{{3, 64, 32, true}, "num_local_experts: the weights were prepared for 2, got 3"},
           Case{{2, 80, 32, true}, "hidden_size: the weights were prepared for 64, got 80"},
           Case{{2, 64, 48, true}, "intermediate_size: the weights were prepared for 32, got 48"},
           Case{{2, 64, 32, false}, "gated: the weights were prepared for 1, got 0"},
       }) {
    const Stacks other(c.given, 9);
    const Status status = weights.refresh(other.fc1_view(), other.fc2_view());
    EXPECT_EQ(status.code(), ErrorCode::kMetadataMismatch);
    EXPECT_EQ(status.message(), c.message);
    EXPECT_TRUE(exported(weights) == before);
  }
}

TEST(Weights, NanPoisonsItsMatrixWithPadding) {
  const ExpertShape shape{2, 80, 48, true};
  Stacks stacks(shape, 5);
  stacks.fc2[5] = 0x7FC1;
  const ExpertWeights weights = stacks.prepare();
  const Canonical canonical = exported(weights);
  EXPECT_EQ(std::bit_cast<uint32_t>(canonical.fc2_alpha[0]), kCanonicalNan);
  EXPECT_TRUE(std::isfinite(canonical.fc2_alpha[1]));
  const std::size_t one = canonical.fc2_scales.size() / 2;
  for (std::size_t i = 0; i < one; ++i)
    ASSERT_EQ(canonical.fc2_scales[i], kE4M3Nan);
  for (std::size_t i = 0; i < canonical.fc2_data.size() / 2; ++i)
    ASSERT_EQ(canonical.fc2_data[i], 0);
  // And it comes back.
  Canonical copy = canonical;
  ExpertWeights imported = ExpertWeights::allocate(shape, {}).value();
  ASSERT_EQ(imported.import_canonical(copy.view()).to_string(), "ok");
  EXPECT_TRUE(exported(imported) == canonical);
}

TEST(Weights, NonFiniteWeightsAreNamedOnRequest) {
  Stacks stacks({3, 64, 32, false}, 5);
  stacks.fc1[2 * 32 * 64 + 3] = 0xFF80;
  PrepareOptions options;
  options.refuse_nonfinite = true;
  const auto weights = ExpertWeights::prepare(stacks.fc1_view(), stacks.fc2_view(), options);
  EXPECT_EQ(weights.status().code(), ErrorCode::kNonFiniteWeights);
  EXPECT_EQ(weights.status().message(), "fc1_weight: expert 2 holds an infinity");

  Stacks nan({3, 64, 32, false}, 5);
  nan.fc2[1 * 32 * 64] = 0xFFC1;
  const auto other = ExpertWeights::prepare(nan.fc1_view(), nan.fc2_view(), options);
  EXPECT_EQ(other.status().code(), ErrorCode::kNonFiniteWeights);
  EXPECT_EQ(other.status().message(), "fc2_weight: expert 1 holds a NaN");
}

TEST(Weights, PaddingOfAnImportMustBeZero) {
  const ExpertShape shape{1, 80, 48, false};
  ExpertWeights weights = Stacks(shape, 5).prepare();
  const Canonical good = exported(weights);
  Canonical bad = good;
  bad.fc1_data[100] = 0x10;  // row 0, column 201
  const Status status = weights.import_canonical(bad.view());
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "fc1: expert 0: padding at row 0, column 201 is not zero");
  EXPECT_TRUE(exported(weights) == good);
}

TEST(Weights, NanCodedAndNegativeScalesOfAnImportAreRefused) {
  const ExpertShape shape{1, 80, 48, false};
  ExpertWeights weights = Stacks(shape, 5).prepare();
  const Canonical good = exported(weights);
  for (uint8_t byte : {uint8_t{0x7F}, uint8_t{0xB8}}) {
    Canonical bad = good;
    bad.fc2_scales[16] = byte;  // row 1, block 0
    const Status status = weights.import_canonical(bad.view());
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_NE(status.message().find("fc2: expert 0, row 1, block 0"), std::string::npos)
        << status.message();
    EXPECT_TRUE(exported(weights) == good);
  }
}

TEST(Weights, InfiniteAlphasOfAnImportAreRefused) {
  const ExpertShape shape{2, 80, 48, true};
  ExpertWeights weights = Stacks(shape, 5).prepare();
  const Canonical good = exported(weights);
  for (std::vector<float> Canonical::*alphas :
       {&Canonical::fc1_alpha, &Canonical::fc1_gate_alpha, &Canonical::fc2_alpha}) {
    Canonical bad = good;
    (bad.*alphas)[1] = -std::numeric_limits<float>::infinity();
    const Status status = weights.import_canonical(bad.view());
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_NE(status.message().find("alpha: expert 1 has -inf, expected a finite number"),
              std::string::npos)
        << status.message();
    EXPECT_TRUE(exported(weights) == good);
  }
}

TEST(Weights, NullBuffersOfAnImportAreNamed) {
  const ExpertShape shape{1, 80, 48, true};
  ExpertWeights weights = Stacks(shape, 5).prepare();
  Canonical bytes = exported(weights);
  const auto expect_null = [&](const char* name, const CanonicalWeights& source) {
    const Status status = weights.import_canonical(source);
    EXPECT_EQ(status.code(), ErrorCode::kNullPointer);
    EXPECT_EQ(status.message(), std::string(name) + ": must not be null");
  };
  CanonicalWeights source = bytes.view();
  source.fc1_data = nullptr;
  expect_null("fc1_data", source);
  source = bytes.view();
  source.fc1_scale_swizzled = nullptr;
  expect_null("fc1_scale_swizzled", source);
  source = bytes.view();
  source.fc1_alpha = nullptr;
  expect_null("fc1_alpha", source);
  source = bytes.view();
  source.fc2_data = nullptr;
  expect_null("fc2_data", source);
  source = bytes.view();
  source.fc2_scale_swizzled = nullptr;
  expect_null("fc2_scale_swizzled", source);
  source = bytes.view();
  source.fc2_alpha = nullptr;
  expect_null("fc2_alpha", source);
}

TEST(Weights, GateAndUpKeepTheirOwnAlphas) {
  const ExpertShape shape{1, 64, 32, true};
  ExpertWeights weights = Stacks(shape, 5).prepare();
  std::vector<uint8_t> codes(64 * 32 / 2, 0x21);
  std::vector<uint8_t> scales(64 * 32 / 16, 0x38);
  const QuantizedProjection gate{codes.data(), scales.data(), 0.25F};
  const QuantizedProjection up{codes.data(), scales.data(), 2.0F};
  ASSERT_TRUE(weights.set_quantized_expert(0, {gate, up, gate}).ok());
  Canonical canonical(shape);
  CanonicalWeights out = canonical.view();
  EXPECT_TRUE(weights.export_canonical(out).ok());
  EXPECT_EQ(canonical.fc1_alpha[0], 2.0F);
  EXPECT_EQ(canonical.fc1_gate_alpha[0], 0.25F);
  out.fc1_gate_alpha = nullptr;
  EXPECT_EQ(weights.export_canonical(out).code(), ErrorCode::kUnsupported);
}

TEST(Weights, ExportsThatOverlapAreRefusedAndNothingIsWritten) {
  const ExpertShape shape{2, 80, 48, true};
  const ExpertWeights weights = Stacks(shape, 5).prepare();
  Canonical canonical(shape);
  const Canonical before = canonical;
  const CanonicalWeights all = canonical.view();
  const auto expect =
      [](const Status& status, const std::string& first, const std::string& second) {
        EXPECT_EQ(status.code(), ErrorCode::kInvalidOutput) << status.to_string();
        EXPECT_EQ(status.message().rfind(
                      first + ": expected memory that overlaps no other output, got [0x", 0),
                  0U)
            << status.message();
        EXPECT_NE(status.message().find(" over " + second + " at [0x"), std::string::npos)
            << status.message();
      };
  CanonicalWeights out = all;
  out.fc2_data = all.fc1_data + canonical.fc1_data.size() - 1;
  expect(weights.export_canonical(out), "fc1_data", "fc2_data");
  out = all;
  out.fc2_scale_swizzled = all.fc1_scale_swizzled;
  expect(weights.export_canonical(out), "fc1_scale_swizzled", "fc2_scale_swizzled");
  out = all;
  out.fc1_gate_alpha = all.fc1_alpha;
  expect(weights.export_canonical(out), "fc1_alpha", "fc1_gate_alpha");
  out = all;
  out.fc2_alpha = all.fc1_gate_alpha + 1;
  expect(weights.export_canonical(out), "fc1_gate_alpha", "fc2_alpha");
  EXPECT_TRUE(canonical == before);

  PoisonedBuffer<uint8_t> memory(48 * 80 / 2 + 48 * 80 / 16 + 64);
  uint8_t* const codes = memory.data();
  uint8_t* const behind = codes + 48 * 80 / 2;
  const auto projection = [&](uint8_t* block_scales, void* alpha) {
    return weights.export_projection(
        1, ExpertWeights::Projection::kUp, codes, block_scales, static_cast<float*>(alpha));
  };
  float alpha = 0;
  expect(projection(behind - 1, &alpha), "codes", "block_scales");
  expect(projection(behind, codes), "codes", "alpha");
  expect(projection(behind, behind), "block_scales", "alpha");
  EXPECT_TRUE(memory.untouched());
  EXPECT_EQ(projection(behind, behind + 48 * 80 / 16).to_string(), "ok");
  EXPECT_EQ(projection(behind, nullptr).to_string(), "ok");
}

TEST(Weights, BadQuantizedExpertsAreRefusedBeforeAnythingIsWritten) {
  const ExpertShape shape{2, 64, 32, true};
  ExpertWeights weights = Stacks(shape, 5).prepare();
  const Canonical before = exported(weights);
  const std::vector<uint8_t> codes(64 * 32 / 2, 0x21);
  const std::vector<uint8_t> scales(64 * 32 / 16, 0x38);
  const QuantizedProjection good{codes.data(), scales.data(), 1.0F};
  for (uint8_t byte : {uint8_t{0x7F}, uint8_t{0xFF}, uint8_t{0x81}}) {
    std::vector<uint8_t> bad = scales;
    bad[5] = byte;
    const Status status =
        weights.set_quantized_expert(1, {good, {codes.data(), bad.data(), 1.0F}, good});
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_NE(status.message().find("up: expert 1, row 1, block 1"), std::string::npos)
        << status.message();
  }
  for (float alpha : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const Status status =
        weights.set_quantized_expert(0, {good, good, {codes.data(), scales.data(), alpha}});
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_NE(status.message().find("down"), std::string::npos);
  }
  EXPECT_EQ(weights.set_quantized_expert(2, {good, good, good}).message(),
            "expert: expected 0..1, got 2");
  EXPECT_TRUE(exported(weights) == before);
}

TEST(Weights, MemoryIsFourAndAHalfBitsAWeight) {
  // Sizes that are multiples of 64: no padding.
  const ExpertShape shape{4, 2688, 1856, false};
  const ExpertWeights weights = ExpertWeights::allocate(shape, {}).value();
  const int64_t elements = 2 * 4 * int64_t{2688} * 1856;
  EXPECT_EQ(weights.size_bytes(), elements * 9 / 16 + 3 * 4 * 4);
}

struct BadStack {
  ConstTensorView fc1, fc2;
  ErrorCode code;
  const char* message;
};

TEST(Weights, BadStacksAreRefused) {
  alignas(64) static uint16_t memory[4096] = {};
  const auto view = [](std::initializer_list<int64_t> shape, DType dtype = DType::kBF16) {
    return ConstTensorView(memory, dtype, shape);
  };
  ConstTensorView strided = view({2, 16, 32});
  strided.strides[1] = 64;
  ConstTensorView null = view({2, 16, 32});
  null.data = nullptr;
  ConstTensorView odd = view({2, 16, 32});
  odd.data = memory + 1;
  ConstTensorView gpu = view({2, 16, 32});
  gpu.device = Device::cuda(0);
  const ConstTensorView fc2 = view({2, 32, 16});
  for (const BadStack& bad : {
           BadStack{view({16, 32}), fc2, ErrorCode::kInvalidShape, "expected rank 3"},
           BadStack{view({2, 0, 32}), fc2, ErrorCode::kInvalidShape, "every dimension"},
           BadStack{view({2, 16, 32}, DType::kF16), fc2, ErrorCode::kInvalidDtype, "f16"},
           BadStack{strided, fc2, ErrorCode::kNotContiguous, "packed"},
           BadStack{null, fc2, ErrorCode::kNullPointer, "null"},
           BadStack{odd, fc2, ErrorCode::kMisaligned, "multiple of 16"},
           BadStack{gpu, fc2, ErrorCode::kDeviceMismatch, "cuda:0"},
           BadStack{view({3, 16, 32}), fc2, ErrorCode::kShapeMismatch, "expected 3 experts"},
           BadStack{view({2, 16, 48}), fc2, ErrorCode::kShapeMismatch, "expected 32 columns"},
           BadStack{view({2, 24, 32}), fc2, ErrorCode::kShapeMismatch, "expected 16 rows"},
       }) {
    const auto weights = ExpertWeights::prepare(bad.fc1, bad.fc2, {});
    EXPECT_EQ(weights.status().code(), bad.code) << weights.status().to_string();
    EXPECT_NE(weights.status().message().find(bad.message), std::string::npos)
        << weights.status().message();
  }
}

// Both calls that read stacks check both stacks, in the same words.
TEST(Weights, BadSecondStacksAndRefreshesAreRefused) {
  ExpertWeights weights = Stacks({2, 32, 16, false}, 5).prepare();
  const Canonical before = exported(weights);
  alignas(64) static uint16_t memory[4096] = {};
  const ConstTensorView fc1(memory, DType::kBF16, {2, 16, 32});
  const auto expect_both = [&](ErrorCode code, const char* message, const ConstTensorView& fc2) {
    for (const Status& status :
         {ExpertWeights::prepare(fc1, fc2).status(), weights.refresh(fc1, fc2)}) {
      EXPECT_EQ(status.code(), code) << status.to_string();
      EXPECT_EQ(status.message(), message);
    }
  };
  ConstTensorView fc2(memory, DType::kBF16, {32, 16});
  expect_both(ErrorCode::kInvalidShape, "fc2_weight: expected rank 3, got [32, 16] bf16", fc2);
  fc2 = {memory, DType::kBF16, {0, 32, 16}};
  expect_both(ErrorCode::kInvalidShape,
              "fc2_weight: every dimension must be in 1..1073741824, got [0, 32, 16] bf16",
              fc2);
  fc2 = {memory, DType::kF32, {2, 32, 16}};
  expect_both(ErrorCode::kInvalidDtype, "fc2_weight: expected bf16, got [2, 32, 16] f32", fc2);
  fc2 = {memory, DType::kBF16, {2, 32, 16}};
  fc2.strides[2] = 2;
  expect_both(ErrorCode::kNotContiguous, "fc2_weight: expected a packed row-major tensor", fc2);
  fc2 = {memory, DType::kBF16, {2, 32, 16}, Device::cuda(3)};
  expect_both(ErrorCode::kDeviceMismatch, "fc2_weight: expected memory of cpu, got cuda:3", fc2);
  fc2 = {nullptr, DType::kBF16, {2, 32, 16}};
  expect_both(ErrorCode::kNullPointer, "fc2_weight: data is null", fc2);
  fc2 = {memory, DType::kBF16, {2, 32, 12}};
  expect_both(ErrorCode::kShapeMismatch,
              "fc1_weight: expected 12 rows (intermediate_size) or 24 (gate and up), got 16",
              fc2);
  fc2 = {memory, DType::kBF16, {2, 30, 16}};
  expect_both(ErrorCode::kShapeMismatch,
              "fc1_weight: expected 30 columns (hidden_size, the rows of fc2_weight), got 32",
              fc2);
  EXPECT_TRUE(exported(weights) == before);
}

TEST(Weights, NumberOfThreadsIsLimited) {
  for (const int threads : {-1, 1025, std::numeric_limits<int>::max()}) {
    PrepareOptions options;
    options.num_threads = threads;
    const Status status = ExpertWeights::allocate({1, 16, 16, false}, options).status();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "num_threads: expected 0..1024, got " + std::to_string(threads));
  }
}

TEST(Weights, HugeAllocationsFailWithAStatus) {
  const auto weights =
      ExpertWeights::allocate({int64_t{1} << 20, int64_t{1} << 20, int64_t{1} << 20, true}, {});
  EXPECT_EQ(weights.status().code(), ErrorCode::kOutOfMemory);
}

}  // namespace
}  // namespace hexpert::test

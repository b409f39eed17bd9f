// The C ABI: the golden vectors through it, handles, and every refusal with its code and text.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "capi.hpp"
#include "golden.hpp"
#include "hexpert/moe.hpp"
#include "support.hpp"

namespace {

using namespace hexpert;        // NOLINT(google-build-using-namespace)
using namespace hexpert::test;  // NOLINT(google-build-using-namespace)

Tensor tensor_of(const GoldenArray& array) {
  const DLDataType dtype = array.dtype == "bf16"  ? kBf16
                           : array.dtype == "f32" ? kF32
                           : array.dtype == "i32" ? kI32
                                                  : kU8;
  return {array.bytes.data(), dtype, array.shape};
}

template <typename T>
void expect_same(const PoisonedBuffer<T>& got, const GoldenArray& want, const std::string& what) {
  ASSERT_EQ(static_cast<std::size_t>(got.size()) * sizeof(T), want.bytes.size()) << what;
  EXPECT_EQ(std::memcmp(got.data(), want.bytes.data(), want.bytes.size()), 0) << what;
  EXPECT_TRUE(got.guards_intact()) << what;
}

// --- golden vectors ---

hx_quantize_options options_of(const std::string& name) {
  hx_quantize_options options = HX_QUANTIZE_OPTIONS_INIT;
  if (name.rfind("mae", 0) == 0) options.four_over_six = HX_FOUR_OVER_SIX_MAE;
  if (name.rfind("mse", 0) == 0) options.four_over_six = HX_FOUR_OVER_SIX_MSE;
  if (name.find("256") != std::string::npos) options.e4m3_max = 256;
  return options;
}

class CApiGoldenQuantize : public testing::TestWithParam<const char*> {};

TEST_P(CApiGoldenQuantize, Bytes) {
  const std::string group = GetParam();
  const Golden& all = Golden::instance();
  for (const std::string& name : all.cases(group)) {
    const bool per_row = all.has(group, name, "row_scale");
    const hx_quantize_options options = options_of(name);
    const GoldenArray x = golden(group, name, "x");
    const GoldenArray data = golden(group, name, "data");
    const int64_t rows = data.shape[0];
    const int64_t cols = data.shape[1] * 2;
    for (const auto& [layout, array] : {std::pair{HX_SCALES_LINEAR, "scale_linear"},
                                        std::pair{HX_SCALES_128X4, "scale_128x4"},
                                        std::pair{HX_SCALES_8X4, "scale_8x4"}}) {
      if (!all.has(group, name, array)) continue;
      PoisonedBuffer<uint8_t> codes(rows * cols / 2);
      PoisonedBuffer<uint8_t> scales(hx_block_scale_bytes(layout, rows, cols));
      PoisonedBuffer<float> t(per_row ? rows : 1);
      const Tensor input = tensor_of(x);
      const Tensor codes_out(codes.data(), kU8, {rows, cols / 2});
      const Tensor scales_out(scales.data(), kU8, {scales.size()});
      const Tensor outer_out(t.data(), kF32, {t.size()});
      hx_nvfp4 out = HX_NVFP4_INIT;
      out.codes = &codes_out;
      out.block_scales = &scales_out;
      out.outer = &outer_out;
      out.per_row = per_row ? 1 : 0;
      out.scale_layout = layout;
      const std::string what = group + "/" + name + "/" + array;
      const hx_status status = per_row ? hx_quantize_tokens(&input, cols, &out, &options, nullptr)
                                       : hx_quantize_matrix(&input, &out, &options, nullptr);
      ASSERT_EQ(status, HX_OK) << what << ": " << hx_last_error();
      expect_same(codes, data, what);
      expect_same(scales, golden(group, name, array), what);
      const char* outer = per_row ? "row_scale" : "alpha";
      if (all.has(group, name, outer)) expect_same(t, golden(group, name, outer), what);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Groups,
                         CApiGoldenQuantize,
                         testing::Values("per_token", "per_tensor", "nonfinite", "four_over_six"));

TEST(CApiGolden, EveryCode) {
  const GoldenArray e2m1 = golden("tables", "e2m1", "decode");
  const GoldenArray e4m3 = golden("tables", "e4m3", "decode");
  std::vector<uint8_t> codes, scales;
  for (int scale = 0; scale < 256; ++scale) {
    scales.push_back(static_cast<uint8_t>(scale));
    for (int pair = 0; pair < 8; ++pair)
      codes.push_back(static_cast<uint8_t>(2 * pair | (2 * pair + 1) << 4));
  }
  const float one = 1;
  PoisonedBuffer<float> out(int64_t{256} * 16);
  const Tensor codes_in(codes.data(), kU8, {256, 8});
  const Tensor scales_in(scales.data(), {kDLFloat8_e4m3fn, 8, 1}, {256, 1});
  const Tensor outer_in(&one, kF32, {1});
  const Tensor result(out.data(), kF32, {256, 16});
  const hx_nvfp4 in = {sizeof(in), &codes_in, &scales_in, &outer_in, 0, HX_SCALES_LINEAR};
  ASSERT_EQ(hx_dequantize(&in, &result, nullptr), HX_OK) << hx_last_error();
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 16; ++code) {
      const float want = e2m1.data<float>()[code] * e4m3.data<float>()[scale];
      const float got = out[scale * 16 + code];
      EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : std::memcmp(&got, &want, 4) == 0)
          << "scale " << scale << ", code " << code << ": " << got;
    }
  }
}

hx_status prepare(const std::string& name, Weights& weights) {
  const GoldenArray fc1 = golden("weights", name, "fc1_weight");
  const GoldenArray fc2 = golden("weights", name, "fc2_weight");
  const Tensor fc1_weight = tensor_of(fc1);
  const Tensor fc2_weight = tensor_of(fc2);
  return hx_weights_prepare(&fc1_weight, &fc2_weight, nullptr, nullptr, &weights.handle);
}

TEST(CApiGolden, CanonicalWeightsOutAndIn) {
  for (const std::string& name : Golden::instance().cases("weights")) {
    Weights weights;
    ASSERT_EQ(prepare(name, weights), HX_OK) << hx_last_error();
    const char* fields[] = {"fc1_data",
                            "fc1_scale_swizzled",
                            "fc1_alpha",
                            "fc2_data",
                            "fc2_scale_swizzled",
                            "fc2_alpha"};
    std::vector<GoldenArray> want;
    std::vector<PoisonedBuffer<uint8_t>> got;
    for (const char* field : fields) {
      want.push_back(golden("weights", name, field));
      got.emplace_back(static_cast<int64_t>(want.back().bytes.size()));
    }
    const auto at = [&](std::size_t i) {
      return Tensor(got[i].data(), i % 3 == 2 ? kF32 : kU8, want[i].shape);
    };
    const Tensor a = at(0), b = at(1), c = at(2), d = at(3), e = at(4), f = at(5);
    hx_canonical_weights canonical = HX_CANONICAL_WEIGHTS_INIT;
    canonical.fc1_data = &a;
    canonical.fc1_scale_swizzled = &b;
    canonical.fc1_alpha = &c;
    canonical.fc2_data = &d;
    canonical.fc2_scale_swizzled = &e;
    canonical.fc2_alpha = &f;
    ASSERT_EQ(hx_weights_export_canonical(weights.handle, &canonical, nullptr), HX_OK)
        << hx_last_error();
    for (std::size_t i = 0; i < got.size(); ++i)
      expect_same(got[i], want[i], name + "/" + fields[i]);

    hx_expert_shape shape = HX_EXPERT_SHAPE_INIT;
    ASSERT_EQ(hx_weights_get_shape(weights.handle, &shape), HX_OK);
    Weights other;
    ASSERT_EQ(hx_weights_allocate(&shape, nullptr, &other.handle), HX_OK) << hx_last_error();
    ASSERT_EQ(hx_weights_import_canonical(other.handle, &canonical, nullptr), HX_OK)
        << hx_last_error();
    for (auto& buffer : got)
      std::fill(buffer.begin(), buffer.end(), uint8_t{0x5A});
    ASSERT_EQ(hx_weights_export_canonical(other.handle, &canonical, nullptr), HX_OK);
    for (std::size_t i = 0; i < got.size(); ++i)
      expect_same(got[i], want[i], name + "/" + fields[i]);
    EXPECT_EQ(hx_weights_size_bytes(other.handle), hx_weights_size_bytes(weights.handle));
  }
}

TEST(CApiGolden, ProjectionsOutAndIn) {
  Weights weights;
  ASSERT_EQ(prepare("gated_e2_i192_h80", weights), HX_OK);
  hx_expert_shape shape = HX_EXPERT_SHAPE_INIT;
  ASSERT_EQ(hx_weights_get_shape(weights.handle, &shape), HX_OK);
  Weights copy;
  ASSERT_EQ(hx_weights_allocate(&shape, nullptr, &copy.handle), HX_OK);
  struct Memory {
    PoisonedBuffer<uint8_t> codes, scales;
    Tensor codes_tensor, scales_tensor;
    hx_projection projection;
    Memory(int64_t rows, int64_t cols)
        : codes(rows * cols / 2),
          scales(rows * cols / 16),
          codes_tensor(codes.data(), kU8, {rows, cols / 2}),
          scales_tensor(scales.data(), {kDLFloat8_e4m3fn, 8, 1}, {rows, cols / 16}),
          projection{sizeof(hx_projection), &codes_tensor, &scales_tensor, 0} {}
  };
  for (int64_t expert = 0; expert < 2; ++expert) {
    Memory gate(192, 80), up(192, 80), down(80, 192);
    for (auto [kind, memory] :
         {std::pair{HX_GATE, &gate}, std::pair{HX_UP, &up}, std::pair{HX_DOWN, &down}}) {
      ASSERT_EQ(
          hx_weights_export_projection(weights.handle, expert, kind, &memory->projection, nullptr),
          HX_OK)
          << hx_last_error();
      EXPECT_GT(memory->projection.alpha, 0);
    }
    ASSERT_EQ(hx_weights_set_quantized_expert(
                  copy.handle, expert, &gate.projection, &up.projection, &down.projection, nullptr),
              HX_OK)
        << hx_last_error();
  }
  for (hx_weights* handle : {weights.handle, copy.handle}) {
    const GoldenArray want = golden("weights", "gated_e2_i192_h80", "fc1_data");
    PoisonedBuffer<uint8_t> got(want.count());
    const Tensor out(got.data(), kU8, want.shape);
    hx_canonical_weights canonical = HX_CANONICAL_WEIGHTS_INIT;
    canonical.fc1_data = &out;
    ASSERT_EQ(hx_weights_export_canonical(handle, &canonical, nullptr), HX_OK);
    expect_same(got, want, "fc1_data");
  }
}

TEST(CApiGolden, Forward) {
  for (const std::string& name : Golden::instance().cases("moe")) {
    const bool gated = name == "gated";
    const GoldenArray config = golden("moe", name, "config");
    const GoldenArray x = golden("moe", name, "hidden_states");
    const GoldenArray ids = golden("moe", name, "routing_map");
    const GoldenArray p = golden("moe", name, "probabilities");
    const GoldenArray want = golden("moe", name, "output_bf16");
    Weights weights;
    ASSERT_EQ(prepare(gated ? "gated_e2_i192_h80" : "relu2_e3_i96_h64", weights), HX_OK);
    hx_moe_problem problem = HX_MOE_PROBLEM_INIT;
    problem.max_tokens = x.shape[0];
    problem.top_k = ids.shape[1];
    problem.num_experts = config.data<int32_t>()[0];
    problem.local_expert_offset = config.data<int32_t>()[1];
    problem.activation = gated ? HX_SWIGLU : HX_SQUARED_RELU;
    for (int32_t i = 0; i < hx_num_backends(); ++i) {
      hx_backend_info info = HX_BACKEND_INFO_INIT;
      ASSERT_EQ(hx_get_backend(i, &info), HX_OK);
      EXPECT_EQ(info.available != 0, std::string(info.reason).empty());
      if (info.available == 0 || std::string(info.name).find("cpu") == std::string::npos) continue;
      hx_moe_options options = HX_MOE_OPTIONS_INIT;
      options.backend = info.name;
      Moe moe;
      ASSERT_EQ(hx_moe_create(&problem, weights.handle, &options, &moe.handle), HX_OK)
          << hx_last_error();
      EXPECT_STREQ(hx_moe_backend(moe.handle), info.name);
      EXPECT_EQ(std::string(hx_moe_plan(moe.handle)).rfind(info.name, 0), 0U);
      EXPECT_GT(hx_moe_workspace_bytes(moe.handle), 0);
      PoisonedBuffer<uint16_t> out(want.count());
      const Tensor hidden = tensor_of(x), map = tensor_of(ids), probabilities = tensor_of(p);
      const Tensor result(out.data(), kBf16, want.shape);
      hx_moe_inputs inputs = HX_MOE_INPUTS_INIT;
      inputs.hidden_states = &hidden;
      inputs.routing_map = &map;
      inputs.probabilities = &probabilities;
      ASSERT_EQ(hx_moe_forward(moe.handle, &inputs, &result, nullptr), HX_OK) << hx_last_error();
      expect_same(out, want, name + " on " + info.name);
    }
  }
}

// The parameters of the activations arrive: the same bits as from the C++ API, and others without them.
TEST(CApi, Activations) {
  constexpr int64_t kHidden = 32, kInter = 16;
  const Bf16Vector fc1 = gaussian_bf16(2 * 2 * kInter * kHidden, 1, 0.3);
  const Bf16Vector fc2 = gaussian_bf16(2 * kHidden * kInter, 2, 0.3);
  const Bf16Vector x = gaussian_bf16(kHidden, 3);
  const int32_t ids[] = {1, 0};
  const AlignedVector<float> p = {0.25F, 0.75F};
  const Tensor fc1_weight(fc1.data(), kBf16, {2, 2 * kInter, kHidden});
  const Tensor fc2_weight(fc2.data(), kBf16, {2, kHidden, kInter});
  Weights weights;
  ASSERT_EQ(hx_weights_prepare(&fc1_weight, &fc2_weight, nullptr, nullptr, &weights.handle), HX_OK);
  const auto same_weights =
      ExpertWeights::prepare({fc1.data(), DType::kBF16, {2, 2 * kInter, kHidden}},
                             {fc2.data(), DType::kBF16, {2, kHidden, kInter}});
  std::set<std::vector<float>> results;
  for (const Activation& activation :
       {Activation{ActivationType::kSwiGlu},
        Activation{ActivationType::kSwiGluOai, 1.702F, 1, 0.5F},
        Activation{ActivationType::kGeGluTanh},
        Activation{.type = ActivationType::kSiTu, .situ_b = 0.5F},
        Activation{.type = ActivationType::kSiTu, .situ_b = 0.5F, .situ_c = 0.75F}}) {
    hx_moe_problem problem = HX_MOE_PROBLEM_INIT;
    problem.max_tokens = 1;
    problem.top_k = problem.num_experts = 2;
    problem.activation = static_cast<int32_t>(activation.type);
    problem.alpha = activation.alpha;
    problem.beta = activation.beta;
    problem.limit = activation.limit;
    problem.situ_b = activation.situ_b;
    problem.situ_c = activation.situ_c.value_or(0);
    Moe moe;
    ASSERT_EQ(hx_moe_create(&problem, weights.handle, nullptr, &moe.handle), HX_OK)
        << hx_last_error();
    const Tensor hidden(x.data(), kBf16, {1, kHidden}), map(ids, kI32, {1, 2}),
        weight(p.data(), kF32, {1, 2});
    AlignedVector<float> got(kHidden), want(kHidden);
    const Tensor out(got.data(), kF32, {1, kHidden});
    const hx_moe_inputs inputs = {sizeof(inputs), &hidden, &map, &weight, 0, 0, 0};
    ASSERT_EQ(hx_moe_forward(moe.handle, &inputs, &out, nullptr), HX_OK) << hx_last_error();
    auto layer = RoutedMoe::create({1, 2, 2, 0, activation}, *same_weights);
    ASSERT_TRUE(layer
                    ->forward({{x.data(), DType::kBF16, {1, kHidden}},
                               {ids, DType::kI32, {1, 2}},
                               {p.data(), DType::kF32, {1, 2}}},
                              {want.data(), DType::kF32, {1, kHidden}})
                    .ok());
    EXPECT_EQ(got, want);
    results.emplace(got.begin(), got.end());
  }
  EXPECT_EQ(results.size(), 5U) << "each parameter counts";
}

// --- handles ---

TEST(CApi, VersionAndNames) {
  EXPECT_EQ(hx_version(), HX_VERSION);
  EXPECT_EQ(std::string(hx_version_string()),
            std::to_string(HX_VERSION_MAJOR) + "." + std::to_string(HX_VERSION_MINOR) + "." +
                std::to_string(HX_VERSION_PATCH));
  EXPECT_STREQ(hx_status_name(HX_SHAPE_MISMATCH), "shape mismatch");
  EXPECT_STREQ(hx_status_name(static_cast<hx_status>(31)), "unknown error");
  const char* name = nullptr;
  ASSERT_EQ(hx_query_backend({kDLCPU, 0}, &name), HX_OK);
  EXPECT_NE(std::string(name), "");
  EXPECT_EQ(hx_block_scale_bytes(HX_SCALES_128X4, 129, 64), 1024);
  EXPECT_EQ(hx_block_scale_bytes(HX_SCALES_128X4, -1, 64), -1);
  EXPECT_EQ(hx_block_scale_bytes(HX_SCALES_128X4, 1, 65), -1);
}

TEST(CApi, FreedInAnyOrder) {
  Weights weights;
  ASSERT_EQ(prepare("relu2_e3_i96_h64", weights), HX_OK);
  hx_moe_problem problem = HX_MOE_PROBLEM_INIT;
  problem.max_tokens = problem.top_k = 1;
  problem.num_experts = 3;
  problem.activation = HX_SQUARED_RELU;
  Moe moe;
  ASSERT_EQ(hx_moe_create(&problem, weights.handle, nullptr, &moe.handle), HX_OK);
  hx_weights_free(weights.handle);
  weights.handle = nullptr;
  AlignedVector<uint16_t> x(64, 0x3F80);
  const int32_t id = 1;
  const float p = 1;
  PoisonedBuffer<float> out(64);
  const Tensor hidden(x.data(), kBf16, {1, 64}), map(&id, kI32, {1, 1}), weight(&p, kF32, {1, 1});
  const Tensor result(out.data(), kF32, {1, 64});
  hx_moe_inputs inputs = HX_MOE_INPUTS_INIT;
  inputs.hidden_states = &hidden;
  inputs.routing_map = &map;
  inputs.probabilities = &weight;
  ASSERT_EQ(hx_moe_forward(moe.handle, &inputs, &result, nullptr), HX_OK) << hx_last_error();
  EXPECT_EQ(out[0], 0) << "expert 1 is zero";
  hx_moe_free(nullptr);
  hx_weights_free(nullptr);
}

TEST(CApi, LastErrorIsOfTheThread) {
  EXPECT_EQ(hx_weights_refresh(nullptr, nullptr, nullptr, nullptr), HX_NULL_POINTER);
  const std::string mine = hx_last_error();
  EXPECT_EQ(mine, "null pointer: weights: expected a pointer, got null");
  std::string before, after;
  std::thread([&] {
    before = hx_last_error();
    (void)hx_query_backend({kDLVulkan, 0}, nullptr);
    after = hx_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_EQ(after, "null pointer: name: expected a pointer, got null");
  EXPECT_EQ(hx_last_error(), mine);
}

}  // namespace

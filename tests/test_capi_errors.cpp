// Every refusal of the C ABI: code and text, and nothing written.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "capi.hpp"
#include "support.hpp"

namespace hexpert::test {
namespace {

constexpr int64_t kExperts = 2, kHidden = 32, kInter = 16, kTokens = 4, kTopK = 2;

// Sizes of one call, changed by each test in one place.
class CApiErrors : public testing::Test {
 protected:
  CApiErrors() {
    EXPECT_EQ(hx_weights_prepare(&fc1_, &fc2_, nullptr, nullptr, &weights_.handle), HX_OK)
        << hx_last_error();
    problem_.max_tokens = kTokens;
    problem_.top_k = kTopK;
    problem_.num_experts = kExperts;
    EXPECT_EQ(hx_moe_create(&problem_, weights_.handle, nullptr, &moe_.handle), HX_OK)
        << hx_last_error();
    inputs_.hidden_states = &hidden_;
    inputs_.routing_map = &map_;
    inputs_.probabilities = &probabilities_;
    nvfp4_.codes = &codes_;
    nvfp4_.block_scales = &scales_;
    nvfp4_.outer = &outer_;
  }

  void expect(hx_status status, hx_status code, const std::string& text) {
    EXPECT_EQ(status, code) << hx_last_error();
    EXPECT_EQ(std::string(hx_last_error()), std::string(hx_status_name(code)) + ": " + text);
    EXPECT_TRUE(out_memory_.untouched() && codes_memory_.untouched());
  }
  // For texts with addresses.
  void expect_start(hx_status status, hx_status code, const std::string& text) {
    EXPECT_EQ(status, code) << hx_last_error();
    EXPECT_EQ(std::string(hx_last_error()).rfind(hx_status_name(code) + (": " + text), 0), 0U)
        << hx_last_error();
  }
  hx_status prepare(const Tensor& fc1, const Tensor& fc2) {
    hx_weights* never = nullptr;
    const hx_status status = hx_weights_prepare(&fc1, &fc2, nullptr, nullptr, &never);
    EXPECT_EQ(never, nullptr);
    return status;
  }
  hx_status forward() { return hx_moe_forward(moe_.handle, &inputs_, &out_, nullptr); }
  hx_status create() {
    hx_moe* never = nullptr;
    const hx_status status = hx_moe_create(&problem_, weights_.handle, nullptr, &never);
    EXPECT_EQ(never, nullptr);
    return status;
  }
  hx_status quantize(int64_t padded = kHidden) {
    return hx_quantize_tokens(&hidden_, padded, &nvfp4_, nullptr, nullptr);
  }

  Bf16Vector fc1_memory_ = gaussian_bf16(kExperts * 2 * kInter * kHidden, 1, 0.1);
  Bf16Vector fc2_memory_ = gaussian_bf16(kExperts * kHidden * kInter, 2, 0.1);
  Bf16Vector hidden_memory_ = gaussian_bf16(kTokens * kHidden, 3);
  AlignedVector<int32_t> map_memory_ = AlignedVector<int32_t>(kTokens * kTopK, 0);
  AlignedVector<float> probabilities_memory_ = AlignedVector<float>(kTokens * kTopK, 0.5F);
  PoisonedBuffer<float> out_memory_{kTokens * kHidden};
  PoisonedBuffer<uint8_t> codes_memory_{kTokens * kHidden / 2};
  PoisonedBuffer<uint8_t> scales_memory_{kTokens * kHidden / 16};
  PoisonedBuffer<float> outer_memory_{kTokens};
  Tensor fc1_{fc1_memory_.data(), kBf16, {kExperts, 2 * kInter, kHidden}};
  Tensor fc2_{fc2_memory_.data(), kBf16, {kExperts, kHidden, kInter}};
  Tensor hidden_{hidden_memory_.data(), kBf16, {kTokens, kHidden}};
  Tensor map_{map_memory_.data(), kI32, {kTokens, kTopK}};
  Tensor probabilities_{probabilities_memory_.data(), kF32, {kTokens, kTopK}};
  Tensor out_{out_memory_.data(), kF32, {kTokens, kHidden}};
  Tensor codes_{codes_memory_.data(), kU8, {kTokens, kHidden / 2}};
  Tensor scales_{scales_memory_.data(), kU8, {kTokens, kHidden / 16}};
  Tensor outer_{outer_memory_.data(), kF32, {kTokens}};
  Weights weights_;
  Moe moe_;
  hx_moe_problem problem_ = HX_MOE_PROBLEM_INIT;
  hx_moe_inputs inputs_ = HX_MOE_INPUTS_INIT;
  hx_nvfp4 nvfp4_ = HX_NVFP4_INIT;
};

TEST_F(CApiErrors, PrepareShapes) {
  expect(prepare({fc1_memory_.data(), kBf16, {64, kHidden}}, fc2_),
         HX_INVALID_SHAPE,
         "fc1_weight: expected rank 3, got [64, 32] bf16");
  expect(prepare({fc1_memory_.data(), kBf16, {kExperts, 0, kHidden}}, fc2_),
         HX_INVALID_SHAPE,
         "fc1_weight: every dimension must be in 1..1073741824, got [2, 0, 32] bf16");
  expect(prepare({fc1_memory_.data(), kBf16, {1, 1, 1, 1, 1, 1, 1}}, fc2_),
         HX_INVALID_SHAPE,
         "fc1_weight: expected rank 0..6, got 7");
  const int64_t huge = std::numeric_limits<int64_t>::max();
  expect(prepare({fc1_memory_.data(), kBf16, {huge, huge, kHidden}}, fc2_),
         HX_INVALID_SHAPE,
         "fc1_weight: expected at most 2^58 elements, got [9223372036854775807, "
         "9223372036854775807, 32] bf16");
  expect(prepare(fc1_, {fc2_memory_.data(), kBf16, {1, kHidden, kInter}}),
         HX_SHAPE_MISMATCH,
         "fc2_weight: expected 2 experts to match fc1_weight, got 1");
  expect(prepare({fc1_memory_.data(), kBf16, {kExperts, 2 * kInter, 16}}, fc2_),
         HX_SHAPE_MISMATCH,
         "fc1_weight: expected 32 columns (hidden_size, the rows of fc2_weight), got 16");
  expect(prepare({fc1_memory_.data(), kBf16, {kExperts, 24, kHidden}}, fc2_),
         HX_SHAPE_MISMATCH,
         "fc1_weight: expected 16 rows (intermediate_size) or 32 (gate and up), got 24");
}

TEST_F(CApiErrors, PrepareMemory) {
  expect(prepare({fc1_memory_.data(), kF32, {kExperts, 2 * kInter, kHidden}}, fc2_),
         HX_INVALID_DTYPE,
         "fc1_weight: expected bf16, got [2, 32, 32] f32");
  expect(prepare({fc1_memory_.data(), kF64, {kExperts, 2 * kInter, kHidden}}, fc2_),
         HX_INVALID_DTYPE,
         "fc1_weight: expected bf16, got [2, 32, 32] f64");
  Tensor strided(fc1_memory_.data(), kBf16, {kExperts, kInter, kHidden});
  strided.set_strides({2 * kInter * kHidden, 2 * kHidden, 1});
  expect(
      prepare(strided, fc2_), HX_NOT_CONTIGUOUS, "fc1_weight: expected a packed row-major tensor");
  Tensor cuda(fc1_memory_.data(), kBf16, {kExperts, 2 * kInter, kHidden});
  cuda.dl.device = {kDLVulkan, 0};
  expect(prepare(cuda, fc2_),
         HX_DEVICE_MISMATCH,
         "fc1_weight: expected cpu or cuda, got device type 7");
  expect(prepare({nullptr, kBf16, {kExperts, 2 * kInter, kHidden}}, fc2_),
         HX_NULL_POINTER,
         "fc1_weight: data is null");
  expect_start(prepare({fc1_memory_.data() + 1, kBf16, {1, 2 * kInter, kHidden}},
                       {fc2_memory_.data(), kBf16, {1, kHidden, kInter}}),
               HX_MISALIGNED,
               "fc1_weight: address 0x");
  Tensor offset(fc1_memory_.data(), kBf16, {1, 2 * kInter, kHidden});
  offset.dl.byte_offset = 2;
  expect_start(prepare(offset, {fc2_memory_.data(), kBf16, {1, kHidden, kInter}}),
               HX_MISALIGNED,
               "fc1_weight: address 0x");
  hx_weights* never = nullptr;
  expect(hx_weights_prepare(nullptr, &fc2_, nullptr, nullptr, &never),
         HX_NULL_POINTER,
         "fc1_weight: expected a tensor, got null");
  expect(hx_weights_prepare(&fc1_, &fc2_, nullptr, nullptr, nullptr),
         HX_NULL_POINTER,
         "weights: expected a pointer, got null");
}

TEST_F(CApiErrors, NonFiniteWeights) {
  fc2_memory_.back() = 0x7F80;
  hx_prepare_options options = HX_PREPARE_OPTIONS_INIT;
  options.refuse_nonfinite = 1;
  hx_weights* never = nullptr;
  expect(hx_weights_prepare(&fc1_, &fc2_, &options, nullptr, &never),
         HX_NON_FINITE_WEIGHTS,
         "fc2_weight: expert 1 holds an infinity");
}

TEST_F(CApiErrors, Refresh) {
  const Tensor fc1(fc1_memory_.data(), kBf16, {kExperts, kInter, kHidden});
  expect(hx_weights_refresh(weights_.handle, &fc1, &fc2_, nullptr),
         HX_METADATA_MISMATCH,
         "gated: the weights were prepared for 1, got 0");
  const Tensor one1(fc1_memory_.data(), kBf16, {1, 2 * kInter, kHidden});
  const Tensor one2(fc2_memory_.data(), kBf16, {1, kHidden, kInter});
  expect(hx_weights_refresh(weights_.handle, &one1, &one2, nullptr),
         HX_METADATA_MISMATCH,
         "num_local_experts: the weights were prepared for 2, got 1");
  EXPECT_EQ(hx_weights_refresh(weights_.handle, &fc1_, &fc2_, nullptr), HX_OK);
  const Tensor m1(fc1_memory_.data(), kBf16, {2 * kInter, kHidden});
  const Tensor m2(fc2_memory_.data(), kBf16, {kHidden, kInter});
  EXPECT_EQ(hx_weights_set_expert(weights_.handle, 1, &m1, &m2, nullptr), HX_OK);
  EXPECT_EQ(hx_weights_set_expert(weights_.handle, 2, &m1, &m2, nullptr), HX_INVALID_ARGUMENT);
  EXPECT_NE(std::string(hx_last_error()).find("got 2"), std::string::npos) << hx_last_error();
}

TEST_F(CApiErrors, Canonical) {
  hx_canonical_weights canonical = HX_CANONICAL_WEIGHTS_INIT;
  canonical.fc1_data = &codes_;
  expect(hx_weights_export_canonical(weights_.handle, &canonical, nullptr),
         HX_SHAPE_MISMATCH,
         "fc1_data: expected 131072 elements, got [4, 16] u8");
  canonical.fc1_data = nullptr;
  canonical.fc1_alpha = &codes_;
  expect(hx_weights_export_canonical(weights_.handle, &canonical, nullptr),
         HX_INVALID_DTYPE,
         "fc1_alpha: expected f32, got [4, 16] u8");
  AlignedVector<float> alphas(kExperts);
  const Tensor alpha(alphas.data(), kF32, {kExperts});
  canonical.fc1_alpha = canonical.fc2_alpha = &alpha;
  expect_start(hx_weights_export_canonical(weights_.handle, &canonical, nullptr),
               HX_INVALID_OUTPUT,
               "fc1_alpha: expected memory that overlaps no other output, got [");
  canonical = HX_CANONICAL_WEIGHTS_INIT;
  EXPECT_EQ(hx_weights_import_canonical(weights_.handle, &canonical, nullptr), HX_NULL_POINTER);
  EXPECT_NE(std::string(hx_last_error()).find("fc1_data"), std::string::npos);
}

TEST_F(CApiErrors, Projection) {
  hx_projection out = HX_PROJECTION_INIT;
  out.codes = &codes_;
  out.block_scales = &scales_;
  expect(hx_weights_export_projection(weights_.handle, 0, HX_UP, &out, nullptr),
         HX_SHAPE_MISMATCH,
         "out.codes: expected 256 elements, got [4, 16] u8");
  expect(hx_weights_export_projection(
             weights_.handle, 0, static_cast<hx_projection_kind>(3), &out, nullptr),
         HX_INVALID_ARGUMENT,
         "projection: expected 0..2, got 3");
  const Tensor codes(out_memory_.data(), kU8, {kInter, kHidden / 2});
  const Tensor scales(out_memory_.data(), kU8, {kInter, kHidden / 16});
  out.codes = &codes;
  out.block_scales = &scales;
  expect_start(hx_weights_export_projection(weights_.handle, 0, HX_UP, &out, nullptr),
               HX_INVALID_OUTPUT,
               "codes: expected memory that overlaps no other output, got [");
  EXPECT_TRUE(out_memory_.untouched());
  expect(hx_weights_set_quantized_expert(weights_.handle, 0, nullptr, &out, &out, nullptr),
         HX_NULL_POINTER,
         "gate: expected a pointer, got null");
}

TEST_F(CApiErrors, Load) {
  hx_weights* never = nullptr;
  EXPECT_EQ(hx_weights_load("/nonexistent.safetensors", "x", 0, -1, nullptr, &never), HX_NOT_FOUND);
  EXPECT_NE(std::string(hx_last_error()).find("/nonexistent.safetensors"), std::string::npos);
  expect(hx_weights_load(nullptr, "x", 0, -1, nullptr, &never),
         HX_NULL_POINTER,
         "path: expected a pointer, got null");
}

TEST_F(CApiErrors, Quantize) {
  expect(quantize(kHidden - 16),
         HX_INVALID_ARGUMENT,
         "padded_hidden_size: expected a multiple of 16 and at least 32, got 16");
  hidden_.dl.ndim = 1;
  expect(quantize(), HX_INVALID_SHAPE, "hidden_states: expected rank 2, got rank 1");
  hidden_.dl.ndim = 2;
  hidden_.dl.dtype = {kDLFloat, 16, 1};
  expect(quantize(), HX_INVALID_DTYPE, "hidden_states: expected bf16, got f16");
  hidden_.dl.dtype = kBf16;
  hidden_.set_strides({1, kTokens});
  expect(quantize(), HX_NOT_CONTIGUOUS, "hidden_states: expected a column stride of 1, got 4");
  hidden_.dl.strides = nullptr;
  scales_.shape[1] = 1;
  expect(quantize(), HX_SHAPE_MISMATCH, "out.block_scales: expected 8 elements, got [4, 1] u8");
  scales_.shape[1] = 2;
  outer_.dl.data = nullptr;
  expect(quantize(), HX_NULL_POINTER, "out.outer: expected 4 elements, got null data");
  outer_.dl.data = outer_memory_.data();
  nvfp4_.scale_layout = 9;
  expect(quantize(), HX_INVALID_ARGUMENT, "scale_layout: expected 0..2, got 9");
  nvfp4_.scale_layout = 0;
  nvfp4_.size = 8;
  expect(quantize(),
         HX_INVALID_ARGUMENT,
         "out.size: expected " + std::to_string(sizeof(hx_nvfp4)) +
             " (start from the ..._INIT of hexpert.h), got 8");
}

TEST_F(CApiErrors, QuantizeOptions) {
  hx_quantize_options options = HX_QUANTIZE_OPTIONS_INIT;
  const auto quantize_with = [&] {
    return hx_quantize_tokens(&hidden_, kHidden, &nvfp4_, &options, nullptr);
  };
  options.four_over_six = 3;
  expect(quantize_with(), HX_INVALID_ARGUMENT, "options.four_over_six: expected 0..2, got 3");
  options.four_over_six = HX_FOUR_OVER_SIX_MSE;
  options.e4m3_max = 100;
  expect_start(quantize_with(), HX_INVALID_ARGUMENT, "e4m3_max: expected 448 or 256");
  options.size = 0;
  expect_start(quantize_with(), HX_INVALID_ARGUMENT, "options.size: expected ");
}

TEST_F(CApiErrors, QuantizeMatrix) {
  nvfp4_.per_row = 0;
  const auto quantize_matrix = [&](const DLTensor* matrix) {
    return hx_quantize_matrix(matrix, &nvfp4_, nullptr, nullptr);
  };
  expect(quantize_matrix(nullptr), HX_NULL_POINTER, "matrix: expected a tensor, got null");
  expect(
      quantize_matrix(&hidden_), HX_SHAPE_MISMATCH, "out.outer: expected 1 elements, got [4] f32");
  outer_.shape[0] = 1;
  expect(quantize_matrix(&out_), HX_INVALID_DTYPE, "matrix: expected bf16, got f32");
  hidden_.dl.device = {kDLCUDA, 0};
  expect(quantize_matrix(&hidden_),
         HX_DEVICE_MISMATCH,
         "out.codes: expected memory of cuda:0, got cpu");
}

TEST_F(CApiErrors, QuantizeOverlaps) {
  scales_.dl.data = codes_memory_.data();
  expect_start(quantize(),
               HX_INVALID_OUTPUT,
               "out.codes: expected memory that overlaps no other output, got [");
  scales_.dl.data = hidden_memory_.data();
  expect_start(
      quantize(), HX_INVALID_OUTPUT, "out.block_scales: expected memory that overlaps no input");
  nvfp4_.per_row = 0;
  outer_.shape[0] = 1;
  expect_start(hx_quantize_matrix(&hidden_, &nvfp4_, nullptr, nullptr),
               HX_INVALID_OUTPUT,
               "out.block_scales: expected memory that overlaps no input");
  scales_.dl.data = scales_memory_.data();
  codes_.dl.data = out_memory_.data();
  expect_start(hx_dequantize(&nvfp4_, &out_, nullptr),
               HX_INVALID_OUTPUT,
               "out: expected memory that overlaps no input, got [");
  EXPECT_TRUE(out_memory_.untouched() && codes_memory_.untouched() && scales_memory_.untouched());
}

TEST_F(CApiErrors, Dequantize) {
  const auto dequantize = [&] { return hx_dequantize(&nvfp4_, &out_, nullptr); };
  out_.dl.dtype = kF64;
  expect(dequantize(), HX_INVALID_DTYPE, "out: expected f32 or bf16, got [4, 32] f64");
  out_.dl.dtype = kF32;
  out_.dl.device = {kDLCUDA, 0};
  expect(dequantize(), HX_DEVICE_MISMATCH, "out: expected memory of cpu, got cuda:0");
  out_.dl.device = {kDLCPU, 0};
  out_.shape[0] = 3;
  expect_start(dequantize(), HX_SHAPE_MISMATCH, "out: expected [4, 32]");
  out_.shape[0] = kTokens;
  codes_.shape[1] = 15;
  expect(dequantize(),
         HX_INVALID_SHAPE,
         "in.codes: expected [rows, cols / 2] with cols % 16 == 0, got [4, 15] u8");
  expect(
      hx_dequantize(nullptr, &out_, nullptr), HX_NULL_POINTER, "in: expected a pointer, got null");
}

TEST_F(CApiErrors, Allocate) {
  hx_expert_shape shape = {sizeof(shape), 0, kHidden, kInter, 1};
  hx_prepare_options options = HX_PREPARE_OPTIONS_INIT;
  const auto allocate = [&] {
    hx_weights* never = nullptr;
    const hx_status status = hx_weights_allocate(&shape, &options, &never);
    EXPECT_EQ(never, nullptr);
    return status;
  };
  expect_start(allocate(),
               HX_INVALID_SHAPE,
               "shape: every size must be in 1..1073741824, got num_local_experts 0");
  shape.num_local_experts = kExperts;
  options.device_type = kDLVulkan;
  expect(allocate(),
         HX_DEVICE_MISMATCH,
         "options.device_type: expected cpu or cuda, got device type 7");
  options.device_type = kDLCUDA;
  options.device_id = 99;
  EXPECT_EQ(allocate(), HX_UNSUPPORTED_DEVICE) << hx_last_error();
  options = HX_PREPARE_OPTIONS_INIT;
  options.backend = "abacus";
  expect_start(allocate(), HX_NOT_FOUND, "backend: expected one of ");
  shape.size = 1;
  expect_start(allocate(), HX_INVALID_ARGUMENT, "shape.size: expected ");
}

// Nothing to do is no error, whatever the pointers and strides.
TEST_F(CApiErrors, NoTokens) {
  hidden_.shape[0] = map_.shape[0] = probabilities_.shape[0] = out_.shape[0] = 0;
  codes_.shape[0] = scales_.shape[0] = outer_.shape[0] = 0;
  for (auto tensor : {std::ref(hidden_),
                      std::ref(map_),
                      std::ref(probabilities_),
                      std::ref(out_),
                      std::ref(codes_),
                      std::ref(scales_),
                      std::ref(outer_)}) {
    tensor.get().dl.data = nullptr;
    tensor.get().set_strides(std::vector<int64_t>(tensor.get().shape.size(), 0));
  }
  EXPECT_EQ(forward(), HX_OK) << hx_last_error();
  EXPECT_EQ(quantize(), HX_OK) << hx_last_error();
  EXPECT_EQ(hx_dequantize(&nvfp4_, &out_, nullptr), HX_OK) << hx_last_error();
}

TEST_F(CApiErrors, Create) {
  problem_.num_experts = 0;
  expect(create(), HX_INVALID_ARGUMENT, "num_experts: expected >= 1, got 0");
  problem_.num_experts = kExperts;
  problem_.local_expert_offset = 1;
  expect(create(),
         HX_INVALID_ARGUMENT,
         "local_expert_offset: expected offset + num_local_experts <= num_experts = 2, got 1 + 2");
  problem_.local_expert_offset = 0;
  problem_.activation = HX_SQUARED_RELU;
  expect(create(),
         HX_ACTIVATION_MISMATCH,
         "activation: expected a gated activation for gated weights, got squared_relu");
  problem_.activation = 17;
  expect(create(), HX_UNSUPPORTED, "activation: expected 0..4, got 17");
  problem_.activation = HX_SITU;
  expect_start(create(), HX_INVALID_ARGUMENT, "situ_b: expected");
  problem_.activation = HX_SWIGLU;
  problem_.max_tokens = int64_t{1} << 40;
  expect(create(),
         HX_TOO_LARGE,
         "max_tokens: expected max_tokens * top_k <= 2147483647, got 1099511627776 * 2");
  problem_.max_tokens = 1;
  problem_.top_k = 0;
  expect(create(), HX_INVALID_ARGUMENT, "top_k: expected >= 1, got 0");
  problem_.top_k = 1;
  hx_moe_options options = HX_MOE_OPTIONS_INIT;
  options.backend = "abacus";
  hx_moe* never = nullptr;
  expect_start(hx_moe_create(&problem_, weights_.handle, &options, &never),
               HX_NOT_FOUND,
               "backend: expected one of ");
  problem_.top_k = std::numeric_limits<int32_t>::max();
  options = HX_MOE_OPTIONS_INIT;
  options.num_threads = 1024;
  expect_start(
      hx_moe_create(&problem_, weights_.handle, &options, &never), HX_OUT_OF_MEMORY, "workspace: ");
}

TEST_F(CApiErrors, Workspace) {
  int64_t needed = 0;
  ASSERT_EQ(hx_moe_workspace_bytes_for(&problem_, weights_.handle, nullptr, &needed), HX_OK)
      << hx_last_error();
  ASSERT_GT(needed, 0);
  AlignedVector<uint8_t> memory(static_cast<std::size_t>(needed) + 512);
  uint8_t* start = memory.data();
  while (reinterpret_cast<uintptr_t>(start) % HX_WORKSPACE_ALIGNMENT != 0)
    ++start;
  hx_moe_options options = HX_MOE_OPTIONS_INIT;
  options.workspace = start;
  options.workspace_bytes = needed;
  Moe moe;
  ASSERT_EQ(hx_moe_create(&problem_, weights_.handle, &options, &moe.handle), HX_OK)
      << hx_last_error();
  EXPECT_EQ(hx_moe_forward(moe.handle, &inputs_, &out_, nullptr), HX_OK) << hx_last_error();
  out_.dl.data = start;
  expect_start(hx_moe_forward(moe.handle, &inputs_, &out_, nullptr),
               HX_INVALID_OUTPUT,
               "out: expected memory that overlaps no workspace, got [");
  out_.dl.data = out_memory_.data();
  hidden_.dl.data = start;
  expect_start(hx_moe_forward(moe.handle, &inputs_, &out_, nullptr),
               HX_INVALID_OUTPUT,
               "workspace: expected memory that overlaps no input, got [");
  const auto create_with = [&] {
    hx_moe* never = nullptr;
    return hx_moe_create(&problem_, weights_.handle, &options, &never);
  };
  options.workspace_bytes = needed - 1;
  expect_start(create_with(), HX_WORKSPACE_TOO_SMALL, "workspace: expected at least ");
  options.workspace_bytes = needed;
  options.workspace = start + 1;
  expect_start(create_with(), HX_MISALIGNED, "workspace: expected an address aligned to 256 bytes");
  options.workspace = nullptr;
  expect_start(create_with(), HX_NULL_POINTER, "workspace: expected ");
  problem_.top_k = 0;
  expect_start(hx_moe_workspace_bytes_for(&problem_, weights_.handle, nullptr, &needed),
               HX_INVALID_ARGUMENT,
               "top_k: expected >= 1, got 0");
}

TEST_F(CApiErrors, ForwardInputs) {
  hidden_.shape[1] = 31;
  expect(forward(), HX_SHAPE_MISMATCH, "hidden_states: expected [4, 32], got [4, 31] bf16");
  hidden_.shape[1] = kHidden;
  map_.shape[1] = 1;
  expect(forward(), HX_SHAPE_MISMATCH, "routing_map: expected [4, 2], got [4, 1] i32");
  map_.shape[1] = kTopK;
  map_.dl.dtype = {kDLInt, 16, 1};
  expect(forward(), HX_INVALID_DTYPE, "routing_map: expected i32 or i64, got [4, 2] i16");
  map_.dl.dtype = kI32;
  probabilities_.dl.dtype = kF64;
  expect(forward(), HX_INVALID_DTYPE, "probabilities: expected f32, got [4, 2] f64");
  probabilities_.dl.dtype = kF32;
  probabilities_.dl.device = {kDLCUDA, 0};
  expect(forward(), HX_DEVICE_MISMATCH, "probabilities: expected memory of cpu, got cuda:0");
  probabilities_.dl.device = {kDLCPU, 0};
  hidden_.set_strides({2 * kHidden, 1});
  expect(forward(),
         HX_NOT_CONTIGUOUS,
         "hidden_states: expected packed rows, got [4, 32] bf16 with strides [64, 1]");
  hidden_.dl.strides = nullptr;
  inputs_.token_capacity = -1;
  inputs_.has_token_capacity = inputs_.use_bounded_rows = 1;
  expect(forward(), HX_INVALID_ARGUMENT, "token_capacity: expected >= 0, got -1");
  inputs_.has_token_capacity = 0;
  hidden_.shape[0] = map_.shape[0] = probabilities_.shape[0] = out_.shape[0] = 5;
  expect(forward(), HX_TOO_LARGE, "hidden_states: expected at most max_tokens = 4 tokens, got 5");
  inputs_.hidden_states = nullptr;
  expect(forward(), HX_NULL_POINTER, "hidden_states: expected a tensor, got null");
  expect(hx_moe_forward(nullptr, &inputs_, &out_, nullptr),
         HX_NULL_POINTER,
         "moe: expected a pointer, got null");
}

TEST_F(CApiErrors, ForwardOut) {
  out_.shape[0] = 3;
  expect(forward(), HX_INVALID_OUTPUT, "out: expected [4, 32], got [3, 32] f32");
  out_.shape[0] = kTokens;
  out_.dl.dtype = {kDLFloat, 16, 1};
  expect(forward(), HX_INVALID_OUTPUT, "out: expected bf16 or f32, got [4, 32] f16");
  out_.dl.dtype = kF32;
  out_.dl.data = nullptr;
  expect(forward(), HX_NULL_POINTER, "out: expected 512 bytes, got a null pointer");
  out_.dl.data = out_memory_.data() + 1;
  expect_start(forward(), HX_MISALIGNED, "out: expected an address aligned to 16 bytes, got 0x");
  out_.dl.data = hidden_memory_.data();
  expect_start(forward(), HX_INVALID_OUTPUT, "out: expected memory that overlaps no input, got [");
}

TEST_F(CApiErrors, Devices) {
  const char* name = "untouched";
  expect(hx_query_backend({kDLVulkan, 0}, &name),
         HX_DEVICE_MISMATCH,
         "device: expected cpu or cuda, got device type 7");
  EXPECT_EQ(hx_query_backend({kDLCUDA, 99}, &name), HX_UNSUPPORTED_DEVICE);
  EXPECT_EQ(std::string(hx_last_error()).rfind("unsupported device: backend: ", 0), 0U)
      << hx_last_error();
  EXPECT_STREQ(name, "untouched");
  hx_backend_info info = HX_BACKEND_INFO_INIT;
  EXPECT_EQ(hx_get_backend(-1, &info), HX_INVALID_ARGUMENT);
  EXPECT_EQ(hx_get_backend(hx_num_backends(), &info), HX_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace hexpert::test

// The C ABI with tensors on the GPU: the golden vectors, the bits of the C++ API, the stream, and refusals.
#include "capi.hpp"
#include "cuda_case.hpp"
#include "golden.hpp"

namespace hexpert::test {
namespace {

constexpr DLDevice kThere = {kDLCUDA, 0};

// Values on the GPU, and the tensor that a C program would describe them with.
struct DeviceTensor {
  DeviceBuffer<uint8_t> memory;
  Tensor tensor;
  DeviceTensor(const void* host, int64_t bytes, DLDataType dtype, std::vector<int64_t> shape)
      : memory(bytes, 0xFF), tensor(memory.data(), dtype, std::move(shape), kThere) {
    if (host != nullptr) memory.upload(static_cast<const uint8_t*>(host));
  }
  DeviceTensor(const GoldenArray& array, DLDataType dtype)
      : DeviceTensor(
            array.bytes.data(), static_cast<int64_t>(array.bytes.size()), dtype, array.shape) {}
  const DLTensor* operator&() const { return &tensor; }  // NOLINT(google-runtime-operator)
};

void expect_same(const DeviceTensor& got, const GoldenArray& want, const char* what) {
  const std::vector<uint8_t> bytes = got.memory.to_vector();
  ASSERT_EQ(bytes.size(), want.bytes.size()) << what;
  EXPECT_EQ(std::memcmp(bytes.data(), want.bytes.data(), bytes.size()), 0) << what;
  EXPECT_TRUE(got.memory.fences_intact()) << what;
}

void expect_refused(hx_status status, hx_status code, const std::string& text) {
  EXPECT_EQ(status, code) << hx_last_error();
  EXPECT_NE(std::string(hx_last_error()).find(text), std::string::npos) << hx_last_error();
}

// A layer of the golden vectors, through C alone.
struct GoldenLayer {
  std::string name;
  bool gated = name == "gated";
  std::string stacks = gated ? "gated_e2_i192_h80" : "relu2_e3_i96_h64";
  DeviceTensor fc1{golden("weights", stacks, "fc1_weight"), kBf16};
  DeviceTensor fc2{golden("weights", stacks, "fc2_weight"), kBf16};
  DeviceTensor x{golden("moe", name, "hidden_states"), kBf16};
  DeviceTensor ids{golden("moe", name, "routing_map"), kI32};
  DeviceTensor p{golden("moe", name, "probabilities"), kF32};
  GoldenArray want = golden("moe", name, "output_bf16");
  DeviceTensor out{nullptr, static_cast<int64_t>(want.bytes.size()), kBf16, want.shape};
  hx_moe_inputs inputs = HX_MOE_INPUTS_INIT;
  Weights weights;
  Moe moe;

  explicit GoldenLayer(std::string of) : name(std::move(of)) {
    const GoldenArray config = golden("moe", name, "config");
    hx_moe_problem problem = HX_MOE_PROBLEM_INIT;
    problem.max_tokens = want.shape[0];
    problem.top_k = ids.tensor.shape[1];
    problem.num_experts = config.data<int32_t>()[0];
    problem.local_expert_offset = config.data<int32_t>()[1];
    problem.activation = gated ? HX_SWIGLU : HX_SQUARED_RELU;
    inputs.hidden_states = &x;
    inputs.routing_map = &ids;
    inputs.probabilities = &p;
    EXPECT_EQ(hx_weights_prepare(&fc1, &fc2, nullptr, nullptr, &weights.handle), HX_OK)
        << hx_last_error();
    EXPECT_EQ(hx_moe_create(&problem, weights.handle, nullptr, &moe.handle), HX_OK)
        << hx_last_error();
  }
};

TEST(CApiCuda, GoldenForward) {
  for (const std::string& name : Golden::instance().cases("moe")) {
    SCOPED_TRACE(name);
    const GoldenLayer layer(name);
    EXPECT_STREQ(hx_moe_backend(layer.moe.handle), kHopper);
    DLDevice device{};
    ASSERT_EQ(hx_weights_get_device(layer.weights.handle, &device), HX_OK);
    EXPECT_EQ(device.device_type, kDLCUDA);
    ASSERT_EQ(hx_moe_forward(layer.moe.handle, &layer.inputs, &layer.out, nullptr), HX_OK)
        << hx_last_error();
    expect_same(layer.out, layer.want, "output_bf16");
  }
}

TEST(CApiCuda, GoldenTokens) {
  const GoldenArray x = golden("per_token", "random", "x");
  const GoldenArray data = golden("per_token", "random", "data");
  const GoldenArray scales = golden("per_token", "random", "scale_linear");
  const GoldenArray outer = golden("per_token", "random", "row_scale");
  const auto room = [](const GoldenArray& array, DLDataType dtype) {
    return DeviceTensor(nullptr, static_cast<int64_t>(array.bytes.size()), dtype, array.shape);
  };
  const DeviceTensor input(x, kBf16);
  const DeviceTensor codes = room(data, kU8);
  const DeviceTensor block_scales = room(scales, kU8);
  const DeviceTensor t = room(outer, kF32);
  hx_nvfp4 out = HX_NVFP4_INIT;
  out.codes = &codes;
  out.block_scales = &block_scales;
  out.outer = &t;
  ASSERT_EQ(hx_quantize_tokens(&input, data.shape[1] * 2, &out, nullptr, nullptr), HX_OK)
      << hx_last_error();
  expect_same(codes, data, "data");
  expect_same(block_scales, scales, "scale_linear");
  expect_same(t, outer, "row_scale");
}

TEST(CApiCuda, GoldenCanonicalWeights) {
  const GoldenLayer layer("gated");
  const GoldenArray want = golden("weights", layer.stacks, "fc1_data");
  AlignedVector<uint8_t> got(want.bytes.size());
  const Tensor out(got.data(), kU8, want.shape);
  hx_canonical_weights canonical = HX_CANONICAL_WEIGHTS_INIT;
  canonical.fc1_data = &out;
  ASSERT_EQ(hx_weights_export_canonical(layer.weights.handle, &canonical, nullptr), HX_OK)
      << hx_last_error();
  EXPECT_TRUE(got == want.bytes);
}

// A layer on random data, prepared and run through both interfaces.
TEST(CApiCuda, BitsOfTheCppApi) {
  for (const Activation& activation : {kSquaredRelu, kSwiGlu}) {
    const MoeCase c{.num_experts = 16,
                    .top_k = 4,
                    .hidden_size = 200,
                    .intermediate_size = 136,
                    .tokens = 33,
                    .num_local_experts = 8,
                    .local_expert_offset = 4,
                    .activation = activation,
                    .routing = Routing::kRepeating};
    SCOPED_TRACE(testing::Message() << c);
    const int64_t fc1_rows = c.intermediate_size * (c.gated() ? 2 : 1);
    const Bf16Vector fc1_host = gaussian_bf16(c.local() * fc1_rows * c.hidden_size, 1, 0.1);
    const Bf16Vector fc2_host =
        gaussian_bf16(c.local() * c.hidden_size * c.intermediate_size, 2, 0.1);
    const DeviceTensor fc1(fc1_host.data(),
                           static_cast<int64_t>(fc1_host.size()) * 2,
                           kBf16,
                           {c.local(), fc1_rows, c.hidden_size});
    const DeviceTensor fc2(fc2_host.data(),
                           static_cast<int64_t>(fc2_host.size()) * 2,
                           kBf16,
                           {c.local(), c.hidden_size, c.intermediate_size});
    PrepareOptions there;
    there.device = kGpu;
    const ExpertWeights weights =
        ExpertWeights::prepare(
            {fc1_host.data(), DType::kBF16, {c.local(), fc1_rows, c.hidden_size}},
            {fc2_host.data(), DType::kBF16, {c.local(), c.hidden_size, c.intermediate_size}},
            there)
            .value();
    RoutedMoe cpp = RoutedMoe::create(c.problem(), weights).value();
    Weights c_weights;
    ASSERT_EQ(hx_weights_prepare(&fc1, &fc2, nullptr, nullptr, &c_weights.handle), HX_OK)
        << hx_last_error();
    hx_moe_problem problem = HX_MOE_PROBLEM_INIT;
    problem.max_tokens = c.tokens;
    problem.top_k = c.top_k;
    problem.num_experts = c.num_experts;
    problem.local_expert_offset = c.local_expert_offset;
    problem.activation = c.gated() ? HX_SWIGLU : HX_SQUARED_RELU;
    Moe moe;
    ASSERT_EQ(hx_moe_create(&problem, c_weights.handle, nullptr, &moe.handle), HX_OK)
        << hx_last_error();

    const MoeData host(c);
    const DeviceData data(host.inputs(c));
    const bool wide = data.inputs.routing_map.dtype == DType::kI64;
    const Tensor x(data.inputs.hidden_states.data, kBf16, {c.tokens, c.hidden_size}, kThere);
    const Tensor ids(data.inputs.routing_map.data, wide ? kI64 : kI32, {c.tokens, c.top_k}, kThere);
    const Tensor p(data.inputs.probabilities.data, kF32, {c.tokens, c.top_k}, kThere);
    hx_moe_inputs inputs = HX_MOE_INPUTS_INIT;
    inputs.hidden_states = &x;
    inputs.routing_map = &ids;
    inputs.probabilities = &p;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const DeviceOut want(c, dtype);
      ASSERT_EQ(cpp.forward(data.inputs, want.view).to_string(), "ok");
      const DeviceOut got(c, dtype);
      const Tensor out(
          got.view.data, dtype == DType::kF32 ? kF32 : kBf16, {c.tokens, c.hidden_size}, kThere);
      ASSERT_EQ(hx_moe_forward(moe.handle, &inputs, &out, nullptr), HX_OK) << hx_last_error();
      EXPECT_TRUE(got.bytes.to_vector() == want.bytes.to_vector());
      EXPECT_TRUE(got.bytes.fences_intact());
    }
  }
}

// What is captured was enqueued on the stream that was named, and nothing else: no allocation, no wait.
TEST(CApiCuda, ForwardAndRefreshUnderAGraph) {
  const GoldenLayer layer("gated");
  const TestStream stream;
  ASSERT_EQ(hx_moe_forward(layer.moe.handle, &layer.inputs, &layer.out, stream.get()), HX_OK);
  stream.wait();
  const TestGraph graph(stream, [&] {
    EXPECT_EQ(hx_weights_refresh(layer.weights.handle, &layer.fc1, &layer.fc2, stream.get()), HX_OK)
        << hx_last_error();
    EXPECT_EQ(hx_moe_forward(layer.moe.handle, &layer.inputs, &layer.out, stream.get()), HX_OK)
        << hx_last_error();
  });
  for (int i = 0; i < 3; ++i) {
    cuda_ok(cudaMemset(layer.out.memory.data(), 0xFF, layer.want.bytes.size()));
    cuda_ok(cudaDeviceSynchronize());
    graph.replay(stream);
    expect_same(layer.out, layer.want, "output_bf16");
  }
}

TEST(CApiCuda, HandlesFreedInAnyOrder) {
  for (bool weights_first : {true, false}) {
    GoldenLayer layer("relu2");
    if (weights_first) hx_weights_free(std::exchange(layer.weights.handle, nullptr));
    ASSERT_EQ(hx_moe_forward(layer.moe.handle, &layer.inputs, &layer.out, nullptr), HX_OK);
    hx_moe_free(std::exchange(layer.moe.handle, nullptr));  // with the work under way
    expect_same(layer.out, layer.want, "output_bf16");
  }
}

TEST(CApiCuda, Refusals) {
  GoldenLayer layer("gated");
  const AlignedVector<uint8_t> host(1 << 16);
  const auto forward =
      [&](const DLTensor* x, const DLTensor* ids, const DLTensor* p, const DLTensor* out) {
        hx_moe_inputs inputs = layer.inputs;
        if (x != nullptr) inputs.hidden_states = x;
        if (ids != nullptr) inputs.routing_map = ids;
        if (p != nullptr) inputs.probabilities = p;
        return hx_moe_forward(
            layer.moe.handle, &inputs, out != nullptr ? out : &layer.out, nullptr);
      };
  const std::vector<int64_t> rows = layer.x.tensor.shape;
  const std::vector<int64_t> routes = layer.ids.tensor.shape;
  const std::string here = ": expected memory of cuda:0, got cpu";
  const Tensor x(host.data(), kBf16, rows);
  expect_refused(
      forward(&x, nullptr, nullptr, nullptr), HX_DEVICE_MISMATCH, "hidden_states" + here);
  const Tensor ids(host.data(), kI32, routes);
  expect_refused(
      forward(nullptr, &ids, nullptr, nullptr), HX_DEVICE_MISMATCH, "routing_map" + here);
  const Tensor p(host.data(), kF32, routes);
  expect_refused(
      forward(nullptr, nullptr, &p, nullptr), HX_DEVICE_MISMATCH, "probabilities" + here);
  const Tensor out(host.data(), kBf16, rows);
  expect_refused(forward(nullptr, nullptr, nullptr, &out), HX_DEVICE_MISMATCH, "out" + here);
  const Tensor liar(host.data(), kBf16, rows, kThere);
  expect_refused(forward(&liar, nullptr, nullptr, nullptr),
                 HX_DEVICE_MISMATCH,
                 "hidden_states: expected memory of cuda:0, got host memory");
  const Tensor elsewhere(layer.x.memory.data(), kBf16, rows, {kDLCUDA, 1});
  expect_refused(forward(&elsewhere, nullptr, nullptr, nullptr),
                 HX_DEVICE_MISMATCH,
                 "hidden_states: expected memory of cuda:0, got cuda:1");
  const Tensor metal(layer.x.memory.data(), kBf16, rows, {kDLMetal, 0});
  expect_refused(forward(&metal, nullptr, nullptr, nullptr),
                 HX_DEVICE_MISMATCH,
                 "hidden_states: expected cpu or cuda, got device type");
  for (uint8_t byte : layer.out.memory.to_vector())
    ASSERT_EQ(byte, 0xFF) << "a refused forward wrote";
}

}  // namespace
}  // namespace hexpert::test

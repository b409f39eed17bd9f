#include "cuda_case.hpp"

#include <cstdio>

namespace hexpert::test {
namespace {

int64_t bytes_of(const ConstTensorView& view) {
  return view.num_elements() * size_of(view.dtype);
}

// TestedDevice::run.
std::unique_ptr<MoeRun> run_on_device(const MoeOptions& options_in,
                                      const MoeCase& c,
                                      const ExpertWeights& host,
                                      const MoeInputs& host_inputs,
                                      int64_t multiple) {
  const ExpertWeights weights = copy_to_device(host);
  MoeOptions options = options_in;
  const int64_t bytes = RoutedMoe::workspace_bytes_for(c.problem(), weights, options).value();
  DeviceBuffer<std::byte> workspace(bytes, 0xFF);
  options.workspace = {workspace.data(), bytes};
  RoutedMoe moe = RoutedMoe::create(c.problem(), weights, options).value();
  const TestStream stream;
  const DeviceData data(host_inputs);

  auto result = std::make_unique<MoeRun>(c, multiple);
  DeviceBuffer<float> out(result->out.size());
  out.upload(result->out.data());
  const Status dumped =
      forward_with_dump(moe,
                        data.inputs,
                        {out.data(), DType::kF32, {c.tokens, c.hidden_size}, kGpu},
                        result->dump(),
                        stream.view());
  if (!dumped.ok()) throw Error(dumped);
  stream.wait();
  out.download(result->out.data());

  // Nothing may come from the former run.
  workspace.poison();
  cuda_ok(cudaDeviceSynchronize());
  DeviceBuffer<uint16_t> out_bf16(result->out_bf16.size());
  out_bf16.upload(result->out_bf16.data());
  const Status plain = moe.forward(
      data.inputs, {out_bf16.data(), DType::kBF16, {c.tokens, c.hidden_size}, kGpu}, stream.view());
  if (!plain.ok()) throw Error(plain);
  stream.wait();
  out_bf16.download(result->out_bf16.data());

  EXPECT_TRUE(result->guards_intact() && out.fences_intact() && out_bf16.fences_intact() &&
              workspace.fences_intact() && data.hidden_states.fences_intact())
      << "a write outside of the buffers";
  return result;
}

}  // namespace

ExpertWeights copy_to_device(const ExpertWeights& host) {
  PrepareOptions options;
  options.device = kGpu;
  ExpertWeights copy = ExpertWeights::allocate(host.shape(), options).value();
  const ExpertWeights::Storage& from = host.storage();
  const std::unique_ptr<ExpertWeights::Storage> one = tiles_of_one_expert(from);
  for (int64_t e = 0; e < host.shape().num_local_experts; ++e) {
    const auto i = static_cast<size_t>(e);
    std::copy_n(from.fc1_expert(e), from.fc1_bytes, one->fc1_expert(0));
    std::copy_n(from.fc2_expert(e), from.fc2_bytes, one->fc2_expert(0));
    one->fc1_up_alpha[0] = from.fc1_up_alpha[i];
    one->fc1_gate_alpha[0] = from.fc1_gate_alpha[i];
    one->fc2_alpha[0] = from.fc2_alpha[i];
    const Status status = copy.storage().on_device->write_expert(e, *one);
    if (!status.ok()) throw Error(status);
  }
  return copy;
}

DeviceData::DeviceData(const MoeInputs& host)
    : hidden_states(host.hidden_states.num_elements(), 0xFF),
      routing_map(bytes_of(host.routing_map), 0xFF),
      probabilities(host.probabilities.num_elements(), 0xFF),
      inputs(host) {
  upload(host);
  const auto move = [](ConstTensorView& view, const void* data) {
    view.data = data;
    view.device = kGpu;
  };
  move(inputs.hidden_states, hidden_states.data());
  move(inputs.routing_map, routing_map.data());
  move(inputs.probabilities, probabilities.data());
}

void DeviceData::upload(const MoeInputs& host) {
  hidden_states.upload(host.hidden_states.as<uint16_t>());
  routing_map.upload(host.routing_map.as<std::byte>());
  probabilities.upload(host.probabilities.as<float>());
}

DeviceOut::DeviceOut(const MoeCase& c, DType dtype)
    : bytes(c.tokens * c.hidden_size * size_of(dtype), 0xFF),
      view(bytes.data(), dtype, {c.tokens, c.hidden_size}, kGpu) {}

void DeviceOut::reset() {
  bytes.poison();
  cuda_ok(cudaDeviceSynchronize());
}

std::vector<float> DeviceOut::values() const {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  if (view.dtype == DType::kF32) {
    cuda_ok(cudaMemcpy(values.data(), view.data, values.size() * 4, cudaMemcpyDefault));
    return values;
  }
  std::vector<uint16_t> bf16_values(values.size());
  cuda_ok(cudaMemcpy(bf16_values.data(), view.data, values.size() * 2, cudaMemcpyDefault));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = bf16_to_f32(bf16_values[i]);
  return values;
}

}  // namespace hexpert::test

// Exit code 77, "skipped" for CTest, where no GPU can run the backend.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  for (const hexpert::BackendInfo& info : hexpert::list_backends()) {
    if (info.name != hexpert::test::kHopper || info.available) continue;
    std::printf("skipped: %s: %s\n", hexpert::test::kHopper, info.reason.c_str());
    return 77;
  }
  hexpert::test::tested_device = {hexpert::DeviceType::kCuda, hexpert::test::run_on_device};
  return RUN_ALL_TESTS();
}

// What a GPU layer refuses before it launches anything, and what it says of a device that failed.
#include <thread>

#include "cuda/device_memory.hpp"
#include "cuda_case.hpp"
#include "cuda_trap.hpp"

namespace hexpert::test {
namespace {

constexpr MoeCase kCase{.num_experts = 8,
                        .top_k = 2,
                        .hidden_size = 48,
                        .intermediate_size = 32,
                        .tokens = 4,
                        .num_local_experts = 4,
                        .local_expert_offset = 2,
                        .activation = kSwiGlu};

class CudaErrors : public testing::Test {
 protected:
  void expect(ErrorCode code, const std::string& message) {
    const Status status = moe_.forward(inputs_, out_);
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_EQ(status.message().rfind(message, 0), 0U) << status.message();
    cuda_ok(cudaDeviceSynchronize());
    for (float v : memory_.values())
      ASSERT_TRUE(std::isnan(v)) << "a refused forward wrote to the output";
    inputs_ = data_.inputs;
    out_ = memory_.view;
  }

  ExpertWeights weights_ = copy_to_device(make_weights(kCase));
  RoutedMoe moe_ = RoutedMoe::create(kCase.problem(), weights_).value();
  MoeData host_{kCase};
  DeviceData data_{host_.inputs(kCase)};
  DeviceOut memory_{kCase, DType::kBF16};
  MoeInputs inputs_ = data_.inputs;
  TensorView out_ = memory_.view;
};

TEST_F(CudaErrors, WrongDevice) {
  inputs_.hidden_states.device = Device::cpu();
  expect(ErrorCode::kDeviceMismatch, "hidden_states: expected memory of cuda:0, got cpu");
  inputs_.routing_map.device = Device::cuda(1);
  expect(ErrorCode::kDeviceMismatch, "routing_map: expected memory of cuda:0, got cuda:1");
  inputs_.probabilities.device = Device::cpu();
  expect(ErrorCode::kDeviceMismatch, "probabilities: expected memory of cuda:0, got cpu");
  out_.device = Device::cpu();
  expect(ErrorCode::kDeviceMismatch, "out: expected memory of cuda:0, got cpu");
}

TEST_F(CudaErrors, HostPointersThatClaimToBeOnTheDevice) {
  inputs_.hidden_states.data = host_.hidden_states.data();
  expect(ErrorCode::kDeviceMismatch, "hidden_states: expected memory of cuda:0, got host memory");
  inputs_.routing_map.data = host_.ids.data();
  expect(ErrorCode::kDeviceMismatch, "routing_map: expected memory of cuda:0, got host memory");
  inputs_.probabilities.data = host_.probabilities.data();
  expect(ErrorCode::kDeviceMismatch, "probabilities: expected memory of cuda:0, got host memory");
  PoisonedBuffer<uint16_t> host_out(kCase.tokens * kCase.hidden_size);
  out_.data = host_out.data();
  expect(ErrorCode::kDeviceMismatch, "out: expected memory of cuda:0, got host memory");
  EXPECT_TRUE(host_out.untouched());
}

TEST_F(CudaErrors, MappedHostMemoryIsAccepted) {
  void* pinned = nullptr;
  const size_t bytes = host_.hidden_states.size() * 2;
  cuda_ok(cudaMallocHost(&pinned, bytes));
  std::memcpy(pinned, host_.hidden_states.data(), bytes);
  inputs_.hidden_states.data = pinned;
  EXPECT_EQ(moe_.forward(inputs_, out_).to_string(), "ok");
  cuda_ok(cudaDeviceSynchronize());
  cuda_ok(cudaFreeHost(pinned));
}

TEST_F(CudaErrors, AThreadThatUsedNoDeviceKnowsItsMemory) {
  void* pinned = nullptr;
  cuda_ok(cudaMallocHost(&pinned, 64));
  const void* const pointers[] = {data_.inputs.hidden_states.data, pinned, host_.ids.data()};
  std::vector<ErrorCode> codes;
  for (const void* data : pointers) {
    std::thread([&] {
      codes.push_back(cuda::check_memory("hidden_states", data, Device::cuda(0)).code());
    }).join();
  }
  cuda_ok(cudaFreeHost(pinned));
  EXPECT_EQ(codes, (std::vector{ErrorCode::kOk, ErrorCode::kOk, ErrorCode::kDeviceMismatch}));
}

TEST_F(CudaErrors, ShapesTypesAlignmentOverlap) {
  inputs_.hidden_states.shape[1] = 32;
  expect(ErrorCode::kShapeMismatch, "hidden_states: expected [4, 48], got [4, 32] bf16");
  inputs_.routing_map.dtype = DType::kF32;
  expect(ErrorCode::kInvalidDtype, "routing_map: expected i32 or i64, got");
  inputs_.probabilities.dtype = DType::kBF16;
  expect(ErrorCode::kInvalidDtype, "probabilities: expected f32, got");
  out_.dtype = DType::kF16;
  expect(ErrorCode::kInvalidOutput, "out: expected bf16 or f32, got");
  inputs_.hidden_states.strides[0] = 64;
  expect(ErrorCode::kNotContiguous, "hidden_states: expected packed rows");
  inputs_.hidden_states.data = inputs_.hidden_states.as<std::byte>() + 2;
  expect(ErrorCode::kMisaligned, "hidden_states: expected an address aligned to 16 bytes");
  inputs_.probabilities.data = nullptr;
  expect(ErrorCode::kNullPointer, "probabilities: expected 32 bytes, got a null pointer");
  inputs_.token_capacity = -1;
  expect(ErrorCode::kInvalidArgument, "token_capacity: expected >= 0, got -1");
  out_.data = const_cast<void*>(inputs_.hidden_states.data);
  expect(ErrorCode::kInvalidOutput, "out: expected memory that overlaps no input");
}

TEST_F(CudaErrors, Workspaces) {
  const int64_t needed = RoutedMoe::workspace_bytes_for(kCase.problem(), weights_).value();
  const DeviceBuffer<std::byte> memory(needed + 256);
  const auto create = [&](void* data, int64_t bytes) {
    MoeOptions options;
    options.workspace = {data, bytes};
    return RoutedMoe::create(kCase.problem(), weights_, options).status();
  };
  EXPECT_EQ(create(memory.data(), needed).to_string(), "ok");
  EXPECT_EQ(create(memory.data(), needed - 1).code(), ErrorCode::kWorkspaceTooSmall);
  EXPECT_EQ(create(nullptr, needed).code(), ErrorCode::kNullPointer);
  EXPECT_EQ(create(memory.data() + 128, needed).code(), ErrorCode::kMisaligned);
  AlignedVector<std::byte> host(static_cast<size_t>(needed + 512));
  void* aligned = host.data();
  size_t space = host.size();
  std::align(256, static_cast<size_t>(needed), aligned, space);
  EXPECT_EQ(create(aligned, needed).code(), ErrorCode::kDeviceMismatch);
}

TEST_F(CudaErrors, CpuBackendsDoNotRunDeviceWeights) {
  for (const char* backend : {"reference", "cpu-scalar"}) {
    MoeOptions options;
    options.backend = backend;
    EXPECT_EQ(RoutedMoe::create(kCase.problem(), weights_, options).status().code(),
              ErrorCode::kUnsupportedDevice);
  }
  const ExpertWeights host = make_weights(kCase);
  MoeOptions options;
  options.backend = kHopper;
  EXPECT_EQ(RoutedMoe::create(kCase.problem(), host, options).status().code(),
            ErrorCode::kUnsupportedDevice);
}

TEST_F(CudaErrors, MoreExpertsThanTheRoutingCounts) {
  const MoeCase c{.num_experts = 16385, .hidden_size = 16, .intermediate_size = 16};
  PrepareOptions options;
  options.device = kGpu;
  const ExpertWeights weights = ExpertWeights::allocate(c.shape(), options).value();
  const std::string reason = "cuda-sm90a: at most 16384 local experts, got 16385";
  const auto create = [&](const char* backend) {
    MoeOptions moe_options;
    moe_options.backend = backend;
    return RoutedMoe::create(c.problem(), weights, moe_options).status();
  };
  EXPECT_EQ(create(kHopper).code(), ErrorCode::kUnsupported);
  EXPECT_EQ(create(kHopper).message(), "backend: " + reason);
  EXPECT_EQ(create("").code(), ErrorCode::kUnsupportedDevice);
  EXPECT_EQ(create("").message(), "backend: no backend of this build for cuda:0; " + reason);
}

TEST_F(CudaErrors, DevicesThatDoNotExist) {
  int count = 0;
  cuda_ok(cudaGetDeviceCount(&count));
  const Status status = query_backend(Device::cuda(count)).status();
  EXPECT_EQ(status.code(), ErrorCode::kUnsupportedDevice);
  EXPECT_NE(status.message().find("cuda-sm90a: no cuda:" + std::to_string(count) + ", " +
                                  std::to_string(count) + " found"),
            std::string::npos)
      << status.message();
  PrepareOptions options;
  options.device = Device::cuda(count);
  EXPECT_EQ(ExpertWeights::allocate(kCase.shape(), options).status().code(),
            ErrorCode::kUnsupportedDevice);
}

TEST_F(CudaErrors, ExhaustedMemoryInCreateIsAStatusAndLeavesNothing) {
  const auto free_memory = [] {
    size_t free = 0;
    size_t total = 0;
    cuda_ok(cudaMemGetInfo(&free, &total));
    return free;
  };
  ASSERT_TRUE(RoutedMoe::create(kCase.problem(), weights_).ok());  // what is kept once it was there
  const size_t before = free_memory();
  int failures = 0;
  for (int n = 1; n < 20; ++n) {
    cuda::fail_allocation(n);
    const Status status = RoutedMoe::create(kCase.problem(), weights_).status();
    cuda::fail_allocation(0);
    EXPECT_EQ(free_memory(), before);
    if (status.ok()) break;
    EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory) << status.to_string();
    ++failures;
  }
  EXPECT_GE(failures, 1);
  MoeProblem huge = kCase.problem();
  huge.max_tokens = (int64_t{1} << 28) - 8;
  EXPECT_EQ(RoutedMoe::create(huge, weights_).status().code(), ErrorCode::kOutOfMemory);
}

// In a process of its own: nothing brings a context back after this.
void run_on_a_broken_device() {
  const ExpertWeights weights = copy_to_device(make_weights(kCase));
  RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights).value();
  const MoeData host(kCase);
  const DeviceData data(host.inputs(kCase));
  const DeviceOut out(kCase, DType::kBF16);
  if (!moe.forward(data.inputs, out.view).ok()) std::_Exit(1);
  launch_trap();
  cudaDeviceSynchronize();
  const Status first = moe.forward(data.inputs, out.view);
  const Status second = moe.forward(data.inputs, out.view);
  const bool good = first.code() == ErrorCode::kDeviceError &&
                    first.message().find("launch failure") != std::string::npos &&
                    second.code() == ErrorCode::kDeviceError &&
                    second.message().rfind("this layer is broken since an earlier error", 0) == 0;
  if (!good)
    std::fprintf(stderr, "%s\n%s\n", first.to_string().c_str(), second.to_string().c_str());
  std::_Exit(good ? 0 : 2);
}

TEST(CudaErrorsDeathTest, AFailedDeviceIsReportedOnceThenTheLayerIsBroken) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_on_a_broken_device(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace hexpert::test

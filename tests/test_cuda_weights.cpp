// Expert weights on the GPU: the bytes of the reference from stacks there and in host memory, in place,
// under a graph, and everything that is refused.
#include "cuda/device_memory.hpp"
#include "cuda/device_weights.hpp"
#include "cuda_case.hpp"
#include "golden.hpp"
#include "weights_case.hpp"

namespace hexpert::test {
namespace {

PrepareOptions on_gpu() {
  PrepareOptions options;
  options.device = kGpu;
  return options;
}

// The stacks of a layer in device memory.
struct DeviceStacks {
  DeviceBuffer<uint16_t> fc1, fc2;
  ConstTensorView fc1_view, fc2_view;
  explicit DeviceStacks(const Stacks& host)
      : fc1(DeviceBuffer<uint16_t>::copy_of(host.fc1)),
        fc2(DeviceBuffer<uint16_t>::copy_of(host.fc2)),
        fc1_view(host.fc1_view()),
        fc2_view(host.fc2_view()) {
    fc1_view.data = fc1.data();
    fc2_view.data = fc2.data();
    fc1_view.device = fc2_view.device = kGpu;
  }
};

const cuda::FragmentWeights& fragments_of(const ExpertWeights& weights) {
  return static_cast<const cuda::HopperWeights&>(*weights.storage().on_device).view();
}

void expect_same_bytes(const Canonical& actual, const Canonical& expected) {
  EXPECT_TRUE(actual.fc1_data == expected.fc1_data) << "FC1 codes";
  EXPECT_TRUE(actual.fc1_scales == expected.fc1_scales) << "FC1 scales";
  EXPECT_TRUE(actual.fc2_data == expected.fc2_data) << "FC2 codes";
  EXPECT_TRUE(actual.fc2_scales == expected.fc2_scales) << "FC2 scales";
  EXPECT_TRUE(actual == expected) << "alphas";
}

// From device memory, from host memory, one of each, and expert by expert.
void expect_prepared(const Stacks& stacks) {
  SCOPED_TRACE(testing::Message() << "L" << stacks.shape.num_local_experts << " H"
                                  << stacks.shape.hidden_size << " I"
                                  << stacks.shape.intermediate_size << " gated "
                                  << stacks.shape.gated);
  const Canonical expected = exported(stacks.prepare());
  const DeviceStacks there(stacks);
  const auto prepare = [](const ConstTensorView& fc1, const ConstTensorView& fc2) {
    return ExpertWeights::prepare(fc1, fc2, on_gpu()).value();
  };
  expect_same_bytes(exported(prepare(there.fc1_view, there.fc2_view)), expected);
  expect_same_bytes(exported(prepare(stacks.fc1_view(), stacks.fc2_view())), expected);
  expect_same_bytes(exported(prepare(there.fc1_view, stacks.fc2_view())), expected);
  EXPECT_TRUE(there.fc1.fences_intact() && there.fc2.fences_intact());
}

TEST(CudaWeights, GoldenBytes) {
  for (const char* name : {"gated_e2_i192_h80", "relu2_e3_i96_h64"}) {
    const auto stack = [name](const char* array) { return golden("weights", name, array); };
    const GoldenArray fc1 = stack("fc1_weight");
    const GoldenArray fc2 = stack("fc2_weight");
    Stacks stacks({fc2.shape[0], fc2.shape[1], fc2.shape[2], fc1.shape[1] == 2 * fc2.shape[2]}, 1);
    stacks.fc1.assign(fc1.data<uint16_t>(), fc1.data<uint16_t>() + fc1.count());
    stacks.fc2.assign(fc2.data<uint16_t>(), fc2.data<uint16_t>() + fc2.count());
    expect_prepared(stacks);
    const DeviceStacks there(stacks);
    const Canonical actual =
        exported(ExpertWeights::prepare(there.fc1_view, there.fc2_view, on_gpu()).value());
    EXPECT_EQ(actual.fc1_data, stack("fc1_data").values<uint8_t>());
    EXPECT_EQ(actual.fc1_scales, stack("fc1_scale_swizzled").values<uint8_t>());
    EXPECT_EQ(actual.fc1_alpha, stack("fc1_alpha").values<float>());
    EXPECT_EQ(actual.fc2_data, stack("fc2_data").values<uint8_t>());
    EXPECT_EQ(actual.fc2_scales, stack("fc2_scale_swizzled").values<uint8_t>());
    EXPECT_EQ(actual.fc2_alpha, stack("fc2_alpha").values<float>());
  }
}

TEST(CudaWeights, SmallAndOddShapes) {
  constexpr int64_t kSizes[][2] = {{1, 1},
                                   {16, 16},
                                   {17, 15},
                                   {64, 64},
                                   {64, 128},
                                   {128, 128},
                                   {128, 256},
                                   {100, 33},
                                   {130, 250},
                                   {257, 1},
                                   {256, 512},
                                   {384, 512},
                                   {1000, 72}};
  uint64_t seed = 1;
  for (const auto& [hidden, intermediate] : kSizes) {
    for (bool gated : {false, true})
      expect_prepared(Stacks({3, hidden, intermediate, gated}, ++seed));
  }
}

TEST(CudaWeights, ModelShapes) {
  struct Model {
    int64_t experts, hidden, intermediate;
    bool gated;
  };
  for (const Model& m : {Model{4, 2688, 1856, false},
                         Model{4, 1024, 2688, false},
                         Model{4, 2048, 768, true},
                         Model{4, 4096, 1536, true},
                         Model{2, 7168, 2048, true},
                         Model{2, 2880, 2880, true},
                         Model{1, 4096, 14336, true}}) {
    expect_prepared(Stacks({m.experts, m.hidden, m.intermediate, m.gated}, 5));
  }
}

// Every class of values: no expert touches its neighbours.
TEST(CudaWeights, SpecialExperts) {
  for (bool gated : {false, true}) {
    const ExpertShape shape{8, 80, 72, gated};
    Stacks stacks(shape, 9);
    const auto fc1 = [&](int64_t e) {
      return stacks.fc1.begin() + e * stacks.fc1_rows() * shape.hidden_size;
    };
    const auto fc2 = [&](int64_t e) {
      return stacks.fc2.begin() + e * shape.hidden_size * shape.intermediate_size;
    };
    const int64_t fc2_size = shape.hidden_size * shape.intermediate_size;
    std::fill_n(fc2(0), fc2_size, uint16_t{0});
    std::fill_n(fc2(1), fc2_size, uint16_t{0x8000});
    fc1(2)[stacks.fc1_rows() * shape.hidden_size - 1] = 0x7FC1;
    fc1(3)[0] = 0xFF80;
    fc2(3)[11] = 0x7F80;
    fc2(3)[12] = 0xFFC0;
    const Bf16Vector tiny = log_uniform_bf16(fc2_size, 1, -133, -120);
    std::copy(tiny.begin(), tiny.end(), fc2(4));
    const Bf16Vector huge = log_uniform_bf16(fc2_size, 2, 90, 127);
    std::copy(huge.begin(), huge.end(), fc2(5));
    const Bf16Vector wide = log_uniform_bf16(fc2_size, 3, -60, 20);
    std::copy(wide.begin(), wide.end(), fc2(6));
    const Bf16Vector any = any_bf16(fc2_size, 4);
    std::copy(any.begin(), any.end(), fc2(7));
    expect_prepared(stacks);
  }
}

TEST(CudaWeights, SetExpertFromEitherMemory) {
  const ExpertShape shape{4, 96, 56, true};
  const Stacks stacks(shape, 3);
  const Canonical expected = exported(stacks.prepare());
  ExpertWeights weights = ExpertWeights::allocate(shape, on_gpu()).value();
  for (int64_t e = 0; e < shape.num_local_experts; ++e) {
    const int64_t fc1_size = stacks.fc1_rows() * shape.hidden_size;
    const int64_t fc2_size = shape.hidden_size * shape.intermediate_size;
    const Bf16Vector fc1(stacks.fc1.begin() + e * fc1_size,
                         stacks.fc1.begin() + (e + 1) * fc1_size);
    const Bf16Vector fc2(stacks.fc2.begin() + e * fc2_size,
                         stacks.fc2.begin() + (e + 1) * fc2_size);
    const auto fc1_there = DeviceBuffer<uint16_t>::copy_of(fc1);
    const auto fc2_there = DeviceBuffer<uint16_t>::copy_of(fc2);
    const bool there = e % 2 == 0;
    const Device device = there ? kGpu : Device::cpu();
    ASSERT_EQ(weights
                  .set_expert(e,
                              {there ? fc1_there.data() : fc1.data(),
                               DType::kBF16,
                               {stacks.fc1_rows(), shape.hidden_size},
                               device},
                              {there ? fc2_there.data() : fc2.data(),
                               DType::kBF16,
                               {shape.hidden_size, shape.intermediate_size},
                               device})
                  .to_string(),
              "ok");
  }
  expect_same_bytes(exported(weights), expected);
}

TEST(CudaWeights, CanonicalAndProjectionRoundTrips) {
  for (const ExpertShape& shape : {ExpertShape{3, 130, 70, true}, ExpertShape{2, 64, 200, false}}) {
    const Stacks stacks(shape, 5);
    const ExpertWeights host = stacks.prepare();
    Canonical canonical = exported(host);
    ExpertWeights imported = ExpertWeights::allocate(shape, on_gpu()).value();
    ASSERT_EQ(imported.import_canonical(canonical.view()).to_string(), "ok");
    expect_same_bytes(exported(imported), canonical);

    using P = ExpertWeights::Projection;
    ExpertWeights rebuilt = ExpertWeights::allocate(shape, on_gpu()).value();
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
        b.codes.resize(static_cast<size_t>(rows * round_up(cols, 16) / 2));
        b.scales.resize(static_cast<size_t>(rows * round_up(cols, 16) / 16));
        ASSERT_TRUE(
            imported.export_projection(e, p, b.codes.data(), b.scales.data(), &b.alpha).ok());
      }
      const auto view = [&](P p) {
        const Buffers& b = buffers[static_cast<int>(p)];
        return QuantizedProjection{b.codes.data(), b.scales.data(), b.alpha};
      };
      ASSERT_TRUE(
          rebuilt.set_quantized_expert(e, {view(P::kGate), view(P::kUp), view(P::kDown)}).ok());
    }
    expect_same_bytes(exported(rebuilt), canonical);
  }
}

TEST(CudaWeights, RefreshKeepsAddressesAlsoInAGraph) {
  const ExpertShape shape{4, 144, 96, true};
  const Stacks first(shape, 1);
  const Stacks second(shape, 2);
  const Stacks third(shape, 3);
  DeviceStacks there(first);
  ExpertWeights weights = ExpertWeights::prepare(there.fc1_view, there.fc2_view, on_gpu()).value();
  const cuda::FragmentWeights before = fragments_of(weights);
  EXPECT_EQ(weights.device(), kGpu);
  EXPECT_EQ(weights.layout_name(), "sm90-fragments");

  const DeviceStacks other(second);
  const TestStream stream;
  ASSERT_TRUE(weights.refresh(other.fc1_view, other.fc2_view, stream.view()).ok());
  stream.wait();
  expect_same_bytes(exported(weights), exported(second.prepare()));
  ASSERT_TRUE(weights.refresh(third.fc1_view(), third.fc2_view(), stream.view()).ok());
  expect_same_bytes(exported(weights), exported(third.prepare()));

  Status captured;
  const TestGraph graph(
      stream, [&] { captured = weights.refresh(there.fc1_view, there.fc2_view, stream.view()); });
  ASSERT_EQ(captured.to_string(), "ok");
  expect_same_bytes(exported(weights), exported(third.prepare()));  // not run yet
  for (const Stacks* stacks : {&first, &second}) {
    there.fc1.upload(stacks->fc1.data());
    there.fc2.upload(stacks->fc2.data());
    graph.replay(stream);
    expect_same_bytes(exported(weights), exported(stacks->prepare()));
  }
  const cuda::FragmentWeights after = fragments_of(weights);
  EXPECT_EQ(after.fc1, before.fc1);
  EXPECT_EQ(after.fc2, before.fc2);
  EXPECT_EQ(after.fc1_up_alpha, before.fc1_up_alpha);
  EXPECT_EQ(after.fc2_alpha, before.fc2_alpha);
}

TEST(CudaWeights, HostStacksAreNotCaptured) {
  const Stacks stacks({2, 64, 64, false}, 1);
  ExpertWeights weights = stacks.prepare(on_gpu());
  const TestStream stream;
  Status captured;
  const TestGraph graph(stream, [&] {
    captured = weights.refresh(stacks.fc1_view(), stacks.fc2_view(), stream.view());
  });
  EXPECT_EQ(captured.code(), ErrorCode::kUnsupported) << captured.to_string();
}

TEST(CudaWeights, NonFiniteWeightsAreNamedOnRequest) {
  Stacks stacks({3, 64, 32, false}, 5);
  stacks.fc1[2 * 32 * 64 + 3] = 0xFF80;
  PrepareOptions options = on_gpu();
  options.refuse_nonfinite = true;
  const DeviceStacks there(stacks);
  for (const auto& [fc1, fc2] : {std::pair(stacks.fc1_view(), stacks.fc2_view()),
                                 std::pair(there.fc1_view, there.fc2_view)}) {
    const Status status = ExpertWeights::prepare(fc1, fc2, options).status();
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_EQ(status.message(), "fc1_weight: expert 2 holds an infinity");
  }
  stacks.fc1[2 * 32 * 64 + 3] = 0;
  stacks.fc2[64 * 32] = 0x7FC0;
  EXPECT_EQ(
      ExpertWeights::prepare(stacks.fc1_view(), stacks.fc2_view(), options).status().message(),
      "fc2_weight: expert 1 holds a NaN");
}

TEST(CudaWeights, MemoryIsFourAndAHalfBitsAWeight) {
  const ExpertShape shape{16, 2048, 768, true};
  const ExpertWeights weights = ExpertWeights::allocate(shape, on_gpu()).value();
  const int64_t elements = 3 * 16 * int64_t{2048} * 768;
  EXPECT_GE(weights.size_bytes(), elements * 9 / 16);
  EXPECT_LE(weights.size_bytes(), elements * 9 / 16 + elements / 1000);
}

TEST(CudaWeights, WrongMemoryAndShapesAreRefused) {
  const Stacks stacks({2, 64, 32, true}, 1);
  const DeviceStacks there(stacks);
  // Device tensors need device weights.
  EXPECT_EQ(ExpertWeights::prepare(there.fc1_view, there.fc2_view, {}).status().code(),
            ErrorCode::kDeviceMismatch);
  // Host memory that claims to be on the device.
  ConstTensorView liar = stacks.fc1_view();
  liar.device = kGpu;
  const Status lied = ExpertWeights::prepare(liar, there.fc2_view, on_gpu()).status();
  EXPECT_EQ(lied.code(), ErrorCode::kDeviceMismatch);
  EXPECT_EQ(lied.message().rfind("fc1_weight: expected memory of cuda:0, got host memory", 0), 0U)
      << lied.message();
  ConstTensorView elsewhere = there.fc1_view;
  elsewhere.device = Device::cuda(1);
  EXPECT_EQ(ExpertWeights::prepare(elsewhere, there.fc2_view, on_gpu()).status().message(),
            "fc1_weight: expected memory of cuda:0, got cuda:1");
  PrepareOptions far = on_gpu();
  far.device = Device::cuda(63);
  EXPECT_FALSE(ExpertWeights::allocate(stacks.shape, far).ok());

  ExpertWeights weights = stacks.prepare(on_gpu());
  const Canonical before = exported(weights);
  const Stacks other({2, 64, 48, true}, 2);
  const DeviceStacks other_there(other);
  EXPECT_EQ(weights.refresh(other_there.fc1_view, other_there.fc2_view).message(),
            "intermediate_size: the weights were prepared for 32, got 48");
  expect_same_bytes(exported(weights), before);
}

TEST(CudaWeights, ExhaustedMemoryIsAStatusAndLeavesNothing) {
  const Stacks stacks({2, 256, 128, true}, 1);
  ExpertWeights weights = stacks.prepare(on_gpu());
  stacks.prepare(on_gpu());  // what is kept once it was there
  const auto free_memory = [] {
    size_t free = 0;
    size_t total = 0;
    cuda_ok(cudaMemGetInfo(&free, &total));
    return free;
  };
  const size_t free_before = free_memory();
  for (int n : {1, 2}) {
    cuda::fail_allocation(n);
    const Status status =
        ExpertWeights::prepare(stacks.fc1_view(), stacks.fc2_view(), on_gpu()).status();
    cuda::fail_allocation(0);
    EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory) << n << ": " << status.to_string();
    EXPECT_EQ(free_memory(), free_before);
  }
  const Canonical before = exported(weights);
  const Stacks other({2, 256, 128, true}, 2);
  cuda::fail_allocation(1);
  EXPECT_EQ(weights.refresh(other.fc1_view(), other.fc2_view()).code(), ErrorCode::kOutOfMemory);
  cuda::fail_allocation(0);
  expect_same_bytes(exported(weights), before);
  EXPECT_EQ(ExpertWeights::allocate({1 << 15, 1 << 20, 1 << 20, true}, on_gpu()).status().code(),
            ErrorCode::kOutOfMemory);
  EXPECT_EQ(ExpertWeights::allocate({4096, 1 << 14, 1 << 14, true}, on_gpu()).status().code(),
            ErrorCode::kOutOfMemory);
}

}  // namespace
}  // namespace hexpert::test

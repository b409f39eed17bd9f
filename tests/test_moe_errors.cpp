// Every refusal of RoutedMoe: code, message, and nothing written.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "moe/reference.hpp"
#include "moe_case.hpp"

namespace hexpert {
namespace {

using test::kGeGlu;
using test::kOai;
using test::kSiTu;
using test::kSquaredRelu;
using test::kSwiGlu;
using test::MoeCase;
using test::MoeData;

constexpr MoeCase kCase{.num_experts = 8,
                        .top_k = 2,
                        .hidden_size = 48,
                        .intermediate_size = 32,
                        .tokens = 4,
                        .num_local_experts = 4,
                        .local_expert_offset = 2,
                        .activation = kSwiGlu};

// --- create ---

class Create : public testing::Test {
 protected:
  Status create(const std::function<void(MoeProblem&, MoeOptions&)>& change) {
    MoeProblem problem = kCase.problem();
    MoeOptions options;
    change(problem, options);
    return RoutedMoe::create(problem, weights_, options).status();
  }
  void expect(ErrorCode code,
              const std::string& message,
              const std::function<void(MoeProblem&, MoeOptions&)>& change) {
    const Status status = create(change);
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_EQ(status.message(), message);
  }
  ExpertWeights weights_ = test::make_weights(kCase);
};

TEST_F(Create, Accepts) {
  EXPECT_TRUE(create([](MoeProblem&, MoeOptions&) {}).ok());
  EXPECT_TRUE(create([](MoeProblem& p, MoeOptions&) { p.local_expert_offset = 4; }).ok());
  EXPECT_TRUE(create([](MoeProblem& p, MoeOptions&) { p.max_tokens = 0; }).ok());
  for (const Activation& a : {kOai, kGeGlu, kSiTu, test::kSiTuBoth}) {
    EXPECT_TRUE(create([&](MoeProblem& p, MoeOptions&) { p.activation = a; }).ok());
  }
}

TEST_F(Create, Experts) {
  expect(ErrorCode::kInvalidArgument,
         "num_experts: expected >= 1, got 0",
         [](MoeProblem& p, MoeOptions&) { p.num_experts = 0; });
  expect(ErrorCode::kInvalidArgument,
         "local_expert_offset: expected >= 0, got -1",
         [](MoeProblem& p, MoeOptions&) { p.local_expert_offset = -1; });
  expect(ErrorCode::kInvalidArgument,
         "local_expert_offset: expected offset + num_local_experts <= num_experts = 8, got 5 + 4",
         [](MoeProblem& p, MoeOptions&) { p.local_expert_offset = 5; });
  expect(ErrorCode::kInvalidArgument,
         "local_expert_offset: expected offset + num_local_experts <= num_experts = 8, got "
         "9223372036854775807 + 4",
         [](MoeProblem& p, MoeOptions&) {
           p.local_expert_offset = std::numeric_limits<int64_t>::max();
         });
  expect(ErrorCode::kInvalidArgument,
         "local_expert_offset: expected offset + num_local_experts <= num_experts = 3, got 0 + 4",
         [](MoeProblem& p, MoeOptions&) {
           p.num_experts = 3;
           p.local_expert_offset = 0;
         });
}

TEST_F(Create, Sizes) {
  expect(ErrorCode::kInvalidArgument,
         "max_tokens: expected >= 0, got -1",
         [](MoeProblem& p, MoeOptions&) { p.max_tokens = -1; });
  expect(ErrorCode::kInvalidArgument,
         "top_k: expected >= 1, got 0",
         [](MoeProblem& p, MoeOptions&) { p.top_k = 0; });
  expect(ErrorCode::kTooLarge,
         "max_tokens: expected max_tokens * top_k <= 2147483647, got 1073741824 * 2",
         [](MoeProblem& p, MoeOptions&) { p.max_tokens = int64_t{1} << 30; });
  expect(ErrorCode::kTooLarge,
         "max_tokens: expected max_tokens * top_k <= 2147483647, got 4611686018427387904 * "
         "4611686018427387904",
         [](MoeProblem& p, MoeOptions&) { p.max_tokens = p.top_k = int64_t{1} << 62; });
  expect(ErrorCode::kTooLarge,
         "top_k: expected <= 2147483647, got 4611686018427387904",
         [](MoeProblem& p, MoeOptions&) {
           p.max_tokens = 0;
           p.top_k = int64_t{1} << 62;
         });
  expect(ErrorCode::kInvalidArgument,
         "num_threads: expected 0..1024, got -1",
         [](MoeProblem&, MoeOptions& o) { o.num_threads = -1; });
  expect(ErrorCode::kInvalidArgument,
         "num_threads: expected 0..1024, got 1025",
         [](MoeProblem&, MoeOptions& o) { o.num_threads = 1025; });
}

TEST_F(Create, WorkspaceThatDoesNotExist) {
  for (const std::string& backend : test::available_backends()) {
    const Status status = create([&](MoeProblem& p, MoeOptions& o) {
      p.max_tokens = 1;
      p.top_k = std::numeric_limits<int32_t>::max();
      o.num_threads = 1024;
      o.backend = backend;
    });
    EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory) << backend << ": " << status.to_string();
    EXPECT_EQ(status.message().rfind("workspace: ", 0), 0U) << status.message();
  }
}

// The largest sizes: no workspace is too small because a product wrapped around.
TEST_F(Create, WorkspaceNear64Bits) {
  weights_ = ExpertWeights::allocate({1, reference::kMaxExactK, 1, false}).value();
  for (const std::string& backend : test::available_backends()) {
    MoeProblem problem{.max_tokens = 1,
                       .top_k = std::numeric_limits<int32_t>::max(),
                       .num_experts = 1,
                       .activation = kSquaredRelu};
    const Status status =
        RoutedMoe::create(problem, weights_, {.backend = backend, .num_threads = 1024}).status();
    EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory) << backend << ": " << status.to_string();
  }
}

// The sums of the reference are exact or there are none.
TEST_F(Create, ReferenceRefusesSumsThatPassInt64) {
  constexpr int64_t kLongest = reference::kMaxExactK;
  MoeProblem problem{.max_tokens = 1, .top_k = 1, .num_experts = 1, .activation = kSquaredRelu};
  weights_ = ExpertWeights::allocate({1, kLongest, 1, false}).value();
  EXPECT_TRUE(RoutedMoe::create(problem, weights_, {.backend = "reference"}).ok());
  for (const ExpertShape& shape :
       {ExpertShape{1, kLongest + 1, 1, false}, ExpertShape{1, 1, kLongest + 1, false}}) {
    weights_ = ExpertWeights::allocate(shape).value();
    const Status status = RoutedMoe::create(problem, weights_, {.backend = "reference"}).status();
    EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(status.message(),
              "backend: reference: sums over 1217345 elements do not fit int64, 1217344 do");
    EXPECT_TRUE(RoutedMoe::create(problem, weights_, {}).ok()) << "others take any size";
  }
}

TEST_F(Create, ActivationMustFitTheWeights) {
  expect(ErrorCode::kActivationMismatch,
         "activation: expected a gated activation for gated weights, got squared_relu",
         [](MoeProblem& p, MoeOptions&) { p.activation = kSquaredRelu; });
  MoeCase plain = kCase;
  plain.activation = kSquaredRelu;
  weights_ = test::make_weights(plain);
  expect(ErrorCode::kActivationMismatch,
         "activation: expected a non-gated activation for non-gated weights, got swiglu",
         [](MoeProblem&, MoeOptions&) {});
  EXPECT_TRUE(create([](MoeProblem& p, MoeOptions&) { p.activation = kSquaredRelu; }).ok());
}

TEST_F(Create, ActivationParameters) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto expect_activation = [&](ErrorCode code, const std::string& text, const Activation& a) {
    expect(code, text, [&](MoeProblem& p, MoeOptions&) { p.activation = a; });
  };
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  Activation a = kSiTu;
  a.type = static_cast<ActivationType>(5);
  expect_activation(ErrorCode::kUnsupported, "activation: expected 0..4, got 5", a);
  for (const auto& [b, text] :
       {std::pair{0.0F, "0"}, {-1.0F, "-1"}, {kInf, "inf"}, {kNan, "nan"}}) {
    a = kSiTu;
    a.situ_b = b;
    expect_activation(
        kInvalid, std::string("situ_b: expected a finite number > 0, got ") + text, a);
    a = kSiTu;
    a.situ_c = b;
    expect_activation(
        kInvalid, std::string("situ_c: expected a finite number > 0, or none, got ") + text, a);
  }
  a = {.type = ActivationType::kSiTu, .situ_c = 1.0F};  // c without b
  expect_activation(kInvalid, "situ_b: expected a finite number > 0, got 0", a);
  a = kSwiGlu;
  a.situ_b = 1;
  expect_activation(kInvalid, "activation: situ_b and situ_c belong to situ, got swiglu", a);
  a = kGeGlu;
  a.situ_c = 1.0F;
  expect_activation(kInvalid, "activation: situ_b and situ_c belong to situ, got geglu_tanh", a);
  a = kOai;
  a.limit = 0;
  expect_activation(kInvalid, "limit: expected a number > 0, got 0", a);
  a.limit = kNan;
  expect_activation(kInvalid, "limit: expected a number > 0, got nan", a);
  a = kOai;
  a.alpha = kInf;
  expect_activation(kInvalid, "alpha: expected a finite number, got inf", a);
  a = kOai;
  a.beta = kNan;
  expect_activation(kInvalid, "beta: expected a finite number, got nan", a);
  a = kSwiGlu;
  a.limit = 7;
  expect_activation(
      kInvalid,
      "activation: alpha, beta and limit belong to swiglu_oai, got swiglu with 1, 0, 7",
      a);
}

TEST_F(Create, Backend) {
  expect(ErrorCode::kNotFound,
         "backend: expected one of cuda-sm90a, cpu-amx, cpu-avx512-vnni, cpu-avx2, cpu-scalar, "
         "reference, got abacus",
         [](MoeProblem&, MoeOptions& o) { o.backend = "abacus"; });
  expect(ErrorCode::kUnsupportedDevice,
         "backend: cuda-sm90a: runs on cuda, not on cpu",
         [](MoeProblem&, MoeOptions& o) { o.backend = "cuda-sm90a"; });
  for (const BackendInfo& info : list_backends()) {
    if (info.available || info.device != DeviceType::kCpu) continue;
    expect(ErrorCode::kUnsupportedDevice,
           "backend: " + std::string(info.name) + ": " + info.reason,
           [&](MoeProblem&, MoeOptions& o) { o.backend = info.name; });
  }
}

// --- forward ---

class Forward : public testing::Test {
 protected:
  void expect(ErrorCode code, const std::string& message) {
    for (const std::string& backend : test::available_backends()) {
      MoeProblem problem = kCase.problem();
      problem.max_tokens = 5;
      RoutedMoe moe =
          RoutedMoe::create(problem, weights_, {.backend = backend, .num_threads = 1}).value();
      const Status status = moe.forward(inputs_, out_);
      EXPECT_EQ(status.code(), code) << status.to_string();
      EXPECT_EQ(status.message(), message);
    }
    EXPECT_TRUE(memory_.untouched()) << "a refused forward wrote to the output";
  }
  // For messages with addresses.
  Status forward() {
    RoutedMoe moe = test::make_moe(kCase, weights_, {.backend = "", .num_threads = 1});
    const Status status = moe.forward(inputs_, out_);
    EXPECT_TRUE(memory_.untouched());
    return status;
  }

  ExpertWeights weights_ = test::make_weights(kCase);
  MoeData data_{kCase};
  MoeInputs inputs_ = data_.inputs(kCase);
  test::PoisonedBuffer<float> memory_{6 * 48};
  TensorView out_{memory_.data(), DType::kF32, {4, 48}};
};

TEST_F(Forward, HiddenStates) {
  const ConstTensorView good = inputs_.hidden_states;
  inputs_.hidden_states = {good.data, DType::kBF16, {192}};
  expect(ErrorCode::kInvalidShape, "hidden_states: expected [tokens, 48], got [192] bf16");
  inputs_.hidden_states = {good.data, DType::kBF16, {-1, 48}};
  expect(ErrorCode::kInvalidShape, "hidden_states: expected [tokens, 48], got [-1, 48] bf16");
  inputs_.hidden_states = {good.data, DType::kBF16, {4, 47}};
  expect(ErrorCode::kShapeMismatch, "hidden_states: expected [4, 48], got [4, 47] bf16");
  inputs_.hidden_states = {good.data, DType::kF16, {4, 48}};
  expect(ErrorCode::kInvalidDtype, "hidden_states: expected bf16, got [4, 48] f16");
  inputs_.hidden_states = good;
  inputs_.hidden_states.strides[0] = 64;
  expect(ErrorCode::kNotContiguous,
         "hidden_states: expected packed rows, got [4, 48] bf16 with strides [64, 1]");
  inputs_.hidden_states.strides[0] = 1;
  inputs_.hidden_states.strides[1] = 4;
  expect(ErrorCode::kNotContiguous,
         "hidden_states: expected packed rows, got [4, 48] bf16 with strides [1, 4]");
}

// A view of more dimensions than views have: described and refused, wherever it is given.
TEST_F(Forward, RankPastTheLargest) {
  const ConstTensorView deep(inputs_.hidden_states.data, DType::kBF16, {1, 1, 1, 1, 1, 1, 4, 48});
  EXPECT_EQ(deep.rank, 8);
  EXPECT_EQ(describe(deep), "[1, 1, 1, 1, 1, 1, ...] bf16");
  const MoeInputs good = inputs_;
  inputs_.hidden_states = deep;
  expect(ErrorCode::kInvalidShape,
         "hidden_states: expected [tokens, 48], got [1, 1, 1, 1, 1, 1, ...] bf16");
  inputs_ = good;
  inputs_.routing_map.rank = 1000;
  expect(ErrorCode::kShapeMismatch,
         "routing_map: expected [4, 2], got [4, 2, 0, 0, 0, 0, ...] i64");
  inputs_.routing_map.rank = -1;
  expect(ErrorCode::kShapeMismatch, "routing_map: expected [4, 2], got [] i64");
}

TEST_F(Forward, RoutingMapAndProbabilities) {
  const ConstTensorView map = inputs_.routing_map;
  const ConstTensorView probabilities = inputs_.probabilities;
  inputs_.routing_map = {map.data, DType::kI64, {8}};
  expect(ErrorCode::kShapeMismatch, "routing_map: expected [4, 2], got [8] i64");
  inputs_.routing_map = {map.data, DType::kI64, {3, 2}};
  expect(ErrorCode::kShapeMismatch, "routing_map: expected [4, 2], got [3, 2] i64");
  inputs_.routing_map = {map.data, DType::kI64, {4, 1}};
  expect(ErrorCode::kShapeMismatch, "routing_map: expected [4, 2], got [4, 1] i64");
  inputs_.routing_map = {map.data, DType::kF32, {4, 2}};
  expect(ErrorCode::kInvalidDtype, "routing_map: expected i32 or i64, got [4, 2] f32");
  inputs_.routing_map = map;
  inputs_.routing_map.strides[0] = 3;
  expect(ErrorCode::kNotContiguous,
         "routing_map: expected packed rows, got [4, 2] i64 with strides [3, 1]");
  inputs_.routing_map = map;

  inputs_.probabilities = {probabilities.data, DType::kF32, {4, 2, 1}};
  expect(ErrorCode::kShapeMismatch, "probabilities: expected [4, 2], got [4, 2, 1] f32");
  inputs_.probabilities = {probabilities.data, DType::kF32, {4, 3}};
  expect(ErrorCode::kShapeMismatch, "probabilities: expected [4, 2], got [4, 3] f32");
  inputs_.probabilities = {probabilities.data, DType::kBF16, {4, 2}};
  expect(ErrorCode::kInvalidDtype, "probabilities: expected f32, got [4, 2] bf16");
  inputs_.probabilities = probabilities;
  inputs_.probabilities.strides[1] = 2;
  expect(ErrorCode::kNotContiguous,
         "probabilities: expected packed rows, got [4, 2] f32 with strides [2, 2]");
}

TEST_F(Forward, Out) {
  out_ = {memory_.data(), DType::kF32, {5, 48}};
  expect(ErrorCode::kInvalidOutput, "out: expected [4, 48], got [5, 48] f32");
  out_ = {memory_.data(), DType::kF32, {4 * 48}};
  expect(ErrorCode::kInvalidOutput, "out: expected [4, 48], got [192] f32");
  out_ = {memory_.data(), DType::kF16, {4, 48}};
  expect(ErrorCode::kInvalidOutput, "out: expected bf16 or f32, got [4, 48] f16");
  out_ = {memory_.data(), DType::kF32, {4, 48}};
  out_.strides[0] = 50;
  expect(ErrorCode::kInvalidOutput,
         "out: expected packed rows, got [4, 48] f32 with strides [50, 1]");
}

TEST_F(Forward, OutOverlapsAnInput) {
  // Each input in turn lies inside the memory of the output, at its first or last bytes.
  std::byte* base = reinterpret_cast<std::byte*>(memory_.data());
  const int64_t out_bytes = 4 * 48 * 4;
  const auto expect_overlap = [&](const std::string& name) {
    const Status status = forward();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidOutput) << name;
    EXPECT_EQ(status.message().rfind("out: expected memory that overlaps no input, got [0x", 0), 0U)
        << status.message();
    EXPECT_NE(status.message().find(" over " + name + " at [0x"), std::string::npos)
        << status.message();
  };
  const MoeInputs good = inputs_;
  inputs_.hidden_states.data = base;
  expect_overlap("hidden_states");
  inputs_.hidden_states.data = base + out_bytes - 16;
  expect_overlap("hidden_states");
  inputs_ = good;
  inputs_.routing_map.data = base + out_bytes - 8;
  expect_overlap("routing_map");
  inputs_ = good;
  inputs_.probabilities.data = base + out_bytes - 4;
  expect_overlap("probabilities");
}

TEST_F(Forward, TouchingIsNotOverlapping) {
  test::PoisonedBuffer<float> memory(4 * 48 + 4 * 2);
  std::copy(data_.probabilities.begin(), data_.probabilities.end(), memory.data() + 4 * 48);
  inputs_.probabilities.data = memory.data() + 4 * 48;
  RoutedMoe moe = test::make_moe(kCase, weights_, {});
  EXPECT_TRUE(moe.forward(inputs_, {memory.data(), DType::kF32, {4, 48}}).ok());
}

TEST_F(Forward, TokenCapacity) {
  inputs_.token_capacity = -1;
  expect(ErrorCode::kInvalidArgument, "token_capacity: expected >= 0, got -1");
  inputs_.use_bounded_rows = true;
  inputs_.token_capacity = std::numeric_limits<int64_t>::min();
  expect(ErrorCode::kInvalidArgument, "token_capacity: expected >= 0, got -9223372036854775808");
}

TEST_F(Forward, MoreTokensThanPlanned) {
  inputs_.hidden_states = {inputs_.hidden_states.data, DType::kBF16, {6, 48}};
  inputs_.routing_map = {inputs_.routing_map.data, DType::kI64, {6, 2}};
  inputs_.probabilities = {inputs_.probabilities.data, DType::kF32, {6, 2}};
  out_ = {memory_.data(), DType::kF32, {6, 48}};
  expect(ErrorCode::kTooLarge, "hidden_states: expected at most max_tokens = 5 tokens, got 6");
  // Sizes whose product does not fit 64 bits are refused before anything is multiplied.
  constexpr int64_t kHuge = int64_t{1} << 62;
  inputs_.hidden_states.shape[0] = kHuge;
  inputs_.routing_map.shape[0] = kHuge;
  inputs_.probabilities.shape[0] = kHuge;
  out_.shape[0] = kHuge;
  expect(ErrorCode::kTooLarge,
         "hidden_states: expected at most max_tokens = 5 tokens, got 4611686018427387904");
}

TEST_F(Forward, Devices) {
  const MoeInputs good = inputs_;
  inputs_.hidden_states.device = Device::cuda(0);
  expect(ErrorCode::kDeviceMismatch, "hidden_states: expected memory of cpu, got cuda:0");
  inputs_ = good;
  inputs_.routing_map.device = Device::cuda(1);
  expect(ErrorCode::kDeviceMismatch, "routing_map: expected memory of cpu, got cuda:1");
  inputs_ = good;
  inputs_.probabilities.device = Device::cuda(0);
  expect(ErrorCode::kDeviceMismatch, "probabilities: expected memory of cpu, got cuda:0");
  inputs_ = good;
  out_.device = Device::cuda(0);
  expect(ErrorCode::kDeviceMismatch, "out: expected memory of cpu, got cuda:0");
}

TEST_F(Forward, NullPointers) {
  const MoeInputs good = inputs_;
  inputs_.hidden_states.data = nullptr;
  expect(ErrorCode::kNullPointer, "hidden_states: expected 384 bytes, got a null pointer");
  inputs_ = good;
  inputs_.routing_map.data = nullptr;
  expect(ErrorCode::kNullPointer, "routing_map: expected 64 bytes, got a null pointer");
  inputs_ = good;
  inputs_.probabilities.data = nullptr;
  expect(ErrorCode::kNullPointer, "probabilities: expected 32 bytes, got a null pointer");
  inputs_ = good;
  out_.data = nullptr;
  expect(ErrorCode::kNullPointer, "out: expected 768 bytes, got a null pointer");
}

TEST_F(Forward, Alignment) {
  const auto shifted = [](const void* p, int64_t bytes) {
    return static_cast<const std::byte*>(p) + bytes;
  };
  const auto expect_misaligned = [&](const std::string& name, int alignment) {
    const Status status = forward();
    EXPECT_EQ(status.code(), ErrorCode::kMisaligned) << status.to_string();
    EXPECT_EQ(status.message().rfind(name + ": expected an address aligned to " +
                                         std::to_string(alignment) + " bytes, got 0x",
                                     0),
              0U)
        << status.message();
  };
  const MoeInputs good = inputs_;
  inputs_.hidden_states.data = shifted(good.hidden_states.data, 8);
  expect_misaligned("hidden_states", 16);
  inputs_ = good;
  inputs_.routing_map.data = shifted(good.routing_map.data, 4);
  expect_misaligned("routing_map", 8);
  inputs_ = good;
  inputs_.probabilities.data = shifted(good.probabilities.data, 2);
  expect_misaligned("probabilities", 4);
  inputs_ = good;
  out_.data = memory_.data() + 1;
  expect_misaligned("out", 16);
}

// A routing map that starts in the middle of a larger one needs no more than its own alignment.
TEST_F(Forward, RowsOfALargerRoutingMap) {
  MoeCase part = kCase;
  part.tokens = 3;
  inputs_.hidden_states = {data_.hidden_states.data() + 48, DType::kBF16, {3, 48}};
  inputs_.routing_map = {data_.ids32.data() + 2, DType::kI32, {3, 2}};
  inputs_.probabilities = {data_.probabilities.data() + 2, DType::kF32, {3, 2}};
  RoutedMoe moe = test::make_moe(part, weights_, {});
  EXPECT_TRUE(moe.forward(inputs_, {memory_.data(), DType::kBF16, {3, 48}}).ok());
}

}  // namespace
}  // namespace hexpert

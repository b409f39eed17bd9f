// Workspaces of the caller: what the query says is enough, layers may share one, bad ones are refused.
#include <gtest/gtest.h>

#include "moe_case.hpp"

namespace hexpert {
namespace {

using test::MoeCase;
using test::MoeData;

constexpr MoeCase kCase{.num_experts = 6,
                        .top_k = 2,
                        .hidden_size = 80,
                        .intermediate_size = 48,
                        .tokens = 9,
                        .activation = test::kSwiGlu};

// Exactly `bytes` bytes, so that a sanitizer sees whatever lies behind them.
struct AlignedDelete {
  void operator()(std::byte* p) const {
    ::operator delete[](p, std::align_val_t{kWorkspaceAlignment});
  }
};
std::unique_ptr<std::byte, AlignedDelete> poisoned_workspace(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  auto* memory =
      static_cast<std::byte*>(::operator new[](size, std::align_val_t{kWorkspaceAlignment}));
  std::memset(memory, 0xFF, size);
  return std::unique_ptr<std::byte, AlignedDelete>(memory);
}

TEST(Workspace, OfTheCallerGivesTheSameBitsAndIsShared) {
  const MoeData data(kCase);
  const ExpertWeights first = test::make_weights(kCase);
  MoeCase other_case = kCase;
  other_case.seed = 77;
  const ExpertWeights second = test::make_weights(other_case);
  for (const std::string& backend : test::available_backends()) {
    SCOPED_TRACE(backend);
    MoeOptions options{.backend = backend, .num_threads = 2};
    const int64_t bytes = RoutedMoe::workspace_bytes_for(kCase.problem(), first, options).value();
    const auto memory = poisoned_workspace(bytes);
    options.workspace = {memory.get(), bytes};
    RoutedMoe shared_first = RoutedMoe::create(kCase.problem(), first, options).value();
    RoutedMoe shared_second = RoutedMoe::create(kCase.problem(), second, options).value();
    for (int round = 0; round < 2; ++round) {
      test::expect_same_bits(*test::run(backend, kCase, first, data.inputs(kCase)),
                             *test::run(shared_first, kCase, data.inputs(kCase)));
      test::expect_same_bits(*test::run(backend, kCase, second, data.inputs(kCase)),
                             *test::run(shared_second, kCase, data.inputs(kCase)));
    }
  }
}

TEST(Workspace, BadOnesAreRefused) {
  const ExpertWeights weights = test::make_weights(kCase);
  for (const std::string& backend : test::available_backends()) {
    SCOPED_TRACE(backend);
    MoeOptions options{.backend = backend, .num_threads = 1};
    const int64_t needed =
        RoutedMoe::workspace_bytes_for(kCase.problem(), weights, options).value();
    const auto memory = poisoned_workspace(needed + kWorkspaceAlignment);
    const auto create = [&](void* data, int64_t bytes) {
      options.workspace = {data, bytes};
      return RoutedMoe::create(kCase.problem(), weights, options).status();
    };
    EXPECT_TRUE(create(memory.get(), needed).ok());

    const Status small = create(memory.get(), needed - 1);
    EXPECT_EQ(small.code(), ErrorCode::kWorkspaceTooSmall);
    EXPECT_EQ(small.message(),
              "workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                  std::to_string(needed - 1));
    EXPECT_EQ(create(memory.get(), 0).code(), ErrorCode::kWorkspaceTooSmall);
    EXPECT_EQ(create(memory.get(), -1).code(), ErrorCode::kWorkspaceTooSmall);

    const Status null = create(nullptr, needed);
    EXPECT_EQ(null.code(), ErrorCode::kNullPointer);
    EXPECT_EQ(null.message(),
              "workspace: expected " + std::to_string(needed) + " bytes, got a null pointer");

    const Status misaligned = create(memory.get() + 64, needed);
    EXPECT_EQ(misaligned.code(), ErrorCode::kMisaligned);
    EXPECT_EQ(misaligned.message().rfind(
                  "workspace: expected an address aligned to 256 bytes, got 0x", 0),
              0U)
        << misaligned.message();
  }
}

TEST(Workspace, NoArgumentMayLieInIt) {
  const MoeData data(kCase);
  const ExpertWeights weights = test::make_weights(kCase);
  const int64_t hidden_bytes = kCase.tokens * kCase.hidden_size * 2;
  for (const std::string& backend : test::available_backends()) {
    SCOPED_TRACE(backend);
    MoeOptions options{.backend = backend, .num_threads = 1};
    const int64_t needed =
        RoutedMoe::workspace_bytes_for(kCase.problem(), weights, options).value();
    const int64_t bytes = round_up(needed, kWorkspaceAlignment);
    const auto memory = poisoned_workspace(bytes + round_up(hidden_bytes, kWorkspaceAlignment));
    options.workspace = {memory.get(), bytes};
    RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights, options).value();
    if (moe.workspace_bytes() == 0) continue;
    const int64_t last = (moe.workspace_bytes() - 1) / 16 * 16;
    test::PoisonedBuffer<uint16_t> result(kCase.tokens * kCase.hidden_size);
    const TensorView apart{
        result.data(), DType::kBF16, {kCase.tokens, kCase.hidden_size}, Device::cpu()};
    const auto expect_refused = [&](const MoeInputs& inputs,
                                    const TensorView& out,
                                    const std::string& begin,
                                    const std::string& over) {
      const Status status = moe.forward(inputs, out);
      EXPECT_EQ(status.code(), ErrorCode::kInvalidOutput) << status.to_string();
      EXPECT_EQ(status.message().rfind(begin, 0), 0U) << status.message();
      EXPECT_NE(status.message().find(" over " + over + " at [0x"), std::string::npos)
          << status.message();
    };
    const MoeInputs good = data.inputs(kCase);
    for (const int64_t offset : {int64_t{0}, last}) {
      std::byte* inside = memory.get() + offset;
      TensorView out = apart;
      out.data = inside;
      expect_refused(
          good, out, "out: expected memory that overlaps no workspace, got [0x", "workspace");
      const std::string begin = "workspace: expected memory that overlaps no input, got [0x";
      MoeInputs inputs = good;
      inputs.hidden_states.data = inside;
      expect_refused(inputs, apart, begin, "hidden_states");
      inputs = good;
      inputs.routing_map.data = inside;
      expect_refused(inputs, apart, begin, "routing_map");
      inputs = good;
      inputs.probabilities.data = inside;
      expect_refused(inputs, apart, begin, "probabilities");
    }
    EXPECT_TRUE(result.untouched());
    for (int64_t i = 0; i < bytes; ++i)
      ASSERT_EQ(memory.get()[i], std::byte{0xFF}) << "a refused forward wrote to the workspace";

    // Touching is not overlapping.
    TensorView out = apart;
    out.data = memory.get() + bytes;
    EXPECT_EQ(moe.forward(good, out).to_string(), "ok");
  }
}

TEST(Workspace, QueryFailsAsCreateDoes) {
  const ExpertWeights weights = test::make_weights(kCase);
  MoeProblem problem = kCase.problem();
  problem.top_k = 0;
  EXPECT_EQ(RoutedMoe::workspace_bytes_for(problem, weights).status().code(),
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace hexpert

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

TEST(Workspace, QueryFailsAsCreateDoes) {
  const ExpertWeights weights = test::make_weights(kCase);
  MoeProblem problem = kCase.problem();
  problem.top_k = 0;
  EXPECT_EQ(RoutedMoe::workspace_bytes_for(problem, weights).status().code(),
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace hexpert

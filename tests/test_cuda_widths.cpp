// Every tile width of the Hopper GEMM, with whole and with split sums, judged stage by stage.
#include <set>
#include <utility>

#include "cuda/hopper_plan.hpp"
#include "cuda_case.hpp"
#include "staged.hpp"

namespace hexpert::test {
namespace {

cuda::ForwardPlan plan_of(const MoeCase& c, bool batch_invariant = false) {
  return cuda::plan_forward(
      c.problem(), cuda::fragment_sizes(c.shape()), c.tokens, batch_invariant);
}

TEST(CudaWidths, EveryWidthWholeAndSplit) {
  std::set<int> whole;
  std::set<int> split;
  for (const Activation& activation : {kSwiGlu, kSquaredRelu}) {
    // Rows of an expert at, below and above the width; the last tile of an expert is narrower.
    for (int64_t tokens : {1, 7, 8, 15, 16, 25, 30, 32, 50, 60, 64, 100, 120, 128, 200, 256, 300}) {
      const MoeCase c{.num_experts = 2,
                      .top_k = 1,
                      .hidden_size = 1104,
                      .intermediate_size = 712,
                      .tokens = tokens,
                      .activation = activation,
                      .routing = Routing::kImbalanced,
                      .seed = static_cast<uint64_t>(tokens)};
      const cuda::ForwardPlan plan = plan_of(c);
      if (!plan.decode) {
        (plan.fc1_splits > 1 ? split : whole).insert(plan.gemm->max_width);
        (plan.fc2_splits > 1 ? split : whole).insert(plan.gemm->max_width);
      }
      whole.insert(plan_of(c, true).gemm->max_width);
      expect_every_backend(c);
      if (HasFailure()) return;
    }
  }
  const std::set<int> all = {8, 16, 32, 64, 112, 160, 256};
  EXPECT_EQ(whole, all);
  EXPECT_GE(split.size(), 4U);
}

// More tiles than multiprocessors, experts of 0 to 600 rows beside each other in one launch.
TEST(CudaWidths, MixedTilesOfOneLaunch) {
  for (const Activation& activation : {kSwiGlu, kSquaredRelu, kOai}) {
    MoeCase c{.num_experts = 24,
              .top_k = 2,
              .hidden_size = 320,
              .intermediate_size = 448,
              .tokens = 900,
              .activation = activation};
    const ExpertWeights weights = make_weights(c);
    MoeData data(c);
    for (int64_t slot = 0; slot < c.tokens * c.top_k; ++slot) {
      // Expert e gets about e^2 / sum of squares of the slots; 0 none.
      const int64_t at = slot * 4324 / (c.tokens * c.top_k);
      int64_t e = 0;
      for (int64_t sum = 0; sum <= at; sum += e * e)
        ++e;
      data.ids[static_cast<size_t>(slot * 7 % (c.tokens * c.top_k))] = std::min<int64_t>(e, 23);
    }
    data.sync_ids();
    expect_every_backend(c, weights, data, data.inputs(c));
  }
}

// Enough items that blocks take most of them as they get ready, in every kernel that does so, experts of
// very unequal load, and items of one stage, with which the blocks of a cluster are furthest apart.
TEST(CudaWidths, BlocksTakeItems) {
  std::set<int> widths;
  for (int64_t tokens_per_expert : {5, 10, 24, 64, 120, 160}) {
    const MoeCase c{.num_experts = 64,
                    .top_k = 1,
                    .hidden_size = 64,
                    .intermediate_size = 1280,
                    .tokens = 64 * tokens_per_expert,
                    .activation = kSwiGlu,
                    .routing = Routing::kImbalanced,
                    .seed = static_cast<uint64_t>(tokens_per_expert)};
    widths.insert(plan_of(c).gemm->max_width);
    expect_every_backend(c);
    if (HasFailure()) return;
  }
  EXPECT_EQ(widths, (std::set<int>{16, 32, 64, 112, 160, 256}));
}

// Slots without an expert: up to some number of routes another kernel does the work, and one route more
// is the planned kernel's again.
TEST(CudaWidths, NarrowerKernelForFewRoutes) {
  std::set<std::pair<int, int>> pairs;
  for (int64_t tokens_per_expert : {50, 80, 120, 200}) {
    const MoeCase c{.num_experts = 8,
                    .top_k = 2,
                    .hidden_size = 320,
                    .intermediate_size = 448,
                    .tokens = 4 * tokens_per_expert,
                    .activation = tokens_per_expert == 80 ? kOai : kSwiGlu};
    const cuda::ForwardPlan plan = plan_of(c);
    ASSERT_NE(plan.narrow_gemm, nullptr);
    pairs.insert({plan.narrow_gemm->max_width, plan.gemm->max_width});
    const ExpertWeights weights = make_weights(c);
    const int64_t slots = c.tokens * c.top_k;
    for (int64_t routes : {int64_t{0}, plan.max_narrow_routes, plan.max_narrow_routes + 1}) {
      MoeData data(c);
      ASSERT_LT(routes, slots);
      for (int64_t slot = 0; slot < slots; ++slot) {  // the empty ones are spread evenly
        if ((slot + 1) * routes / slots == slot * routes / slots) {
          data.ids[static_cast<size_t>(slot)] = -1;
        }
      }
      data.sync_ids();
      expect_every_backend(c, weights, data, data.inputs(c));
      if (HasFailure()) return;
    }
  }
  EXPECT_EQ(pairs, (std::set<std::pair<int, int>>{{64, 112}, {112, 160}, {160, 256}}));
}

// Many experts with a row each: as many tiles as slots.
TEST(CudaWidths, ATileOfOneRowForEverySlot) {
  const MoeCase c{.num_experts = 512,
                  .top_k = 22,
                  .hidden_size = 192,
                  .intermediate_size = 128,
                  .tokens = 20,
                  .activation = kSquaredRelu};
  expect_every_backend(c);
}

struct DecodeSizes {
  int64_t experts, top_k, hidden, intermediate;
};

void expect_decode(const DecodeSizes& sizes) {
  for (int64_t tokens : {1, 2}) {
    for (const Activation& activation : {kSwiGlu, kSquaredRelu}) {
      for (Routing routing : {Routing::kRepeating, Routing::kAllToOne}) {
        const MoeCase c{.num_experts = sizes.experts,
                        .top_k = sizes.top_k,
                        .hidden_size = sizes.hidden,
                        .intermediate_size = sizes.intermediate,
                        .tokens = tokens,
                        .activation = activation,
                        .routing = routing};
        ASSERT_TRUE(plan_of(c).decode);
        expect_every_backend(c);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// One kernel for a whole layer: sizes that are no multiples of anything, stages that are not full,
// experts with more routes than a tile holds, more blocks than units and the other way round.
TEST(CudaDecode, SmallSizes) {
  expect_decode({1, 1, 16, 16});
  expect_decode({2, 2, 8, 24});
  expect_decode({3, 22, 400, 712});
}

TEST(CudaDecode, Sizes) {
  expect_decode({3, 22, 1104, 712});
  expect_decode({8, 2, 1000, 6000});
  expect_decode({16, 64, 257, 65});
  expect_decode({64, 8, 2048, 768});
}

TEST(CudaDecode, OnlyWhereItIsMeant) {
  MoeCase c{.num_experts = 8, .top_k = 2, .tokens = 2, .activation = kSwiGlu};
  EXPECT_TRUE(plan_of(c).decode);
  EXPECT_FALSE(plan_of(c, true).decode) << "batch invariant";
  c.tokens = 3;
  EXPECT_FALSE(plan_of(c).decode) << "tokens";
  c.tokens = 1;
  c.activation = kOai;
  EXPECT_FALSE(plan_of(c).decode) << "activation";
  c.activation = kSquaredRelu;
  c.intermediate_size = 1 << 20;
  EXPECT_FALSE(plan_of(c).decode) << "a row of activations must fit the shared memory";
}

}  // namespace
}  // namespace hexpert::test

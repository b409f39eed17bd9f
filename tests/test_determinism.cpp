// Same inputs, same bits: threads, batches, floating-point modes, refreshed weights; properties.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <xmmintrin.h>

#include <numeric>

#include "moe_case.hpp"
#include "staged.hpp"

namespace hexpert {
namespace {

using test::available_backends;
using test::expect_every_backend;
using test::kGeGlu;
using test::kOai;
using test::kSiTu;
using test::kSiTuBoth;
using test::kSquaredRelu;
using test::kSwiGlu;
using test::make_moe;
using test::make_weights;
using test::MoeCase;
using test::MoeData;
using test::MoeRun;
using test::Routing;

// --- determinism ---

TEST(Determinism, ThreadsAndRepetitionChangeNothing) {
  for (const Activation& activation : {kSquaredRelu, kSwiGlu}) {
    const MoeCase c{.num_experts = 16,
                    .top_k = 4,
                    .hidden_size = 200,
                    .intermediate_size = 136,
                    .tokens = 70,
                    .activation = activation,
                    .routing = Routing::kImbalanced};
    const ExpertWeights weights = make_weights(c);
    const MoeData data(c);
    for (const std::string& backend : available_backends()) {
      SCOPED_TRACE(backend);
      RoutedMoe one = make_moe(c, weights, {.backend = backend, .num_threads = 1});
      const std::unique_ptr<MoeRun> expected = test::run(one, c, data.inputs(c));
      test::expect_same_bits(*expected, *test::run(one, c, data.inputs(c, false)));
      for (int num_threads : {2, 3, 5}) {
        test::expect_same_bits(*expected,
                               *test::run(backend, c, weights, data.inputs(c), num_threads));
      }
    }
  }
}

// Rows [first, first + count) of the data alone.
struct Batch {
  MoeCase c;
  MoeData data;
};
Batch slice(const MoeCase& c, const MoeData& data, const std::vector<int64_t>& tokens) {
  MoeCase part = c;
  part.tokens = static_cast<int64_t>(tokens.size());
  MoeData rows(part);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto to = static_cast<int64_t>(i);
    std::copy_n(data.hidden_states.begin() + tokens[i] * c.hidden_size,
                c.hidden_size,
                rows.hidden_states.begin() + to * c.hidden_size);
    std::copy_n(data.ids.begin() + tokens[i] * c.top_k, c.top_k, rows.ids.begin() + to * c.top_k);
    std::copy_n(data.probabilities.begin() + tokens[i] * c.top_k,
                c.top_k,
                rows.probabilities.begin() + to * c.top_k);
  }
  rows.sync_ids();
  return {part, rows};
}

// The chosen tokens alone, on every backend that promises it, give the rows of the whole batch.
void expect_batch_invariant(const MoeCase& c,
                            const ExpertWeights& weights,
                            const MoeData& data,
                            const std::vector<int64_t>& tokens) {
  const Batch part = slice(c, data, tokens);
  for (const std::string& backend : available_backends()) {
    for (bool asked : {false, true}) {
      if (!asked && backend == "cpu-amx") continue;
      const MoeOptions options{.backend = backend, .num_threads = 2, .batch_invariant = asked};
      RoutedMoe whole_moe = make_moe(c, weights, options);
      RoutedMoe part_moe = make_moe(part.c, weights, options);
      const std::unique_ptr<MoeRun> whole = test::run(whole_moe, c, data.inputs(c));
      const std::unique_ptr<MoeRun> alone = test::run(part_moe, part.c, part.data.inputs(part.c));
      for (size_t i = 0; i < tokens.size(); ++i) {
        ASSERT_EQ(std::memcmp(whole->out.data() + tokens[i] * c.hidden_size,
                              alone->out.data() + static_cast<int64_t>(i) * c.hidden_size,
                              static_cast<size_t>(c.hidden_size) * sizeof(float)),
                  0)
            << backend << " token " << tokens[i] << " of a batch of " << tokens.size();
      }
    }
  }
}

TEST(Determinism, BatchInvariance) {
  const MoeCase c{.num_experts = 4,
                  .top_k = 2,
                  .hidden_size = 192,
                  .intermediate_size = 96,
                  .tokens = 64,
                  .activation = kSwiGlu};
  const ExpertWeights weights = make_weights(c);
  const MoeData data(c);
  for (int64_t token : {0, 31, 63})
    expect_batch_invariant(c, weights, data, {token});
  expect_batch_invariant(c, weights, data, {5, 6, 7, 8, 9, 10, 11});
  std::vector<int64_t> reversed(64);
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  expect_batch_invariant(c, weights, data, reversed);
}

TEST(Determinism, CallerMayFlushSubnormals) {
  const MoeCase c{.num_experts = 4, .top_k = 2, .hidden_size = 80, .tokens = 12};
  const ExpertWeights weights = make_weights(c);
  MoeData data(c);
  const test::Bf16Vector tiny = test::log_uniform_bf16(c.tokens * c.hidden_size, 4, -133, -110);
  data.hidden_states = tiny;
  for (const std::string& backend : available_backends()) {
    SCOPED_TRACE(backend);
    const std::unique_ptr<MoeRun> expected = test::run(backend, c, weights, data.inputs(c), 1);
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);  // FTZ and DAZ
    const std::unique_ptr<MoeRun> flushed = test::run(backend, c, weights, data.inputs(c), 1);
    EXPECT_EQ(_mm_getcsr() & 0x8040U, 0x8040U) << "the caller's mode was changed";
    _mm_setcsr(saved);
    test::expect_same_bits(*expected, *flushed);
  }
}

// --- weights that change under a plan ---

TEST(Refresh, SameAddressesAndTheResultsOfAFreshPrepare) {
  const MoeCase c{.num_experts = 3,
                  .top_k = 2,
                  .hidden_size = 50,
                  .intermediate_size = 70,
                  .tokens = 12,
                  .activation = kSwiGlu};
  const MoeData data(c);
  const int64_t fc1_count = c.num_experts * 2 * c.intermediate_size * c.hidden_size;
  const int64_t fc2_count = c.num_experts * c.hidden_size * c.intermediate_size;
  struct Stacks {
    test::Bf16Vector fc1, fc2;
  };
  const auto stacks = [&](uint64_t seed) {
    return Stacks{test::gaussian_bf16(fc1_count, seed, 0.1),
                  test::gaussian_bf16(fc2_count, seed + 1, 0.3)};
  };
  const auto fc1_view = [&](const Stacks& s) {
    return ConstTensorView(
        s.fc1.data(), DType::kBF16, {c.num_experts, 2 * c.intermediate_size, c.hidden_size});
  };
  const auto fc2_view = [&](const Stacks& s) {
    return ConstTensorView(
        s.fc2.data(), DType::kBF16, {c.num_experts, c.hidden_size, c.intermediate_size});
  };
  const Stacks before = stacks(100);
  const Stacks after = stacks(200);
  ExpertWeights weights = ExpertWeights::prepare(fc1_view(before), fc2_view(before)).value();
  const ExpertWeights fresh = ExpertWeights::prepare(fc1_view(after), fc2_view(after)).value();
  for (const std::string& backend : available_backends()) {
    SCOPED_TRACE(backend);
    ASSERT_TRUE(weights.refresh(fc1_view(before), fc2_view(before)).ok());
    RoutedMoe planned = make_moe(c, weights, {.backend = backend, .num_threads = 2});
    const std::unique_ptr<MoeRun> old = test::run(planned, c, data.inputs(c));
    const uint8_t* fc1_address = weights.storage().fc1.data();
    const float* alpha_address = weights.storage().fc1_up_alpha.data();

    ConstTensorView narrow = fc2_view(after);  // another I: refused, nothing written
    narrow.shape[2] -= 1;
    EXPECT_FALSE(weights.refresh(fc1_view(after), narrow).ok());
    test::expect_same_bits(*old, *test::run(planned, c, data.inputs(c)));

    ASSERT_TRUE(weights.refresh(fc1_view(after), fc2_view(after)).ok());
    EXPECT_EQ(weights.storage().fc1.data(), fc1_address);
    EXPECT_EQ(weights.storage().fc1_up_alpha.data(), alpha_address);
    test::expect_same_bits(*test::run(backend, c, fresh, data.inputs(c)),
                           *test::run(planned, c, data.inputs(c)));
  }
}

TEST(Refresh, PlanOutlivesAMoveOfTheObjects) {
  const MoeCase c;
  const MoeData data(c);
  ExpertWeights weights = make_weights(c);
  RoutedMoe planned = make_moe(c, weights, {});
  const std::unique_ptr<MoeRun> expected = test::run(planned, c, data.inputs(c));
  const ExpertWeights moved_weights = std::move(weights);
  RoutedMoe moved = std::move(planned);
  test::expect_same_bits(*expected, *test::run(moved, c, data.inputs(c)));
}

// --- properties ---

MoeCase arbitrary_case() {
  MoeCase c;
  c.num_experts = *rc::gen::inRange<int64_t>(1, 12);
  c.num_local_experts = *rc::gen::inRange<int64_t>(1, c.num_experts + 1);
  c.local_expert_offset = *rc::gen::inRange<int64_t>(0, c.num_experts - c.num_local_experts + 1);
  c.top_k = *rc::gen::inRange<int64_t>(1, 7);
  c.hidden_size = *rc::gen::inRange<int64_t>(1, 150);
  c.intermediate_size = *rc::gen::inRange<int64_t>(1, 150);
  c.tokens = *rc::gen::inRange<int64_t>(1, 40);
  c.activation = *rc::gen::element(kSquaredRelu, kSwiGlu, kOai, kGeGlu, kSiTu, kSiTuBoth);
  c.routing = *rc::gen::element(
      Routing::kUniform, Routing::kRepeating, Routing::kImbalanced, Routing::kAllToOne);
  c.seed = *rc::gen::inRange<uint64_t>(0, 1000);
  return c;
}

RC_GTEST_PROP(BackendProperty, EveryStageAgreesWithTheReference, ()) {
  expect_every_backend(arbitrary_case());
  RC_ASSERT(!testing::Test::HasFailure());
}

RC_GTEST_PROP(BackendProperty, PermutingOrDroppingTokensPermutesOrDropsRows, ()) {
  const MoeCase c = arbitrary_case();
  std::vector<int64_t> tokens(static_cast<size_t>(c.tokens));
  std::iota(tokens.begin(), tokens.end(), 0);
  test::Random random(c.seed);
  for (size_t i = tokens.size() - 1; i > 0; --i) {
    std::swap(tokens[i], tokens[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i)))]);
  }
  tokens.resize(static_cast<size_t>(random.integer(1, c.tokens)));
  expect_batch_invariant(c, make_weights(c), MoeData(c), tokens);
  RC_ASSERT(!testing::Test::HasFailure());
}

}  // namespace
}  // namespace hexpert

// The forward of cpu-amx over an emulated tile unit, stage by stage against the reference: machines
// without AMX test all of it but the instructions.
#include <gtest/gtest.h>

#include "cpu/forward.hpp"
#include "moe_case.hpp"
#include "staged.hpp"

namespace hexpert {
namespace {

using test::kSquaredRelu;
using test::kSwiGlu;
using test::make_moe;
using test::make_weights;
using test::MoeCase;
using test::MoeData;
using test::MoeRun;
using test::Routing;

cpu::Engine engine() {
  return {cpu::avx512_vnni_kernels(), cpu::emulated_amx_kernels()};
}

constexpr Backend kEmulated = {
    .name = "emulated-amx",
    .device = DeviceType::kCpu,
    .available = [](const Device&) { return Support::yes(); },
    .supports = [](const MoeProblem&, const ExpertShape&) { return Support::yes(); },
    .workspace_bytes =
        [](const MoeProblem& problem, const ExpertShape& shape, const MoeOptions& options) {
          return cpu::forward_workspace_bytes(engine(), problem, shape, options.num_threads);
        },
    .describe =
        [](const MoeProblem&, const ExpertShape&, const MoeOptions&) { return std::string(); },
    .forward = [](const ForwardArgs& args) { return cpu::forward(engine(), args); },
};

class ForwardAmx : public testing::Test {
 protected:
  void SetUp() override {
    if (cpu::emulated_amx_kernels() == nullptr) GTEST_SKIP() << "needs AVX-512 with VBMI and VNNI";
  }

  static std::unique_ptr<MoeRun> run(const MoeCase& c,
                                     const ExpertWeights& weights,
                                     const MoeData& data,
                                     const MoeOptions& options) {
    RoutedMoe moe = RoutedMoe::create(c.problem(), weights, options).value();
    RoutedMoe::Impl& impl = moe.impl();
    impl.backend = &kEmulated;
    impl.workspace_bytes = kEmulated.workspace_bytes(c.problem(), c.shape(), options);
    impl.own_workspace = AlignedBuffer::zeroed(impl.workspace_bytes);
    impl.workspace = reinterpret_cast<std::byte*>(impl.own_workspace.data());
    test::poison_workspace(moe);
    return test::run(moe, c, data.inputs(c));
  }
  static void expect_staged(const MoeCase& c, const ExpertWeights& weights, const MoeData& data) {
    SCOPED_TRACE(testing::Message() << c);
    const std::unique_ptr<MoeRun> exact = test::run("reference", c, weights, data.inputs(c));
    const std::unique_ptr<MoeRun> actual =
        run(c, weights, data, {.backend = "reference", .num_threads = 2});
    test::StagedCheck(c, weights, data, c.tokens).expect(*exact, *actual);
    test::expect_same_bits(*actual,
                           *run(c, weights, data, {.backend = "reference", .num_threads = 3}));
  }
  static void expect_staged(const MoeCase& c) { expect_staged(c, make_weights(c), MoeData(c)); }
};

// Around the fewest rows that go to the unit, its tiles of 16 tokens and its passes of 256.
TEST_F(ForwardAmx, RowsPerExpert) {
  for (int64_t rows : {8, 9, 16, 17, 257}) {
    expect_staged({.num_experts = 2,
                   .top_k = 1,
                   .hidden_size = 64,
                   .intermediate_size = 32,
                   .tokens = rows,
                   .activation = rows % 2 == 0 ? kSwiGlu : kSquaredRelu,
                   .routing = Routing::kAllToOne});
  }
}

TEST_F(ForwardAmx, Sizes) {
  constexpr int64_t kSizes[][2] = {{1, 1}, {16, 70}, {65, 63}, {130, 250}, {320, 192}};
  for (const auto& [hidden, intermediate] : kSizes) {
    for (const Activation& activation : {kSquaredRelu, kSwiGlu}) {
      expect_staged({.num_experts = 3,
                     .top_k = 2,
                     .hidden_size = hidden,
                     .intermediate_size = intermediate,
                     .tokens = 20,
                     .activation = activation});
    }
  }
}

TEST_F(ForwardAmx, MixesExpertsWithFewAndManyRows) {
  for (Routing routing : {Routing::kImbalanced, Routing::kRepeating}) {
    expect_staged({.num_experts = 12,
                   .top_k = 4,
                   .hidden_size = 100,
                   .intermediate_size = 80,
                   .tokens = 60,
                   .num_local_experts = 8,
                   .local_expert_offset = 2,
                   .activation = kSwiGlu,
                   .routing = routing});
  }
}

TEST_F(ForwardAmx, SpecialValues) {
  const MoeCase c{.num_experts = 2,
                  .top_k = 2,
                  .hidden_size = 80,
                  .intermediate_size = 72,
                  .tokens = 40,
                  .activation = kSwiGlu};
  MoeData data(c);
  data.hidden_states[5 * 80 + 3] = 0x7FC0;  // NaN
  data.hidden_states[6 * 80 + 3] = 0xFF80;  // -infinity
  std::fill_n(data.hidden_states.begin() + 7 * 80, 80, uint16_t{0});
  for (int64_t token = 8; token < c.tokens; ++token) {
    const test::Bf16Vector row = test::outlier_bf16(
        80, static_cast<uint64_t>(token), std::ldexp(1.0, static_cast<int>(token * 6) - 150));
    std::copy(row.begin(), row.end(), data.hidden_states.begin() + token * 80);
  }
  expect_staged(c, make_weights(c), data);
}

// Asked for batch invariance, the integer GEMM does everything.
TEST_F(ForwardAmx, BatchInvariantIsTheIntegerGemm) {
  const MoeCase c{.num_experts = 2,
                  .top_k = 2,
                  .hidden_size = 192,
                  .intermediate_size = 96,
                  .tokens = 40,
                  .activation = kSwiGlu};
  const ExpertWeights weights = make_weights(c);
  const MoeData data(c);
  const std::unique_ptr<MoeRun> asked =
      run(c, weights, data, {.backend = "reference", .num_threads = 2, .batch_invariant = true});
  test::expect_same_bits(*test::run("cpu-avx512-vnni", c, weights, data.inputs(c)), *asked);
}

}  // namespace
}  // namespace hexpert

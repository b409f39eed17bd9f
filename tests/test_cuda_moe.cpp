// Layers on the GPU: graphs, determinism, batch invariance, shared workspaces. The values themselves are
// judged by the tests of the backends, which run on the GPU too.
#include "cuda_case.hpp"

namespace hexpert::test {
namespace {

constexpr MoeCase kCase{.num_experts = 16,
                        .top_k = 4,
                        .hidden_size = 512,
                        .intermediate_size = 256,
                        .tokens = 40,
                        .activation = kSwiGlu};

ExpertWeights weights_on_device(const MoeCase& c) {
  return copy_to_device(make_weights(c));
}

std::vector<float> forward(RoutedMoe& moe,
                           const MoeCase& c,
                           const MoeInputs& inputs,
                           DType dtype = DType::kF32) {
  const TestStream stream;
  const DeviceOut out(c, dtype);
  const Status status = moe.forward(inputs, out.view, stream.view());
  if (!status.ok()) throw Error(status);
  stream.wait();
  EXPECT_TRUE(out.bytes.fences_intact());
  return out.values();
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

MoeData changed(const MoeCase& c, uint64_t seed) {
  MoeCase other = c;
  other.seed = seed;
  other.routing = Routing::kRepeating;
  return MoeData(other);
}

TEST(CudaMoe, BestBackendOfTheDevice) {
  EXPECT_EQ(query_backend(kGpu).value(), kHopper);
  const ExpertWeights weights = weights_on_device(kCase);
  const RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights).value();
  EXPECT_EQ(moe.backend_name(), kHopper);
  EXPECT_EQ(moe.plan().find('\n'), std::string::npos);
  EXPECT_EQ(moe.plan().rfind(kHopper, 0), 0U) << moe.plan();
}

TEST(CudaMoe, GraphFollowsRoutingProbabilitiesAndWeights) {
  for (bool batch_invariant : {false, true}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const ExpertWeights host = make_weights(kCase);
      ExpertWeights weights = copy_to_device(host);
      MoeOptions options;
      options.batch_invariant = batch_invariant;
      RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights, options).value();
      const MoeData first(kCase);
      DeviceData data(first.inputs(kCase));
      DeviceOut out(kCase, dtype);
      const TestStream stream;
      Status captured;
      const TestGraph graph(stream,
                            [&] { captured = moe.forward(data.inputs, out.view, stream.view()); });
      ASSERT_EQ(captured.to_string(), "ok");

      const auto expect_replay_equals_a_fresh_run = [&] {
        out.reset();
        graph.replay(stream);
        const std::vector<float> replayed = out.values();
        out.reset();
        graph.replay(stream);
        EXPECT_TRUE(same_bits(out.values(), replayed)) << "two replays";
        EXPECT_TRUE(same_bits(forward(moe, kCase, data.inputs, dtype), replayed)) << "eager";
        RoutedMoe fresh = RoutedMoe::create(kCase.problem(), weights, options).value();
        EXPECT_TRUE(same_bits(forward(fresh, kCase, data.inputs, dtype), replayed)) << "fresh";
        return replayed;
      };
      const std::vector<float> one = expect_replay_equals_a_fresh_run();
      for (uint64_t seed : {5, 6, 7}) {
        data.upload(changed(kCase, seed).inputs(kCase));
        EXPECT_FALSE(same_bits(expect_replay_equals_a_fresh_run(), one));
      }
      MoeData other_probabilities = first;
      std::reverse(other_probabilities.probabilities.begin(),
                   other_probabilities.probabilities.end());
      data.upload(other_probabilities.inputs(kCase));
      EXPECT_FALSE(same_bits(expect_replay_equals_a_fresh_run(), one));

      data.upload(first.inputs(kCase));
      MoeCase refreshed = kCase;
      refreshed.seed = 99;
      const ExpertSource source(refreshed);
      for (int64_t e = 0; e < kCase.local(); ++e) {
        const Bf16Vector fc1 = source.fc1(e);
        const Bf16Vector fc2 = source.fc2(e);
        ASSERT_TRUE(weights.set_expert(e, source.fc1_view(fc1), source.fc2_view(fc2)).ok());
      }
      EXPECT_FALSE(same_bits(expect_replay_equals_a_fresh_run(), one));
    }
  }
}

TEST(CudaMoe, CapturedBoundedRowsLeaveTheRest) {
  const ExpertWeights weights = weights_on_device(kCase);
  RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights).value();
  const MoeData host(kCase);
  DeviceData data(host.inputs(kCase));
  data.inputs.use_bounded_rows = true;
  data.inputs.token_capacity = 13;
  DeviceOut out(kCase, DType::kF32);
  const TestStream stream;
  Status captured;
  const TestGraph graph(stream,
                        [&] { captured = moe.forward(data.inputs, out.view, stream.view()); });
  ASSERT_EQ(captured.to_string(), "ok");
  graph.replay(stream);
  const std::vector<float> values = out.values();
  for (size_t i = 0; i < values.size(); ++i) {
    const bool live = i < static_cast<size_t>(13 * kCase.hidden_size);
    ASSERT_EQ(f32_bits(values[i]) == 0xFFFFFFFFU, !live) << i;
  }
}

TEST(CudaMoe, NothingToDoCapturesAnEmptyGraph) {
  const ExpertWeights weights = weights_on_device(kCase);
  RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights).value();
  const MoeData host(kCase);
  DeviceData data(host.inputs(kCase));
  data.inputs.use_bounded_rows = true;
  data.inputs.token_capacity = 0;
  const DeviceOut out(kCase, DType::kBF16);
  const TestStream stream;
  ASSERT_TRUE(moe.forward(data.inputs, out.view, stream.view()).ok());
  stream.wait();
  for (float v : out.values())
    ASSERT_TRUE(std::isnan(v));
}

// A token's bits, whatever stands around it, wherever it stands, and however many there are.
TEST(CudaMoe, BatchInvariance) {
  for (const Activation& activation : {kSwiGlu, kSquaredRelu}) {
    MoeCase all{.num_experts = 32,
                .top_k = 4,
                .hidden_size = 1024,
                .intermediate_size = 704,
                .tokens = 1000,
                .activation = activation};
    const ExpertWeights weights = weights_on_device(all);
    const MoeData host(all);
    MoeOptions options;
    options.batch_invariant = true;
    RoutedMoe planned = RoutedMoe::create(all.problem(), weights, options).value();
    const DeviceData data(host.inputs(all));
    const std::vector<float> expected = forward(planned, all, data.inputs);
    for (int64_t tokens : {1, 7, 64}) {
      for (int64_t first : {int64_t{0}, int64_t{511}, 1000 - tokens}) {
        MoeCase part = all;
        part.tokens = tokens;
        MoeData slice(part);
        std::copy_n(host.hidden_states.begin() + first * all.hidden_size,
                    tokens * all.hidden_size,
                    slice.hidden_states.begin());
        std::copy_n(host.ids.begin() + first * all.top_k, tokens * all.top_k, slice.ids.begin());
        std::copy_n(host.probabilities.begin() + first * all.top_k,
                    tokens * all.top_k,
                    slice.probabilities.begin());
        const DeviceData there(slice.inputs(part));
        const auto begin = expected.begin() + first * all.hidden_size;
        const std::vector<float> wanted(begin, begin + tokens * all.hidden_size);
        EXPECT_TRUE(same_bits(forward(planned, part, there.inputs), wanted))
            << tokens << " tokens from " << first << ", planned for 1000";
        RoutedMoe own = RoutedMoe::create(part.problem(), weights, options).value();
        EXPECT_TRUE(same_bits(forward(own, part, there.inputs), wanted))
            << tokens << " tokens from " << first << ", planned for themselves";
      }
    }
  }
}

TEST(CudaMoe, LayersShareAWorkspace) {
  const ExpertWeights first = weights_on_device(kCase);
  MoeCase other_case = kCase;
  other_case.seed = 77;
  const ExpertWeights second = weights_on_device(other_case);
  const int64_t bytes = RoutedMoe::workspace_bytes_for(kCase.problem(), first).value();
  const DeviceBuffer<std::byte> memory(bytes, 0xFF);
  MoeOptions options;
  options.workspace = {memory.data(), bytes};
  const DeviceData data(MoeData(kCase).inputs(kCase));
  RoutedMoe alone_first = RoutedMoe::create(kCase.problem(), first).value();
  RoutedMoe alone_second = RoutedMoe::create(kCase.problem(), second).value();
  RoutedMoe shared_first = RoutedMoe::create(kCase.problem(), first, options).value();
  RoutedMoe shared_second = RoutedMoe::create(kCase.problem(), second, options).value();
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(same_bits(forward(shared_first, kCase, data.inputs),
                          forward(alone_first, kCase, data.inputs)));
    EXPECT_TRUE(same_bits(forward(shared_second, kCase, data.inputs),
                          forward(alone_second, kCase, data.inputs)));
  }
  EXPECT_TRUE(memory.fences_intact());
}

TEST(CudaMoe, ForwardsOfDifferentStreamsAndSizesInARow) {
  const ExpertWeights weights = weights_on_device(kCase);
  RoutedMoe moe = RoutedMoe::create(kCase.problem(), weights).value();
  for (int64_t tokens : {40, 1, 3, 40, 8, 2}) {
    MoeCase c = kCase;
    c.tokens = tokens;
    const DeviceData data(MoeData(c).inputs(c));
    RoutedMoe fresh = RoutedMoe::create(c.problem(), weights).value();
    const std::vector<float> expected = forward(fresh, c, data.inputs);
    // Which sums are split may depend on the tokens of the call, never on the plan's largest number.
    EXPECT_TRUE(same_bits(forward(moe, c, data.inputs), expected)) << tokens << " tokens";
  }
}

// Output and routes of a batch whose element offsets pass 2^31.
TEST(CudaMoe, OffsetsPast2To31) {
  MoeCase c{.num_experts = 2,
            .top_k = 4,
            .hidden_size = 8192,
            .intermediate_size = 64,
            .tokens = 66000,
            .activation = kSwiGlu,
            .routing = Routing::kRepeating};
  const ExpertWeights host = make_weights(c);
  const ExpertWeights weights = copy_to_device(host);
  RoutedMoe moe = RoutedMoe::create(c.problem(), weights).value();
  MoeCase few = c;
  few.tokens = 8;
  const MoeData pattern(few);
  MoeData data(few);
  data.hidden_states.resize(static_cast<size_t>(c.tokens * c.hidden_size));
  data.ids.resize(static_cast<size_t>(c.tokens * c.top_k));
  data.probabilities.resize(data.ids.size());
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::copy_n(pattern.hidden_states.begin() + t % 8 * c.hidden_size,
                c.hidden_size,
                data.hidden_states.begin() + t * c.hidden_size);
    for (int64_t s = 0; s < c.top_k; ++s) {
      const auto from = static_cast<size_t>(t % 8 * c.top_k + s);
      const auto to = static_cast<size_t>(t * c.top_k + s);
      data.ids[to] = pattern.ids[from];
      data.probabilities[to] = pattern.probabilities[from];
    }
  }
  const DeviceData there(data.inputs(c));
  const std::vector<float> out = forward(moe, c, there.inputs, DType::kBF16);
  const auto row = [&](int64_t t) { return out.data() + t * c.hidden_size; };
  for (int64_t t = 8; t < c.tokens; ++t) {
    ASSERT_EQ(std::memcmp(row(t), row(t % 8), static_cast<size_t>(c.hidden_size) * 4), 0) << t;
  }
  const std::unique_ptr<MoeRun> exact = run("reference", few, host, pattern.inputs(few));
  double noise = 0;
  double signal = 0;
  for (int64_t i = 0; i < exact->out.size(); ++i) {
    const double e = static_cast<double>(exact->out[i]);
    noise += (static_cast<double>(out[static_cast<size_t>(i)]) - e) *
             (static_cast<double>(out[static_cast<size_t>(i)]) - e);
    signal += e * e;
  }
  EXPECT_LE(noise, 1e-4 * signal);
}

}  // namespace
}  // namespace hexpert::test

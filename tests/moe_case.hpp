// A routed MoE layer with inputs, made from a few numbers, and runs of it that catch every write.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "hexpert/moe.hpp"
#include "moe/routed_moe_impl.hpp"
#include "support.hpp"

namespace hexpert::test {

// Parameters of the conformance cases.
inline constexpr Activation kSquaredRelu{.type = ActivationType::kSquaredRelu};
inline constexpr Activation kSwiGlu{.type = ActivationType::kSwiGlu};
inline constexpr Activation kOai{
    .type = ActivationType::kSwiGluOai, .alpha = 1.702F, .beta = 1, .limit = 7};
inline constexpr Activation kGeGlu{.type = ActivationType::kGeGluTanh};
inline constexpr Activation kSiTu{.type = ActivationType::kSiTu, .situ_b = 1.75F};
inline constexpr Activation kSiTuBoth{
    .type = ActivationType::kSiTu, .situ_b = 0.8F, .situ_c = 1.5F};

enum class Routing : uint8_t {
  kUniform,     // distinct experts of a token
  kRepeating,   // any expert in any slot, -1 and ids outside of 0..E-1 among them
  kImbalanced,  // half of the slots go to one expert
  kAllToOne,    // every slot goes to one expert
};

struct MoeCase {
  int64_t num_experts = 8;
  int64_t top_k = 2;
  int64_t hidden_size = 64;
  int64_t intermediate_size = 64;
  int64_t tokens = 4;
  int64_t max_tokens = 0;         // of the plan; 0: tokens
  int64_t num_local_experts = 0;  // 0: all
  int64_t local_expert_offset = 0;
  Activation activation = kSquaredRelu;
  Routing routing = Routing::kUniform;
  uint64_t seed = 1;

  int64_t local() const { return num_local_experts == 0 ? num_experts : num_local_experts; }
  bool gated() const { return is_gated(activation.type); }
  MoeProblem problem() const {
    return {.max_tokens = std::max(tokens, max_tokens),
            .top_k = top_k,
            .num_experts = num_experts,
            .local_expert_offset = local_expert_offset,
            .activation = activation};
  }
  ExpertShape shape() const { return {local(), hidden_size, intermediate_size, gated()}; }
};

inline std::ostream& operator<<(std::ostream& stream, const MoeCase& c) {
  return stream << "E" << c.num_experts << " k" << c.top_k << " H" << c.hidden_size << " I"
                << c.intermediate_size << " T" << c.tokens << " local " << c.local() << "+"
                << c.local_expert_offset << " " << to_string(c.activation.type) << " routing "
                << static_cast<int>(c.routing) << " seed " << c.seed;
}

// BF16 matrices of one expert: N(0, 1) / 10 times a factor in 0.75..1.25. Pieces of one random
// sequence, so that hundreds of experts of real size are made in moments.
class ExpertSource {
 public:
  explicit ExpertSource(const MoeCase& c)
      : fc1_rows_(c.intermediate_size * (c.gated() ? 2 : 1)),
        hidden_size_(c.hidden_size),
        intermediate_size_(c.intermediate_size) {
    for (int i = 0; i < kFactors; ++i) {
      pools_.push_back(gaussian_bf16(kPoolSize, c.seed, 0.1 * (0.75 + 0.5 * i / (kFactors - 1))));
    }
  }

  Bf16Vector fc1(int64_t expert) const { return piece(2 * expert, fc1_rows_ * hidden_size_); }
  Bf16Vector fc2(int64_t expert) const {
    return piece(2 * expert + 1, hidden_size_ * intermediate_size_);
  }
  ConstTensorView fc1_view(const Bf16Vector& matrix) const {
    return {matrix.data(), DType::kBF16, {fc1_rows_, hidden_size_}};
  }
  ConstTensorView fc2_view(const Bf16Vector& matrix) const {
    return {matrix.data(), DType::kBF16, {hidden_size_, intermediate_size_}};
  }

 private:
  static constexpr int kFactors = 5;
  static constexpr int64_t kPoolSize = (1 << 16) + 977;

  Bf16Vector piece(int64_t index, int64_t count) const {
    const Bf16Vector& pool = pools_[static_cast<std::size_t>(index % kFactors)];
    Bf16Vector values(static_cast<std::size_t>(count));
    int64_t from = index * 4099 % kPoolSize;
    for (int64_t done = 0; done < count; from = 0) {
      const int64_t part = std::min(count - done, kPoolSize - from);
      std::copy_n(pool.begin() + from, part, values.begin() + done);
      done += part;
    }
    return values;
  }

  int64_t fc1_rows_;
  int64_t hidden_size_;
  int64_t intermediate_size_;
  std::vector<Bf16Vector> pools_;
};

inline ExpertWeights make_weights(const MoeCase& c) {
  ExpertWeights weights = ExpertWeights::allocate(c.shape()).value();
  const ExpertSource source(c);
  for (int64_t e = 0; e < c.local(); ++e) {
    const Bf16Vector fc1 = source.fc1(e);
    const Bf16Vector fc2 = source.fc2(e);
    const Status status = weights.set_expert(e, source.fc1_view(fc1), source.fc2_view(fc2));
    if (!status.ok()) throw Error(status);
  }
  return weights;
}

inline AlignedVector<int64_t> make_routing(const MoeCase& c) {
  Random random(c.seed + 1000);
  AlignedVector<int64_t> ids(static_cast<std::size_t>(c.tokens * c.top_k));
  std::vector<int64_t> experts(static_cast<std::size_t>(c.num_experts));
  const int64_t favourite = c.local_expert_offset + c.local() / 2;
  for (int64_t token = 0; token < c.tokens; ++token) {
    for (std::size_t e = 0; e < experts.size(); ++e)
      experts[e] = static_cast<int64_t>(e);
    for (int64_t s = 0; s < c.top_k; ++s) {
      int64_t& id = ids[static_cast<std::size_t>(token * c.top_k + s)];
      switch (c.routing) {
        case Routing::kUniform: {  // beyond E slots the rest stay empty
          if (s >= c.num_experts) {
            id = -1;
            break;
          }
          const auto at = static_cast<std::size_t>(random.integer(s, c.num_experts - 1));
          std::swap(experts[static_cast<std::size_t>(s)], experts[at]);
          id = experts[static_cast<std::size_t>(s)];
          break;
        }
        case Routing::kRepeating:
          id = random.integer(-2, c.num_experts + 1);
          break;
        case Routing::kImbalanced:
          id = random.uniform() < 0.5 ? favourite : random.integer(0, c.num_experts - 1);
          break;
        case Routing::kAllToOne:
          id = favourite;
          break;
      }
    }
  }
  return ids;
}

// Inputs of one forward.
struct MoeData {
  Bf16Vector hidden_states;
  AlignedVector<int64_t> ids;
  AlignedVector<int32_t> ids32;
  AlignedVector<float> probabilities;

  explicit MoeData(const MoeCase& c)
      : hidden_states(gaussian_bf16(c.tokens * c.hidden_size, c.seed + 1, 0.1)),
        ids(make_routing(c)),
        probabilities(ids.size()) {
    Random random(c.seed + 2);
    for (float& p : probabilities)
      p = static_cast<float>(0.05 + random.uniform());
    for (std::size_t row = 0; row < probabilities.size();
         row += static_cast<std::size_t>(c.top_k)) {
      float sum = 0;
      for (int64_t s = 0; s < c.top_k; ++s)
        sum += probabilities[row + static_cast<std::size_t>(s)];
      for (int64_t s = 0; s < c.top_k; ++s)
        probabilities[row + static_cast<std::size_t>(s)] /= sum;
    }
    sync_ids();
  }
  // After a change of `ids`.
  void sync_ids() { ids32.assign(ids.begin(), ids.end()); }

  MoeInputs inputs(const MoeCase& c, bool use_i64 = true) const {
    MoeInputs in;
    in.hidden_states = {hidden_states.data(), DType::kBF16, {c.tokens, c.hidden_size}};
    in.routing_map = use_i64 ? ConstTensorView(ids.data(), DType::kI64, {c.tokens, c.top_k})
                             : ConstTensorView(ids32.data(), DType::kI32, {c.tokens, c.top_k});
    in.probabilities = {probabilities.data(), DType::kF32, {c.tokens, c.top_k}};
    return in;
  }
  // Local expert of a slot, or -1.
  int64_t local_expert(const MoeCase& c, int64_t slot) const {
    const int64_t id = ids[static_cast<std::size_t>(slot)] - c.local_expert_offset;
    return id >= 0 && id < c.local() ? id : -1;
  }
};

// Output and intermediate results of one forward, in fenced, poisoned memory.
struct MoeRun {
  int64_t hidden_cols;
  int64_t intermediate_cols;
  PoisonedBuffer<uint8_t> x_codes, x_block_scales;
  PoisonedBuffer<float> x_token_scale;
  PoisonedBuffer<uint16_t> intermediate;
  PoisonedBuffer<uint8_t> h_codes, h_block_scales;
  PoisonedBuffer<float> h_token_scale;
  PoisonedBuffer<uint16_t> route_output;
  PoisonedBuffer<float> out;          // f32
  PoisonedBuffer<uint16_t> out_bf16;  // of a second forward

  MoeRun(const MoeCase& c, int64_t multiple = 64)
      : hidden_cols(round_up(c.hidden_size, multiple)),
        intermediate_cols(round_up(c.intermediate_size, multiple)),
        x_codes(c.tokens * hidden_cols / 2),
        x_block_scales(c.tokens * hidden_cols / 16),
        x_token_scale(c.tokens),
        intermediate(c.tokens * c.top_k * intermediate_cols),
        h_codes(c.tokens * c.top_k * intermediate_cols / 2),
        h_block_scales(c.tokens * c.top_k * intermediate_cols / 16),
        h_token_scale(c.tokens * c.top_k),
        route_output(c.tokens * c.top_k * c.hidden_size),
        out(c.tokens * c.hidden_size),
        out_bf16(c.tokens * c.hidden_size) {
    std::fill(out.begin(), out.end(), std::bit_cast<float>(kUnwritten));
    std::fill(out_bf16.begin(), out_bf16.end(), kUnwrittenBf16);
  }
  // NaN, so that adding to what was there shows too.
  static constexpr uint32_t kUnwritten = 0x7FC5A5A5;
  static constexpr uint16_t kUnwrittenBf16 = 0x7FC5;

  StageDump dump() {
    return {.hidden_cols = hidden_cols,
            .x_codes = x_codes.data(),
            .x_block_scales = x_block_scales.data(),
            .x_token_scale = x_token_scale.data(),
            .intermediate_cols = intermediate_cols,
            .intermediate = intermediate.data(),
            .h_codes = h_codes.data(),
            .h_block_scales = h_block_scales.data(),
            .h_token_scale = h_token_scale.data(),
            .route_output = route_output.data()};
  }
  bool guards_intact() const {
    return x_codes.guards_intact() && x_block_scales.guards_intact() &&
           x_token_scale.guards_intact() && intermediate.guards_intact() &&
           h_codes.guards_intact() && h_block_scales.guards_intact() &&
           h_token_scale.guards_intact() && route_output.guards_intact() && out.guards_intact() &&
           out_bf16.guards_intact();
  }
};

inline TensorView view(PoisonedBuffer<float>& out, const MoeCase& c) {
  return {out.data(), DType::kF32, {c.tokens, c.hidden_size}};
}
inline TensorView view(PoisonedBuffer<uint16_t>& out, const MoeCase& c) {
  return {out.data(), DType::kBF16, {c.tokens, c.hidden_size}};
}

// Nothing a forward computes may come from what the workspace held before.
inline void poison_workspace(RoutedMoe& moe) {
  std::byte* workspace = moe.impl().workspace;
  if (workspace != nullptr)
    std::memset(workspace, 0xFF, static_cast<size_t>(moe.workspace_bytes()));
}

inline RoutedMoe make_moe(const MoeCase& c, const ExpertWeights& weights, MoeOptions options) {
  RoutedMoe moe = RoutedMoe::create(c.problem(), weights, options).value();
  poison_workspace(moe);
  return moe;
}

// A forward with FP32 output and all stages, and one with BF16 output.
inline std::unique_ptr<MoeRun> run(RoutedMoe& moe,
                                   const MoeCase& c,
                                   const MoeInputs& inputs,
                                   int64_t multiple = 64) {
  auto result = std::make_unique<MoeRun>(c, multiple);
  const Status dumped = forward_with_dump(moe, inputs, view(result->out, c), result->dump());
  if (!dumped.ok()) throw Error(dumped);
  poison_workspace(moe);
  const Status plain = moe.forward(inputs, view(result->out_bf16, c));
  if (!plain.ok()) throw Error(plain);
  EXPECT_TRUE(result->guards_intact()) << "a write outside of the buffers";
  return result;
}

// A device whose backends the tests below are run on in place of the CPU's: weights and inputs are
// given in host memory and copied there. Set before main() by the file that knows the device.
struct TestedDevice {
  DeviceType type = DeviceType::kCpu;
  std::unique_ptr<MoeRun> (*run)(const MoeOptions& options,
                                 const MoeCase& c,
                                 const ExpertWeights& weights,
                                 const MoeInputs& inputs,
                                 int64_t multiple) = nullptr;
};
inline TestedDevice tested_device;

inline std::unique_ptr<MoeRun> run(const MoeOptions& options,
                                   const MoeCase& c,
                                   const ExpertWeights& weights,
                                   const MoeInputs& inputs,
                                   int64_t multiple = 64) {
  if (tested_device.run != nullptr && options.backend != "reference") {
    return tested_device.run(options, c, weights, inputs, multiple);
  }
  RoutedMoe moe = make_moe(c, weights, options);
  return run(moe, c, inputs, multiple);
}
inline std::unique_ptr<MoeRun> run(const std::string& backend,
                                   const MoeCase& c,
                                   const ExpertWeights& weights,
                                   const MoeInputs& inputs,
                                   int num_threads = 2) {
  return run(MoeOptions{.backend = backend, .num_threads = num_threads}, c, weights, inputs);
}

inline std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : list_backends()) {
    if (info.available && info.device == tested_device.type) names.emplace_back(info.name);
  }
  return names;
}

template <typename T>
bool same_bits(const PoisonedBuffer<T>& a, const PoisonedBuffer<T>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.size()) * sizeof(T)) == 0;
}
// Every stage and both outputs, unwritten rows included.
inline void expect_same_bits(const MoeRun& a, const MoeRun& b) {
  EXPECT_TRUE(same_bits(a.x_codes, b.x_codes));
  EXPECT_TRUE(same_bits(a.x_block_scales, b.x_block_scales));
  EXPECT_TRUE(same_bits(a.x_token_scale, b.x_token_scale));
  EXPECT_TRUE(same_bits(a.intermediate, b.intermediate));
  EXPECT_TRUE(same_bits(a.h_codes, b.h_codes));
  EXPECT_TRUE(same_bits(a.h_block_scales, b.h_block_scales));
  EXPECT_TRUE(same_bits(a.h_token_scale, b.h_token_scale));
  EXPECT_TRUE(same_bits(a.route_output, b.route_output));
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.out_bf16, b.out_bf16));
}

}  // namespace hexpert::test

// Layers of real models: their hidden and intermediate sizes, top_k and activation, with few experts
// and tokens, on every available backend.
#include <gtest/gtest.h>

#include "moe_case.hpp"
#include "staged.hpp"

namespace hexpert {
namespace {

using test::kOai;
using test::kSquaredRelu;
using test::kSwiGlu;
using test::MoeCase;

struct Model {
  const char* name;
  int64_t top_k;
  int64_t hidden_size;
  int64_t intermediate_size;
  Activation activation;
};

constexpr Model kModels[] = {
    {"Nemotron-3-Nano", 6, 2688, 1856, kSquaredRelu},
    {"Nemotron-3-Super", 22, 1024, 2688, kSquaredRelu},
    {"Nemotron-3-Ultra", 22, 2048, 5120, kSquaredRelu},
    {"Qwen3-30B-A3B", 8, 2048, 768, kSwiGlu},
    {"Qwen3-235B-A22B", 8, 4096, 1536, kSwiGlu},
    {"Qwen3.5-397B-A17B", 10, 4096, 1024, kSwiGlu},
    {"DeepSeek-V2-Lite", 6, 2048, 1408, kSwiGlu},
    {"DeepSeek-V3", 8, 7168, 2048, kSwiGlu},
    {"DeepSeek-V4-Flash", 6, 4096, 2048, kSwiGlu},
    {"DeepSeek-V4-Pro", 6, 7168, 3072, kSwiGlu},
    {"GPT-OSS-120B", 4, 2880, 2880, kOai},
    {"Mixtral-8x7B", 2, 4096, 14336, kSwiGlu},
    {"GLM-4.5", 8, 5120, 1536, kSwiGlu},
    {"GLM-5", 8, 6144, 2048, kSwiGlu},
    {"Kimi-K2", 8, 7168, 2048, kSwiGlu},
};

class ModelShapes : public testing::TestWithParam<Model> {};

TEST_P(ModelShapes, EveryStage) {
  const Model& model = GetParam();
  constexpr int64_t kExperts = 4;
  MoeCase c{.num_experts = kExperts,
            .top_k = std::min(model.top_k, kExperts),
            .hidden_size = model.hidden_size,
            .intermediate_size = model.intermediate_size,
            .tokens = 3,
            .activation = model.activation};
  test::expect_every_backend(c);
}

std::string name_of(const testing::TestParamInfo<Model>& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char ch) { return ch == '-' || ch == '.'; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, ModelShapes, testing::ValuesIn(kModels), name_of);

}  // namespace
}  // namespace hexpert

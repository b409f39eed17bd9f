#include <cstdint>
#include <cstdio>
#include <vector>

#include "hexpert/moe.hpp"

int main() {
  using hexpert::DType;
  constexpr int64_t kExperts = 2, kHidden = 16, kInter = 32, kTokens = 4;
  std::vector<uint16_t> fc1(kExperts * kInter * kHidden, 0x3D80);  // bf16 1/16
  std::vector<uint16_t> fc2(kExperts * kHidden * kInter, 0x3D00);  // bf16 1/32
  std::vector<uint16_t> x(kTokens * kHidden, 0x3F80);              // bf16 1
  std::vector<float> out(kTokens * kHidden);
  const int32_t ids[kTokens] = {0, 1, -1, 0};  // the expert of each token; -1: none
  const float probabilities[kTokens] = {1, 0.5F, 1, 1};

  const auto weights =
      hexpert::ExpertWeights::prepare({fc1.data(), DType::kBF16, {kExperts, kInter, kHidden}},
                                      {fc2.data(), DType::kBF16, {kExperts, kHidden, kInter}});
  const hexpert::MoeProblem problem{
      kTokens, 1, kExperts, 0, {hexpert::ActivationType::kSquaredRelu}};
  auto layer = hexpert::RoutedMoe::create(problem, weights.value());  // value() throws on failure
  const hexpert::MoeInputs inputs{{x.data(), DType::kBF16, {kTokens, kHidden}},
                                  {ids, DType::kI32, {kTokens, 1}},
                                  {probabilities, DType::kF32, {kTokens, 1}}};
  const auto done = layer.value().forward(inputs, {out.data(), DType::kF32, {kTokens, kHidden}});
  std::printf("%s: %g %g %g\n", done.to_string().c_str(), out[0], out[16], out[32]);  // 1 0.5 0
  return done.ok() ? 0 : 1;
}

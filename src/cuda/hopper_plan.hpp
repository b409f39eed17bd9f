// How a forward runs on Hopper: tile width, parts of K and workspace for a number of tokens. Pure
// host arithmetic.
#pragma once

#include <cstdint>

#include "cuda/combine.hpp"
#include "cuda/fragment_weights.hpp"
#include "cuda/gemm.hpp"
#include "cuda/route.hpp"
#include "hexpert/moe.hpp"

namespace hexpert::cuda {

// Every compiled width, ascending.
extern const GemmVariant* const kGemmVariants[7];

// What one forward does with `rows` tokens.
struct ForwardPlan {
  bool decode = false;  // one kernel for all; the rest is of no use then
  const GemmVariant* gemm = nullptr;
  // Takes over when so few of the slots have a local expert, which only the device knows.
  const GemmVariant* narrow_gemm = nullptr;
  int64_t max_narrow_routes = -1;  // how few
  int fc1_splits = 1;
  int fc2_splits = 1;
  // FC1 leaves FP32 sums, and the requantizer activates them.
  bool fc1_partial = false;
  bool fc2_partial = false;
};

ForwardPlan plan_forward(const MoeProblem& problem,
                         const FragmentWeights& sizes,
                         int64_t rows,
                         bool batch_invariant);

// Intermediate results of a layer, in one allocation. Sized for max_tokens.
struct HopperWorkspace {
  Routes routes;
  float* x_token_scale = nullptr;  // [max_tokens]
  float* x_route_scale = nullptr;  // [routes] of the route's token
  uint16_t* h = nullptr;           // [routes, intermediate] bf16, then fp16
  float* h_token_scale = nullptr;  // [routes]
  // One region holds the operand and the sums of FC1, and after them what FC2 leaves.
  uint16_t* x = nullptr;         // [routes, hidden] fp16
  float* fc1_sums = nullptr;     // [fc1_splits, routes, fc1_rows]
  std::byte* results = nullptr;  // [routes, fc2_rows] bf16, or [fc2_splits, routes, fc2_rows] f32
  int64_t bytes = 0;
};

// With a null base only `bytes` is of use.
HopperWorkspace lay_out_workspace(const MoeProblem& problem,
                                  const FragmentWeights& sizes,
                                  bool batch_invariant,
                                  std::byte* base);

}  // namespace hexpert::cuda

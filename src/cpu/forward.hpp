// The routed MoE forward on a CPU, over any kernel table.
#pragma once

#include <cstdint>

#include "backend/backend.hpp"
#include "cpu/gemm_amx.hpp"
#include "cpu/kernels.hpp"

namespace hexpert::cpu {

// What a backend is made of.
struct Engine {
  const Kernels* kernels = nullptr;
  const AmxKernels* amx = nullptr;  // null: the integer GEMM for every expert
};

// Experts with more tokens than this go to the AMX unit; below, the integer GEMM reads the same
// weights at the speed of memory.
inline constexpr int64_t kAmxAboveTokens = 8;

// Longer batches are cut into chunks of tokens, so that the workspace has a bound. At 2048 tokens
// the layer is limited by arithmetic, and reading the weights again for the next chunk hides.
inline constexpr int64_t kChunkTokens = 2048;

int64_t forward_workspace_bytes(const Engine& engine,
                                const MoeProblem& problem,
                                const ExpertShape& shape,
                                int num_threads);

Status forward(const Engine& engine, const ForwardArgs& args);

}  // namespace hexpert::cpu

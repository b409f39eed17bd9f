// What hexpert bench was asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.hpp"

namespace hexpert::tools {

struct BenchOptions {
  std::vector<std::string> models = {"qwen3-30b-a3b", "nemotron-3-nano"};
  std::string tokens = "1,8,64,512,2048";
  std::vector<std::string> backends;
  std::vector<std::string> stages = {"layer", "quantize", "prepare"};
  int64_t num_experts = 0;
  int64_t local_experts = 0;                        // GPU: experts held of num_experts; 0: all
  std::vector<std::string> routings = {"uniform"};  // GPU
  bool batch_invariant = false;
  int threads = 0;
  int samples = 15;
  double rotate_gb = 1.0;
  double max_seconds = 20;
  std::string json;
  uint64_t seed = 1;
  bool list_models = false;
};

// The same command on a GPU: layers as one graph, its own ceilings. Returns the exit code.
int run_cuda_bench(const BenchOptions& options,
                   const std::string& backend,
                   const std::vector<ModelShape>& models,
                   const std::vector<int64_t>& tokens);

}  // namespace hexpert::tools

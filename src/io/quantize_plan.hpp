// Which tensors go into which output file of quantize_checkpoint().
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hexpert/checkpoint.hpp"
#include "io/checkpoint_impl.hpp"

namespace hexpert::io {

// The smallest piece that is written into one file: a copied tensor, one expert (ModelOpt), or all
// experts of a layer (canonical).
struct OutputUnit {
  const TensorRef* copy = nullptr;
  const LayerSource* layer = nullptr;
  int64_t first_expert = 0;
  int64_t num_experts = 0;
  int64_t source_bytes = 0;
};

struct OutputFile {
  std::string name;  // without directory
  std::vector<OutputUnit> units;
  std::vector<TensorSpec> specs;
  int64_t bytes = 0;
};

struct OutputPlan {
  std::vector<OutputFile> files;
  std::map<std::string, std::string> metadata;  // of every file
  int64_t source_bytes = 0;
  int64_t num_layers = 0;
};

inline constexpr const char* kSourceMetadata = "hexpert.source";  // fingerprint

// One file called `single_name`, or, when that is empty, shards.
Result<OutputPlan> plan_output(const Checkpoint& input,
                               const QuantizeCheckpointOptions& options,
                               const std::string& single_name);

// Name of a tensor of an expert in the ModelOpt arrangement, without the part:
// "model.layers.3.mlp.experts.7.up_proj".
std::string projection_name(const LayerSource& layer,
                            int64_t expert,
                            ExpertWeights::Projection projection);
// "model.layers.3.mlp.experts.fc1_data".
std::string canonical_name(const LayerSource& layer, const char* field);
// Whether the gate rows of a layer need scales of their own.
bool has_gate_alpha(const LayerSource& layer);

}  // namespace hexpert::io

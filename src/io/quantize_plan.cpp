#include "io/quantize_plan.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "io/io_support.hpp"

namespace hexpert::io {
namespace {

using Projection = ExpertWeights::Projection;

// FNV-1a: tells runs on the same source with the same options from others. Not a defence.
class Fingerprint {
 public:
  void add(std::string_view text) {
    for (const char c : text)
      hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
    hash_ = (hash_ ^ 0xFF) * 0x100000001B3U;  // "ab", "c" is not "a", "bc"
  }
  void add(int64_t number) { add(std::to_string(number)); }
  std::string text() const {
    char hex[17];
    std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(hash_));
    return hex;
  }

 private:
  uint64_t hash_ = 0xCBF29CE484222325U;
};

std::string fingerprint(const Checkpoint& input, const OutputPlan& plan) {
  Fingerprint print;
  print.add("1");  // revision of what is written
  for (const SafetensorsFile& file : input.files()) {
    print.add(file.path());
    print.add(file.file_bytes());
    print.add(file.modified_ns());
  }
  for (const auto& [key, value] : plan.metadata) {
    print.add(key);
    print.add(value);
  }
  for (const OutputFile& file : plan.files) {
    print.add(file.name);
    for (const TensorSpec& spec : file.specs) {
      print.add(spec.name);
      print.add(spec.dtype);
      for (const int64_t extent : spec.shape)
        print.add(extent);
    }
  }
  return print.text();
}

std::string layer_metadata(const ExpertShape& shape) {
  return nlohmann::json({{"num_experts", shape.num_local_experts},
                         {"hidden_size", shape.hidden_size},
                         {"intermediate_size", shape.intermediate_size},
                         {"gated", shape.gated}})
      .dump();
}

void add_modelopt_specs(const LayerSource& layer, int64_t expert, std::vector<TensorSpec>* specs) {
  const ExpertShape& shape = layer.info.shape;
  const auto add = [&](Projection projection, int64_t rows, int64_t cols) {
    const std::string name = projection_name(layer, expert, projection);
    const int64_t blocks = round_up(cols, kBlockSize) / kBlockSize;
    specs->push_back({name + ".weight", "U8", {rows, blocks * 8}});
    specs->push_back({name + ".weight_scale", "F8_E4M3", {rows, blocks}});
    specs->push_back({name + ".weight_scale_2", "F32", {}});
  };
  if (shape.gated) add(Projection::kGate, shape.intermediate_size, shape.hidden_size);
  add(Projection::kUp, shape.intermediate_size, shape.hidden_size);
  add(Projection::kDown, shape.hidden_size, shape.intermediate_size);
}

void add_canonical_specs(const LayerSource& layer, std::vector<TensorSpec>* specs) {
  const ExpertShape& shape = layer.info.shape;
  const int64_t experts = shape.num_local_experts;
  const int64_t rows = shape.canonical_fc1_rows();
  const int64_t hidden = shape.padded_hidden_size();
  const int64_t intermediate = shape.padded_intermediate_size();
  const auto add = [&](const char* field, const char* dtype, std::vector<int64_t> extents) {
    specs->push_back({canonical_name(layer, field), dtype, std::move(extents)});
  };
  add("fc1_data", "U8", {experts, rows, hidden / 2});
  add("fc1_scale_swizzled", "F8_E4M3", {experts, rows, hidden / kBlockSize});
  add("fc1_alpha", "F32", {experts});
  if (has_gate_alpha(layer)) add("fc1_gate_alpha", "F32", {experts});
  add("fc2_data", "U8", {experts, hidden, intermediate / 2});
  add("fc2_scale_swizzled", "F8_E4M3", {experts, hidden, intermediate / kBlockSize});
  add("fc2_alpha", "F32", {experts});
  add("fc2_input_scale", "F32", {1});
}

int64_t bytes_of(const TensorSpec& spec) {
  int64_t bytes = spec.dtype == "F32" ? 4 : 1;
  for (const int64_t extent : spec.shape)
    bytes *= extent;
  return bytes;
}

// Fills files up to a size, in order.
class Packer {
 public:
  Packer(OutputPlan* plan, int64_t max_bytes) : plan_(plan), max_bytes_(max_bytes) {}

  void add(const OutputUnit& unit, std::vector<TensorSpec> specs, int64_t bytes) {
    const bool full = !plan_->files.empty() && !plan_->files.back().units.empty() &&
                      bytes > max_bytes_ - std::min(max_bytes_, plan_->files.back().bytes);
    if (plan_->files.empty() || full) plan_->files.emplace_back();
    OutputFile& file = plan_->files.back();
    file.units.push_back(unit);
    file.bytes += bytes;
    std::move(specs.begin(), specs.end(), std::back_inserter(file.specs));
    plan_->source_bytes += unit.source_bytes;
  }

 private:
  OutputPlan* plan_;
  int64_t max_bytes_;
};

void pack_layer(const LayerSource& layer, Arrangement arrangement, Packer* packer) {
  const int64_t experts = layer.info.shape.num_local_experts;
  const int64_t expert_bytes = layer.info.source_bytes / experts;
  const int64_t step = arrangement == Arrangement::kCanonical ? experts : 1;
  for (int64_t e = 0; e < experts; e += step) {
    std::vector<TensorSpec> specs;
    if (arrangement == Arrangement::kCanonical) {
      add_canonical_specs(layer, &specs);
    } else {
      add_modelopt_specs(layer, e, &specs);
    }
    int64_t bytes = 0;
    for (const TensorSpec& spec : specs)
      bytes += bytes_of(spec);
    packer->add({nullptr, &layer, e, step, expert_bytes * step}, std::move(specs), bytes);
  }
}

void name_files(const std::string& single_name, OutputPlan* plan) {
  if (plan->files.size() == 1) {
    plan->files[0].name = single_name.empty() ? "model.safetensors" : single_name;
    return;
  }
  for (std::size_t i = 0; i < plan->files.size(); ++i) {
    char name[64];
    std::snprintf(
        name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, plan->files.size());
    plan->files[i].name = name;
  }
}

}  // namespace

std::string projection_name(const LayerSource& layer, int64_t expert, Projection projection) {
  const bool mixtral = layer.info.naming == ExpertNaming::kMixtral;
  const char* name = mixtral ? "w2" : "down_proj";
  if (projection == Projection::kGate) name = mixtral ? "w1" : "gate_proj";
  if (projection == Projection::kUp) name = mixtral ? "w3" : "up_proj";
  return canonical_name(layer, std::to_string(expert).c_str()) + "." + name;
}

std::string canonical_name(const LayerSource& layer, const char* field) {
  return layer.info.prefix + (layer.info.prefix.empty() ? "experts." : ".experts.") + field;
}

bool has_gate_alpha(const LayerSource& layer) {
  if (!layer.info.shape.gated || !is_nvfp4(layer.info.format)) return false;
  return std::any_of(layer.experts.begin(), layer.experts.end(), [](const ExpertSource& expert) {
    return std::memcmp(expert.gate.outer, expert.up.outer, sizeof(float)) != 0;
  });
}

Result<OutputPlan> plan_output(const Checkpoint& input,
                               const QuantizeCheckpointOptions& options,
                               const std::string& single_name) {
  const Checkpoint::Impl& impl = input.impl();
  if (options.max_shard_bytes < 1) {
    return Status(
        ErrorCode::kInvalidArgument,
        "max_shard_bytes: expected at least 1, got " + std::to_string(options.max_shard_bytes));
  }
  std::vector<const LayerSource*> layers;
  for (const std::string& prefix : options.layers) {
    const Result<const LayerSource*> layer = impl.layer(prefix);
    if (!layer.ok()) return layer.status();
    if (std::find(layers.begin(), layers.end(), *layer) == layers.end()) layers.push_back(*layer);
  }
  if (options.layers.empty()) {
    for (const LayerSource& layer : impl.layers)
      layers.push_back(&layer);
  }
  if (layers.empty()) {
    return Status(ErrorCode::kInvalidArgument, "the checkpoint has no experts to quantize");
  }

  OutputPlan plan;
  plan.num_layers = static_cast<int64_t>(layers.size());
  for (const SafetensorsFile& file : input.files())
    plan.metadata.insert(file.metadata().begin(), file.metadata().end());
  for (const LayerSource* layer : layers) {
    plan.metadata[kLayerMetadata + layer->info.prefix] = layer_metadata(layer->info.shape);
  }
  plan.metadata["hexpert.version"] = "1";
  plan.metadata["hexpert.arrangement"] =
      options.arrangement == Arrangement::kCanonical ? "canonical" : "modelopt";
  plan.metadata.erase(kSourceMetadata);

  const int64_t max_bytes = single_name.empty() ? options.max_shard_bytes : INT64_MAX;
  Packer packer(&plan, max_bytes);
  if (options.copy_other_tensors) {
    std::set<const TensorInfo*> replaced;
    for (const LayerSource* layer : layers) {
      for (const TensorRef& tensor : layer->tensors)
        replaced.insert(tensor.info);
    }
    for (const TensorRef& tensor : impl.tensors) {
      const TensorInfo& info = *tensor.info;
      if (replaced.count(&info) != 0) continue;
      packer.add({&tensor, nullptr, 0, 0, info.size_bytes},
                 {{info.name, info.dtype, info.shape}},
                 info.size_bytes);
    }
  }
  for (const LayerSource* layer : layers)
    pack_layer(*layer, options.arrangement, &packer);
  name_files(single_name, &plan);
  plan.metadata[kSourceMetadata] = fingerprint(input, plan);
  return plan;
}

}  // namespace hexpert::io

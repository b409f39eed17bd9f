// What a Checkpoint knows: which bytes of which file are the projections of which expert.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hexpert/checkpoint.hpp"

namespace hexpert {
namespace io {

// One projection of one expert in mapped memory. Pointers have any alignment.
struct ProjectionSource {
  const uint8_t* weights = nullptr;  // dense elements, or codes of two elements a byte
  int64_t rows = 0;
  int64_t cols = 0;
  // Dense: element (r, c) lies at r * row_stride + c * col_stride.
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  // NVFP4.
  const uint8_t* block_scales = nullptr;
  const uint8_t* outer = nullptr;  // F32: alpha, or its inverse in compressed-tensors
  bool gate_rows = false;          // canonical, gated: the gate rows of FC1, else the up rows
};

struct ExpertSource {
  ProjectionSource gate;  // unused when not gated
  ProjectionSource up;
  ProjectionSource down;
};

struct TensorRef {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
  explicit operator bool() const { return info != nullptr; }
  const uint8_t* data() const { return file->data(*info); }
};

struct LayerSource {
  MoeLayerInfo info;
  std::vector<ExpertSource> experts;
  std::vector<TensorRef> tensors;  // all that belong to the experts
};

// Finds the layers among the tensors of a checkpoint, in natural order of their prefixes.
Result<std::vector<LayerSource>> find_layers(const std::vector<TensorRef>& tensors,
                                             StackedLayout stacked);

// --- parts of find_layers() ---

// Where a failure is: "model.layers.3.mlp: expert 7 up_proj: ".
std::string place_of(const std::string& prefix);
std::string place_of(const std::string& prefix, int64_t expert, std::string_view projection);

// Stacked tensors of one layer. gate_up, or up with or without gate.
struct StackedTensors {
  TensorRef gate_up;
  TensorRef gate;
  TensorRef up;
  TensorRef down;
};
Status build_stacked(const StackedTensors& tensors, StackedLayout stacked, LayerSource* layer);

// Tensors of the canonical arrangement, by field.
struct CanonicalTensors {
  TensorRef fc1_data;
  TensorRef fc1_scale;
  TensorRef fc1_alpha;
  TensorRef fc1_gate_alpha;
  TensorRef fc2_data;
  TensorRef fc2_scale;
  TensorRef fc2_alpha;
  TensorRef fc2_input_scale;
};
Status build_canonical(const CanonicalTensors& tensors, LayerSource* layer);

// The element dtype of dense weights, none for NVFP4.
std::optional<DType> dense_dtype(WeightFormat format);
std::optional<WeightFormat> dense_format(std::string_view dtype);

// Metadata key of a layer; its value is a JSON object with ExpertShape's fields.
inline constexpr const char* kLayerMetadata = "hexpert.layer.";
// Bytes of one projection in the ModelOpt arrangement.
constexpr int64_t nvfp4_projection_bytes(int64_t rows, int64_t cols) {
  return rows * (round_up(cols, kBlockSize) / kBlockSize) * 9 + static_cast<int64_t>(sizeof(float));
}
// Sets nvfp4_bytes from the shape, source_bytes from the tensors.
void set_bytes(LayerSource* layer);

}  // namespace io

struct Checkpoint::Impl {
  std::vector<SafetensorsFile> files;
  std::vector<io::TensorRef> tensors;  // all, sorted by name
  std::vector<io::LayerSource> layers;
  std::vector<MoeLayerInfo> infos;  // of `layers`

  Result<const io::LayerSource*> layer(std::string_view prefix) const;
};

}  // namespace hexpert

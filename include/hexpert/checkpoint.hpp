// Checkpoints: finding, loading and quantizing the experts of a model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hexpert/quantize.hpp"
#include "hexpert/safetensors.hpp"
#include "hexpert/status.hpp"
#include "hexpert/weights.hpp"

namespace hexpert {

/// How a checkpoint names the experts of a layer. N is the expert, 0 first.
enum class ExpertNaming : uint8_t {
  kMixtral,    // experts.N.w1 (gate), w3 (up), w2 (down)
  kPerExpert,  // experts.N.gate_proj, up_proj, down_proj; without gate_proj: not gated
  kStacked,    // experts.gate_up_proj (or up_proj) and experts.down_proj, all experts in one tensor
  kCanonical,  // experts.fc1_data, fc1_scale_swizzled, fc1_alpha, fc2_...: CanonicalWeights
};
std::string_view to_string(ExpertNaming naming);

/// How a checkpoint stores the weights of a layer.
enum class WeightFormat : uint8_t {
  kF32,
  kF16,
  kBF16,
  kModelOpt,           // weight U8, weight_scale F8_E4M3, weight_scale_2 F32 (decode scale)
  kCompressedTensors,  // weight_packed U8, weight_scale F8_E4M3, weight_global_scale F32 (encode)
  kCanonical,          // CanonicalWeights
};
std::string_view to_string(WeightFormat format);
/// Whether the weights are NVFP4 already.
bool is_nvfp4(WeightFormat format);

/// One mixture-of-experts layer of a checkpoint.
struct MoeLayerInfo {
  std::string prefix;  // what stands before ".experts": "model.layers.3.mlp"
  ExpertNaming naming = ExpertNaming::kPerExpert;
  WeightFormat format = WeightFormat::kBF16;
  ExpertShape shape;         // num_local_experts counts all experts of the layer
  int64_t source_bytes = 0;  // of the expert tensors in the files
  int64_t nvfp4_bytes = 0;   // in the ModelOpt arrangement: codes, block scales, FP32 scales
};

/// Order of the two inner dimensions of stacked expert tensors.
enum class StackedLayout : uint8_t {
  kAuto,        // told by the shapes; refused where both readings fit
  kOutputRows,  // [L, 2 I, H] and [L, H, I]: a row is an output feature
  kInputRows,   // [L, H, 2 I] and [L, I, H]: transposed
};

/// A checkpoint, mapped read-only: one .safetensors file, a directory of them, or an
/// .index.json. Move-only; everything loaded from it is a copy.
class Checkpoint {
 public:
  /// Maps all files, checks their headers and finds the experts.
  ///
  /// With an index, tensors that it does not list do not exist. A checkpoint without experts is not
  /// an error: layers() is empty.
  ///
  /// @return the checkpoint; kNotFound (path, or a shard, which is named); kIoError; kInvalidFile
  ///         (header, index, missing experts, experts of unequal shape); kUnsupported (dtype, bias
  ///         or layout of an expert tensor); kOutOfMemory.
  static Result<Checkpoint> open(const std::string& path,
                                 StackedLayout stacked = StackedLayout::kAuto);

  /// In natural order of their prefixes: layer 2 before layer 10.
  const std::vector<MoeLayerInfo>& layers() const;
  /// The layer of a prefix; kNotFound names those that exist.
  Result<const MoeLayerInfo*> layer(std::string_view prefix) const;
  /// The mapped files.
  const std::vector<SafetensorsFile>& files() const;

  struct Impl;  // src/io/checkpoint_impl.hpp
  const Impl& impl() const { return *impl_; }

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

 private:
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Loads experts [first_expert, first_expert + num_experts) of a layer as NVFP4, one expert in
/// memory at a time. FP32 and FP16 sources are rounded to BF16 (nearest even) first. NVFP4 sources
/// keep their bytes and scales, gate and up each their own.
///
/// @param num_experts  -1: all from first_expert on
/// @return the weights; kNotFound (prefix); kInvalidArgument (range); kNonFiniteWeights: a NaN,
///         an infinity, a value past the largest BF16, or a NaN-coded or negative scale, naming the
///         expert; the codes of ExpertWeights::allocate().
Result<ExpertWeights> load_experts(const Checkpoint& checkpoint,
                                   std::string_view prefix,
                                   const PrepareOptions& options = {},
                                   int64_t first_expert = 0,
                                   int64_t num_experts = -1);

/// One expert as BF16.
struct DenseExpert {
  HostTensor fc1;  // [I, H] or, gated, [2 I, H]: gate rows first
  HostTensor fc2;  // [H, I]
};
/// Loads one expert of a BF16, FP16 or FP32 layer.
///
/// @return kNotFound, kInvalidArgument (expert), kUnsupported (the layer is NVFP4 already),
///         kNonFiniteWeights, kOutOfMemory.
Result<DenseExpert> load_dense_expert(const Checkpoint& checkpoint,
                                      std::string_view prefix,
                                      int64_t expert);

/// What NVFP4 does to one expert, gate, up and down together. Errors as for load_dense_expert().
Result<ErrorStats> expert_error(const Checkpoint& checkpoint,
                                std::string_view prefix,
                                int64_t expert,
                                int num_threads = 0);

/// How quantize_checkpoint() arranges the experts that it writes.
enum class Arrangement : uint8_t {
  kModelOpt,   // per expert and projection: weight, weight_scale, weight_scale_2
  kCanonical,  // per layer: the fields of CanonicalWeights
};

struct QuantizeProgress {
  int64_t bytes_done = 0;  // of source tensors
  int64_t bytes_total = 0;
  std::string_view item;  // the layer or tensor at work
};

struct QuantizeCheckpointOptions {
  Arrangement arrangement = Arrangement::kModelOpt;
  std::vector<std::string> layers;  // prefixes to write; empty: all
  bool copy_other_tensors = true;   // tensors that are no experts, and experts of other layers
  int64_t max_shard_bytes = 5'000'000'000;
  bool overwrite = false;                                 // replace an existing output
  int num_threads = 0;                                    // 0: the OpenMP default; at most 1024
  std::function<void(const QuantizeProgress&)> progress;  // after each expert and copied piece
};

struct QuantizeSummary {
  int64_t layers = 0;
  int64_t experts = 0;
  int64_t expert_bytes_in = 0;
  int64_t expert_bytes_out = 0;
  int64_t other_bytes = 0;   // copied unchanged
  int64_t files = 0;         // written or reused
  int64_t files_reused = 0;  // finished by an earlier run that was interrupted
};

/// Writes a checkpoint with its experts in NVFP4.
///
/// Memory stays at one expert and a few buffers whatever the size. `output` is a .safetensors file,
/// or else a directory of shards with an index. Everything is written beside it (".partial"),
/// flushed, and renamed when whole: `output` is complete or does not exist. A run that was killed
/// is taken up where its last finished shard ends, if source and options are the same. Experts that
/// are NVFP4 already are rearranged, bytes and scales unchanged.
///
/// @return the summary; kInvalidArgument (output exists or is the input, no experts),
///         kNotFound (layer), kNonFiniteWeights (expert named), kIoError (disk full: what was
///         written for the unfinished file is removed), kOutOfMemory, kUnsupported.
Result<QuantizeSummary> quantize_checkpoint(const Checkpoint& input,
                                            const std::string& output,
                                            const QuantizeCheckpointOptions& options = {});

}  // namespace hexpert

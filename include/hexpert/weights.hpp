// ExpertWeights: NVFP4 expert stacks of one layer, prepared once and refreshed in place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hexpert/quantize.hpp"
#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert {

/// Sizes of the local experts of one layer.
struct ExpertShape {
  int64_t num_local_experts = 0;
  int64_t hidden_size = 0;        // H, any value >= 1; padding happens inside
  int64_t intermediate_size = 0;  // I, any value >= 1
  bool gated = false;             // true: FC1 holds gate and up

  int64_t padded_hidden_size() const { return round_up(hidden_size, kPaddingMultiple); }
  int64_t padded_intermediate_size() const { return round_up(intermediate_size, kPaddingMultiple); }
  /// Rows of one canonical FC1 matrix: padded_intermediate_size, twice that when gated.
  int64_t canonical_fc1_rows() const { return padded_intermediate_size() * (gated ? 2 : 1); }
  bool operator==(const ExpertShape&) const = default;
};

struct PrepareOptions {
  std::string backend;  // "" picks the best one for the device; see backends()
  bool refuse_nonfinite =
      false;            // scan for NaN and infinity first: kNonFiniteWeights names the expert
  int num_threads = 0;  // 0: the OpenMP default; at most 1024
  Device device{};      // where the weights live
  Stream stream{};      // of that device: what prepare() enqueues on
};

/// The canonical arrangement: the bytes FlashInfer's routed NVFP4 module prepares. All buffers are
/// the caller's and packed; L = num_local_experts, Hp / Ip the padded sizes, N1 = Ip or 2 Ip.
struct CanonicalWeights {
  uint8_t* fc1_data = nullptr;            // [L, N1, Hp / 2]; gated rows interleaved by 64, up first
  uint8_t* fc1_scale_swizzled = nullptr;  // [L, N1 * Hp / 16] E4M3, 128x4 per expert
  float* fc1_alpha = nullptr;             // [L]; when gated, of the up rows
  float* fc1_gate_alpha = nullptr;        // [L] of the gate rows, or null: same as fc1_alpha
  uint8_t* fc2_data = nullptr;            // [L, Hp, Ip / 2]
  uint8_t* fc2_scale_swizzled = nullptr;  // [L, Hp * Ip / 16] E4M3, 128x4 per expert
  float* fc2_alpha = nullptr;             // [L]
};

/// One projection of one expert in checkpoint order, already NVFP4: rows packed, scales linear.
struct QuantizedProjection {
  const uint8_t* codes = nullptr;         // [rows, ceil(cols / 16) * 8]
  const uint8_t* block_scales = nullptr;  // [rows, ceil(cols / 16)] E4M3
  float alpha = 1;                        // decode scale of this projection
};

/// One expert in checkpoint order, already NVFP4.
struct QuantizedExpert {
  QuantizedProjection gate;  // [I, H]; unused when not gated
  QuantizedProjection up;    // [I, H]
  QuantizedProjection down;  // [H, I]
};

/// NVFP4 weights of the experts of one layer, in the order the chosen backend reads. Move-only.
///
/// Holds one copy only: 4.5 bits a weight plus padding. A refresh writes into the same memory: no
/// address, shape or stride ever changes. Not synchronized: a refresh must be ordered against
/// forwards by the caller. Functions without a stream wait for a CUDA device and take and give host
/// memory.
class ExpertWeights {
 public:
  /// Quantizes BF16 stacks.
  ///
  /// @param fc1_weight  [L, I, H] bf16 (squared ReLU), or [L, 2 I, H] (gated): rows 0..I-1 gate,
  ///                    I..2I-1 up. Packed.
  /// @param fc2_weight  [L, H, I] bf16, packed. I and H are taken from here.
  /// Both on options.device, or in host memory: then they pass to a CUDA device one expert at a time.
  /// @return the weights; kInvalidShape, kInvalidDtype, kNotContiguous, kShapeMismatch,
  ///         kNullPointer, kMisaligned, kDeviceMismatch, kNonFiniteWeights, kDeviceError;
  ///         the codes of allocate().
  /// @post   Peak extra memory: a few kilobytes a thread; on a CUDA device one expert where a stack
  ///         is in host memory, nothing otherwise. With both stacks on a CUDA device the work is
  ///         enqueued on options.stream and may still run when the call returns.
  /// Source: docs/format.md section 5.
  static Result<ExpertWeights> prepare(const ConstTensorView& fc1_weight,
                                       const ConstTensorView& fc2_weight,
                                       const PrepareOptions& options = {});

  /// Zero experts (codes 0, scales 0, alpha 1), to be filled by set_expert() or import_*().
  ///
  /// @return kInvalidShape, kInvalidArgument (num_threads), kNotFound (backend name),
  ///         kUnsupportedDevice, kOutOfMemory.
  static Result<ExpertWeights> allocate(const ExpertShape& shape,
                                        const PrepareOptions& options = {});

  /// Quantizes both stacks again, in place. Arguments as for prepare(); nothing is written unless
  /// they fit shape(): kMetadataMismatch names the field and both values. With both stacks on a
  /// CUDA device it enqueues on `stream`, allocates nothing and may be captured in a CUDA graph.
  Status refresh(const ConstTensorView& fc1_weight,
                 const ConstTensorView& fc2_weight,
                 Stream stream = {});

  /// Quantizes one expert in place: streaming, one expert in memory at a time.
  ///
  /// @param expert      local index, 0..L-1
  /// @param fc1_weight  [I, H] or [2 I, H] bf16, packed
  /// @param fc2_weight  [H, I] bf16, packed
  Status set_expert(int64_t expert,
                    const ConstTensorView& fc1_weight,
                    const ConstTensorView& fc2_weight,
                    Stream stream = {});

  /// Takes one expert that is already NVFP4, bytes and scales unchanged. Gate and up may have
  /// different alphas; both are kept. NaN-coded (0x7F, 0xFF) or negative block scales and
  /// non-finite alphas are refused: kNonFiniteWeights names the expert and the projection.
  Status set_quantized_expert(int64_t expert, const QuantizedExpert& source);

  /// Takes canonical bytes. Padding rows and columns must be zero (or poisoned with the matrix).
  /// An alpha may be NaN, the mark of a poisoned matrix, and not infinite.
  ///
  /// @return kNullPointer, kInvalidArgument (padding), kNonFiniteWeights, kOutOfMemory.
  Status import_canonical(const CanonicalWeights& source);
  /// Writes the canonical bytes: identical to what prepare() is defined to make, whatever order
  /// this backend holds. A null member of `out` is skipped; the others lie apart from each other,
  /// else kInvalidOutput. kUnsupported when gate and up alphas differ and `out.fc1_gate_alpha` is
  /// null.
  Status export_canonical(const CanonicalWeights& out) const;
  /// One projection in checkpoint order (linear scales), for writing checkpoints and for tests.
  ///
  /// @param codes         [rows, ceil(cols / 16) * 8] u8
  /// @param block_scales  [rows, ceil(cols / 16)] E4M3
  /// @param alpha         its decode scale, or null
  /// @return kInvalidArgument (expert, no gate), kNullPointer, kInvalidOutput (overlap).
  enum class Projection : uint8_t { kGate, kUp, kDown };
  Status export_projection(int64_t expert,
                           Projection projection,
                           uint8_t* codes,
                           uint8_t* block_scales,
                           float* alpha) const;

  const ExpertShape& shape() const;
  Device device() const;
  /// Bytes held, alphas and padding included.
  int64_t size_bytes() const;
  /// Name of the storage order: "cpu-tiles", "sm90-fragments".
  std::string_view layout_name() const;

  struct Storage;  // src/weights/storage.hpp
  const Storage& storage() const { return *storage_; }

  ExpertWeights(ExpertWeights&&) noexcept;
  ExpertWeights& operator=(ExpertWeights&&) noexcept;
  ~ExpertWeights();

 private:
  explicit ExpertWeights(std::unique_ptr<Storage> storage);
  Status check_expert(int64_t expert) const;
  std::unique_ptr<Storage> storage_;
};

}  // namespace hexpert

// RoutedMoe: plan once, run many. The whole routed NVFP4 mixture-of-experts forward.
#pragma once

#include <cfloat>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"
#include "hexpert/weights.hpp"

namespace hexpert {

enum class ActivationType : uint8_t {
  kSquaredRelu,  // max(z, 0)^2, not gated
  kSwiGlu,       // g sigmoid(g) u
  kSwiGluOai,    // min(g, limit) sigmoid(alpha g') (clamp(u, -limit, limit) + beta)
  kGeGluTanh,    // gelu_tanh(g) u
  kSiTu,         // b tanh(g / b) sigmoid(g) c tanh(u / c), or u in place of c tanh(u / c)
};
std::string_view to_string(ActivationType type);
bool is_gated(ActivationType type);

struct Activation {
  ActivationType type = ActivationType::kSwiGlu;
  float alpha = 1;                // kSwiGluOai
  float beta = 0;                 // kSwiGluOai
  float limit = FLT_MAX;          // kSwiGluOai
  float situ_b = 0;               // kSiTu, finite and > 0
  std::optional<float> situ_c{};  // kSiTu, finite and > 0 when given
};

/// Sizes and rules that are fixed when a layer is planned.
struct MoeProblem {
  int64_t max_tokens = 0;           // largest number of rows forward() will be given
  int64_t top_k = 0;                // width of routing_map
  int64_t num_experts = 0;          // experts of the whole layer, over all devices
  int64_t local_expert_offset = 0;  // the weights are experts [offset, offset + L)
  Activation activation;
};

/// Memory of the caller for a layer's intermediate results.
struct WorkspaceView {
  void* data = nullptr;
  int64_t bytes = 0;
};
/// Every workspace starts at a multiple of this, in bytes.
inline constexpr int64_t kWorkspaceAlignment = 256;

struct MoeOptions {
  std::string backend;  // "" picks the best; a name forces one
  int num_threads = 0;  // CPU: 0 is the OpenMP default; at most 1024. No result depends on it.
  /// A token's output does not depend on the other tokens of the call, bit for bit. Always true
  /// on "reference", "cpu-scalar", "cpu-avx2" and "cpu-avx512-vnni". On "cpu-amx" it costs the
  /// AMX unit, which adds in another order, and is off unless asked for. On "cuda-sm90a" small
  /// batches split their sums along K unless it is asked for, in a way fixed by the layer's sizes
  /// and the number of tokens: the same batch always gives the same bits, another batch may not.
  bool batch_invariant = false;
  /// CUDA: kernels of a layer start while their predecessors drain (programmatic dependent launch).
  /// No result depends on it.
  bool overlap_launches = true;
  /// On the device of the weights, at least workspace_bytes_for() bytes, aligned to
  /// kWorkspaceAlignment. The first workspace_bytes() of it belong to the layer during a forward: no
  /// argument may lie there. Layers may share it when no two of them run at a time. Null: create()
  /// allocates one for the layer.
  WorkspaceView workspace{};
};

/// Inputs of one forward. T = hidden_states.shape[0] <= max_tokens.
struct MoeInputs {
  ConstTensorView hidden_states;  // [T, H] bf16, packed
  ConstTensorView routing_map;  // [T, top_k] i32 or i64, packed; global expert ids, others ignored
  ConstTensorView probabilities;  // [T, top_k] f32, packed; applied as given, once, in the combine
  std::optional<int64_t> token_capacity{};  // with use_bounded_rows: rows [0, capacity) are live
  bool use_bounded_rows = false;
};

/// Why a backend can or cannot run here.
struct BackendInfo {
  std::string_view name;
  DeviceType device = DeviceType::kCpu;
  bool available = false;
  std::string reason;  // empty when available, else the first unmet condition in words
};
/// All backends, best first, "reference" last, each asked about the first device of its type: cuda:0. Of
/// another device query_backend() tells. Never fails.
std::vector<BackendInfo> list_backends();
/// The best backend for a device, or the reason why there is none. Never throws.
Result<std::string> query_backend(const Device& device);

/// One routed MoE layer, planned. Move-only; one forward at a time per object.
class RoutedMoe {
 public:
  /// Plans the layer and allocates its workspace, unless options.workspace is given.
  ///
  /// @param weights  must outlive this object; refreshing them in place is allowed between forwards.
  /// @return kInvalidArgument, kActivationMismatch, kUnsupported, kUnsupportedDevice, kTooLarge,
  ///         kNotFound (backend name), kOutOfMemory, kWorkspaceTooSmall, kMisaligned, kNullPointer
  ///         and kDeviceMismatch (of options.workspace).
  static Result<RoutedMoe> create(const MoeProblem& problem,
                                  const ExpertWeights& weights,
                                  const MoeOptions& options = {});

  /// Bytes that options.workspace must have for this layer; options.workspace itself is not read.
  /// Fails as create() does.
  static Result<int64_t> workspace_bytes_for(const MoeProblem& problem,
                                             const ExpertWeights& weights,
                                             const MoeOptions& options = {});

  /// Runs the layer. On a CUDA device it enqueues on `stream` and returns; it allocates nothing,
  /// waits for nothing, and may be captured in a CUDA graph.
  ///
  ///   out[i] = sum over slots s of probabilities[i, s] * expert(routing_map[i, s], hidden_states[i])
  ///
  /// @param out  [T, H] bf16 (rounded once) or f32 (the unrounded sum), packed. Rows [0, R) are
  ///             fully overwritten, R = min(T, token_capacity) under use_bounded_rows and T
  ///             otherwise; later rows keep their content. Inputs, `out` and options.workspace lie
  ///             apart; inputs may share memory with each other.
  /// @return kOk; kShapeMismatch, kInvalidShape, kInvalidDtype, kNotContiguous, kInvalidOutput,
  ///         kInvalidArgument, kDeviceMismatch, kNullPointer, kMisaligned, kTooLarge; kDeviceError
  ///         once the device failed, from then on always. Nothing is written when a check fails.
  /// @post   Same inputs, same bits. Allocates nothing.
  /// Source: docs/format.md section 6.
  Status forward(const MoeInputs& inputs, const TensorView& out, Stream stream = {});

  /// One line: backend, tiles, threads, workspace.
  std::string plan() const;
  std::string_view backend_name() const;
  int64_t workspace_bytes() const;

  struct Impl;  // src/moe/routed_moe.cpp
  Impl& impl() { return *impl_; }

  RoutedMoe(RoutedMoe&&) noexcept;
  RoutedMoe& operator=(RoutedMoe&&) noexcept;
  ~RoutedMoe();

 private:
  explicit RoutedMoe(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hexpert

// The one seam: all that the core knows of a backend, and all that a backend must give.
// A new backend is its file, its row in backend_list.cpp, its line in CMakeLists.txt.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "backend/device_weights.hpp"
#include "hexpert/moe.hpp"
#include "hexpert/weights.hpp"

namespace hexpert {

// Yes, or the first unmet condition in words.
struct Support {
  bool ok = true;
  std::string reason;
  static Support yes() { return {}; }
  static Support no(std::string reason) { return {false, std::move(reason)}; }
  explicit operator bool() const { return ok; }
};

// Intermediate results of a forward, for staged tests and accuracy reports. Null members are
// skipped. Host memory on every device; a forward that fills them waits for the device. Rows are expanded indices x = token * top_k + slot; rows of slots that are not local
// are left as they are. Ip here is the caller's `intermediate_cols` >= intermediate_size.
struct StageDump {
  int64_t hidden_cols = 0;            // columns of the quantized input, multiple of 64, >= H
  uint8_t* x_codes = nullptr;         // [R, hidden_cols / 2]
  uint8_t* x_block_scales = nullptr;  // [R, hidden_cols / 16]
  float* x_token_scale = nullptr;     // [R]
  int64_t intermediate_cols = 0;      // multiple of 64, >= I
  uint16_t* intermediate = nullptr;   // [R * top_k, intermediate_cols] bf16
  uint8_t* h_codes = nullptr;         // [R * top_k, intermediate_cols / 2]
  uint8_t* h_block_scales = nullptr;  // [R * top_k, intermediate_cols / 16]
  float* h_token_scale = nullptr;     // [R * top_k]
  uint16_t* route_output = nullptr;   // [R * top_k, H] bf16
};

// What a backend keeps between the forwards of one layer.
struct BackendPlan {
  virtual ~BackendPlan() = default;
};

// Everything a forward needs, validated: pointers are right, sizes agree, rows > 0.
struct ForwardArgs {
  const MoeProblem* problem = nullptr;
  const ExpertWeights::Storage* weights = nullptr;
  const uint16_t* hidden_states = nullptr;  // [rows, H] bf16
  const void* routing_map = nullptr;        // [rows, top_k]
  bool routing_is_i64 = false;
  const float* probabilities = nullptr;  // [rows, top_k]
  int64_t rows = 0;                      // active rows R
  void* out = nullptr;                   // [rows, H]
  bool out_is_f32 = false;
  std::byte* workspace = nullptr;  // workspace_bytes(), aligned to kWorkspaceAlignment
  BackendPlan* plan = nullptr;     // of Backend::plan
  int num_threads = 1;
  bool batch_invariant = false;
  Stream stream;
  const StageDump* dump = nullptr;
};

// In all functions the num_threads of MoeOptions is resolved.
struct Backend {
  std::string_view name;
  DeviceType device = DeviceType::kCpu;
  Support (*available)(const Device&);  // can that device, one of its type, run it
  Support (*supports)(const MoeProblem&, const ExpertShape&);
  // A function of its arguments only; touches no device.
  int64_t (*workspace_bytes)(const MoeProblem&, const ExpertShape&, const MoeOptions&);
  std::string (*describe)(const MoeProblem&, const ExpertShape&, const MoeOptions&);
  Status (*forward)(const ForwardArgs&);

  // Backends of the CPU leave the rest null: weights are CPU tiles, the workspace is an
  // AlignedBuffer, nothing is kept between forwards, any address will do.

  // Zero experts: codes 0, scales 0, alpha 1.
  Result<std::unique_ptr<DeviceWeights>> (*allocate_weights)(const ExpertShape&,
                                                             const PrepareOptions&) = nullptr;
  Result<std::unique_ptr<Memory>> (*allocate)(int64_t bytes, const Device&) = nullptr;
  Result<std::unique_ptr<BackendPlan>> (*plan)(const MoeProblem&,
                                               const ExpertWeights::Storage&,
                                               const MoeOptions&,
                                               std::byte* workspace) = nullptr;
  // Is `data`, said to be memory of the device, reachable from it? kDeviceMismatch names `name`.
  Status (*check_memory)(std::string_view name, const void* data, const Device&) = nullptr;
  // Waits for all that was enqueued on the stream.
  Status (*synchronize)(Stream stream, const Device&) = nullptr;
  // quantize_tokens() of tensors on the device: arguments checked, linear scales, no option set.
  Status (*quantize_tokens)(const ConstTensorView& hidden_states,
                            const Nvfp4View& out,
                            Stream stream) = nullptr;
};

// Best first, "reference" last.
std::span<const Backend* const> backends();
// The named backend, or the best available one for "" ; the Status says why not.
Result<const Backend*> find_backend(std::string_view name, const Device& device);

}  // namespace hexpert

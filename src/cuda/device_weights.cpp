#include "cuda/device_weights.hpp"

#include <fmt/format.h>

#include <limits>

#include "core/without_bad_alloc.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/fragments.hpp"
#include "cuda/launch.hpp"
#include "cuda/parts.hpp"

namespace hexpert::cuda {
namespace {

constexpr double kMaxBytes = 1e15;  // beyond any device; keeps the sums below inside int64
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// One matrix of every expert, where it is quantized to.
struct Target {
  const char* name;
  int64_t rows;  // of one projection
  int64_t cols;
  bool gated;
  int64_t fragment_rows;
  int64_t fragment_cols;
  uint8_t* fragments;
  int64_t fragment_bytes;  // per expert
  float* alpha;
  float* gate_alpha;
  uint32_t* amax;
  uint64_t* progress;

  int64_t elements() const { return rows * cols * (gated ? 2 : 1); }
  Status quantize(int64_t first,
                  int64_t experts,
                  const uint16_t* source,
                  cudaStream_t stream) const {
    return check(
        quantize_weights({.source = source,
                          .experts = experts,
                          .rows = rows,
                          .cols = cols,
                          .gated = gated,
                          .fragment_rows = fragment_rows,
                          .fragment_cols = fragment_cols,
                          .fragments = fragments + first * fragment_bytes,
                          .alpha = alpha + first,
                          .gate_alpha = gate_alpha == nullptr ? nullptr : gate_alpha + first,
                          .amax = amax + first,
                          .progress = progress},
                         stream),
        name);
  }
  // Through `buffer`, which holds one expert.
  Status quantize_from_host(int64_t first,
                            int64_t experts,
                            const uint16_t* source,
                            const Memory& buffer,
                            cudaStream_t stream) const {
    auto* staged = reinterpret_cast<uint16_t*>(buffer.data());
    const auto bytes = static_cast<size_t>(elements() * 2);
    for (int64_t e = 0; e < experts; ++e) {
      HX_RETURN_IF_ERROR(check(
          cudaMemcpyAsync(staged, source + e * elements(), bytes, cudaMemcpyHostToDevice, stream),
          name));
      HX_RETURN_IF_ERROR(quantize(first + e, 1, staged, stream));
    }
    return {};
  }
};

Target fc1_target(const FragmentWeights& w, uint32_t* amax, uint64_t* progress) {
  return {"fc1_weight",
          w.shape.intermediate_size,
          w.shape.hidden_size,
          w.shape.gated,
          w.fc1_rows,
          w.hidden,
          w.fc1,
          w.fc1_bytes(),
          w.fc1_up_alpha,
          w.fc1_gate_alpha,
          amax,
          progress};
}

Target fc2_target(const FragmentWeights& w, uint32_t* amax, uint64_t* progress) {
  return {"fc2_weight",
          w.shape.hidden_size,
          w.shape.intermediate_size,
          false,
          w.fc2_rows,
          w.intermediate,
          w.fc2,
          w.fc2_bytes(),
          w.fc2_alpha,
          nullptr,
          amax,
          progress};
}

Status refuse_capture(cudaStream_t stream, const Device& device) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  HX_RETURN_IF_ERROR(check(cudaStreamIsCapturing(stream, &capture), "stream"));
  if (capture == cudaStreamCaptureStatusNone) return {};
  return {ErrorCode::kUnsupported,
          fmt::format("fc1_weight, fc2_weight: expected memory of {} while a graph is captured, "
                      "got host memory",
                      to_string(device))};
}

Status copy(void* to, const void* from, int64_t bytes, const char* what) {
  return check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault), what);
}

}  // namespace

HopperWeights::HopperWeights(const Device& device, const FragmentWeights& sizes)
    : device_(device), view_(sizes) {}

Result<std::unique_ptr<DeviceWeights>> HopperWeights::allocate(const ExpertShape& shape,
                                                               const PrepareOptions& options) {
  const FragmentWeights sizes = fragment_sizes(shape);
  const int64_t experts = shape.num_local_experts;
  const double wanted =
      static_cast<double>(experts) *
      (static_cast<double>(sizes.fc1_rows) * static_cast<double>(sizes.hidden) +
       static_cast<double>(sizes.fc2_rows) * static_cast<double>(sizes.intermediate)) *
      4.5 / 8;
  if (wanted > kMaxBytes) {
    return Status(ErrorCode::kOutOfMemory,
                  fmt::format("weights: {:.3f} GB could not be allocated", wanted * 1e-9));
  }
  const CurrentDevice current(options.device);
  if (!current.status().ok()) return current.status();
  HX_RETURN_IF_ERROR(check(configure_quantize_weights(), "weights"));

  std::unique_ptr<HopperWeights> made(new HopperWeights(options.device, sizes));
  FragmentWeights& w = made->view_;
  const auto lay_out = [&](std::byte* base) {
    Parts parts(base);
    w.fc1 = parts.take<uint8_t>(experts * w.fc1_bytes());
    w.fc2 = parts.take<uint8_t>(experts * w.fc2_bytes());
    w.fc1_up_alpha = parts.take<float>(experts);
    w.fc1_gate_alpha = parts.take<float>(experts);
    w.fc2_alpha = parts.take<float>(experts);
    made->fc1_amax_ = parts.take<uint32_t>(experts);
    made->fc2_amax_ = parts.take<uint32_t>(experts);
    made->progress_ = parts.take<uint64_t>(1 + experts);
    return parts.used();
  };
  const int64_t bytes = lay_out(nullptr);
  Result<std::unique_ptr<Memory>> memory = allocate_memory(bytes, options.device);
  if (!memory.ok()) {
    return Status(memory.status().code(),
                  fmt::format("weights: {:.3f} GB: {}",
                              static_cast<double>(bytes) * 1e-9,
                              memory.status().message()));
  }
  made->memory_ = *std::move(memory);
  lay_out(made->memory_->data());

  const cudaStream_t stream = to_cuda(options.stream);
  const std::vector<float> ones(static_cast<size_t>(experts), 1.0F);
  HX_RETURN_IF_ERROR(check(
      cudaMemsetAsync(made->memory_->data(), 0, static_cast<size_t>(bytes), stream), "weights"));
  for (float* alpha : {w.fc1_up_alpha, w.fc1_gate_alpha, w.fc2_alpha}) {
    HX_RETURN_IF_ERROR(
        check(cudaMemcpyAsync(
                  alpha, ones.data(), ones.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
              "weights"));
  }
  HX_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "weights"));
  return std::unique_ptr<DeviceWeights>(std::move(made));
}

Status HopperWeights::quantize_experts(int64_t first,
                                       int64_t experts,
                                       const ConstTensorView& fc1,
                                       const ConstTensorView& fc2,
                                       Stream stream_in) {
  const cudaStream_t stream = to_cuda(stream_in);
  const CurrentDevice current(device_);
  HX_RETURN_IF_ERROR(current.status());
  const Target targets[] = {fc1_target(view_, fc1_amax_, progress_),
                            fc2_target(view_, fc2_amax_, progress_)};
  const ConstTensorView* const stacks[] = {&fc1, &fc2};

  int64_t staged_elements = 0;
  for (int i = 0; i < 2; ++i) {
    if (stacks[i]->device == device_) continue;
    staged_elements = std::max(staged_elements, targets[i].elements());
  }
  std::unique_ptr<Memory> buffer;
  if (staged_elements > 0) {
    HX_RETURN_IF_ERROR(refuse_capture(stream, device_));
    Result<std::unique_ptr<Memory>> made = allocate_memory(staged_elements * 2, device_);
    if (!made.ok()) return made.status();
    buffer = *std::move(made);
  }
  Status status;
  for (int i = 0; i < 2 && status.ok(); ++i) {
    const auto* source = stacks[i]->as<uint16_t>();
    status = stacks[i]->device == device_
                 ? targets[i].quantize(first, experts, source, stream)
                 : targets[i].quantize_from_host(first, experts, source, *buffer, stream);
  }
  if (!buffer) return status;
  // Before the buffer and the caller's memory may go, after a failure too.
  const Status drained = check(cudaStreamSynchronize(stream), "weights");
  return status.ok() ? drained : status;
}

Status HopperWeights::check_finite(Stream stream) const {
  const CurrentDevice current(device_);
  HX_RETURN_IF_ERROR(current.status());
  HX_RETURN_IF_ERROR(check(cudaStreamSynchronize(to_cuda(stream)), "weights"));
  const int64_t experts = view_.shape.num_local_experts;
  std::vector<uint32_t> amax(static_cast<size_t>(experts));
  for (const Target& target :
       {fc1_target(view_, fc1_amax_, progress_), fc2_target(view_, fc2_amax_, progress_)}) {
    HX_RETURN_IF_ERROR(copy(amax.data(), target.amax, experts * 4, target.name));
    for (size_t e = 0; e < amax.size(); ++e) {
      if (amax[e] < 0x7F80) continue;
      return {ErrorCode::kNonFiniteWeights,
              fmt::format("{}: expert {} holds {}",
                          target.name,
                          e,
                          amax[e] > 0x7F80 ? "a NaN" : "an infinity")};
    }
  }
  return {};
}

Status HopperWeights::quantize(const ConstTensorView& fc1,
                               const ConstTensorView& fc2,
                               bool refuse_nonfinite,
                               Stream stream) {
  HX_RETURN_IF_ERROR(quantize_experts(0, view_.shape.num_local_experts, fc1, fc2, stream));
  return refuse_nonfinite ? check_finite(stream) : Status();
}

Status HopperWeights::set_expert(int64_t expert,
                                 const ConstTensorView& fc1,
                                 const ConstTensorView& fc2,
                                 Stream stream) {
  return quantize_experts(expert, 1, fc1, fc2, stream);
}

Status HopperWeights::write_expert(int64_t expert, const ExpertWeights::Storage& tiles) {
  return without_bad_alloc([&]() -> Status {
    const FragmentWeights& w = view_;
    std::vector<uint8_t> fc1(static_cast<size_t>(w.fc1_bytes()));
    std::vector<uint8_t> fc2(static_cast<size_t>(w.fc2_bytes()));
    tiles_to_fragments(tiles, w, fc1.data(), fc2.data());
    const CurrentDevice current(device_);
    HX_RETURN_IF_ERROR(current.status());
    HX_RETURN_IF_ERROR(check(cudaDeviceSynchronize(), "weights"));
    HX_RETURN_IF_ERROR(copy(w.fc1 + expert * w.fc1_bytes(), fc1.data(), w.fc1_bytes(), "weights"));
    HX_RETURN_IF_ERROR(copy(w.fc2 + expert * w.fc2_bytes(), fc2.data(), w.fc2_bytes(), "weights"));
    HX_RETURN_IF_ERROR(copy(w.fc1_up_alpha + expert, tiles.fc1_up_alpha.data(), 4, "weights"));
    HX_RETURN_IF_ERROR(copy(w.fc1_gate_alpha + expert, tiles.fc1_gate_alpha.data(), 4, "weights"));
    return copy(w.fc2_alpha + expert, tiles.fc2_alpha.data(), 4, "weights");
  });
}

Status HopperWeights::read_expert(int64_t expert, ExpertWeights::Storage& tiles) const {
  return without_bad_alloc([&]() -> Status {
    const FragmentWeights& w = view_;
    std::vector<uint8_t> fc1(static_cast<size_t>(w.fc1_bytes()));
    std::vector<uint8_t> fc2(static_cast<size_t>(w.fc2_bytes()));
    const CurrentDevice current(device_);
    HX_RETURN_IF_ERROR(current.status());
    HX_RETURN_IF_ERROR(check(cudaDeviceSynchronize(), "weights"));
    HX_RETURN_IF_ERROR(copy(fc1.data(), w.fc1 + expert * w.fc1_bytes(), w.fc1_bytes(), "weights"));
    HX_RETURN_IF_ERROR(copy(fc2.data(), w.fc2 + expert * w.fc2_bytes(), w.fc2_bytes(), "weights"));
    HX_RETURN_IF_ERROR(copy(tiles.fc1_up_alpha.data(), w.fc1_up_alpha + expert, 4, "weights"));
    HX_RETURN_IF_ERROR(copy(tiles.fc1_gate_alpha.data(), w.fc1_gate_alpha + expert, 4, "weights"));
    HX_RETURN_IF_ERROR(copy(tiles.fc2_alpha.data(), w.fc2_alpha + expert, 4, "weights"));
    fragments_to_tiles(fc1.data(), fc2.data(), w, tiles);
    return {};
  });
}

Status HopperWeights::read_alphas(float* fc1_up, float* fc1_gate, float* fc2) const {
  const CurrentDevice current(device_);
  HX_RETURN_IF_ERROR(current.status());
  HX_RETURN_IF_ERROR(check(cudaDeviceSynchronize(), "weights"));
  const int64_t bytes = view_.shape.num_local_experts * 4;
  HX_RETURN_IF_ERROR(copy(fc1_up, view_.fc1_up_alpha, bytes, "weights"));
  HX_RETURN_IF_ERROR(copy(fc1_gate, view_.fc1_gate_alpha, bytes, "weights"));
  return copy(fc2, view_.fc2_alpha, bytes, "weights");
}

Status quantize_tokens_on_device(const ConstTensorView& hidden_states,
                                 const Nvfp4View& out,
                                 Stream stream) {
  if (hidden_states.shape[0] > kMaxInt32 || out.cols > kMaxInt32) {
    return {ErrorCode::kTooLarge,
            fmt::format("hidden_states: expected at most {} rows and padded columns on {}, got {} "
                        "and {}",
                        kMaxInt32,
                        to_string(hidden_states.device),
                        hidden_states.shape[0],
                        out.cols)};
  }
  const CurrentDevice current(hidden_states.device);
  HX_RETURN_IF_ERROR(current.status());
  return check(quantize_tokens({.source = hidden_states.as<uint16_t>(),
                                .rows = hidden_states.shape[0],
                                .cols = hidden_states.shape[1],
                                .source_stride = hidden_states.strides[0],
                                .padded_cols = out.cols,
                                .codes = out.codes,
                                .block_scales = out.block_scales,
                                .token_scale = out.outer},
                               to_cuda(stream)),
               "quantize_tokens");
}

}  // namespace hexpert::cuda

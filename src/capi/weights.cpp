// Expert weights in the C ABI.
#include "hexpert/weights.hpp"

#include "capi/call.hpp"
#include "hexpert/checkpoint.hpp"

namespace hexpert::capi {
namespace {

using Projection = ExpertWeights::Projection;

// `where` is the device of the stacks.
Result<PrepareOptions> options_of(const hx_prepare_options* given,
                                  const Device& where = {},
                                  void* stream = nullptr) {
  const Result<hx_prepare_options> in =
      read_or("options", given, hx_prepare_options HX_PREPARE_OPTIONS_INIT);
  if (!in.ok()) return in.status();
  PrepareOptions options{.backend = string_of(in->backend),
                         .refuse_nonfinite = in->refuse_nonfinite != 0,
                         .num_threads = in->num_threads,
                         .device = where,
                         .stream = {stream}};
  if (in->device_type != 0) {
    const Result<Device> device = device_of(
        "options.device_type", {static_cast<DLDeviceType>(in->device_type), in->device_id});
    if (!device.ok()) return device.status();
    options.device = *device;
  }
  return options;
}

// Hands the weights of `made` to the caller.
Status hand_over(Result<ExpertWeights> made, hx_weights** out) {
  if (!made.ok()) return made.status();
  *out = new hx_weights{std::make_shared<ExpertWeights>(*std::move(made))};
  return {};
}

// Both matrices or stacks of a call.
struct Pair {
  TensorView fc1;
  TensorView fc2;
};
Result<Pair> pair_of(const DLTensor* fc1_weight, const DLTensor* fc2_weight) {
  const Result<TensorView> fc1 = view_of("fc1_weight", "bf16", fc1_weight);
  if (!fc1.ok()) return fc1.status();
  const Result<TensorView> fc2 = view_of("fc2_weight", "bf16", fc2_weight);
  if (!fc2.ok()) return fc2.status();
  return Pair{*fc1, *fc2};
}

Result<CanonicalWeights> canonical_of(const char* name,
                                      const ExpertShape& shape,
                                      const hx_canonical_weights* given) {
  const Result<hx_canonical_weights> in = read(name, given);
  if (!in.ok()) return in.status();
  const int64_t experts = shape.num_local_experts;
  const int64_t hidden = shape.padded_hidden_size();
  const int64_t inter = shape.padded_intermediate_size();
  const int64_t fc1 = experts * shape.canonical_fc1_rows() * hidden;
  const int64_t fc2 = experts * hidden * inter;
  CanonicalWeights out;
  const auto take_bytes = [](const char* field,
                             const DLTensor* tensor,
                             int64_t count,
                             bool scales,
                             uint8_t*& pointer) -> Status {
    if (tensor == nullptr) return {};
    const Result<uint8_t*> data = bytes(field, tensor, count, scales);
    if (data.ok()) pointer = *data;
    return data.status();
  };
  const auto take_floats = [&](const char* field, const DLTensor* tensor, float*& pointer) {
    if (tensor == nullptr) return Status();
    const Result<float*> data = floats(field, tensor, experts);
    if (data.ok()) pointer = *data;
    return data.status();
  };
  HX_RETURN_IF_ERROR(take_bytes("fc1_data", in->fc1_data, fc1 / 2, false, out.fc1_data));
  HX_RETURN_IF_ERROR(take_bytes(
      "fc1_scale_swizzled", in->fc1_scale_swizzled, fc1 / 16, true, out.fc1_scale_swizzled));
  HX_RETURN_IF_ERROR(take_floats("fc1_alpha", in->fc1_alpha, out.fc1_alpha));
  HX_RETURN_IF_ERROR(take_floats("fc1_gate_alpha", in->fc1_gate_alpha, out.fc1_gate_alpha));
  HX_RETURN_IF_ERROR(take_bytes("fc2_data", in->fc2_data, fc2 / 2, false, out.fc2_data));
  HX_RETURN_IF_ERROR(take_bytes(
      "fc2_scale_swizzled", in->fc2_scale_swizzled, fc2 / 16, true, out.fc2_scale_swizzled));
  HX_RETURN_IF_ERROR(take_floats("fc2_alpha", in->fc2_alpha, out.fc2_alpha));
  return out;
}

// Rows and columns of a projection.
struct Extent {
  int64_t rows;
  int64_t blocks;
};
Extent extent_of(const ExpertShape& shape, ExpertWeights::Projection projection) {
  const bool down = projection == ExpertWeights::Projection::kDown;
  const int64_t cols = down ? shape.intermediate_size : shape.hidden_size;
  return {down ? shape.hidden_size : shape.intermediate_size,
          round_up(cols, kBlockSize) / kBlockSize};
}

struct ProjectionMemory {
  uint8_t* codes = nullptr;
  uint8_t* block_scales = nullptr;
  float alpha = 1;
};
Result<ProjectionMemory> projection_of(const char* name,
                                       const Extent& extent,
                                       const hx_projection* given) {
  const Result<hx_projection> in = read(name, given);
  if (!in.ok()) return in.status();
  const Result<uint8_t*> codes = bytes(
      fmt::format("{}.codes", name).c_str(), in->codes, extent.rows * extent.blocks * 8, false);
  if (!codes.ok()) return codes.status();
  const Result<uint8_t*> scales = bytes(fmt::format("{}.block_scales", name).c_str(),
                                        in->block_scales,
                                        extent.rows * extent.blocks,
                                        true);
  if (!scales.ok()) return scales.status();
  return ProjectionMemory{*codes, *scales, in->alpha};
}

// Memory of one projection of `expert`, as a source.
Status take_projection(const char* name,
                       const Extent& extent,
                       const hx_projection* given,
                       QuantizedProjection& out) {
  const Result<ProjectionMemory> memory = projection_of(name, extent, given);
  if (memory.ok()) out = {memory->codes, memory->block_scales, memory->alpha};
  return memory.status();
}

}  // namespace
}  // namespace hexpert::capi

using hexpert::ErrorCode;
using hexpert::ExpertWeights;
using hexpert::Result;
using hexpert::Status;
namespace capi = hexpert::capi;

hx_status hx_weights_prepare(const DLTensor* fc1_weight,
                             const DLTensor* fc2_weight,
                             const hx_prepare_options* options,
                             void* stream,
                             hx_weights** weights) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto stacks = capi::pair_of(fc1_weight, fc2_weight);
    if (!stacks.ok()) return stacks.status();
    const bool on_host = stacks->fc1.device.type == hexpert::DeviceType::kCpu;
    const auto rules =
        capi::options_of(options, on_host ? stacks->fc2.device : stacks->fc1.device, stream);
    if (!rules.ok()) return rules.status();
    return capi::hand_over(ExpertWeights::prepare(stacks->fc1, stacks->fc2, *rules), weights);
  });
}

hx_status hx_weights_allocate(const hx_expert_shape* shape,
                              const hx_prepare_options* options,
                              hx_weights** weights) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto sizes = capi::read("shape", shape);
    if (!sizes.ok()) return sizes.status();
    const auto rules = capi::options_of(options);
    if (!rules.ok()) return rules.status();
    return capi::hand_over(ExpertWeights::allocate({.num_local_experts = sizes->num_local_experts,
                                                    .hidden_size = sizes->hidden_size,
                                                    .intermediate_size = sizes->intermediate_size,
                                                    .gated = sizes->gated != 0},
                                                   *rules),
                           weights);
  });
}

hx_status hx_weights_load(const char* path,
                          const char* prefix,
                          int64_t first_expert,
                          int64_t num_experts,
                          const hx_prepare_options* options,
                          hx_weights** weights) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("path", path));
    HX_RETURN_IF_ERROR(capi::require("prefix", prefix));
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto rules = capi::options_of(options);
    if (!rules.ok()) return rules.status();
    const auto checkpoint = hexpert::Checkpoint::open(path);
    if (!checkpoint.ok()) return checkpoint.status();
    return capi::hand_over(
        hexpert::load_experts(*checkpoint, prefix, *rules, first_expert, num_experts), weights);
  });
}

void hx_weights_free(hx_weights* weights) {
  delete weights;
}

hx_status hx_weights_refresh(hx_weights* weights,
                             const DLTensor* fc1_weight,
                             const DLTensor* fc2_weight,
                             void* stream) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto stacks = capi::pair_of(fc1_weight, fc2_weight);
    if (!stacks.ok()) return stacks.status();
    return weights->weights->refresh(stacks->fc1, stacks->fc2, {stream});
  });
}

hx_status hx_weights_set_expert(hx_weights* weights,
                                int64_t expert,
                                const DLTensor* fc1_weight,
                                const DLTensor* fc2_weight,
                                void* stream) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto matrices = capi::pair_of(fc1_weight, fc2_weight);
    if (!matrices.ok()) return matrices.status();
    return weights->weights->set_expert(expert, matrices->fc1, matrices->fc2, {stream});
  });
}

hx_status hx_weights_set_quantized_expert(hx_weights* weights,
                                          int64_t expert,
                                          const hx_projection* gate,
                                          const hx_projection* up,
                                          const hx_projection* down,
                                          void* /*stream*/) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const hexpert::ExpertShape& shape = weights->weights->shape();
    if (!shape.gated && gate != nullptr) {
      return {ErrorCode::kInvalidArgument, "gate: expected null, since these weights have no gate"};
    }
    using capi::Projection;
    const capi::Extent fc1 = capi::extent_of(shape, Projection::kUp);
    const capi::Extent fc2 = capi::extent_of(shape, Projection::kDown);
    hexpert::QuantizedExpert source;
    if (shape.gated) HX_RETURN_IF_ERROR(capi::take_projection("gate", fc1, gate, source.gate));
    HX_RETURN_IF_ERROR(capi::take_projection("up", fc1, up, source.up));
    HX_RETURN_IF_ERROR(capi::take_projection("down", fc2, down, source.down));
    return weights->weights->set_quantized_expert(expert, source);
  });
}

hx_status hx_weights_export_projection(const hx_weights* weights,
                                       int64_t expert,
                                       hx_projection_kind projection,
                                       hx_projection* out,
                                       void* /*stream*/) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    if (projection < HX_GATE || projection > HX_DOWN) {
      return {ErrorCode::kInvalidArgument,
              fmt::format("projection: expected 0..{}, got {}", +HX_DOWN, +projection)};
    }
    const auto kind = static_cast<capi::Projection>(projection);
    const auto memory =
        capi::projection_of("out", capi::extent_of(weights->weights->shape(), kind), out);
    if (!memory.ok()) return memory.status();
    return weights->weights->export_projection(
        expert, kind, memory->codes, memory->block_scales, &out->alpha);
  });
}

hx_status hx_weights_import_canonical(hx_weights* weights,
                                      const hx_canonical_weights* source,
                                      void* /*stream*/) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto canonical = capi::canonical_of("source", weights->weights->shape(), source);
    if (!canonical.ok()) return canonical.status();
    return weights->weights->import_canonical(*canonical);
  });
}

hx_status hx_weights_export_canonical(const hx_weights* weights,
                                      const hx_canonical_weights* out,
                                      void* /*stream*/) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto canonical = capi::canonical_of("out", weights->weights->shape(), out);
    if (!canonical.ok()) return canonical.status();
    return weights->weights->export_canonical(*canonical);
  });
}

hx_status hx_weights_get_shape(const hx_weights* weights, hx_expert_shape* shape) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    const auto given = capi::read("shape", shape);
    if (!given.ok()) return given.status();
    const hexpert::ExpertShape& from = weights->weights->shape();
    shape->num_local_experts = from.num_local_experts;
    shape->hidden_size = from.hidden_size;
    shape->intermediate_size = from.intermediate_size;
    shape->gated = from.gated ? 1 : 0;
    return {};
  });
}

hx_status hx_weights_get_device(const hx_weights* weights, DLDevice* device) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    HX_RETURN_IF_ERROR(capi::require("device", device));
    const hexpert::Device from = weights->weights->device();
    device->device_type = from.type == hexpert::DeviceType::kCpu ? kDLCPU : kDLCUDA;
    device->device_id = from.index;
    return {};
  });
}

int64_t hx_weights_size_bytes(const hx_weights* weights) {
  return weights == nullptr ? 0 : weights->weights->size_bytes();
}

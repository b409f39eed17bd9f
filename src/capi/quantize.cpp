// Quantization in the C ABI.
#include "hexpert/quantize.hpp"

#include "capi/call.hpp"

namespace hexpert::capi {
namespace {

Result<ScaleLayout> scale_layout_of(int32_t layout) {
  if (layout < HX_SCALES_LINEAR || layout > HX_SCALES_8X4) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("scale_layout: expected 0..{}, got {}", +HX_SCALES_8X4, layout));
  }
  return static_cast<ScaleLayout>(layout);
}

// In memory of `device`.
Result<Nvfp4View> nvfp4_of(const char* name, const hx_nvfp4* given, const Device& device) {
  const Result<hx_nvfp4> in = read(name, given);
  if (!in.ok()) return in.status();
  const Result<TensorView> codes =
      packed(fmt::format("{}.codes", name).c_str(), "u8", in->codes, {DType::kU8}, device);
  if (!codes.ok()) return codes.status();
  if (codes->rank != 2 || codes->shape[1] % (kBlockSize / 2) != 0) {
    return Status(ErrorCode::kInvalidShape,
                  fmt::format("{}.codes: expected [rows, cols / 2] with cols % {} == 0, got {}",
                              name,
                              kBlockSize,
                              describe(*codes)));
  }
  const Result<ScaleLayout> layout = scale_layout_of(in->scale_layout);
  if (!layout.ok()) return layout.status();
  Nvfp4View view;
  view.rows = codes->shape[0];
  view.cols = codes->shape[1] * 2;
  view.per_row = in->per_row != 0;
  view.scale_layout = *layout;
  view.codes = codes->as<uint8_t>();
  const Result<uint8_t*> scales =
      bytes(fmt::format("{}.block_scales", name).c_str(),
            in->block_scales,
            view.rows * view.cols == 0 ? 0 : block_scale_bytes(*layout, view.rows, view.cols),
            true,
            device);
  if (!scales.ok()) return scales.status();
  view.block_scales = *scales;
  const Result<float*> outer = floats(
      fmt::format("{}.outer", name).c_str(), in->outer, view.per_row ? view.rows : 1, device);
  if (!outer.ok()) return outer.status();
  view.outer = *outer;
  return view;
}

Result<QuantizeOptions> options_of(const hx_quantize_options* given, void* stream) {
  const Result<hx_quantize_options> in =
      read_or("options", given, hx_quantize_options HX_QUANTIZE_OPTIONS_INIT);
  if (!in.ok()) return in.status();
  QuantizeOptions options;
  options.num_threads = in->num_threads;
  options.stream = {stream};
  if (in->four_over_six < HX_FOUR_OVER_SIX_OFF || in->four_over_six > HX_FOUR_OVER_SIX_MSE) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("options.four_over_six: expected 0..{}, got {}",
                              +HX_FOUR_OVER_SIX_MSE,
                              in->four_over_six));
  }
  if (in->four_over_six != HX_FOUR_OVER_SIX_OFF) {
    options.four_over_six =
        FourOverSix{in->four_over_six == HX_FOUR_OVER_SIX_MSE ? FourOverSix::Error::kMse
                                                              : FourOverSix::Error::kMae,
                    in->e4m3_max};
  }
  return options;
}

}  // namespace
}  // namespace hexpert::capi

using hexpert::Result;
using hexpert::Status;
using hexpert::TensorView;
namespace capi = hexpert::capi;

int64_t hx_block_scale_bytes(hx_scale_layout layout, int64_t rows, int64_t cols) {
  if (layout < HX_SCALES_LINEAR || layout > HX_SCALES_8X4 || rows < 0 || cols < 0 ||
      cols % hexpert::kBlockSize != 0) {
    return -1;
  }
  return hexpert::block_scale_bytes(static_cast<hexpert::ScaleLayout>(layout), rows, cols);
}

hx_status hx_quantize_tokens(const DLTensor* hidden_states,
                             int64_t padded_hidden_size,
                             const hx_nvfp4* out,
                             const hx_quantize_options* options,
                             void* stream) {
  return capi::call([&]() -> Status {
    const Result<TensorView> x = hexpert::view_of("hidden_states", "bf16", hidden_states);
    if (!x.ok()) return x.status();
    const auto to = capi::nvfp4_of("out", out, x->device);
    if (!to.ok()) return to.status();
    const auto rules = capi::options_of(options, stream);
    if (!rules.ok()) return rules.status();
    return hexpert::quantize_tokens(*x, padded_hidden_size, *to, *rules);
  });
}

hx_status hx_quantize_matrix(const DLTensor* matrix,
                             const hx_nvfp4* out,
                             const hx_quantize_options* options,
                             void* stream) {
  return capi::call([&]() -> Status {
    const Result<TensorView> x = hexpert::view_of("matrix", "bf16", matrix);
    if (!x.ok()) return x.status();
    const auto to = capi::nvfp4_of("out", out, x->device);
    if (!to.ok()) return to.status();
    const auto rules = capi::options_of(options, stream);
    if (!rules.ok()) return rules.status();
    return hexpert::quantize_matrix(*x, *to, *rules);
  });
}

hx_status hx_dequantize(const hx_nvfp4* in, const DLTensor* out, void* /*stream*/) {
  return capi::call([&]() -> Status {
    const auto from = capi::nvfp4_of("in", in, hexpert::Device::cpu());
    if (!from.ok()) return from.status();
    const Result<TensorView> to = hexpert::view_of("out", "f32 or bf16", out);
    if (!to.ok()) return to.status();
    if (to->device.type != hexpert::DeviceType::kCpu) {
      return {hexpert::ErrorCode::kDeviceMismatch,
              fmt::format("out: expected memory of cpu, got {}", to_string(to->device))};
    }
    hexpert::ConstNvfp4View view;
    view.codes = from->codes;
    view.block_scales = from->block_scales;
    view.outer = from->outer;
    view.rows = from->rows;
    view.cols = from->cols;
    view.per_row = from->per_row;
    view.scale_layout = from->scale_layout;
    return hexpert::dequantize(view, *to);
  });
}

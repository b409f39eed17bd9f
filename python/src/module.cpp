// The extension module hexpert._core: backends and quantization. Weights and layers have their own files.
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string_view>
#include <utility>

#include "arguments.hpp"
#include "arrays.hpp"
#include "bindings.hpp"
#include "hexpert/format.hpp"
#include "hexpert/hexpert.h"
#include "hexpert/moe.hpp"
#include "hexpert/quantize.hpp"

namespace hexpert::python {
namespace {

using namespace nb::literals;  // NOLINT(google-build-using-namespace)

QuantizeOptions options_of(nb::handle four_over_six, nb::handle e4m3_max, nb::handle num_threads) {
  QuantizeOptions options;
  options.num_threads = argument<int>(num_threads, "num_threads");
  const auto error = optional_argument<FourOverSix::Error>(four_over_six, "four_over_six");
  const auto largest = argument<float>(e4m3_max, "e4m3_max");
  if (error) options.four_over_six = FourOverSix{*error, largest};
  return options;
}

ScaleLayout layout_of(nb::handle scale_layout) {
  return argument<ScaleLayout>(scale_layout, "scale_layout");
}

// The memory of a quantized matrix: made, or the caller's.
struct Quantized {
  nb::object codes;
  nb::object block_scales;
  nb::object outer;

  Quantized(nb::handle like,
            nb::handle out,
            int64_t rows,
            int64_t cols,
            bool per_row,
            ScaleLayout layout) {
    if (out.is_none()) {
      codes = new_array(like, {rows, cols / 2}, "uint8");
      block_scales = layout == ScaleLayout::kLinear
                         ? new_array(like, {rows, cols / kBlockSize}, "uint8")
                         : new_array(like, {block_scale_bytes(layout, rows, cols)}, "uint8");
      outer = new_array(like, {per_row ? rows : 1}, "float32");
      return;
    }
    const bool is_tuple = nb::isinstance<nb::tuple>(out);
    if (!is_tuple || nb::len(out) != 3) {
      raise(
          {ErrorCode::kInvalidDtype,
           fmt::format("out: expected a tuple of three arrays: codes, block_scales, outer; got {}",
                       is_tuple ? fmt::format("{} of them", nb::len(out)) : given_text(out))});
    }
    codes = out[0];
    block_scales = out[1];
    outer = out[2];
  }
  nb::tuple finished(nb::handle like) const {
    return nb::make_tuple(finish(like, codes), finish(like, block_scales), finish(like, outer));
  }
};

// Refuses all but a packed array of `count` elements.
void check_count(const Array& array, int64_t count) {
  const TensorView& view = array.view();
  if (!view.is_contiguous()) {
    raise({ErrorCode::kNotContiguous,
           fmt::format(
               "{}: expected a packed array, got {} with gaps", array.name(), describe(view))});
  }
  if (view.num_elements() != count) {
    raise({ErrorCode::kShapeMismatch,
           fmt::format("{}: expected {} elements, got {}", array.name(), count, describe(view))});
  }
}

Nvfp4View nvfp4_of(const Array& codes,
                   const Array& block_scales,
                   const Array& outer,
                   bool per_row,
                   ScaleLayout layout,
                   const Device& device) {
  const TensorView& c = codes.view();
  if (c.rank != 2 || c.shape[1] % (kBlockSize / 2) != 0) {
    raise({ErrorCode::kInvalidShape,
           fmt::format("{}: expected [rows, cols / 2] with cols % {} == 0, got {}",
                       codes.name(),
                       kBlockSize,
                       describe(c))});
  }
  check_count(codes, c.num_elements());
  Nvfp4View view;
  view.rows = c.shape[0];
  view.cols = c.shape[1] * 2;
  view.per_row = per_row;
  view.scale_layout = layout;
  check_count(block_scales,
              c.num_elements() == 0 ? 0 : block_scale_bytes(layout, view.rows, view.cols));
  check_count(outer, per_row ? view.rows : 1);
  for (const Array* array : {&codes, &block_scales, &outer}) {
    if (array->view().device != device) {
      raise({ErrorCode::kDeviceMismatch,
             fmt::format("{}: expected memory of {}, got {}",
                         array->name(),
                         to_string(device),
                         to_string(array->view().device))});
    }
  }
  view.codes = c.as<uint8_t>();
  view.block_scales = block_scales.view().as<uint8_t>();
  view.outer = outer.view().as<float>();
  return view;
}

// A failure in the names that the arguments have here: the library says which member of its view it means.
Status renamed(const Status& status,
               std::initializer_list<std::pair<std::string_view, std::string_view>> names) {
  std::string text = status.message();
  for (const auto& [member, argument] : names) {
    const size_t at = text.find(member);
    if (at != std::string::npos) text.replace(at, member.size(), argument);
  }
  return {status.code(), text};
}

nb::tuple quantize(const char* name,
                   nb::handle x,
                   nb::handle padded_hidden_size,
                   nb::handle out,
                   ScaleLayout layout,
                   QuantizeOptions options,
                   bool per_row,
                   nb::handle stream) {
  const auto padded = optional_argument<int64_t>(padded_hidden_size, "padded_hidden_size");
  const Array input(x, name, "bf16", stream_given(stream));
  options.stream = stream_of(input, stream);
  const TensorView& view = input.view();
  if (view.rank != 2) {
    raise({ErrorCode::kInvalidShape,
           fmt::format("{}: expected rank 2, got {}", name, describe(view))});
  }
  const int64_t cols = padded.value_or(round_up(view.shape[1], per_row ? kBlockSize : 1));
  if (cols < 0 || cols % kBlockSize != 0 || cols > int64_t{1} << 40) {
    raise({per_row && padded ? ErrorCode::kInvalidArgument : ErrorCode::kInvalidShape,
           fmt::format("{}: expected a multiple of {}, 0 to 2^40, got {}",
                       padded ? "padded_hidden_size" : std::string(name) + " columns",
                       kBlockSize,
                       cols)});
  }
  const Quantized memory(x, out, view.shape[0], cols, per_row, layout);
  const Array codes(memory.codes, "out[0]", "u8", options.stream);
  const Array scales(memory.block_scales, "out[1]", "u8 or e4m3", options.stream);
  const Array outer(memory.outer, "out[2]", "f32", options.stream);
  for (const Array* array : {&codes, &scales, &outer}) {
    if (!out.is_none()) (void)array->writable();
  }
  const Nvfp4View to = nvfp4_of(codes, scales, outer, per_row, layout, view.device);
  without_gil([&] {
    const Status status =
        per_row ? quantize_tokens(view, cols, to, options) : quantize_matrix(view, to, options);
    if (!status.ok()) {
      return renamed(
          status,
          {{"out.codes", "out[0]"}, {"out.block_scales", "out[1]"}, {"out.outer", "out[2]"}});
    }
    return wait_if_needed({&input, &codes, &scales, &outer}, options.stream, view.device);
  });
  return memory.finished(x);
}

nb::object dequantize_arrays(nb::handle codes,
                             nb::handle block_scales,
                             nb::handle outer,
                             nb::handle out,
                             nb::handle scale_layout) {
  const ScaleLayout layout = layout_of(scale_layout);
  const Array c(codes, "codes", "u8");
  const Array s(block_scales, "block_scales", "u8 or e4m3");
  const Array o(outer, "outer", "f32");
  const Nvfp4View view = nvfp4_of(c, s, o, o.view().num_elements() != 1, layout, Device::cpu());
  const nb::object made =
      out.is_none() ? new_array(codes, {view.rows, view.cols}, "float32") : nb::borrow(out);
  const Array to(made, "out", "f32 or bf16");
  const TensorView target = to.writable();
  ConstNvfp4View from;
  from.codes = view.codes;
  from.block_scales = view.block_scales;
  from.outer = view.outer;
  from.rows = view.rows;
  from.cols = view.cols;
  from.per_row = view.per_row;
  from.scale_layout = layout;
  without_gil([&] {
    return renamed(
        dequantize(from, target),
        {{"in.codes", "codes"}, {"in.block_scales", "block_scales"}, {"in.outer", "outer"}});
  });
  return finish(codes, made);
}

void bind_backends(nb::module_& m) {
  nb::class_<BackendInfo>(m, "BackendInfo", "Why a backend can or cannot run here.")
      .def_ro("name", &BackendInfo::name, "\"cpu-amx\".")
      .def_prop_ro(
          "device",
          [](const BackendInfo& info) { return info.device == DeviceType::kCpu ? "cpu" : "cuda"; },
          "\"cpu\" or \"cuda\".")
      .def_ro("available", &BackendInfo::available, "Runs here; a GPU backend: on cuda:0.")
      .def_ro("reason", &BackendInfo::reason, "The first unmet condition; empty when available.")
      .def("__repr__", [](const BackendInfo& info) {
        return fmt::format("BackendInfo({}{})",
                           info.name,
                           info.available ? "" : fmt::format(", not available: {}", info.reason));
      });
  m.def("list_backends",
        &list_backends,
        "All backends of this build, best first, \"reference\" last. Never fails.");
  m.def(
      "query_backend",
      [](nb::handle device) { return check(hexpert::query_backend(parse_device(device))); },
      "device"_a.none() = "cpu",
      nb::sig("def query_backend(device: typing.Any = 'cpu') -> str"),
      "The best backend of a device: \"cpu\", \"cuda\", \"cuda:1\" or a torch.device.\n\n"
      "Raises UnsupportedError with the reason of each backend when there is none.");
}

void bind_quantize(nb::module_& m) {
  nb::enum_<ScaleLayout>(m, "ScaleLayout", "Order of E4M3 block scales: docs/format.md section 4.")
      .value("LINEAR", ScaleLayout::kLinear, "row major [rows, cols / 16]")
      .value("L128X4", ScaleLayout::k128x4, "tiles of 128 rows x 4 scale columns")
      .value("L8X4", ScaleLayout::k8x4, "tiles of 8 rows x 4 scale columns");
  nb::enum_<FourOverSix::Error>(m, "FourOverSix", "How \"four over six\" weighs a block's error.")
      .value("MAE", FourOverSix::Error::kMae)
      .value("MSE", FourOverSix::Error::kMse);
  m.def(
      "quantize_tokens",
      [](nb::handle x,
         nb::handle padded,
         nb::handle out,
         nb::handle layout,
         nb::handle four_over_six,
         nb::handle e4m3_max,
         nb::handle num_threads,
         nb::handle stream) {
        return quantize("hidden_states",
                        x,
                        padded,
                        out,
                        layout_of(layout),
                        options_of(four_over_six, e4m3_max, num_threads),
                        true,
                        stream);
      },
      "hidden_states"_a.none(),
      "padded_hidden_size"_a = nb::none(),
      nb::kw_only(),
      "out"_a = nb::none(),
      "scale_layout"_a.none() = ScaleLayout::kLinear,
      "four_over_six"_a = nb::none(),
      "e4m3_max"_a.none() = 448.0F,
      "num_threads"_a.none() = 0,
      "stream"_a = nb::none(),
      nb::sig("def quantize_tokens(hidden_states: typing.Any, padded_hidden_size: int | None = "
              "None, *, "
              "out: tuple[typing.Any, typing.Any, typing.Any] | None = None, "
              "scale_layout: ScaleLayout = ..., "
              "four_over_six: FourOverSix | None = None, e4m3_max: float = 448.0, "
              "num_threads: int = 0, stream: int | None = None) "
              "-> tuple[typing.Any, typing.Any, typing.Any]"),
      R"(Quantizes activations to NVFP4, one FP32 scale per token.

    value(r, c) ~= e2m1(codes[r, c]) * e4m3(block_scales[r, c // 16]) * token_scales[r]

hidden_states       [tokens, hidden_size] bf16; rows may be strided, columns not. tokens may be 0.
padded_hidden_size  >= hidden_size, a multiple of 16 (default: the next one). The columns between are
                    zero.
out                 (codes, block_scales, token_scales) to write into, packed, apart from each other and
                    from hidden_states. Default: new arrays of the framework and device of hidden_states.
four_over_six       picks the optional quantizer of docs/format.md section 3, with e4m3_max 448 or 256.
num_threads         0: the OpenMP default. No result depends on it.
stream              a cudaStream_t as int. Default: the current stream of the framework of hidden_states.

Returns (codes [tokens, padded_hidden_size / 2] uint8, block_scales [tokens, padded_hidden_size / 16]
uint8 E4M3, token_scales [tokens] float32). A NaN poisons its own row only.

Raises TypeError (element type), ValueError (shape, layout, size, device, alignment, read-only or overlapping
out), MemoryError.)");
  m.def(
      "quantize_matrix",
      [](nb::handle x,
         nb::handle out,
         nb::handle layout,
         nb::handle four_over_six,
         nb::handle e4m3_max,
         nb::handle num_threads) {
        return quantize("matrix",
                        x,
                        nb::none(),
                        out,
                        layout_of(layout),
                        options_of(four_over_six, e4m3_max, num_threads),
                        false,
                        nb::none());
      },
      "matrix"_a.none(),
      nb::kw_only(),
      "out"_a = nb::none(),
      "scale_layout"_a.none() = ScaleLayout::kLinear,
      "four_over_six"_a = nb::none(),
      "e4m3_max"_a.none() = 448.0F,
      "num_threads"_a.none() = 0,
      nb::sig("def quantize_matrix(matrix: typing.Any, *, "
              "out: tuple[typing.Any, typing.Any, typing.Any] | None = None, "
              "scale_layout: ScaleLayout = ..., "
              "four_over_six: FourOverSix | None = None, e4m3_max: float = 448.0, "
              "num_threads: int = 0) -> tuple[typing.Any, typing.Any, typing.Any]"),
      R"(Quantizes one weight matrix to NVFP4 with a single FP32 scale.

matrix  [rows, cols] bf16 in host memory, cols % 16 == 0; rows may be strided, columns not.

Returns (codes [rows, cols / 2] uint8, block_scales uint8 E4M3 in scale_layout, alpha [1] float32). A NaN
poisons the whole matrix. Other arguments and errors as for quantize_tokens.)");
  m.def("dequantize",
        &dequantize_arrays,
        "codes"_a.none(),
        "block_scales"_a.none(),
        "outer"_a.none(),
        nb::kw_only(),
        "out"_a = nb::none(),
        "scale_layout"_a.none() = ScaleLayout::kLinear,
        nb::sig("def dequantize(codes: typing.Any, block_scales: typing.Any, outer: typing.Any, *, "
                "out: typing.Any | None = None, scale_layout: ScaleLayout = ...) "
                "-> typing.Any"),
        R"(Expands NVFP4 to numbers. All arrays are in host memory.

codes         [rows, cols / 2] uint8, packed; element 2j in the low nibble of byte j
block_scales  uint8 or float8_e4m3fn, packed, in scale_layout
outer         float32 decode scales: [rows], or [1] for the whole matrix
out           [rows, cols] float32 or bf16 (rounded to nearest even), packed, overlapping none of the others.
              Default: new float32.

Raises TypeError (element type), ValueError (shape, layout, device, read-only or overlapping out).)");
}

}  // namespace
}  // namespace hexpert::python

NB_MODULE(_core, m) {
  m.doc() = "Routed NVFP4 mixture-of-experts layers: the C++ library.";
  m.attr("__version__") = hx_version_string();
  hexpert::python::bind_exceptions(m);
  hexpert::python::bind_backends(m);
  hexpert::python::bind_quantize(m);
  hexpert::python::bind_weights(m);
  hexpert::python::bind_moe(m);
}

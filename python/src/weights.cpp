// hexpert.ExpertWeights.
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <mutex>
#include <optional>

#include "arguments.hpp"
#include "arrays.hpp"
#include "bindings.hpp"
#include "hexpert/checkpoint.hpp"

namespace hexpert::python {
namespace {

using namespace nb::literals;  // NOLINT(google-build-using-namespace)

WeightsHandle handle_of(ExpertWeights weights) {
  return {std::make_shared<SharedWeights>(std::move(weights))};
}

PrepareOptions options_of(nb::handle backend, nb::handle num_threads, const Device& device) {
  return {.backend = argument<std::string>(backend, "backend"),
          .num_threads = argument<int>(num_threads, "num_threads"),
          .device = device};
}

// The stack that says where the weights live.
const Array& leading(const Array& fc1, const Array& fc2) {
  return fc1.view().device.type == DeviceType::kCpu ? fc2 : fc1;
}

WeightsHandle prepare(nb::handle fc1_weight,
                      nb::handle fc2_weight,
                      nb::handle backend,
                      nb::handle refuse_nonfinite,
                      nb::handle num_threads,
                      nb::handle device,
                      nb::handle stream) {
  const Array fc1(fc1_weight, "fc1_weight", "bf16", stream_given(stream));
  const Array fc2(fc2_weight, "fc2_weight", "bf16", stream_given(stream));
  const Array& leader = leading(fc1, fc2);
  const Device where = device.is_none() ? leader.view().device : parse_device(device);
  const Device& ordered = leader.view().device == Device::cpu() ? where : leader.view().device;
  const Stream on = stream_of(leader, stream, ordered);
  PrepareOptions options = options_of(backend, num_threads, where);
  options.refuse_nonfinite = argument<bool>(refuse_nonfinite, "refuse_nonfinite");
  options.stream = on;
  return handle_of(without_gil([&]() -> Result<ExpertWeights> {
    Result<ExpertWeights> made = ExpertWeights::prepare(fc1.view(), fc2.view(), options);
    if (made.ok()) HX_RETURN_IF_ERROR(wait_if_needed({&fc1, &fc2}, on, where));
    return made;
  }));
}

WeightsHandle allocate(nb::handle num_local_experts,
                       nb::handle hidden_size,
                       nb::handle intermediate_size,
                       nb::handle gated,
                       nb::handle backend,
                       nb::handle num_threads,
                       nb::handle device) {
  const ExpertShape shape{argument<int64_t>(num_local_experts, "num_local_experts"),
                          argument<int64_t>(hidden_size, "hidden_size"),
                          argument<int64_t>(intermediate_size, "intermediate_size"),
                          argument<bool>(gated, "gated")};
  const PrepareOptions options = options_of(backend, num_threads, parse_device(device));
  return handle_of(without_gil([&] { return ExpertWeights::allocate(shape, options); }));
}

WeightsHandle load(nb::handle path,
                   nb::handle prefix,
                   nb::handle first_expert,
                   nb::handle num_experts,
                   nb::handle backend,
                   nb::handle num_threads,
                   nb::handle device) {
  const std::string file = path_argument(path, "path");
  const auto layer = argument<std::string>(prefix, "prefix");
  const auto first = argument<int64_t>(first_expert, "first_expert");
  const auto count = argument<int64_t>(num_experts, "num_experts");
  const PrepareOptions options = options_of(backend, num_threads, parse_device(device));
  return handle_of(without_gil([&]() -> Result<ExpertWeights> {
    const Result<Checkpoint> checkpoint = Checkpoint::open(file);
    if (!checkpoint.ok()) return checkpoint.status();
    return load_experts(*checkpoint, layer, options, first, count);
  }));
}

void refresh(const WeightsHandle& self,
             nb::handle fc1_weight,
             nb::handle fc2_weight,
             nb::handle stream) {
  const Array fc1(fc1_weight, "fc1_weight", "bf16", stream_given(stream));
  const Array fc2(fc2_weight, "fc2_weight", "bf16", stream_given(stream));
  const Device device = self.shared->weights.device();
  const Stream on = stream_of(leading(fc1, fc2), stream, device);
  without_gil([&] {
    const std::unique_lock lock(self.shared->mutex);
    const Status status = self.shared->weights.refresh(fc1.view(), fc2.view(), on);
    return status.ok() ? wait_if_needed({&fc1, &fc2}, on, device) : status;
  });
}

void set_expert(const WeightsHandle& self,
                nb::handle expert,
                nb::handle fc1_weight,
                nb::handle fc2_weight,
                nb::handle stream) {
  const auto index = argument<int64_t>(expert, "expert");
  const Array fc1(fc1_weight, "fc1_weight", "bf16", stream_given(stream));
  const Array fc2(fc2_weight, "fc2_weight", "bf16", stream_given(stream));
  const Device device = self.shared->weights.device();
  const Stream on = stream_of(leading(fc1, fc2), stream, device);
  without_gil([&] {
    const std::unique_lock lock(self.shared->mutex);
    const Status status = self.shared->weights.set_expert(index, fc1.view(), fc2.view(), on);
    return status.ok() ? wait_if_needed({&fc1, &fc2}, on, device) : status;
  });
}

// The fields of CanonicalWeights, in its order.
constexpr std::array<const char*, 7> kFields = {"fc1_data",
                                                "fc1_scale_swizzled",
                                                "fc1_alpha",
                                                "fc1_gate_alpha",
                                                "fc2_data",
                                                "fc2_scale_swizzled",
                                                "fc2_alpha"};
constexpr size_t kGateAlpha = 3;
using CanonicalArrays = std::array<std::optional<Array>, kFields.size()>;

bool is_alpha(size_t field) {
  return field == 2 || field == kGateAlpha || field == 6;
}

// Elements of each field.
std::array<int64_t, kFields.size()> counts_of(const ExpertShape& shape) {
  const int64_t experts = shape.num_local_experts;
  const int64_t fc1 = experts * shape.canonical_fc1_rows() * shape.padded_hidden_size();
  const int64_t fc2 = experts * shape.padded_hidden_size() * shape.padded_intermediate_size();
  return {fc1 / 2, fc1 / 16, experts, experts, fc2 / 2, fc2 / 16, experts};
}

CanonicalWeights canonical_of(const ExpertShape& shape,
                              const std::array<nb::handle, kFields.size()>& given,
                              CanonicalArrays& arrays,
                              bool written) {
  const auto counts = counts_of(shape);
  std::array<void*, kFields.size()> memory{};
  for (size_t i = 0; i < kFields.size(); ++i) {
    if (given[i].is_none() && (written || i == kGateAlpha)) continue;
    const char* wanted = is_alpha(i) ? "f32" : i == 1 || i == 5 ? "u8 or e4m3" : "u8";
    const Array& array = arrays[i].emplace(given[i], kFields[i], wanted);
    const TensorView& view = written ? array.writable() : array.view();
    if (view.device != Device::cpu()) {
      raise(
          {ErrorCode::kDeviceMismatch,
           fmt::format("{}: expected memory of cpu, got {}", kFields[i], to_string(view.device))});
    }
    if (!view.is_contiguous()) {
      raise({ErrorCode::kNotContiguous,
             fmt::format("{}: expected a packed array, got {}", kFields[i], describe(view))});
    }
    if (view.num_elements() != counts[i]) {
      raise(
          {ErrorCode::kShapeMismatch,
           fmt::format("{}: expected {} elements, got {}", kFields[i], counts[i], describe(view))});
    }
    memory[i] = view.data;
  }
  CanonicalWeights out;
  out.fc1_data = static_cast<uint8_t*>(memory[0]);
  out.fc1_scale_swizzled = static_cast<uint8_t*>(memory[1]);
  out.fc1_alpha = static_cast<float*>(memory[2]);
  out.fc1_gate_alpha = static_cast<float*>(memory[3]);
  out.fc2_data = static_cast<uint8_t*>(memory[4]);
  out.fc2_scale_swizzled = static_cast<uint8_t*>(memory[5]);
  out.fc2_alpha = static_cast<float*>(memory[6]);
  return out;
}

void import_canonical(const WeightsHandle& self,
                      nb::handle fc1_data,
                      nb::handle fc1_scale_swizzled,
                      nb::handle fc1_alpha,
                      nb::handle fc2_data,
                      nb::handle fc2_scale_swizzled,
                      nb::handle fc2_alpha,
                      nb::handle fc1_gate_alpha) {
  CanonicalArrays arrays;
  const CanonicalWeights source = canonical_of(self.shared->weights.shape(),
                                               {fc1_data,
                                                fc1_scale_swizzled,
                                                fc1_alpha,
                                                fc1_gate_alpha,
                                                fc2_data,
                                                fc2_scale_swizzled,
                                                fc2_alpha},
                                               arrays,
                                               false);
  without_gil([&] {
    const std::unique_lock lock(self.shared->mutex);
    return self.shared->weights.import_canonical(source);
  });
}

// Into arrays of the caller.
void export_canonical_into(const WeightsHandle& self,
                           nb::handle fc1_data,
                           nb::handle fc1_scale_swizzled,
                           nb::handle fc1_alpha,
                           nb::handle fc2_data,
                           nb::handle fc2_scale_swizzled,
                           nb::handle fc2_alpha,
                           nb::handle fc1_gate_alpha) {
  CanonicalArrays arrays;
  const CanonicalWeights out = canonical_of(self.shared->weights.shape(),
                                            {fc1_data,
                                             fc1_scale_swizzled,
                                             fc1_alpha,
                                             fc1_gate_alpha,
                                             fc2_data,
                                             fc2_scale_swizzled,
                                             fc2_alpha},
                                            arrays,
                                            true);
  without_gil([&] {
    const std::shared_lock lock(self.shared->mutex);
    return self.shared->weights.export_canonical(out);
  });
}

// Into new numpy arrays, or torch tensors with like=torch tensor, in host memory.
nb::dict export_canonical(const WeightsHandle& self, nb::handle like) {
  const ExpertShape shape = self.shared->weights.shape();
  const int64_t experts = shape.num_local_experts;
  const int64_t rows = shape.canonical_fc1_rows();
  const int64_t hidden = shape.padded_hidden_size();
  const int64_t inter = shape.padded_intermediate_size();
  nb::dict made;
  made["fc1_data"] = host_array(like, {experts, rows, hidden / 2}, "uint8");
  made["fc1_scale_swizzled"] = host_array(like, {experts, rows, hidden / 16}, "uint8");
  made["fc1_alpha"] = host_array(like, {experts}, "float32");
  made["fc1_gate_alpha"] = host_array(like, {experts}, "float32");
  made["fc2_data"] = host_array(like, {experts, hidden, inter / 2}, "uint8");
  made["fc2_scale_swizzled"] = host_array(like, {experts, hidden, inter / 16}, "uint8");
  made["fc2_alpha"] = host_array(like, {experts}, "float32");
  export_canonical_into(self,
                        made["fc1_data"],
                        made["fc1_scale_swizzled"],
                        made["fc1_alpha"],
                        made["fc2_data"],
                        made["fc2_scale_swizzled"],
                        made["fc2_alpha"],
                        made["fc1_gate_alpha"]);
  return made;
}

// What copies and pickles hold: sizes, device, canonical bytes.
nb::tuple get_state(const WeightsHandle& self) {
  const ExpertWeights& weights = self.shared->weights;
  const ExpertShape& shape = weights.shape();
  return nb::make_tuple(shape.num_local_experts,
                        shape.hidden_size,
                        shape.intermediate_size,
                        shape.gated,
                        to_string(weights.device()),
                        export_canonical(self, nb::none()));
}

void set_state(WeightsHandle& self, nb::handle given) {
  constexpr size_t kStateFields = 6;
  if (!nb::isinstance<nb::tuple>(given)) wrong_type("state", "a tuple", given);
  const auto state = nb::borrow<nb::tuple>(given);
  if (state.size() != kStateFields) {
    raise({ErrorCode::kInvalidArgument,
           fmt::format("state: expected {} fields, got {}", kStateFields, state.size())});
  }
  if (!nb::isinstance<nb::dict>(state[5])) wrong_type("state[5]", "a dict", state[5]);
  std::array<nb::object, kFields.size()> fields;
  for (size_t i = 0; i < kFields.size(); ++i) {
    fields[i] = nb::borrow(PyDict_GetItemString(nb::handle(state[5]).ptr(), kFields[i]));
    if (!fields[i].is_valid()) {
      raise({ErrorCode::kInvalidArgument,
             fmt::format("state[5]: expected an item {}, got none", kFields[i])});
    }
  }
  WeightsHandle made =
      allocate(state[0], state[1], state[2], state[3], nb::str(""), nb::int_(0), state[4]);
  import_canonical(
      made, fields[0], fields[1], fields[2], fields[4], fields[5], fields[6], fields[kGateAlpha]);
  new (&self) WeightsHandle(std::move(made));
}

nb::tuple export_projection(const WeightsHandle& self,
                            nb::handle expert,
                            nb::handle projection,
                            nb::handle like) {
  const auto index = argument<int64_t>(expert, "expert");
  const auto matrix = argument<ExpertWeights::Projection>(projection, "projection");
  const ExpertShape& shape = self.shared->weights.shape();
  const bool down = matrix == ExpertWeights::Projection::kDown;
  const int64_t rows = down ? shape.hidden_size : shape.intermediate_size;
  const int64_t cols = round_up(down ? shape.intermediate_size : shape.hidden_size, kBlockSize);
  const nb::object codes = host_array(like, {rows, cols / 2}, "uint8");
  const nb::object scales = host_array(like, {rows, cols / kBlockSize}, "uint8");
  const Array c(codes, "codes", "u8");
  const Array s(scales, "block_scales", "u8");
  float alpha = 0;
  without_gil([&] {
    const std::shared_lock lock(self.shared->mutex);
    return self.shared->weights.export_projection(
        index, matrix, c.view().as<uint8_t>(), s.view().as<uint8_t>(), &alpha);
  });
  return nb::make_tuple(codes, scales, alpha);
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::enum_<ExpertWeights::Projection>(m, "Projection", "One matrix of an expert.")
      .value("GATE", ExpertWeights::Projection::kGate)
      .value("UP", ExpertWeights::Projection::kUp)
      .value("DOWN", ExpertWeights::Projection::kDown);

  nb::class_<WeightsHandle> weights(
      m,
      "ExpertWeights",
      R"(NVFP4 weights of the experts of one layer, in the order the backend reads.

One copy only: 4.5 bits a weight plus padding. A refresh writes into the same memory: no address, shape or
stride changes, so captured graphs stay valid. Threads may share it: the host calls of refreshes and forwards
wait for each other. On a GPU the work itself must be ordered by the caller (one stream, or events).)");
  weights
      .def_static(
          "prepare",
          &prepare,
          "fc1_weight"_a.none(),
          "fc2_weight"_a.none(),
          nb::kw_only(),
          "backend"_a.none() = "",
          "refuse_nonfinite"_a.none() = false,
          "num_threads"_a.none() = 0,
          "device"_a = nb::none(),
          "stream"_a = nb::none(),
          nb::sig(
              "def prepare(fc1_weight: typing.Any, fc2_weight: typing.Any, *, backend: str = '', "
              "refuse_nonfinite: bool = False, num_threads: int = 0, device: typing.Any = None, "
              "stream: int | None = None) -> ExpertWeights"),
          R"(Quantizes BF16 stacks.

fc1_weight        [L, I, H] bf16 (squared ReLU), or [L, 2 I, H] (gated): rows 0..I-1 gate, I..2I-1 up. Packed.
fc2_weight        [L, H, I] bf16, packed. I and H are taken from here.
backend           "" picks the best one
refuse_nonfinite  scan first: ValueError names the expert that holds a NaN or an infinity
device            where the weights live: "cpu", "cuda:0", a torch.device. Default: where the stacks are.
stream            a cudaStream_t as int. Default: the current stream of the framework of the stacks.

Raises TypeError (element type), ValueError (shape, layout, alignment, device), UnsupportedError, MemoryError.)")
      .def_static(
          "allocate",
          &allocate,
          nb::kw_only(),
          "num_local_experts"_a.none(),
          "hidden_size"_a.none(),
          "intermediate_size"_a.none(),
          "gated"_a.none(),
          "backend"_a.none() = "",
          "num_threads"_a.none() = 0,
          "device"_a.none() = "cpu",
          nb::sig(
              "def allocate(*, num_local_experts: int, hidden_size: int, intermediate_size: int, "
              "gated: bool, backend: str = '', num_threads: int = 0, device: typing.Any = 'cpu') "
              "-> ExpertWeights"),
          R"(Zero experts, to be filled by set_expert() or import_canonical().

num_local_experts, hidden_size, intermediate_size  L, H and I of prepare(), >= 1
gated                                              FC1 holds gate and up
backend, num_threads, device                       as for prepare()

Raises ValueError (sizes, device), UnsupportedError, MemoryError.)")
      .def_static(
          "load",
          &load,
          "path"_a.none(),
          "prefix"_a.none(),
          nb::kw_only(),
          "first_expert"_a.none() = 0,
          "num_experts"_a.none() = -1,
          "backend"_a.none() = "",
          "num_threads"_a.none() = 0,
          "device"_a.none() = "cpu",
          nb::sig("def load(path: str | bytes | os.PathLike[str], prefix: str, *, first_expert: "
                  "int = 0, "
                  "num_experts: int = -1, backend: str = '', num_threads: int = 0, "
                  "device: typing.Any = 'cpu') "
                  "-> ExpertWeights"),
          R"(Loads experts [first_expert, first_expert + num_experts) of a layer, -1: all, as NVFP4.

path    a .safetensors file, a directory of them, or an .index.json
prefix  what stands before ".experts": "model.layers.0.mlp"

Raises ValueError (no such file or layer, malformed file, non-finite weights), OSError, UnsupportedError.)")
      .def("__getstate__", &get_state)
      .def("__setstate__", &set_state, "state"_a.none())
      .def("refresh",
           &refresh,
           "fc1_weight"_a.none(),
           "fc2_weight"_a.none(),
           nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def refresh(self, fc1_weight: typing.Any, fc2_weight: typing.Any, *, stream: "
                   "int | None = None) -> None"),
           R"(Quantizes stacks for the same sizes again, in place. Arguments as for prepare().

Raises TypeError (element type), ValueError (other sizes, layout, alignment, device): nothing is written then.)")
      .def("set_expert",
           &set_expert,
           "expert"_a.none(),
           "fc1_weight"_a.none(),
           "fc2_weight"_a.none(),
           nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def set_expert(self, expert: int, fc1_weight: typing.Any, fc2_weight: "
                   "typing.Any, *, "
                   "stream: int | None = None) -> None"),
           R"(Quantizes one expert in place.

expert      0 <= expert < num_local_experts
fc1_weight  [I, H] bf16, or [2 I, H] (gated), packed
fc2_weight  [H, I] bf16, packed

Raises TypeError and ValueError as refresh() does.)")
      .def(
          "export_canonical",
          &export_canonical,
          nb::kw_only(),
          "like"_a = nb::none(),
          nb::sig(
              "def export_canonical(self, *, like: typing.Any = None) -> dict[str, typing.Any]"),
          R"(The canonical bytes (docs/format.md section 5), in new arrays in host memory: torch tensors if `like` is
one, else numpy arrays.

With Hp, Ip the sizes rounded up to 256 and N1 = Ip, or 2 Ip when gated: fc1_data [L, N1, Hp / 2] uint8,
fc1_scale_swizzled [L, N1, Hp / 16] uint8 E4M3 (128x4 order), fc1_alpha and fc1_gate_alpha [L] float32,
fc2_data [L, Hp, Ip / 2], fc2_scale_swizzled [L, Hp, Ip / 16], fc2_alpha [L].

Waits for a GPU. Raises MemoryError, RuntimeError (the device reported an error).)")
      .def(
          "export_canonical_into",
          &export_canonical_into,
          nb::kw_only(),
          "fc1_data"_a = nb::none(),
          "fc1_scale_swizzled"_a = nb::none(),
          "fc1_alpha"_a = nb::none(),
          "fc2_data"_a = nb::none(),
          "fc2_scale_swizzled"_a = nb::none(),
          "fc2_alpha"_a = nb::none(),
          "fc1_gate_alpha"_a = nb::none(),
          nb::sig("def export_canonical_into(self, *, fc1_data: typing.Any = None, "
                  "fc1_scale_swizzled: typing.Any = None, fc1_alpha: typing.Any = None, "
                  "fc2_data: typing.Any = None, fc2_scale_swizzled: typing.Any = None, "
                  "fc2_alpha: typing.Any = None, fc1_gate_alpha: typing.Any = None) -> None"),
          R"(export_canonical() into packed arrays of the caller in host memory; those that are None are skipped.

Raises TypeError (element type), ValueError (number of elements, layout, device, read-only or overlapping arrays;
gate and up rows of different alphas without fc1_gate_alpha), RuntimeError.)")
      .def(
          "import_canonical",
          &import_canonical,
          nb::kw_only(),
          "fc1_data"_a.none(),
          "fc1_scale_swizzled"_a.none(),
          "fc1_alpha"_a.none(),
          "fc2_data"_a.none(),
          "fc2_scale_swizzled"_a.none(),
          "fc2_alpha"_a.none(),
          "fc1_gate_alpha"_a = nb::none(),
          nb::sig(
              "def import_canonical(self, *, fc1_data: typing.Any, fc1_scale_swizzled: typing.Any, "
              "fc1_alpha: typing.Any, fc2_data: typing.Any, fc2_scale_swizzled: typing.Any, "
              "fc2_alpha: typing.Any, fc1_gate_alpha: typing.Any = None) -> None"),
          R"(Takes canonical bytes, as export_canonical() gives them: packed, in host memory, padding zero.

fc1_gate_alpha  default: as fc1_alpha

Raises TypeError (element type), ValueError (number of elements, layout, device, padding, scales that are no
numbers), RuntimeError.)")
      .def(
          "export_projection",
          &export_projection,
          "expert"_a.none(),
          "projection"_a.none(),
          nb::kw_only(),
          "like"_a = nb::none(),
          nb::sig("def export_projection(self, expert: int, projection: Projection, *, "
                  "like: typing.Any = None) -> tuple[typing.Any, typing.Any, float]"),
          R"(One matrix of one expert in checkpoint order, in new arrays in host memory: torch tensors if `like` is
one, else numpy arrays.

Returns (codes [rows, ceil(cols / 16) * 8] uint8, block_scales [rows, ceil(cols / 16)] uint8 E4M3, alpha), as
dequantize() takes them; [rows, cols] is [I, H] for GATE and UP, [H, I] for DOWN.

Raises ValueError (expert, GATE of weights without one), RuntimeError.)");
  const auto shape = [](const WeightsHandle& w) -> const ExpertShape& {
    return w.shared->weights.shape();
  };
  weights
      .def_prop_ro(
          "num_local_experts",
          [=](const WeightsHandle& w) { return shape(w).num_local_experts; },
          "L")
      .def_prop_ro(
          "hidden_size", [=](const WeightsHandle& w) { return shape(w).hidden_size; }, "H")
      .def_prop_ro(
          "intermediate_size",
          [=](const WeightsHandle& w) { return shape(w).intermediate_size; },
          "I")
      .def_prop_ro(
          "gated", [=](const WeightsHandle& w) { return shape(w).gated; }, "FC1 holds gate and up.")
      .def_prop_ro(
          "padded_hidden_size",
          [=](const WeightsHandle& w) { return shape(w).padded_hidden_size(); },
          "Hp of the canonical arrangement: H rounded up to 256.")
      .def_prop_ro(
          "padded_intermediate_size",
          [=](const WeightsHandle& w) { return shape(w).padded_intermediate_size(); },
          "Ip of the canonical arrangement: I rounded up to 256.")
      .def_prop_ro(
          "device",
          [](const WeightsHandle& w) { return to_string(w.shared->weights.device()); },
          "Where the weights live: \"cpu\", \"cuda:0\".")
      .def_prop_ro(
          "size_bytes",
          [](const WeightsHandle& w) { return w.shared->weights.size_bytes(); },
          "Bytes held, alphas and padding included.")
      .def_prop_ro(
          "layout_name",
          [](const WeightsHandle& w) { return w.shared->weights.layout_name(); },
          "Name of the storage order: \"cpu-tiles\".")
      .def("__repr__", [=](const WeightsHandle& w) {
        const ExpertShape& s = shape(w);
        return fmt::format(
            "ExpertWeights({} experts, hidden_size {}, intermediate_size {}, {}, {})",
            s.num_local_experts,
            s.hidden_size,
            s.intermediate_size,
            s.gated ? "gated" : "not gated",
            to_string(w.shared->weights.device()));
      });
}

}  // namespace hexpert::python

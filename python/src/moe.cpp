// hexpert.RoutedMoe.
#include "hexpert/moe.hpp"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <mutex>

#include "arguments.hpp"
#include "arrays.hpp"
#include "bindings.hpp"

namespace hexpert::python {
namespace {

using namespace nb::literals;  // NOLINT(google-build-using-namespace)

// A layer and the weights that it reads. Threads take turns.
struct Layer {
  // Before the layer that refers to them.
  std::shared_ptr<SharedWeights> weights;
  nb::object workspace;           // of the caller, or None
  DlpackExport workspace_export;  // of an exporter: the memory may belong to it alone
  RoutedMoe moe;
  std::unique_ptr<std::mutex> mutex = std::make_unique<std::mutex>();
};

// The workspace may refer to the layer: an array of a class of the program, say. Its export shows no Python objects,
// and stays until the layer, which points into its memory, is gone.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Layer>(self)->workspace.ptr());
  return 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Layer>(self)->workspace = nb::none();
  return 0;
}

nb::object forward(Layer& self,
                   nb::handle hidden_states,
                   nb::handle routing_map,
                   nb::handle probabilities,
                   nb::handle out,
                   nb::handle token_capacity,
                   nb::handle use_bounded_rows,
                   nb::handle stream) {
  MoeInputs inputs;
  inputs.token_capacity = optional_argument<int64_t>(token_capacity, "token_capacity");
  inputs.use_bounded_rows = argument<bool>(use_bounded_rows, "use_bounded_rows");
  const Array hidden(hidden_states, "hidden_states", "bf16", stream_given(stream));
  const Stream on = stream_of(hidden, stream);
  const Array routing(routing_map, "routing_map", "i32 or i64", on);
  const Array weights(probabilities, "probabilities", "f32", on);
  nb::object made;
  if (out.is_none()) {
    const TensorView& view = hidden.view();
    const int64_t hidden_size = self.weights->weights.shape().hidden_size;
    if (view.rank != 2 || view.shape[1] != hidden_size) {
      raise({view.rank != 2 ? ErrorCode::kInvalidShape : ErrorCode::kShapeMismatch,
             fmt::format(
                 "hidden_states: expected [tokens, {}], got {}", hidden_size, describe(view))});
    }
    const bool zeroed =
        inputs.use_bounded_rows && inputs.token_capacity && *inputs.token_capacity < view.shape[0];
    made = matrix_like(hidden_states, view.shape[0], view.shape[1], zeroed);
  } else {
    made = nb::borrow(out);
  }
  const Array result(made, "out", "bf16 or f32", on);
  const TensorView target = out.is_none() ? result.view() : result.writable();
  inputs.hidden_states = hidden.view();
  inputs.routing_map = routing.view();
  inputs.probabilities = weights.view();
  without_gil([&] {
    const std::scoped_lock turn(*self.mutex);
    const std::shared_lock lock(self.weights->mutex);
    const Status status = self.moe.forward(inputs, target, on);
    if (!status.ok()) return status;
    return wait_if_needed({&hidden, &routing, &weights, &result}, on, target.device);
  });
  return out.is_none() ? finish(hidden_states, made) : made;
}

WorkspaceView workspace_of(const SharedWeights& weights, const Array& workspace) {
  const TensorView view = workspace.writable();
  if (!view.is_contiguous()) {
    raise({ErrorCode::kNotContiguous,
           fmt::format("workspace: expected a packed array, got {} with gaps", describe(view))});
  }
  if (view.device != weights.weights.device()) {
    raise({ErrorCode::kDeviceMismatch,
           fmt::format("workspace: expected memory of {}, got {}",
                       to_string(weights.weights.device()),
                       to_string(view.device))});
  }
  return {view.data, view.num_elements()};
}

// What create() plans.
struct Plan {
  MoeProblem problem;
  MoeOptions options;
};

Layer create(const WeightsHandle& weights, Plan plan, nb::handle workspace) {
  DlpackExport memory{nullptr, nullptr};
  if (!workspace.is_none()) {
    Array array(workspace, "workspace", "u8");
    plan.options.workspace = workspace_of(*weights.shared, array);
    memory = array.take_export();
  }
  return {weights.shared, nb::borrow(workspace), std::move(memory), without_gil([&] {
            return RoutedMoe::create(plan.problem, weights.shared->weights, plan.options);
          })};
}

int64_t workspace_bytes_for(const WeightsHandle& weights, const Plan& plan, nb::handle) {
  return check(RoutedMoe::workspace_bytes_for(plan.problem, weights.shared->weights, plan.options));
}

// Two functions have the arguments of a plan.
template <typename Function>
void bind_planned(nb::class_<Layer>& layer,
                  const char* name,
                  const Function& function,
                  const std::string& signature,
                  const char* doc) {
  layer.def_static(
      name,
      [function](nb::handle weights,
                 nb::handle max_tokens,
                 nb::handle top_k,
                 nb::handle num_experts,
                 nb::handle local_expert_offset,
                 nb::handle activation,
                 nb::handle alpha,
                 nb::handle beta,
                 nb::handle limit,
                 nb::handle situ_b,
                 nb::handle situ_c,
                 nb::handle backend,
                 nb::handle num_threads,
                 nb::handle batch_invariant,
                 nb::handle workspace) {
        const auto& shared = argument<const WeightsHandle&>(weights, "weights");
        Plan plan;
        MoeProblem& problem = plan.problem;
        problem.max_tokens = argument<int64_t>(max_tokens, "max_tokens");
        problem.top_k = argument<int64_t>(top_k, "top_k");
        problem.num_experts = argument<int64_t>(num_experts, "num_experts");
        problem.local_expert_offset = argument<int64_t>(local_expert_offset, "local_expert_offset");
        problem.activation.type = argument<ActivationType>(activation, "activation");
        problem.activation.alpha = argument<float>(alpha, "alpha");
        problem.activation.beta = argument<float>(beta, "beta");
        problem.activation.limit = argument<float>(limit, "limit");
        problem.activation.situ_b = argument<float>(situ_b, "situ_b");
        problem.activation.situ_c = optional_argument<float>(situ_c, "situ_c");
        plan.options.backend = argument<std::string>(backend, "backend");
        plan.options.num_threads = argument<int>(num_threads, "num_threads");
        plan.options.batch_invariant = argument<bool>(batch_invariant, "batch_invariant");
        return function(shared, plan, workspace);
      },
      "weights"_a.none(),
      nb::kw_only(),
      "max_tokens"_a.none(),
      "top_k"_a.none(),
      "num_experts"_a.none(),
      "local_expert_offset"_a.none() = 0,
      "activation"_a.none() = ActivationType::kSwiGlu,
      "alpha"_a.none() = 1.0F,
      "beta"_a.none() = 0.0F,
      "limit"_a.none() = FLT_MAX,
      "situ_b"_a.none() = 0.0F,
      "situ_c"_a = nb::none(),
      "backend"_a.none() = "",
      "num_threads"_a.none() = 0,
      "batch_invariant"_a.none() = false,
      "workspace"_a = nb::none(),
      nb::sig(signature.c_str()),
      doc);
}

std::string planned_signature(const std::string& name, const std::string& result) {
  return "def " + name +
         "(weights: ExpertWeights, *, max_tokens: int, top_k: int, num_experts: int, "
         "local_expert_offset: int = 0, activation: ActivationType = ..., alpha: float = 1.0, "
         "beta: float = 0.0, limit: float = 3.4028234663852886e+38, situ_b: float = 0.0, "
         "situ_c: float | None = None, backend: str = '', num_threads: int = 0, "
         "batch_invariant: bool = False, workspace: typing.Any = None) -> " +
         result;
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::enum_<ActivationType>(m, "ActivationType", "What an expert does between its two products.")
      .value("SQUARED_RELU", ActivationType::kSquaredRelu, "max(z, 0)^2, not gated")
      .value("SWIGLU", ActivationType::kSwiGlu, "g sigmoid(g) u")
      .value("SWIGLU_OAI",
             ActivationType::kSwiGluOai,
             "min(g, limit) sigmoid(alpha g') (clamp(u, -limit, limit) + beta)")
      .value("GEGLU_TANH", ActivationType::kGeGluTanh, "gelu_tanh(g) u")
      .value("SITU",
             ActivationType::kSiTu,
             "b tanh(g / b) sigmoid(g) c tanh(u / c), or u for the last");
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {0, nullptr}};
  nb::class_<Layer> layer(m,
                          "RoutedMoe",
                          nb::type_slots(slots),
                          R"(One routed mixture-of-experts layer, planned once and run many times.

Keeps its weights alive; they may be refreshed in place between forwards. Threads take turns.)");
  bind_planned(layer,
               "create",
               create,
               planned_signature("create", "RoutedMoe"),
               R"(Plans the layer and allocates its workspace.

max_tokens           largest number of rows forward() will be given
top_k                width of routing_map
num_experts          experts of the whole layer, over all devices
local_expert_offset  the weights are experts [offset, offset + num_local_experts)
activation           alpha, beta and limit belong to SWIGLU_OAI, situ_b and situ_c (> 0) to SITU
num_threads          CPU; 0: the OpenMP default. No result depends on it.
batch_invariant      a token's output does not depend on the other tokens of the call, bit for bit
workspace            packed uint8 memory on the device of the weights, aligned to 256 bytes, where no argument of
                     forward() may lie. Layers may share it when no two of them run at a time. Default: one is
                     made. Too small: ValueError says what is needed.

Raises ValueError (arguments, activation), UnsupportedError (backend), MemoryError.)");
  bind_planned(layer,
               "workspace_bytes_for",
               workspace_bytes_for,
               planned_signature("workspace_bytes_for", "int"),
               "Bytes that create() wants of a workspace. Arguments and errors as for create().");
  layer
      .def("forward",
           &forward,
           "hidden_states"_a.none(),
           "routing_map"_a.none(),
           "probabilities"_a.none(),
           "out"_a = nb::none(),
           nb::kw_only(),
           "token_capacity"_a = nb::none(),
           "use_bounded_rows"_a.none() = false,
           "stream"_a = nb::none(),
           nb::sig("def forward(self, hidden_states: typing.Any, routing_map: typing.Any, "
                   "probabilities: typing.Any, out: typing.Any = None, *, "
                   "token_capacity: int | None = None, use_bounded_rows: bool = False, "
                   "stream: int | None = None) -> typing.Any"),
           R"(Runs the layer.

    out[i] = sum over slots s of probabilities[i, s] * expert(routing_map[i, s], hidden_states[i])

hidden_states     [tokens, hidden_size] bf16, packed. tokens <= max_tokens, 0 included.
routing_map       [tokens, top_k] int32 or int64, packed: global expert ids; -1 and ids of others are skipped
probabilities     [tokens, top_k] float32, packed; applied as given
out               [tokens, hidden_size] bf16 (rounded once) or float32 (the unrounded sum), packed, apart from
                  the inputs and from a given workspace. Default: a new array like hidden_states.
token_capacity    with use_bounded_rows: only rows [0, token_capacity) are read and written; later rows of
                  `out` keep their content, and are zero in a new one
stream            a cudaStream_t as int. Default: the current stream of the framework of hidden_states.

Returns `out`. Not differentiable. Same inputs, same bits.

Raises TypeError (element type), ValueError (shape, layout, alignment, device, read-only or overlapping out),
UnsupportedError, RuntimeError (the device reported an error).)")
      .def_prop_ro(
          "plan",
          [](const Layer& self) { return self.moe.plan(); },
          "One line: backend, tiles, threads, workspace.")
      .def_prop_ro(
          "backend_name", [](const Layer& self) { return self.moe.backend_name(); }, "\"cpu-amx\".")
      .def_prop_ro(
          "workspace_bytes",
          [](const Layer& self) { return self.moe.workspace_bytes(); },
          "Bytes of the workspace, the caller's or its own.")
      .def("__repr__", [](const Layer& self) { return "RoutedMoe(" + self.moe.plan() + ")"; });
}

}  // namespace hexpert::python

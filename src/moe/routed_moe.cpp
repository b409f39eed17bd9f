// RoutedMoe: checks of a plan and of its inputs. The work itself is a backend's.
#include "hexpert/moe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <new>

#include "core/overlap.hpp"
#include "core/threads.hpp"
#include "moe/activation.hpp"
#include "moe/routed_moe_impl.hpp"

namespace hexpert {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kBaseAlignment = 16;  // of BF16 inputs and outputs, bytes

template <typename... Args>
Status fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return {code, fmt::format(format, std::forward<Args>(args)...)};
}

// --- create ---

Status check_problem(const MoeProblem& problem, const ExpertShape& shape) {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  if (problem.max_tokens < 0) {
    return fail(kInvalid, "max_tokens: expected >= 0, got {}", problem.max_tokens);
  }
  if (problem.top_k < 1) return fail(kInvalid, "top_k: expected >= 1, got {}", problem.top_k);
  if (problem.num_experts < 1) {
    return fail(kInvalid, "num_experts: expected >= 1, got {}", problem.num_experts);
  }
  if (problem.local_expert_offset < 0) {
    return fail(
        kInvalid, "local_expert_offset: expected >= 0, got {}", problem.local_expert_offset);
  }
  if (problem.local_expert_offset > problem.num_experts - shape.num_local_experts) {
    return fail(kInvalid,
                "local_expert_offset: expected offset + num_local_experts <= num_experts = {}, got "
                "{} + {}",
                problem.num_experts,
                problem.local_expert_offset,
                shape.num_local_experts);
  }
  HX_RETURN_IF_ERROR(validate_activation(problem.activation, shape.gated));
  if (problem.max_tokens > kMaxInt32 / problem.top_k) {
    return fail(ErrorCode::kTooLarge,
                "max_tokens: expected max_tokens * top_k <= {}, got {} * {}",
                kMaxInt32,
                problem.max_tokens,
                problem.top_k);
  }
  if (problem.top_k > kMaxInt32) {
    return fail(ErrorCode::kTooLarge, "top_k: expected <= {}, got {}", kMaxInt32, problem.top_k);
  }
  return Status::success();
}

// The named backend, or the first available one that takes the problem.
Result<const Backend*> choose_backend(const MoeProblem& problem,
                                      const ExpertShape& shape,
                                      const std::string& name,
                                      const Device& device) {
  if (!name.empty()) {
    Result<const Backend*> found = find_backend(name, device);
    if (!found.ok()) return found;
    if (const Support support = (*found)->supports(problem, shape); !support) {
      return fail(ErrorCode::kUnsupported, "backend: {}: {}", name, support.reason);
    }
    return found;
  }
  std::string reasons;
  for (const Backend* backend : backends()) {
    if (backend->device != device.type) continue;
    Support support = backend->available(device);
    if (support) support = backend->supports(problem, shape);
    if (support) return backend;
    reasons += fmt::format("; {}: {}", backend->name, support.reason);
  }
  return fail(ErrorCode::kUnsupportedDevice,
              "backend: no backend of this build for {}{}",
              to_string(device),
              reasons);
}

// --- forward ---

// A named argument, for messages.
struct Argument {
  std::string_view name;
  ConstTensorView view;
};

int64_t size_bytes(const ConstTensorView& view) {
  return view.num_elements() * size_of(view.dtype);
}

Status check_shape(const Argument& a, int64_t rows, int64_t cols, ErrorCode code) {
  if (a.view.rank != 2 || a.view.shape[0] != rows || a.view.shape[1] != cols) {
    return fail(code, "{}: expected [{}, {}], got {}", a.name, rows, cols, describe(a.view));
  }
  return Status::success();
}

Status check_packed(const Argument& a, ErrorCode code) {
  if (!a.view.is_contiguous()) {
    return fail(code,
                "{}: expected packed rows, got {} with strides [{}, {}]",
                a.name,
                describe(a.view),
                a.view.strides[0],
                a.view.strides[1]);
  }
  return Status::success();
}

Status check_memory(const Argument& a, const RoutedMoe::Impl& impl, int64_t alignment) {
  const Device& device = impl.device;
  if (!(a.view.device == device)) {
    return fail(ErrorCode::kDeviceMismatch,
                "{}: expected memory of {}, got {}",
                a.name,
                to_string(device),
                to_string(a.view.device));
  }
  if (size_bytes(a.view) == 0) return Status::success();
  if (a.view.data == nullptr) {
    return fail(ErrorCode::kNullPointer,
                "{}: expected {} bytes, got a null pointer",
                a.name,
                size_bytes(a.view));
  }
  if (reinterpret_cast<uintptr_t>(a.view.data) % static_cast<uintptr_t>(alignment) != 0) {
    return fail(ErrorCode::kMisaligned,
                "{}: expected an address aligned to {} bytes, got {}",
                a.name,
                alignment,
                a.view.data);
  }
  if (impl.backend->check_memory == nullptr) return Status::success();
  return impl.backend->check_memory(a.name, a.view.data, device);
}

MemoryRange range_of(const Argument& a) {
  return {a.name, a.view.data, size_bytes(a.view)};
}

// What the stages write, `out` and the workspace, lies apart from what they read and each other.
Status check_overlaps(std::initializer_list<MemoryRange> inputs,
                      const MemoryRange& out,
                      const MemoryRange& workspace) {
  for (const MemoryRange& input : inputs) {
    HX_RETURN_IF_ERROR(check_no_overlap(out, input, "input"));
    HX_RETURN_IF_ERROR(check_no_overlap(workspace, input, "input"));
  }
  return check_no_overlap(out, workspace, "workspace");
}

Status check_forward(const RoutedMoe::Impl& impl,
                     const MoeInputs& inputs,
                     const TensorView& out_view) {
  const Argument hidden{"hidden_states", inputs.hidden_states};
  const Argument routing{"routing_map", inputs.routing_map};
  const Argument probabilities{"probabilities", inputs.probabilities};
  const Argument out{"out", out_view};
  const int64_t hidden_size = impl.weights->shape.hidden_size;
  const int64_t top_k = impl.problem.top_k;

  if (hidden.view.rank != 2 || hidden.view.shape[0] < 0) {
    return fail(ErrorCode::kInvalidShape,
                "hidden_states: expected [tokens, {}], got {}",
                hidden_size,
                describe(hidden.view));
  }
  const int64_t tokens = hidden.view.shape[0];
  HX_RETURN_IF_ERROR(check_shape(hidden, tokens, hidden_size, ErrorCode::kShapeMismatch));
  HX_RETURN_IF_ERROR(check_shape(routing, tokens, top_k, ErrorCode::kShapeMismatch));
  HX_RETURN_IF_ERROR(check_shape(probabilities, tokens, top_k, ErrorCode::kShapeMismatch));
  HX_RETURN_IF_ERROR(check_shape(out, tokens, hidden_size, ErrorCode::kInvalidOutput));
  if (tokens > impl.problem.max_tokens) {
    return fail(ErrorCode::kTooLarge,
                "hidden_states: expected at most max_tokens = {} tokens, got {}",
                impl.problem.max_tokens,
                tokens);
  }

  if (hidden.view.dtype != DType::kBF16) {
    return fail(
        ErrorCode::kInvalidDtype, "hidden_states: expected bf16, got {}", describe(hidden.view));
  }
  if (routing.view.dtype != DType::kI32 && routing.view.dtype != DType::kI64) {
    return fail(ErrorCode::kInvalidDtype,
                "routing_map: expected i32 or i64, got {}",
                describe(routing.view));
  }
  if (probabilities.view.dtype != DType::kF32) {
    return fail(ErrorCode::kInvalidDtype,
                "probabilities: expected f32, got {}",
                describe(probabilities.view));
  }
  if (out.view.dtype != DType::kBF16 && out.view.dtype != DType::kF32) {
    return fail(ErrorCode::kInvalidOutput, "out: expected bf16 or f32, got {}", describe(out.view));
  }

  for (const Argument* input : {&hidden, &routing, &probabilities}) {
    HX_RETURN_IF_ERROR(check_packed(*input, ErrorCode::kNotContiguous));
  }
  HX_RETURN_IF_ERROR(check_packed(out, ErrorCode::kInvalidOutput));

  if (inputs.token_capacity && *inputs.token_capacity < 0) {
    return fail(ErrorCode::kInvalidArgument,
                "token_capacity: expected >= 0, got {}",
                *inputs.token_capacity);
  }

  HX_RETURN_IF_ERROR(check_memory(hidden, impl, kBaseAlignment));
  HX_RETURN_IF_ERROR(check_memory(routing, impl, size_of(routing.view.dtype)));
  HX_RETURN_IF_ERROR(check_memory(probabilities, impl, size_of(DType::kF32)));
  HX_RETURN_IF_ERROR(check_memory(out, impl, kBaseAlignment));
  return check_overlaps({range_of(hidden), range_of(routing), range_of(probabilities)},
                        range_of(out),
                        {"workspace", impl.workspace, impl.workspace_bytes});
}

Status run_forward(RoutedMoe::Impl& impl,
                   const MoeInputs& inputs,
                   const TensorView& out,
                   const StageDump* dump,
                   Stream stream) {
  try {
    HX_RETURN_IF_ERROR(check_forward(impl, inputs, out));
    int64_t rows = inputs.hidden_states.shape[0];
    if (inputs.use_bounded_rows && inputs.token_capacity) {
      rows = std::min(rows, *inputs.token_capacity);
    }
    if (rows == 0) return Status::success();
    return impl.backend->forward({
        .problem = &impl.problem,
        .weights = impl.weights,
        .hidden_states = inputs.hidden_states.as<uint16_t>(),
        .routing_map = inputs.routing_map.data,
        .routing_is_i64 = inputs.routing_map.dtype == DType::kI64,
        .probabilities = inputs.probabilities.as<float>(),
        .rows = rows,
        .out = out.data,
        .out_is_f32 = out.dtype == DType::kF32,
        .workspace = impl.workspace,
        .plan = impl.plan.get(),
        .num_threads = impl.options.num_threads,
        .batch_invariant = impl.options.batch_invariant,
        .stream = stream,
        .dump = dump,
    });
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kOutOfMemory, "forward"};
  }
}

// run_forward() that remembers the first error of the device.
Status run_unless_broken(RoutedMoe::Impl& impl,
                         const MoeInputs& inputs,
                         const TensorView& out,
                         const StageDump* dump,
                         Stream stream) {
  if (!impl.broken.ok()) {
    return fail(ErrorCode::kDeviceError,
                "this layer is broken since an earlier error of its device: {}",
                impl.broken.message());
  }
  Status status = run_forward(impl, inputs, out, dump, stream);
  if (status.code() == ErrorCode::kDeviceError) impl.broken = status;
  return status;
}

// Everything of a layer but its workspace and the backend's plan.
Result<std::unique_ptr<RoutedMoe::Impl>> plan_impl(const MoeProblem& problem,
                                                   const ExpertWeights& weights,
                                                   const MoeOptions& options) {
  const ExpertShape& shape = weights.shape();
  HX_RETURN_IF_ERROR(check_problem(problem, shape));
  HX_RETURN_IF_ERROR(check_num_threads("num_threads", options.num_threads));
  Result<const Backend*> backend =
      choose_backend(problem, shape, options.backend, weights.device());
  if (!backend.ok()) return backend.status();

  auto impl = std::make_unique<RoutedMoe::Impl>();
  impl->problem = problem;
  impl->options = options;
  impl->options.num_threads = threads_or_default(options.num_threads);
  impl->weights = &weights.storage();
  impl->device = weights.device();
  impl->backend = *backend;
  impl->workspace_bytes = impl->backend->workspace_bytes(problem, shape, impl->options);
  return impl;
}

// What the caller must give. The CPU kernels may read past the end of their buffers.
int64_t caller_workspace_bytes(const RoutedMoe::Impl& impl) {
  if (impl.workspace_bytes == 0 || impl.backend->allocate != nullptr) return impl.workspace_bytes;
  return impl.workspace_bytes + AlignedBuffer::kSlackBytes;
}

Status take_workspace(RoutedMoe::Impl& impl, const WorkspaceView& given) {
  const int64_t needed = caller_workspace_bytes(impl);
  if (given.bytes < needed) {
    return fail(ErrorCode::kWorkspaceTooSmall,
                "workspace: expected at least {} bytes, got {}",
                needed,
                given.bytes);
  }
  if (needed == 0) return Status::success();
  if (given.data == nullptr) {
    return fail(
        ErrorCode::kNullPointer, "workspace: expected {} bytes, got a null pointer", needed);
  }
  if (reinterpret_cast<uintptr_t>(given.data) % kWorkspaceAlignment != 0) {
    return fail(ErrorCode::kMisaligned,
                "workspace: expected an address aligned to {} bytes, got {}",
                kWorkspaceAlignment,
                given.data);
  }
  if (impl.backend->check_memory != nullptr) {
    HX_RETURN_IF_ERROR(impl.backend->check_memory("workspace", given.data, impl.device));
  }
  impl.workspace = static_cast<std::byte*>(given.data);
  return Status::success();
}

Status allocate_workspace(RoutedMoe::Impl& impl) {
  if (impl.workspace_bytes == 0) return Status::success();
  if (impl.backend->allocate != nullptr) {
    Result<std::unique_ptr<Memory>> memory =
        impl.backend->allocate(impl.workspace_bytes, impl.device);
    if (!memory.ok()) return memory.status();
    impl.own_device_workspace = *std::move(memory);
    impl.workspace = impl.own_device_workspace->data();
    return Status::success();
  }
  impl.own_workspace = AlignedBuffer::zeroed(impl.workspace_bytes);
  if (!impl.own_workspace) {
    return fail(ErrorCode::kOutOfMemory, "workspace: {} bytes", impl.workspace_bytes);
  }
  impl.workspace = reinterpret_cast<std::byte*>(impl.own_workspace.data());
  return Status::success();
}

Result<std::unique_ptr<RoutedMoe::Impl>> make_impl(const MoeProblem& problem,
                                                   const ExpertWeights& weights,
                                                   const MoeOptions& options) {
  Result<std::unique_ptr<RoutedMoe::Impl>> planned = plan_impl(problem, weights, options);
  if (!planned.ok()) return planned;
  RoutedMoe::Impl& impl = **planned;
  const bool given = options.workspace.data != nullptr || options.workspace.bytes != 0;
  HX_RETURN_IF_ERROR(given ? take_workspace(impl, options.workspace) : allocate_workspace(impl));
  if (impl.backend->plan != nullptr) {
    Result<std::unique_ptr<BackendPlan>> plan =
        impl.backend->plan(problem, *impl.weights, impl.options, impl.workspace);
    if (!plan.ok()) return plan.status();
    impl.plan = *std::move(plan);
  }
  return planned;
}

}  // namespace

Result<RoutedMoe> RoutedMoe::create(const MoeProblem& problem,
                                    const ExpertWeights& weights,
                                    const MoeOptions& options) {
  try {
    Result<std::unique_ptr<Impl>> impl = make_impl(problem, weights, options);
    if (!impl.ok()) return impl.status();
    return RoutedMoe(*std::move(impl));
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kOutOfMemory, "create");
  }
}

Result<int64_t> RoutedMoe::workspace_bytes_for(const MoeProblem& problem,
                                               const ExpertWeights& weights,
                                               const MoeOptions& options) {
  try {
    const Result<std::unique_ptr<Impl>> impl = plan_impl(problem, weights, options);
    if (!impl.ok()) return impl.status();
    return caller_workspace_bytes(**impl);
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kOutOfMemory, "workspace_bytes_for");
  }
}

Status RoutedMoe::forward(const MoeInputs& inputs, const TensorView& out, Stream stream) {
  return run_unless_broken(*impl_, inputs, out, nullptr, stream);
}

Status forward_with_dump(RoutedMoe& moe,
                         const MoeInputs& inputs,
                         const TensorView& out,
                         const StageDump& dump,
                         Stream stream) {
  return run_unless_broken(moe.impl(), inputs, out, &dump, stream);
}

std::string RoutedMoe::plan() const {
  const ExpertShape& shape = impl_->weights->shape;
  const MoeProblem& problem = impl_->problem;
  return fmt::format(
      "{} | tokens <= {} experts {} of {} from {} top_k {} hidden {} intermediate {} {} | {} | "
      "threads {} | workspace {} bytes",
      impl_->backend->name,
      problem.max_tokens,
      shape.num_local_experts,
      problem.num_experts,
      problem.local_expert_offset,
      problem.top_k,
      shape.hidden_size,
      shape.intermediate_size,
      to_string(problem.activation.type),
      impl_->backend->describe(problem, shape, impl_->options),
      impl_->options.num_threads,
      impl_->workspace_bytes);
}

std::string_view RoutedMoe::backend_name() const {
  return impl_->backend->name;
}
int64_t RoutedMoe::workspace_bytes() const {
  return impl_->workspace_bytes;
}

RoutedMoe::RoutedMoe(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RoutedMoe::RoutedMoe(RoutedMoe&&) noexcept = default;
RoutedMoe& RoutedMoe::operator=(RoutedMoe&&) noexcept = default;
RoutedMoe::~RoutedMoe() = default;

}  // namespace hexpert

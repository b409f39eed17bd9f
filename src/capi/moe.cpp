// The routed layer in the C ABI.
#include "hexpert/moe.hpp"

#include "capi/call.hpp"

namespace hexpert::capi {
namespace {

Result<MoeProblem> problem_of(const hx_moe_problem* given) {
  const Result<hx_moe_problem> in = read("problem", given);
  if (!in.ok()) return in.status();
  if (in->activation < HX_SQUARED_RELU || in->activation > HX_SITU) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("activation: expected 0..{}, got {}", +HX_SITU, in->activation));
  }
  MoeProblem problem;
  problem.max_tokens = in->max_tokens;
  problem.top_k = in->top_k;
  problem.num_experts = in->num_experts;
  problem.local_expert_offset = in->local_expert_offset;
  problem.activation.type = static_cast<ActivationType>(in->activation);
  problem.activation.alpha = in->alpha;
  problem.activation.beta = in->beta;
  problem.activation.limit = in->limit;
  problem.activation.situ_b = in->situ_b;
  if (in->situ_c != 0) problem.activation.situ_c = in->situ_c;
  return problem;
}

Result<MoeOptions> options_of(const hx_moe_options* given) {
  const Result<hx_moe_options> in = read_or("options", given, hx_moe_options HX_MOE_OPTIONS_INIT);
  if (!in.ok()) return in.status();
  return MoeOptions{.backend = string_of(in->backend),
                    .num_threads = in->num_threads,
                    .batch_invariant = in->batch_invariant != 0,
                    .workspace = {in->workspace, in->workspace_bytes}};
}

Result<MoeInputs> inputs_of(const hx_moe_inputs* given) {
  const Result<hx_moe_inputs> in = read("inputs", given);
  if (!in.ok()) return in.status();
  const Result<TensorView> hidden = view_of("hidden_states", "bf16", in->hidden_states);
  if (!hidden.ok()) return hidden.status();
  const Result<TensorView> routing = view_of("routing_map", "i32 or i64", in->routing_map);
  if (!routing.ok()) return routing.status();
  const Result<TensorView> probabilities = view_of("probabilities", "f32", in->probabilities);
  if (!probabilities.ok()) return probabilities.status();
  MoeInputs inputs;
  inputs.hidden_states = *hidden;
  inputs.routing_map = *routing;
  inputs.probabilities = *probabilities;
  if (in->has_token_capacity != 0) inputs.token_capacity = in->token_capacity;
  inputs.use_bounded_rows = in->use_bounded_rows != 0;
  return inputs;
}

}  // namespace
}  // namespace hexpert::capi

using hexpert::Status;
namespace capi = hexpert::capi;

hx_status hx_moe_create(const hx_moe_problem* problem,
                        const hx_weights* weights,
                        const hx_moe_options* options,
                        hx_moe** moe) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    HX_RETURN_IF_ERROR(capi::require("moe", moe));
    const auto sizes = capi::problem_of(problem);
    if (!sizes.ok()) return sizes.status();
    const auto rules = capi::options_of(options);
    if (!rules.ok()) return rules.status();
    auto layer = hexpert::RoutedMoe::create(*sizes, *weights->weights, *rules);
    if (!layer.ok()) return layer.status();
    std::string plan = layer->plan();
    *moe = new hx_moe{weights->weights, *std::move(layer), std::move(plan)};
    return {};
  });
}

hx_status hx_moe_workspace_bytes_for(const hx_moe_problem* problem,
                                     const hx_weights* weights,
                                     const hx_moe_options* options,
                                     int64_t* bytes) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("weights", weights));
    HX_RETURN_IF_ERROR(capi::require("bytes", bytes));
    const auto sizes = capi::problem_of(problem);
    if (!sizes.ok()) return sizes.status();
    const auto rules = capi::options_of(options);
    if (!rules.ok()) return rules.status();
    const auto needed = hexpert::RoutedMoe::workspace_bytes_for(*sizes, *weights->weights, *rules);
    if (needed.ok()) *bytes = *needed;
    return needed.status();
  });
}

void hx_moe_free(hx_moe* moe) {
  delete moe;
}

hx_status hx_moe_forward(hx_moe* moe,
                         const hx_moe_inputs* inputs,
                         const DLTensor* out,
                         void* stream) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("moe", moe));
    const auto from = capi::inputs_of(inputs);
    if (!from.ok()) return from.status();
    const auto to = hexpert::view_of("out", "bf16 or f32", out);
    if (!to.ok()) return to.status();
    return moe->layer.forward(*from, *to, {stream});
  });
}

const char* hx_moe_plan(const hx_moe* moe) {
  return moe == nullptr ? "" : moe->plan.c_str();
}
const char* hx_moe_backend(const hx_moe* moe) {
  return moe == nullptr ? "" : moe->layer.backend_name().data();  // a literal
}
int64_t hx_moe_workspace_bytes(const hx_moe* moe) {
  return moe == nullptr ? 0 : moe->layer.workspace_bytes();
}

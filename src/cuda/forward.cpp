#include "cuda/forward.hpp"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <iterator>

#include "cuda/decode.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/device_weights.hpp"
#include "cuda/hopper_plan.hpp"
#include "cuda/launch.hpp"
#include "cuda/requantize.hpp"
#include "cuda/stage_dump.hpp"
#include "weights/storage.hpp"

namespace hexpert::cuda {
namespace {

struct HopperPlan final : BackendPlan {
  Device device;
  FragmentWeights weights;
  HopperWorkspace workspace;
  // Operands of FC1 and FC2, for each variant of the GEMM.
  OperandMaps x_maps[std::size(kGemmVariants)];
  OperandMaps h_maps[std::size(kGemmVariants)];
  int multiprocessors = 0;
  bool overlap = true;
  // Of the decode kernel.
  std::unique_ptr<Memory> arrivals;
  DecodeMaps fc1_maps;
  DecodeMaps fc2_maps;
};

// A named range in the profiler's time line.
class StageRange {
 public:
  explicit StageRange(const char* name) { nvtxRangePushA(name); }
  ~StageRange() { nvtxRangePop(); }
  StageRange(const StageRange&) = delete;
  StageRange& operator=(const StageRange&) = delete;
};

// One forward: what all stages share.
class Forward {
 public:
  Forward(const ForwardArgs& args, const HopperPlan& plan)
      : args_(args),
        plan_(plan),
        problem_(*args.problem),
        w_(plan.weights),
        work_(plan.workspace),
        multiprocessors_(plan.multiprocessors),
        slots_(args.rows * problem_.top_k),
        how_(plan_forward(problem_, w_, args.rows, args.batch_invariant)),
        // A dump looks at results between the stages.
        overlapped_{to_cuda(args.stream), plan.overlap && args.dump == nullptr},
        dump_(args, plan.device, w_, work_) {}

  Status run() {
    HX_RETURN_IF_ERROR(dump_.begin());
    if (how_.decode) {
      HX_RETURN_IF_ERROR(check(decode_tokens(), "decode"));
      HX_RETURN_IF_ERROR(dump_.after_fc1(false));
      return dump_.end(false);
    }
    HX_RETURN_IF_ERROR(check(route(), "route"));
    HX_RETURN_IF_ERROR(check(quantize(), "quantize"));
    HX_RETURN_IF_ERROR(check(fc1(), "fc1"));
    HX_RETURN_IF_ERROR(dump_.after_fc1(how_.fc1_partial));
    HX_RETURN_IF_ERROR(check(requantize_routes(), "requantize"));
    HX_RETURN_IF_ERROR(check(fc2(), "fc2"));
    HX_RETURN_IF_ERROR(check(combine_routes(), "combine"));
    return dump_.end(how_.fc2_partial);
  }

 private:
  cudaError_t decode_tokens() {
    const StageRange range("decode");
    Decode args = {.fc1_maps = plan_.fc1_maps,
                   .fc2_maps = plan_.fc2_maps,
                   .hidden_states = args_.hidden_states,
                   .routing_map = args_.routing_map,
                   .routing_is_i64 = args_.routing_is_i64,
                   .probabilities = args_.probabilities,
                   .rows = static_cast<int>(args_.rows),
                   .top_k = static_cast<int>(problem_.top_k),
                   .local_expert_offset = problem_.local_expert_offset,
                   .weights = w_,
                   .out = args_.out,
                   .out_is_f32 = args_.out_is_f32,
                   .intermediate = work_.h,
                   .route_output = reinterpret_cast<uint16_t*>(work_.results),
                   .arrivals = reinterpret_cast<uint64_t*>(plan_.arrivals->data()),
                   .stages = {}};
    if (args_.dump != nullptr) {
      args.stages = {.x_codes = dump_.x_codes(),
                     .x_block_scales = dump_.x_block_scales(),
                     .x_token_scale = work_.x_token_scale,
                     .h_codes = dump_.h_codes(),
                     .h_block_scales = dump_.h_block_scales(),
                     .h_token_scale = work_.h_token_scale,
                     .expanded_to_permuted = work_.routes.expanded_to_permuted,
                     .num_routes = work_.routes.num_routes};
    }
    return decode(args, multiprocessors_, LaunchOptions{overlapped_.stream});
  }

  cudaError_t route() {
    const StageRange range("route");
    // Without overlap: it waits for all that came before this layer, and the quantizer's early loads
    // rely on that.
    return route_tokens({.routing_map = args_.routing_map,
                         .is_i64 = args_.routing_is_i64,
                         .rows = args_.rows,
                         .top_k = problem_.top_k,
                         .local_expert_offset = problem_.local_expert_offset,
                         .num_local_experts = w_.shape.num_local_experts,
                         .max_width = how_.gemm->max_width,
                         .narrow_max_width = how_.narrow_gemm ? how_.narrow_gemm->max_width : 0,
                         .max_narrow_routes = how_.max_narrow_routes,
                         .out = work_.routes},
                        LaunchOptions{overlapped_.stream, false});
  }

  cudaError_t quantize() {
    const StageRange range("quantize");
    return quantize_tokens({.source = args_.hidden_states,
                            .rows = args_.rows,
                            .cols = w_.shape.hidden_size,
                            .source_stride = w_.shape.hidden_size,
                            .padded_cols = w_.hidden,
                            .codes = dump_.x_codes(),
                            .block_scales = dump_.x_block_scales(),
                            .token_scale = work_.x_token_scale,
                            .operand = work_.x,
                            .expanded_to_permuted = work_.routes.expanded_to_permuted,
                            .top_k = problem_.top_k,
                            .route_scale = work_.x_route_scale},
                           overlapped_);
  }

  cudaError_t fc1() {
    const StageRange range("fc1");
    const Epilogue activated = w_.shape.gated ? Epilogue::kSwiGlu : Epilogue::kSquaredRelu;
    return multiply({.weights = w_.fc1,
                     .expert_bytes = w_.fc1_bytes(),
                     .fragment_rows = w_.fc1_rows,
                     .k = w_.hidden,
                     .x = {},
                     .row_scale = work_.x_route_scale,
                     .up_alpha = w_.fc1_up_alpha,
                     .gate_alpha = w_.fc1_gate_alpha,
                     .routes = work_.routes,
                     .items_taken = work_.routes.items_taken,
                     .out = how_.fc1_partial ? static_cast<void*>(work_.fc1_sums) : work_.h,
                     .out_cols = w_.intermediate,
                     .max_routes = slots_,
                     .splits = how_.fc1_splits},
                    plan_.x_maps,
                    how_.fc1_partial ? Epilogue::kPartial : activated);
  }

  cudaError_t requantize_routes() {
    const StageRange range("requantize");
    Requantize args = {.max_routes = slots_,
                       .num_routes = work_.routes.num_routes,
                       .cols = w_.intermediate,
                       .rows = work_.h,
                       .token_scale = work_.h_token_scale,
                       .codes = dump_.h_codes(),
                       .block_scales = dump_.h_block_scales(),
                       .partial = {}};
    if (how_.fc1_partial) {
      args.partial = {.sums = work_.fc1_sums,
                      .splits = how_.fc1_splits,
                      .fc1_rows = w_.fc1_rows,
                      .activation = problem_.activation,
                      .route_scale = work_.x_route_scale,
                      .route_expert = work_.routes.route_expert,
                      .up_alpha = w_.fc1_up_alpha,
                      .gate_alpha = w_.fc1_gate_alpha,
                      .intermediate = dump_.intermediate()};
    }
    return requantize(args, overlapped_);
  }

  cudaError_t fc2() {
    const StageRange range("fc2");
    return multiply({.weights = w_.fc2,
                     .expert_bytes = w_.fc2_bytes(),
                     .fragment_rows = w_.fc2_rows,
                     .k = w_.intermediate,
                     .x = {},
                     .row_scale = work_.h_token_scale,
                     .up_alpha = w_.fc2_alpha,
                     .routes = work_.routes,
                     .items_taken = work_.routes.items_taken + 1,
                     .out = work_.results,
                     .out_cols = w_.fc2_rows,
                     .max_routes = slots_,
                     .splits = how_.fc2_splits},
                    plan_.h_maps,
                    how_.fc2_partial ? Epilogue::kPartial : Epilogue::kScale);
  }

  cudaError_t combine_routes() {
    const StageRange range("combine");
    Combine args = {.rows = args_.rows,
                    .top_k = problem_.top_k,
                    .cols = w_.shape.hidden_size,
                    .probabilities = args_.probabilities,
                    .expanded_to_permuted = work_.routes.expanded_to_permuted,
                    .out = args_.out,
                    .out_is_f32 = args_.out_is_f32,
                    .route_cols = w_.fc2_rows,
                    .route_output = reinterpret_cast<const uint16_t*>(work_.results),
                    .partial = {}};
    if (how_.fc2_partial) {
      args.partial = {.sums = reinterpret_cast<const float*>(work_.results),
                      .splits = how_.fc2_splits,
                      .max_routes = slots_,
                      .route_expert = work_.routes.route_expert,
                      .token_scale = work_.h_token_scale,
                      .alpha = w_.fc2_alpha,
                      .route_output = dump_.route_output()};
    }
    return combine(args, overlapped_);
  }

  // By the planned kernels, of which the device runs one.
  cudaError_t multiply(GroupedGemm args,
                       const OperandMaps (&maps)[std::size(kGemmVariants)],
                       Epilogue epilogue) {
    args.one_of_two = how_.narrow_gemm != nullptr;
    for (const GemmVariant* gemm : {how_.gemm, how_.narrow_gemm}) {
      if (gemm == nullptr) continue;
      const auto at = std::find(std::begin(kGemmVariants), std::end(kGemmVariants), gemm);
      args.x = maps[at - std::begin(kGemmVariants)];
      const cudaError_t error = gemm->launch(args, epilogue, multiprocessors_, overlapped_);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  const ForwardArgs& args_;
  const HopperPlan& plan_;
  const MoeProblem& problem_;
  const FragmentWeights& w_;
  const HopperWorkspace& work_;
  int multiprocessors_;
  int64_t slots_;
  ForwardPlan how_;
  LaunchOptions overlapped_;
  DeviceDump dump_;
};

// Of every kernel that a forward may launch.
Status configure_kernels() {
  HX_RETURN_IF_ERROR(check(configure_decode(), "decode"));
  HX_RETURN_IF_ERROR(check(configure_route(), "route"));
  HX_RETURN_IF_ERROR(check(configure_quantize_tokens(), "quantize"));
  for (const GemmVariant* variant : kGemmVariants)
    HX_RETURN_IF_ERROR(check(variant->configure(), "grouped_gemm"));
  HX_RETURN_IF_ERROR(check(configure_requantize(), "requantize"));
  return check(configure_combine(), "combine");
}

}  // namespace

Result<std::unique_ptr<BackendPlan>> make_plan(const MoeProblem& problem,
                                               const ExpertWeights::Storage& weights,
                                               const MoeOptions& options,
                                               std::byte* workspace) {
  const auto& held = static_cast<const HopperWeights&>(*weights.on_device);
  const CurrentDevice current(held.device());
  if (!current.status().ok()) return current.status();
  auto plan = std::make_unique<HopperPlan>();
  plan->device = held.device();
  plan->weights = held.view();
  plan->workspace = lay_out_workspace(problem, plan->weights, options.batch_invariant, workspace);
  plan->overlap = options.overlap_launches;
  HX_RETURN_IF_ERROR(
      check(cudaDeviceGetAttribute(
                &plan->multiprocessors, cudaDevAttrMultiProcessorCount, plan->device.index),
            "cudaDevAttrMultiProcessorCount"));
  HX_RETURN_IF_ERROR(configure_kernels());
  Result<std::unique_ptr<Memory>> arrivals = allocate_memory(sizeof(uint64_t), plan->device);
  if (!arrivals.ok()) return arrivals.status();
  plan->arrivals = *std::move(arrivals);
  HX_RETURN_IF_ERROR(check(cudaMemset(plan->arrivals->data(), 0, sizeof(uint64_t)), "arrivals"));
  const FragmentWeights& w = plan->weights;
  HX_RETURN_IF_ERROR(decode_maps(plan->fc1_maps, w.fc1, w.shape.num_local_experts * w.fc1_bytes()));
  HX_RETURN_IF_ERROR(decode_maps(plan->fc2_maps, w.fc2, w.shape.num_local_experts * w.fc2_bytes()));
  const int64_t slots = problem.max_tokens * problem.top_k;
  for (size_t i = 0; i < std::size(kGemmVariants) && slots > 0; ++i) {
    const GemmVariant& variant = *kGemmVariants[i];
    const HopperWorkspace& work = plan->workspace;
    HX_RETURN_IF_ERROR(operand_maps(plan->x_maps[i], variant, work.x, slots, plan->weights.hidden));
    HX_RETURN_IF_ERROR(
        operand_maps(plan->h_maps[i], variant, work.h, slots, plan->weights.intermediate));
  }
  return std::unique_ptr<BackendPlan>(std::move(plan));
}

Status forward(const ForwardArgs& args) {
  const auto& plan = static_cast<const HopperPlan&>(*args.plan);
  const CurrentDevice current(plan.device);
  HX_RETURN_IF_ERROR(current.status());
  return Forward(args, plan).run();
}

}  // namespace hexpert::cuda

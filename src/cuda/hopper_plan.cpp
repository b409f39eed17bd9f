#include "cuda/hopper_plan.hpp"

#include <algorithm>
#include <cmath>

#include "cuda/decode.hpp"
#include "cuda/parts.hpp"

namespace hexpert::cuda {
namespace {

// K is split for the benefit of batches that leave multiprocessors idle. Beyond this many routes
// there is work for all, and the FP32 sums would cost more than they bring.
constexpr int64_t kMaxSplitRoutes = 256;
constexpr int kMaxSplits = 8;
// The number of multiprocessors of the H100 and H200. A constant, so that results do not depend on
// the part of a GPU that a process is given.
constexpr int64_t kMultiprocessors = 132;
// What an item costs beside its stages, and a further split beside its items, in stages.
constexpr double kItemCost = 0.7;
constexpr double kSplitCost = 0.25;
// Of a tile beyond the mean number of tokens.
constexpr double kMaxSpareTokens = 16;
// From here on a kernel that turns out not to be wanted costs less than tiles twice as wide as wanted.
constexpr int kMinWidthOfTwo = 112;

// The mean number of tokens with which nearly every expert's fit in the variant, when experts are equally
// likely: m + 2.5 sqrt(m) of them. Where tiles are wide, a second one for a few experts costs less than a
// wider kernel for all.
double mean_that_fits(const GemmVariant& variant) {
  const auto width = static_cast<double>(variant.max_width);
  const double root = (std::sqrt(2.5 * 2.5 + 4 * width) - 2.5) / 2;
  return std::max(root * root, width - kMaxSpareTokens);
}

const GemmVariant& choose_variant(double tokens_per_expert, int64_t rows) {
  for (const GemmVariant* variant : kGemmVariants) {
    if (rows <= variant->max_width || tokens_per_expert <= mean_that_fits(*variant)) {
      return *variant;
    }
  }
  return gemm_width256;
}

// The number of parts of K that takes the least time: rounds of all multiprocessors, times the
// stages of an item.
int choose_splits(const GemmVariant& gemm, double row_tiles, int64_t fragment_rows, int64_t k) {
  const auto stages = static_cast<double>((k + gemm.stage_k - 1) / gemm.stage_k);
  const double tiles =
      row_tiles * static_cast<double>((fragment_rows + gemm.item_rows - 1) / gemm.item_rows);
  int best = 1;
  double best_cost = 0;
  for (int splits = 1; splits <= std::min<double>(kMaxSplits, stages); ++splits) {
    const double per_item = std::ceil(stages / splits);
    if (per_item * (splits - 1) >= stages) continue;  // the last part would be empty
    const double rounds = std::ceil(tiles * splits / static_cast<double>(kMultiprocessors));
    const double cost = rounds * (per_item + kItemCost) + kSplitCost * (splits - 1);
    if (splits == 1 || cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

bool activated_by_gemm(const Activation& activation) {
  return activation.type == ActivationType::kSquaredRelu ||
         activation.type == ActivationType::kSwiGlu;
}

}  // namespace

const GemmVariant* const kGemmVariants[7] = {&gemm_width8,
                                             &gemm_width16,
                                             &gemm_width32,
                                             &gemm_width64,
                                             &gemm_width112,
                                             &gemm_width160,
                                             &gemm_width256};

ForwardPlan plan_forward(const MoeProblem& problem,
                         const FragmentWeights& sizes,
                         int64_t rows,
                         bool batch_invariant) {
  const int64_t slots = rows * problem.top_k;
  const auto experts = static_cast<double>(problem.num_experts);
  const auto local = static_cast<double>(sizes.shape.num_local_experts);
  ForwardPlan plan;
  plan.decode = !batch_invariant && can_decode(problem, sizes, rows);
  const double tokens_per_expert = static_cast<double>(slots) / experts;
  plan.gemm = &choose_variant(tokens_per_expert, rows);
  if (!batch_invariant && slots <= kMaxSplitRoutes) {
    const double row_tiles =
        std::ceil(std::min(static_cast<double>(slots), experts) * local / experts);
    plan.fc1_splits = choose_splits(*plan.gemm, row_tiles, sizes.fc1_rows, sizes.hidden);
    plan.fc2_splits = choose_splits(*plan.gemm, row_tiles, sizes.fc2_rows, sizes.intermediate);
  }
  if (plan.gemm->max_width >= kMinWidthOfTwo && slots > kMaxSplitRoutes) {
    const GemmVariant& narrow = choose_variant(tokens_per_expert / 2, rows);
    if (&narrow != plan.gemm) {
      plan.narrow_gemm = &narrow;
      plan.max_narrow_routes = static_cast<int64_t>(mean_that_fits(narrow) * local);
    }
  }
  plan.fc1_partial = plan.fc1_splits > 1 || !activated_by_gemm(problem.activation);
  plan.fc2_partial = plan.fc2_splits > 1;
  return plan;
}

HopperWorkspace lay_out_workspace(const MoeProblem& problem,
                                  const FragmentWeights& sizes,
                                  bool batch_invariant,
                                  std::byte* base) {
  const int64_t slots = problem.max_tokens * problem.top_k;
  const int64_t split_slots = batch_invariant ? 0 : std::min(slots, kMaxSplitRoutes);
  int64_t fc1_sums = split_slots * kMaxSplits;  // rows of FP32
  if (!activated_by_gemm(problem.activation)) fc1_sums = std::max(fc1_sums, slots);
  const int64_t x_bytes = round_up(slots * sizes.hidden * 2, kWorkspaceAlignment);
  const int64_t result_bytes = std::max({x_bytes + fc1_sums * sizes.fc1_rows * 4,
                                         split_slots * kMaxSplits * sizes.fc2_rows * 4,
                                         slots * sizes.fc2_rows * 2});
  Parts parts(base);
  HopperWorkspace w;
  w.routes.num_tiles = parts.take<int32_t>(1);
  w.routes.num_routes = parts.take<int32_t>(1);
  w.routes.max_width = parts.take<int32_t>(1);
  w.routes.items_taken = parts.take<int32_t>(2);
  w.routes.tiles = parts.take<RowTile>(
      max_row_tiles(slots, sizes.shape.num_local_experts, kGemmVariants[0]->max_width));
  w.routes.route_expert = parts.take<int32_t>(slots);
  w.routes.expanded_to_permuted = parts.take<int32_t>(slots);
  w.x_token_scale = parts.take<float>(problem.max_tokens);
  w.x_route_scale = parts.take<float>(slots);
  w.h = parts.take<uint16_t>(slots * sizes.intermediate);
  w.h_token_scale = parts.take<float>(slots);
  w.results = parts.take<std::byte>(result_bytes);
  w.x = reinterpret_cast<uint16_t*>(w.results);
  w.fc1_sums = reinterpret_cast<float*>(w.results + x_bytes);
  w.bytes = parts.used();
  return w;
}

}  // namespace hexpert::cuda

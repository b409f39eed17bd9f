// quantize -> route -> FC1 + activation -> requantize -> FC2 -> combine, by all threads together.
//
// The work of a GEMM stage is the list of (expert, strip of 64 rows) in memory order; threads claim
// consecutive parts of it and read one long stream of weights each. Every result element is computed
// by one thread in one fixed order, so neither the number of threads nor their timing changes a bit.
#include "cpu/forward.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <new>

#include "cpu/float_environment.hpp"
#include "cpu/quantize_row.hpp"
#include "cpu/workspace.hpp"
#include "moe/stage_dump.hpp"
#include "weights/storage.hpp"

namespace hexpert::cpu {
namespace {

namespace tiles = layout::cpu_tiles;

using tiles::kPairRows;
using tiles::kStripRows;

// Reading a strip costs as much as multiplying it with this many tokens.
constexpr int64_t kReadCostTokens = 8;
// Threads claim a share of what is left, so that streams are long at first and the last claims are
// short and level the threads; a claim is never smaller than about this.
constexpr int64_t kMinClaimBytes = int64_t{128} << 10;

// One forward over one chunk of tokens, as all threads see it.
struct Pass {
  const Engine& engine;
  const ForwardArgs& args;
  const ExpertWeights::Storage& weights;
  const Workspace& work;
  int64_t first_token;
  int64_t tokens;
  int64_t top_k;

  int64_t num_routes() const { return work.routes.expert_offsets[weights.shape.num_local_experts]; }
  int64_t token_of(int64_t route) const { return work.routes.permuted_to_expanded[route] / top_k; }
};

// --- the two GEMM stages ---

// Weight alpha times activation scale; FC2 has the first only.
struct RouteScale {
  float up;
  float gate;
};

struct Fc1 {
  const Pass& pass;
  int64_t k() const { return pass.weights.hidden; }
  int64_t strips() const { return pass.weights.fc1_rows / kStripRows; }
  const uint8_t* matrix(int64_t expert) const { return pass.weights.fc1_expert(expert); }
  Nvfp4Row row(int64_t route) const {
    const int64_t token = pass.token_of(route);
    return {pass.work.x_codes + token * (k() / 2), pass.work.x_scales + token * (k() / 16)};
  }
  RouteScale scale(int64_t expert, int64_t route) const {
    const auto e = static_cast<size_t>(expert);
    const float token_scale = pass.work.x_token_scale[pass.token_of(route)];
    return {pass.weights.fc1_up_alpha[e] * token_scale,
            pass.weights.fc1_gate_alpha[e] * token_scale};
  }
  // The results of rows [row, row + columns) are in `c` for routes [first, first + count).
  void finish(int64_t row,
              int64_t columns,
              int64_t first,
              int64_t count,
              const float* c,
              const ThreadScratch& scratch) const {
    const bool gated = pass.weights.shape.gated;
    const int64_t feature = gated ? row / 2 : row;
    pass.engine.kernels->activate(pass.args.problem->activation,
                                  gated,
                                  c,
                                  columns,
                                  count,
                                  scratch.up_scale,
                                  scratch.gate_scale,
                                  pass.work.h + first * pass.work.h_stride + feature,
                                  pass.work.h_stride);
  }
};

struct Fc2 {
  const Pass& pass;
  int64_t k() const { return pass.weights.intermediate; }
  int64_t strips() const { return pass.weights.hidden / kStripRows; }
  const uint8_t* matrix(int64_t expert) const { return pass.weights.fc2_expert(expert); }
  Nvfp4Row row(int64_t route) const {
    return {pass.work.h_codes + route * (k() / 2), pass.work.h_scales + route * (k() / 16)};
  }
  RouteScale scale(int64_t expert, int64_t route) const {
    return {pass.weights.fc2_alpha[static_cast<size_t>(expert)] * pass.work.h_token_scale[route],
            0};
  }
  void finish(int64_t row,
              int64_t columns,
              int64_t first,
              int64_t count,
              const float* c,
              const ThreadScratch& scratch) const {
    pass.engine.kernels->round_routes(c,
                                      columns,
                                      count,
                                      scratch.up_scale,
                                      pass.work.y + first * pass.work.y_stride + row,
                                      pass.work.y_stride);
  }
};

// Routes [first, first + count) of one expert times strips [begin, end).
template <typename Stage>
struct Multiplication {
  const Stage& stage;
  const ThreadScratch& scratch;
  int64_t expert;
  int64_t first;
  int64_t count;
  int64_t begin;
  int64_t end;

  const uint8_t* weights(int64_t strip) const {
    return stage.matrix(expert) + tiles::matrix_bytes(strip * kStripRows, stage.k());
  }
  void finish(int64_t row, int64_t columns, const float* c) const {
    stage.finish(row, columns, first, count, c, scratch);
  }
  void run(bool use_amx) const {
    const Engine& engine = stage.pass.engine;
    const int64_t k = stage.k();
    for (int64_t i = 0; i < count; ++i) {
      scratch.rows[i] = stage.row(first + i);
      const RouteScale scale = stage.scale(expert, first + i);
      scratch.up_scale[i] = scale.up;
      scratch.gate_scale[i] = scale.gate;
    }
    if (use_amx) {
      engine.amx->expand(scratch.rows, count, k, scratch.tile);
      const PairSink sink = {const_cast<Multiplication*>(this),
                             [](void* context, int64_t pair, const float* c) {
                               const auto* self = static_cast<const Multiplication*>(context);
                               const int64_t row = self->begin * kStripRows + pair * kPairRows;
                               self->finish(row, kPairRows, c);
                             }};
      const int64_t num_pairs = (end - begin) * (kStripRows / kPairRows);
      engine.amx->gemm_pairs(
          weights(begin), num_pairs, k, scratch.tile, count, scratch.c, scratch.panel, sink);
    } else {
      engine.kernels->expand_int(scratch.rows, count, k, scratch.tile);
      for (int64_t strip = begin; strip < end; ++strip) {
        engine.kernels->gemm_int(weights(strip), k, scratch.tile, count, scratch.c);
        finish(strip * kStripRows, kStripRows, scratch.c);
      }
    }
  }
};

template <typename Stage>
void multiply(
    const Stage& stage, const ThreadScratch& scratch, int64_t expert, int64_t begin, int64_t end) {
  const Pass& pass = stage.pass;
  const int64_t first = pass.work.routes.expert_offsets[expert];
  const int64_t last = pass.work.routes.expert_offsets[expert + 1];
  const bool use_amx =
      pass.engine.amx != nullptr && !pass.args.batch_invariant && last - first > kAmxAboveTokens;
  const TokenCut passes(last - first, use_amx ? kMaxPassTokens : int_pass_tokens(stage.k()));
  for (int64_t i = 0; i < passes.parts; ++i) {
    Multiplication<Stage>{
        stage, scratch, expert, first + passes.begin(i), passes.width(i), begin, end}
        .run(use_amx);
  }
}

// Prefix sums of the experts' cost per strip; both GEMM stages share them.
void measure_load(const Pass& pass) {
  int64_t total = 0;
  const int64_t experts = pass.weights.shape.num_local_experts;
  for (int64_t e = 0; e < experts; ++e) {
    pass.work.load[e] = total;
    const int64_t count =
        pass.work.routes.expert_offsets[e + 1] - pass.work.routes.expert_offsets[e];
    if (count > 0) total += kReadCostTokens + count;
  }
  pass.work.load[experts] = total;
}

// Claims work until none is left.
template <typename Stage>
void run_stage(const Stage& stage, Counter& counter, const ThreadScratch& scratch, int threads) {
  const Pass& pass = stage.pass;
  const int64_t experts = pass.weights.shape.num_local_experts;
  const int64_t* load = pass.work.load;
  const int64_t strips = stage.strips();
  // A position in the work list: strip q of expert e begins at load[e] * strips + q * cost(e).
  const int64_t total = load[experts] * strips;
  const int64_t strip_bytes = tiles::matrix_bytes(kStripRows, stage.k());
  const int64_t min_claim =
      (kReadCostTokens + 1) * std::max<int64_t>(1, kMinClaimBytes / strip_bytes);
  for (int64_t low = counter.next.load(std::memory_order_relaxed); low < total;) {
    const int64_t high = std::min(total, low + std::max(min_claim, (total - low) / (2 * threads)));
    if (!counter.next.compare_exchange_weak(low, high, std::memory_order_relaxed)) continue;
    // The last expert that begins at or before `low`.
    int64_t expert = std::upper_bound(load, load + experts, low / strips) - load - 1;
    for (; expert < experts && load[expert] * strips < high; ++expert) {
      const int64_t cost = load[expert + 1] - load[expert];
      if (cost == 0) continue;
      const auto first_strip_from = [&](int64_t at) {
        const int64_t inside = std::max<int64_t>(0, at - load[expert] * strips);
        return std::min(strips, (inside + cost - 1) / cost);
      };
      const int64_t begin = first_strip_from(low);
      const int64_t end = first_strip_from(high);
      if (begin < end) multiply(stage, scratch, expert, begin, end);
    }
    low = counter.next.load(std::memory_order_relaxed);
  }
}

// --- the stages between ---

void quantize_token(const Pass& pass, int64_t token) {
  const Kernels& kernels = *pass.engine.kernels;
  const int64_t size = pass.weights.shape.hidden_size;
  const int64_t padded = pass.weights.hidden;
  const uint16_t* x = pass.args.hidden_states + (pass.first_token + token) * size;
  const OuterScale outer = token_scale(kernels.amax_bits(x, size));
  uint8_t* codes = pass.work.x_codes + token * (padded / 2);
  uint8_t* scales = pass.work.x_scales + token * (padded / kBlockSize);
  quantize_padded_row(kernels, x, size, padded, outer, codes, scales, x + kRowsAhead * size);
  pass.work.x_token_scale[token] = outer.stored;
  if (const StageDump* dump = pass.args.dump) {
    dump_quantized_row(pass.first_token + token,
                       dump->hidden_cols,
                       codes,
                       scales,
                       outer.stored,
                       padded,
                       dump->x_codes,
                       dump->x_block_scales,
                       dump->x_token_scale);
  }
}

void requantize_route(const Pass& pass, int64_t route) {
  const Kernels& kernels = *pass.engine.kernels;
  const int64_t size = pass.weights.intermediate;
  const uint16_t* h = pass.work.h + route * pass.work.h_stride;
  const OuterScale outer = token_scale(kernels.amax_bits(h, size));
  uint8_t* codes = pass.work.h_codes + route * (size / 2);
  uint8_t* scales = pass.work.h_scales + route * (size / kBlockSize);
  kernels.quantize_row(h, size, outer, codes, scales, h + kRowsAhead * pass.work.h_stride);
  pass.work.h_token_scale[route] = outer.stored;
  if (const StageDump* dump = pass.args.dump) {
    const int64_t expanded =
        pass.first_token * pass.top_k + pass.work.routes.permuted_to_expanded[route];
    dump_bf16_row(expanded, dump->intermediate_cols, h, size, dump->intermediate);
    dump_quantized_row(expanded,
                       dump->intermediate_cols,
                       codes,
                       scales,
                       outer.stored,
                       size,
                       dump->h_codes,
                       dump->h_block_scales,
                       dump->h_token_scale);
  }
}

// Columns [begin, end) of one token.
void combine_token(
    const Pass& pass, const ThreadScratch& scratch, int64_t token, int64_t begin, int64_t end) {
  const int64_t hidden = pass.weights.shape.hidden_size;
  const int32_t* route_of_slot = pass.work.routes.expanded_to_permuted + token * pass.top_k;
  for (int64_t slot = 0; slot < pass.top_k; ++slot) {
    const int32_t route = route_of_slot[slot];
    scratch.routes[slot] = route < 0 ? nullptr : pass.work.y + route * pass.work.y_stride;
  }
  const int64_t row = pass.first_token + token;
  const int64_t element = pass.args.out_is_f32 ? 4 : 2;
  pass.engine.kernels->combine(scratch.routes,
                               pass.args.probabilities + row * pass.top_k,
                               pass.top_k,
                               begin,
                               end,
                               static_cast<std::byte*>(pass.args.out) + row * hidden * element,
                               pass.args.out_is_f32);
  if (const StageDump* dump = pass.args.dump; dump != nullptr && begin == 0) {
    for (int64_t slot = 0; slot < pass.top_k; ++slot) {
      if (scratch.routes[slot] == nullptr) continue;
      dump_bf16_row(
          row * pass.top_k + slot, hidden, scratch.routes[slot], hidden, dump->route_output);
    }
  }
}

// Called by every thread of the team.
void run_pass(const Pass& pass, const ThreadScratch& scratch) {
  constexpr int64_t kCombineColumns = 1024;
  const int threads = omp_get_num_threads();
  const int64_t column_parts =
      (pass.weights.shape.hidden_size + kCombineColumns - 1) / kCombineColumns;

#pragma omp single nowait
  {
    const ForwardArgs& args = pass.args;
    const int64_t id_bytes = args.routing_is_i64 ? 8 : 4;
    route_compact(
        static_cast<const std::byte*>(args.routing_map) + pass.first_token * pass.top_k * id_bytes,
        args.routing_is_i64,
        pass.tokens,
        pass.top_k,
        args.problem->local_expert_offset,
        pass.weights.shape.num_local_experts,
        pass.work.routes);
    measure_load(pass);
    pass.work.counters[0].next.store(0, std::memory_order_relaxed);
    pass.work.counters[1].next.store(0, std::memory_order_relaxed);
  }
#pragma omp for schedule(static)
  for (int64_t token = 0; token < pass.tokens; ++token)
    quantize_token(pass, token);

  run_stage(Fc1{pass}, pass.work.counters[0], scratch, threads);
#pragma omp barrier
#pragma omp for schedule(static)
  for (int64_t route = 0; route < pass.num_routes(); ++route)
    requantize_route(pass, route);

  run_stage(Fc2{pass}, pass.work.counters[1], scratch, threads);
#pragma omp barrier
#pragma omp for schedule(static)
  for (int64_t part = 0; part < pass.tokens * column_parts; ++part) {
    const int64_t begin = part % column_parts * kCombineColumns;
    combine_token(pass,
                  scratch,
                  part / column_parts,
                  begin,
                  std::min(begin + kCombineColumns, pass.weights.shape.hidden_size));
  }
}

}  // namespace

int64_t forward_workspace_bytes(const Engine& engine,
                                const MoeProblem& problem,
                                const ExpertShape& shape,
                                int num_threads) {
  return Workspace::layout(engine, problem, shape, num_threads, nullptr).bytes;
}

Status forward(const Engine& engine, const ForwardArgs& args) {
  const ExpertWeights::Storage& weights = *args.weights;
  const Workspace work =
      Workspace::layout(engine, *args.problem, weights.shape, args.num_threads, args.workspace);
  new (work.counters) Counter[2];
#pragma omp parallel num_threads(args.num_threads)
  {
    const FloatEnvironment environment;
    const ThreadScratch scratch = work.thread(omp_get_thread_num());
    if (engine.amx != nullptr) engine.amx->begin();
    for (int64_t first = 0; first < args.rows; first += kChunkTokens) {
      run_pass({engine,
                args,
                weights,
                work,
                first,
                std::min(kChunkTokens, args.rows - first),
                args.problem->top_k},
               scratch);
    }
    if (engine.amx != nullptr) engine.amx->end();
  }
  return {};
}

}  // namespace hexpert::cpu

#include "cpu/workspace.hpp"

namespace hexpert::cpu {
namespace {

// Hands out consecutive parts, each aligned to a cache line.
class Divider {
 public:
  explicit Divider(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    std::byte* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

// A row of `columns` BF16 values, a multiple of 64, as an odd number of cache lines: the same columns of
// many rows then spread over all sets of the caches. Rows of 4096 bytes would share a single one.
constexpr int64_t in_odd_lines(int64_t columns) {
  constexpr int64_t kLine = 32;
  return (columns / kLine | 1) * kLine;
}

}  // namespace

Workspace Workspace::layout(const Engine& engine,
                            const MoeProblem& problem,
                            const ExpertShape& shape,
                            int num_threads,
                            std::byte* base) {
  const int64_t hidden = round_up(shape.hidden_size, layout::cpu_tiles::kSizeMultiple);
  const int64_t intermediate = round_up(shape.intermediate_size, layout::cpu_tiles::kSizeMultiple);
  const int64_t chunk = std::min(problem.max_tokens, kChunkTokens);
  const int64_t num_routes = chunk * problem.top_k;
  const int64_t longest = std::max(hidden, intermediate);

  Workspace w;
  Divider all(base);
  w.counters = all.take<Counter>(2);
  w.routes.expert_offsets = all.take<int32_t>(shape.num_local_experts + 1);
  w.routes.permuted_to_expanded = all.take<int32_t>(num_routes);
  w.routes.expanded_to_permuted = all.take<int32_t>(num_routes);
  w.load = all.take<int64_t>(shape.num_local_experts + 1);
  w.x_codes = all.take<uint8_t>(chunk * hidden / 2);
  w.x_scales = all.take<uint8_t>(chunk * hidden / 16);
  w.x_token_scale = all.take<float>(chunk);
  w.h_codes = all.take<uint8_t>(num_routes * intermediate / 2);
  w.h_scales = all.take<uint8_t>(num_routes * intermediate / 16);
  w.h_token_scale = all.take<float>(num_routes);
  w.h_stride = in_odd_lines(intermediate);
  w.y_stride = in_odd_lines(hidden);
  w.h = all.take<uint16_t>(num_routes * std::max(w.h_stride, w.y_stride));
  w.y = w.h;

  Divider one(nullptr);
  const auto part = [&one](int64_t size) {
    const int64_t at = one.used();
    one.take<uint8_t>(size);
    return at;
  };
  w.rows_at_ = part(kMaxPassTokens * static_cast<int64_t>(sizeof(Nvfp4Row)));
  w.scales_at_ = part(2 * kMaxPassTokens * static_cast<int64_t>(sizeof(float)));
  w.c_at_ =
      part(kMaxPassTokens * layout::cpu_tiles::kStripRows * static_cast<int64_t>(sizeof(float)));
  w.routes_at_ = part(problem.top_k * static_cast<int64_t>(sizeof(void*)));
  const int64_t pass = std::min(num_routes, kMaxPassTokens);
  const auto int_tiles = [num_routes](int64_t k) {
    return int_tile_bytes(std::min(num_routes, int_pass_tokens(k)), k);
  };
  const int64_t int_tile = std::max(int_tiles(hidden), int_tiles(intermediate));
  w.tile_at_ =
      part(engine.amx == nullptr ? int_tile : std::max(int_tile, amx_tile_bytes(pass, longest)));
  w.panel_at_ = part(engine.amx == nullptr ? 0 : engine.amx->panel_bytes);
  w.thread_bytes = round_up(one.used(), 4096);  // threads never share a page
  w.threads = all.take<uint8_t>(w.thread_bytes * num_threads);
  w.bytes = all.used();
  return w;
}

ThreadScratch Workspace::thread(int index) const {
  uint8_t* base = threads + index * thread_bytes;
  ThreadScratch scratch;
  scratch.rows = reinterpret_cast<Nvfp4Row*>(base + rows_at_);
  scratch.up_scale = reinterpret_cast<float*>(base + scales_at_);
  scratch.gate_scale = scratch.up_scale + kMaxPassTokens;
  scratch.tile = base + tile_at_;
  scratch.c = reinterpret_cast<float*>(base + c_at_);
  scratch.panel = base + panel_at_;
  scratch.routes = reinterpret_cast<const uint16_t**>(base + routes_at_);
  return scratch;
}

}  // namespace hexpert::cpu

// How one block of memory is divided for a forward. Sizes depend on the plan alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/forward.hpp"
#include "format/layout.hpp"
#include "route/route.hpp"

namespace hexpert::cpu {

// Per thread.
struct ThreadScratch {
  Nvfp4Row* rows = nullptr;           // [kMaxPassTokens] activations of the pass
  float* up_scale = nullptr;          // [kMaxPassTokens] scales of the pass, per route
  float* gate_scale = nullptr;        // [kMaxPassTokens]
  uint8_t* tile = nullptr;            // activations of the pass, as the GEMM reads them
  float* c = nullptr;                 // [kMaxPassTokens, 64] results of a strip or a pair of groups
  uint8_t* panel = nullptr;           // weights of the AMX GEMM, expanded
  const uint16_t** routes = nullptr;  // [top_k] for the combine
};

// Shared counters of a chunk, each on its own cache line.
struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
};

struct Workspace {
  Counter* counters = nullptr;  // [2]: FC1, FC2
  CompactRoutes routes;
  int64_t* load = nullptr;      // [L + 1] prefix sums of the experts' share of the work
  uint8_t* x_codes = nullptr;   // [chunk, hidden / 2]
  uint8_t* x_scales = nullptr;  // [chunk, hidden / 16]
  float* x_token_scale = nullptr;
  uint8_t* h_codes = nullptr;   // [chunk * top_k, intermediate / 2]
  uint8_t* h_scales = nullptr;  // [chunk * top_k, intermediate / 16]
  float* h_token_scale = nullptr;
  uint16_t* h = nullptr;  // [chunk * top_k, h_stride] bf16, until it is quantized
  uint16_t* y = nullptr;  // [chunk * top_k, y_stride] bf16: the same memory, afterwards
  int64_t h_stride = 0;   // intermediate or a little more
  int64_t y_stride = 0;   // hidden or a little more
  uint8_t* threads = nullptr;
  int64_t thread_bytes = 0;
  int64_t bytes = 0;

  ThreadScratch thread(int index) const;

  // Lays the parts out from `base`; with null the result is good for its sizes only.
  static Workspace layout(const Engine& engine,
                          const MoeProblem& problem,
                          const ExpertShape& shape,
                          int num_threads,
                          std::byte* base);

 private:
  int64_t rows_at_ = 0, scales_at_ = 0, tile_at_ = 0, c_at_ = 0, panel_at_ = 0, routes_at_ = 0;
};

}  // namespace hexpert::cpu

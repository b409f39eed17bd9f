// The stages of one token in the reference backend, one function each, also for tests that judge
// another backend stage by stage.
#pragma once

#include <cstdint>

#include "backend/backend.hpp"
#include "weights/storage.hpp"

namespace hexpert {

extern const Backend reference_backend;

namespace reference {

// One row in NVFP4 with linear block scales, in memory of the caller.
struct QuantizedRow {
  uint8_t* codes = nullptr;         // [k / 2]
  uint8_t* block_scales = nullptr;  // [k / 16]
  float token_scale = 0;
};

// Quantizes n BF16 values, extended with zeros to `padded` (a multiple of 16) columns.
void quantize_row(const uint16_t* x, int64_t n, int64_t padded, QuantizedRow& out);

// Every code * scale * code * scale is an integer multiple of 2^-20, so int64 holds the sum over k
// exactly, up to a k.
inline constexpr float kSumUnit = 1.0F / 1048576.0F;
inline constexpr int64_t kMaxBlockSum =
    16 * 12 * 12 * int64_t{229376} * 229376;                                    // 6 * 448, squared
inline constexpr int64_t kMaxExactK = INT64_MAX / kMaxBlockSum * 16 / 64 * 64;  // padded to 64
// Sums over k, in units of kSumUnit, of one row times the 16 rows of a cpu_tiles group.
void exact_sums(const QuantizedRow& row, const uint8_t* group, int64_t k, int64_t (&sums)[16]);

// FC1 and activation of one route: intermediate [weights.intermediate] bf16.
void fc1(const ExpertWeights::Storage& weights,
         int64_t expert,
         const Activation& activation,
         const QuantizedRow& x,
         uint16_t* intermediate);

// FC2 of one route: route_output [hidden_size] bf16.
void fc2(const ExpertWeights::Storage& weights,
         int64_t expert,
         const QuantizedRow& h,
         uint16_t* route_output);

// One output element of a token: sum over its local slots, in slot order, of probability times
// route_outputs[slot * stride].
float combine(const float* probabilities,
              const int64_t* local_experts,  // [top_k], < 0 where the slot is not local
              const uint16_t* route_outputs,
              int64_t stride,
              int64_t top_k);

}  // namespace reference
}  // namespace hexpert

// What the Hopper kernels see of a layer's experts: device pointers and padded sizes.
#pragma once

#include <cstdint>

#include "format/layout.hpp"
#include "hexpert/weights.hpp"

namespace hexpert::cuda {

struct FragmentWeights {
  ExpertShape shape;
  int64_t hidden = 0;               // K of FC1: hidden_size padded to 64
  int64_t intermediate = 0;         // K of FC2: intermediate_size padded to 64
  int64_t fc1_rows = 0;             // padded to 128; 2 * intermediate when gated
  int64_t fc2_rows = 0;             // hidden_size padded to 128
  uint8_t* fc1 = nullptr;           // [L, fc1_bytes()] sm90 fragments
  uint8_t* fc2 = nullptr;           // [L, fc2_bytes()] sm90 fragments
  float* fc1_up_alpha = nullptr;    // [L]; the only FC1 alpha when not gated
  float* fc1_gate_alpha = nullptr;  // [L]
  float* fc2_alpha = nullptr;       // [L]

  constexpr int64_t fc1_bytes() const {
    return layout::sm90_fragments::matrix_bytes(fc1_rows, hidden);
  }
  constexpr int64_t fc2_bytes() const {
    return layout::sm90_fragments::matrix_bytes(fc2_rows, intermediate);
  }
};

// Sizes for a shape; the pointers are left null.
inline FragmentWeights fragment_sizes(const ExpertShape& shape) {
  namespace fragments = layout::sm90_fragments;
  FragmentWeights w;
  w.shape = shape;
  w.hidden = round_up(shape.hidden_size, fragments::kSpan);
  w.intermediate = round_up(shape.intermediate_size, fragments::kSpan);
  w.fc1_rows =
      shape.gated ? 2 * w.intermediate : round_up(shape.intermediate_size, fragments::kTileRows);
  w.fc2_rows = round_up(shape.hidden_size, fragments::kTileRows);
  return w;
}

}  // namespace hexpert::cuda

// Where ExpertWeights keeps its bytes, and how one row group gets in and out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/layout.hpp"
#include "hexpert/weights.hpp"
#include "weights/aligned_buffer.hpp"

namespace hexpert {

struct ExpertWeights::Storage {
  ExpertShape shape;
  int num_threads = 0;
  int64_t hidden = 0;  // hidden_size padded to cpu_tiles::kSizeMultiple: K of FC1, rows of FC2
  int64_t intermediate = 0;  // intermediate_size padded likewise: K of FC2, features of FC1
  int64_t fc1_rows = 0;      // intermediate, twice that when gated (groups alternate up, gate)
  int64_t fc1_bytes = 0;     // per expert
  int64_t fc2_bytes = 0;     // per expert
  AlignedBuffer fc1;         // [L, fc1_bytes] CPU tiles
  AlignedBuffer fc2;         // [L, fc2_bytes] CPU tiles
  std::vector<float> fc1_up_alpha;    // [L]; the only FC1 alpha when not gated
  std::vector<float> fc1_gate_alpha;  // [L]
  std::vector<float> fc2_alpha;       // [L]

  const uint8_t* fc1_expert(int64_t e) const { return fc1.data() + e * fc1_bytes; }
  const uint8_t* fc2_expert(int64_t e) const { return fc2.data() + e * fc2_bytes; }
  uint8_t* fc1_expert(int64_t e) { return fc1.data() + e * fc1_bytes; }
  uint8_t* fc2_expert(int64_t e) { return fc2.data() + e * fc2_bytes; }
};

}  // namespace hexpert

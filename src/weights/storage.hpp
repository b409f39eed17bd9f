// Where ExpertWeights keeps its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device_weights.hpp"
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
  // When set, the experts are there, and buffers and vectors here are empty.
  std::unique_ptr<DeviceWeights> on_device;

  explicit Storage(const ExpertShape& shape_in, int num_threads_in = 0)
      : shape(shape_in), num_threads(num_threads_in) {
    namespace tiles = layout::cpu_tiles;
    hidden = round_up(shape.hidden_size, tiles::kSizeMultiple);
    intermediate = round_up(shape.intermediate_size, tiles::kSizeMultiple);
    fc1_rows = intermediate * (shape.gated ? 2 : 1);
    fc1_bytes = tiles::matrix_bytes(fc1_rows, hidden);
    fc2_bytes = tiles::matrix_bytes(hidden, intermediate);
  }
  // Tiles of zero experts; false when memory is exhausted. Throws std::bad_alloc for the alphas.
  bool allocate_tiles();

  const uint8_t* fc1_expert(int64_t e) const { return fc1.data() + e * fc1_bytes; }
  const uint8_t* fc2_expert(int64_t e) const { return fc2.data() + e * fc2_bytes; }
  uint8_t* fc1_expert(int64_t e) { return fc1.data() + e * fc1_bytes; }
  uint8_t* fc2_expert(int64_t e) { return fc2.data() + e * fc2_bytes; }
};

// Zero tiles of one expert of the same sizes: where experts of a device pass through. Throws
// std::bad_alloc.
std::unique_ptr<ExpertWeights::Storage> tiles_of_one_expert(const ExpertWeights::Storage& s);

}  // namespace hexpert

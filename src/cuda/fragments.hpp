// One expert between CPU tiles and Hopper fragments, on the host. docs/format.md section 7.
#pragma once

#include <cstdint>

#include "cuda/fragment_weights.hpp"
#include "weights/storage.hpp"

namespace hexpert::cuda {

// From expert 0 of `one` to fragments of fc1_bytes() and fc2_bytes() bytes. `sizes` is
// fragment_sizes() of its shape.
void tiles_to_fragments(const ExpertWeights::Storage& one,
                        const FragmentWeights& sizes,
                        uint8_t* fc1,
                        uint8_t* fc2);
// And back; the alphas of `one` are left alone.
void fragments_to_tiles(const uint8_t* fc1,
                        const uint8_t* fc2,
                        const FragmentWeights& sizes,
                        ExpertWeights::Storage& one);

}  // namespace hexpert::cuda

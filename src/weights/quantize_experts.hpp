// BF16 experts into CPU tiles. docs/format.md section 5.
#pragma once

#include <cstdint>

#include "weights/storage.hpp"

namespace hexpert {

// Experts [first, first + count) of `s` from consecutive matrices: fc1 [count, I or 2 I, H], fc2
// [count, H, I]. Throws std::bad_alloc before anything is written.
void quantize_experts(ExpertWeights::Storage& s,
                      int64_t first,
                      int64_t count,
                      const uint16_t* fc1,
                      const uint16_t* fc2);

}  // namespace hexpert

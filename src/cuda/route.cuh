// What an id of the routing map means to this process.
#pragma once

#include <cstdint>

namespace hexpert::cuda {

// The local expert of a slot, -1 when it has none here.
__device__ __forceinline__ int local_expert(const void* routing_map,
                                            bool is_i64,
                                            int64_t slot,
                                            int64_t local_expert_offset,
                                            int64_t num_local_experts) {
  const int64_t id = is_i64 ? static_cast<const int64_t*>(routing_map)[slot]
                            : static_cast<const int32_t*>(routing_map)[slot];
  // Compared before the subtraction, which overflows for the smallest ids.
  if (id < local_expert_offset || id >= local_expert_offset + num_local_experts) return -1;
  return static_cast<int>(id - local_expert_offset);
}

}  // namespace hexpert::cuda

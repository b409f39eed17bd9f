// Routings of several kinds, from a seed.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace hexpert::tools {

// Names of random_routing().
inline constexpr const char* kRoutings[] = {"uniform", "one", "zipf", "half-empty"};

struct RandomRouting {
  std::vector<int32_t> ids;          // [tokens, top_k]
  std::vector<float> probabilities;  // [tokens, top_k], a token's add up to 1
};

// "uniform":    the experts of a token are distinct and equally likely
// "one":        every slot goes to the same expert
// "zipf":       distinct, the r-th most popular expert with a likelihood of r^-1.2
// "half-empty": uniform, but every second slot, on average, is -1
RandomRouting random_routing(
    std::string_view kind, int64_t tokens, int64_t top_k, int64_t num_experts, uint64_t seed);

// What it asks of the experts [0, local_experts).
struct RoutingLoad {
  int64_t routes = 0;
  int64_t active_experts = 0;
};
RoutingLoad load_of(const RandomRouting& routing, int64_t local_experts);

}  // namespace hexpert::tools

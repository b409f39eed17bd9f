#include "random_routing.hpp"

#include <algorithm>
#include <cmath>

#include "random_layer.hpp"

namespace hexpert::tools {
namespace {

// Draws experts with given likelihoods.
class Popularity {
 public:
  Popularity(int64_t num_experts, double exponent, Random& random) : cumulative_(), order_() {
    double sum = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      sum += std::pow(static_cast<double>(e + 1), -exponent);
      cumulative_.push_back(sum);
      order_.push_back(static_cast<int32_t>(e));
    }
    for (int64_t e = num_experts - 1; e > 0; --e) {
      std::swap(order_[static_cast<size_t>(e)], order_[static_cast<size_t>(random.below(e + 1))]);
    }
  }
  int32_t draw(Random& random) const {
    const double at = static_cast<double>(random.bits() >> 11) * 0x1p-53 * cumulative_.back();
    const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, at);
    return order_[static_cast<size_t>(found - cumulative_.begin())];
  }

 private:
  std::vector<double> cumulative_;
  std::vector<int32_t> order_;
};

}  // namespace

RandomRouting random_routing(
    std::string_view kind, int64_t tokens, int64_t top_k, int64_t num_experts, uint64_t seed) {
  Random random(seed);
  const Popularity popularity(num_experts, kind == "zipf" ? 1.2 : 0.0, random);
  const int32_t favourite = popularity.draw(random);
  RandomRouting routing;
  std::vector<int32_t> of_token;
  for (int64_t t = 0; t < tokens; ++t) {
    of_token.clear();
    float sum = 0;
    for (int64_t s = 0; s < top_k; ++s) {
      int32_t id = favourite;
      if (kind != "one") {
        do {
          id = popularity.draw(random);
        } while (s < num_experts &&
                 std::find(of_token.begin(), of_token.end(), id) != of_token.end());
      }
      of_token.push_back(id);
      const bool empty = kind == "half-empty" && (random.bits() & 1) != 0;
      routing.ids.push_back(empty ? -1 : id);
      routing.probabilities.push_back(0.1F + static_cast<float>(random.below(1000)) * 1e-3F);
      sum += routing.probabilities.back();
    }
    for (auto p = routing.probabilities.end() - top_k; p != routing.probabilities.end(); ++p)
      *p /= sum;
  }
  return routing;
}

RoutingLoad load_of(const RandomRouting& routing, int64_t local_experts) {
  RoutingLoad load;
  std::vector<bool> active(static_cast<size_t>(local_experts));
  for (int32_t id : routing.ids) {
    if (id < 0 || id >= local_experts) continue;
    ++load.routes;
    active[static_cast<size_t>(id)] = true;
  }
  load.active_experts = std::count(active.begin(), active.end(), true);
  return load;
}

}  // namespace hexpert::tools

// What the subcommands share: model shapes by name, parsers of option values, random problems,
// tables.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hexpert/moe.hpp"
#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert::tools {

// Throws Error unless ok.
void require(const Status& status);

// One mixture-of-experts layer of a published model, as its experts see it.
struct ModelShape {
  std::string_view name;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  Activation activation;
};
std::span<const ModelShape> model_shapes();
// By name, case ignored, or by a prefix that fits one model only. kNotFound lists the names.
Result<ModelShape> find_model(std::string_view name);

// Weights of one expert: gate, up and down.
inline int64_t parameters_per_expert(const ModelShape& model) {
  return (is_gated(model.activation.type) ? 3 : 2) * model.hidden_size * model.intermediate_size;
}

// "1,8,64": positive integers up to kMaxCount, separated by commas. kInvalidArgument.
inline constexpr int64_t kMaxCount = int64_t{1} << 31;
Result<std::vector<int64_t>> parse_counts(std::string_view text);

// "swiglu", "squared-relu", "geglu-tanh", "swiglu-oai[:ALPHA,BETA,LIMIT]" (1.702, 1, 7 unless
// given), "situ:B[,C]". kInvalidArgument.
Result<Activation> parse_activation(std::string_view text);
// The text that parse_activation reads back.
std::string format_activation(const Activation& activation);
inline constexpr const char* kActivationHelp =
    "swiglu, squared-relu, geglu-tanh, swiglu-oai[:ALPHA,BETA,LIMIT] or situ:B[,C]";

// Cheap reproducible random numbers (splitmix64): setting up a benchmark must not take minutes.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  // Mean 0, variance 1, close to Gaussian up to 3.4 sigma.
  float normal() {
    const uint64_t b = bits();
    const auto part = [b](int i) { return static_cast<float>(b >> (16 * i) & 0xFFFFU); };
    return (part(0) + part(1) + part(2) + part(3) - 131070.0F) * (1.0F / 37837.2F);
  }

 private:
  uint64_t state_;
};

std::vector<uint16_t> random_bf16(int64_t count, float sigma, uint64_t seed);

// Random tokens and routes of one call; experts of a token are distinct while top_k allows it.
struct RandomInputs {
  int64_t tokens = 0;
  int64_t top_k = 0;
  int64_t hidden_size = 0;
  std::vector<uint16_t> hidden_states;  // [tokens, hidden_size] bf16
  std::vector<int32_t> routing_map;     // [tokens, top_k]
  std::vector<float> probabilities;     // [tokens, top_k], a token's add up to 1

  MoeInputs view() const;
  // Rows `rows` alone.
  RandomInputs select(std::span<const int64_t> rows) const;
};
RandomInputs random_inputs(
    int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden_size, uint64_t seed);

// How the output of a backend compares with that of the reference. docs/numerics.md, end to end.
struct Agreement {
  int64_t elements = 0;
  int64_t equal = 0;        // same bits
  int64_t largest_ulp = 0;  // largest distance in representable values of the dtype
  double relative_l2 = 0;   // of the whole
  double worst_row_l2 = 0;  // of one row
  int64_t worst_row = -1;
  int64_t rows = 0;             // with a reference that is not zero
  int64_t rows_within = 0;      // of these, within kRowL2
  int64_t wrong_zero_rows = 0;  // zero in the reference, not here
  int64_t nan_mismatches = 0;   // NaN or infinity on one side only

  static constexpr double kRowL2 = 4e-3;     // 95 % of the rows, or all but one below 20 rows
  static constexpr double kWorstRow = 0.12;  // every row
  static constexpr double kWhole = 1e-2;     // 64 rows or more together
  bool ok() const;
  double equal_share() const;
};
// Both [rows, cols], bf16 or f32, the same dtype, packed.
Agreement compare(const ConstTensorView& reference, const ConstTensorView& candidate);

// Columns padded to their widest cell so far, numbers right, text left; rows appear as they come.
class Table {
 public:
  struct Column {
    std::string title;
    int width = 0;
    bool left = false;
  };
  Table(std::FILE* out, std::vector<Column> columns);
  void header() const;
  void row(std::span<const std::string> cells);

 private:
  void line(std::span<const std::string> cells) const;
  std::FILE* out_;
  std::vector<Column> columns_;
};

// "1.2 GB", "340 MB": decimal units.
std::string format_bytes(int64_t bytes);
// Milliseconds with three significant digits.
std::string format_ms(double seconds);
double now_seconds();
double median(std::vector<double> values);
// The q-quantile, nearest rank.
double quantile(std::vector<double> values, double q);
double geometric_mean(std::span<const double> values);

// OpenMP threads that a layer with this `--threads` uses.
int effective_threads(int requested);

}  // namespace hexpert::tools

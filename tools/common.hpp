// What the subcommands share: model shapes by name, parsers of option values, tables.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hexpert/moe.hpp"
#include "hexpert/status.hpp"

namespace hexpert::tools {

// Throws Error unless ok.
void require(const Status& status);

// Throws a usage error for a name that no backend has, and kUnsupportedDevice with the reason for a
// backend that cannot run here. "" is the best one. Returns the backend's name.
std::string require_backend(const std::string& name);

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

// Text of a file for a terminal: control characters as \xNN.
std::string printable(std::string_view text);

// "hexpert: TEXT" on stderr, which may be closed.
void print_error(std::string_view text);

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

#include "common.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cmath>

#include "option_values.hpp"

namespace hexpert::tools {
namespace {

constexpr Activation kSquaredRelu{.type = ActivationType::kSquaredRelu};
constexpr Activation kSwiGlu{.type = ActivationType::kSwiGlu};
constexpr Activation kSwiGluOai{
    .type = ActivationType::kSwiGluOai, .alpha = 1.702F, .beta = 1, .limit = 7};

// Latent models (Super, Ultra): hidden_size is the latent size, which the experts see. GPT-OSS has
// expert biases besides, which this operation has not.
constexpr std::array kModels = {
    ModelShape{"qwen3-30b-a3b", 128, 8, 2048, 768, kSwiGlu},
    ModelShape{"nemotron-3-nano", 128, 6, 2688, 1856, kSquaredRelu},
    ModelShape{"nemotron-3-super", 512, 22, 1024, 2688, kSquaredRelu},
    ModelShape{"nemotron-3-ultra", 512, 22, 2048, 5120, kSquaredRelu},
    ModelShape{"qwen3-235b-a22b", 128, 8, 4096, 1536, kSwiGlu},
    ModelShape{"qwen3.5-397b-a17b", 512, 10, 4096, 1024, kSwiGlu},
    ModelShape{"deepseek-v2-lite", 64, 6, 2048, 1408, kSwiGlu},
    ModelShape{"deepseek-v3", 256, 8, 7168, 2048, kSwiGlu},
    ModelShape{"deepseek-v4-flash", 256, 6, 4096, 2048, kSwiGlu},
    ModelShape{"deepseek-v4-pro", 384, 6, 7168, 3072, kSwiGlu},
    ModelShape{"gpt-oss-120b", 128, 4, 2880, 2880, kSwiGluOai},
    ModelShape{"mixtral-8x7b", 8, 2, 4096, 14336, kSwiGlu},
    ModelShape{"glm-4.5", 160, 8, 5120, 1536, kSwiGlu},
    ModelShape{"glm-5", 256, 8, 6144, 2048, kSwiGlu},
    ModelShape{"kimi-k2", 384, 8, 7168, 2048, kSwiGlu},
};

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

// Finite floats, separated by commas.
bool parse_floats(std::string_view text, std::vector<float>* values) {
  for (std::string_view part : split(text, ',')) {
    float value = 0;
    if (!parse_number(part, &value) || !std::isfinite(value)) return false;
    values->push_back(value);
  }
  return true;
}

}  // namespace

void require(const Status& status) {
  if (!status.ok()) throw Error(status);
}

std::string require_backend(const std::string& name) {
  std::vector<std::string_view> names;
  for (const BackendInfo& backend : list_backends()) {
    names.push_back(backend.name);
    const bool chosen = name.empty() ? backend.available : backend.name == name;
    if (!chosen) continue;
    if (!backend.available) {
      throw Error(
          Status(ErrorCode::kUnsupportedDevice, fmt::format("{}: {}", name, backend.reason)));
    }
    return std::string(backend.name);
  }
  throw CLI::ValidationError(
      "--backend", fmt::format("'{}' is not known; known are {}", name, fmt::join(names, ", ")));
}

std::span<const ModelShape> model_shapes() {
  return kModels;
}

Result<ModelShape> find_model(std::string_view name) {
  const std::string wanted = lower(name);
  std::vector<ModelShape> fitting;
  for (const ModelShape& model : kModels) {
    if (model.name == wanted) return model;
    if (!wanted.empty() && model.name.substr(0, wanted.size()) == wanted) fitting.push_back(model);
  }
  if (fitting.size() == 1) return fitting.front();
  std::vector<std::string_view> names;
  for (const ModelShape& model : fitting.empty() ? model_shapes() : fitting)
    names.push_back(model.name);
  return Status(ErrorCode::kNotFound,
                fmt::format("model: '{}' {}: {}",
                            name,
                            fitting.empty() ? "is not known; known are" : "fits several models",
                            fmt::join(names, ", ")));
}

Result<std::vector<int64_t>> parse_counts(std::string_view text) {
  std::vector<int64_t> counts;
  for (std::string_view part : split(text, ',')) {
    int64_t value = 0;
    if (!parse_number(part, &value) || value < 1 || value > kMaxCount) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("expected positive integers separated by commas, at most {}, got "
                                "'{}'",
                                kMaxCount,
                                text));
    }
    counts.push_back(value);
  }
  return counts;
}

Result<Activation> parse_activation(std::string_view text) {
  const Status failure(ErrorCode::kInvalidArgument,
                       fmt::format("activation: expected {}, got '{}'", kActivationHelp, text));
  const size_t colon = text.find(':');
  const std::string name = lower(text.substr(0, colon));
  std::vector<float> values;
  if (colon != std::string_view::npos && !parse_floats(text.substr(colon + 1), &values)) {
    return failure;
  }
  if (name == "swiglu" && values.empty()) return kSwiGlu;
  if (name == "squared-relu" && values.empty()) return kSquaredRelu;
  if (name == "geglu-tanh" && values.empty()) return Activation{.type = ActivationType::kGeGluTanh};
  if (name == "swiglu-oai" && values.empty()) return kSwiGluOai;
  if (name == "swiglu-oai" && values.size() == 3 && values[2] > 0) {
    return Activation{.type = ActivationType::kSwiGluOai,
                      .alpha = values[0],
                      .beta = values[1],
                      .limit = values[2]};
  }
  if (name == "situ" && (values.size() == 1 || values.size() == 2) && values.front() > 0 &&
      values.back() > 0) {
    Activation activation{.type = ActivationType::kSiTu};
    activation.situ_b = values[0];
    if (values.size() == 2) activation.situ_c = values[1];
    return activation;
  }
  return failure;
}

std::string format_activation(const Activation& a) {
  switch (a.type) {
    case ActivationType::kSquaredRelu:
      return "squared-relu";
    case ActivationType::kSwiGlu:
      return "swiglu";
    case ActivationType::kSwiGluOai:
      return fmt::format("swiglu-oai:{},{},{}", a.alpha, a.beta, a.limit);
    case ActivationType::kGeGluTanh:
      return "geglu-tanh";
    case ActivationType::kSiTu:
      return a.situ_c ? fmt::format("situ:{},{}", a.situ_b, *a.situ_c)
                      : fmt::format("situ:{}", a.situ_b);
  }
  return {};
}

std::string printable(std::string_view text) {
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte < 0x20 || byte == 0x7F ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return result;
}

void print_error(std::string_view text) {
  const std::string line = fmt::format("hexpert: {}\n", printable(text));
  std::fputs(line.c_str(), stderr);
}

Table::Table(std::FILE* out, std::vector<Column> columns)
    : out_(out), columns_(std::move(columns)) {
  for (Column& column : columns_)
    column.width = std::max(column.width, static_cast<int>(column.title.size()));
}

void Table::header() const {
  std::vector<std::string> titles;
  for (const Column& column : columns_)
    titles.push_back(column.title);
  line(titles);
}

void Table::row(std::span<const std::string> cells) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < cells.size(); ++i) {
    texts.push_back(printable(cells[i]));
    columns_[i].width = std::max(columns_[i].width, static_cast<int>(texts[i].size()));
  }
  line(texts);
}

void Table::line(std::span<const std::string> cells) const {
  std::string text;
  for (size_t i = 0; i < cells.size(); ++i) {
    if (i > 0) text += "  ";
    text += columns_[i].left ? fmt::format("{:<{}}", cells[i], columns_[i].width)
                             : fmt::format("{:>{}}", cells[i], columns_[i].width);
  }
  text.erase(text.find_last_not_of(' ') + 1);
  fmt::print(out_, "{}\n", text);
  std::fflush(out_);
}

std::string format_bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (value >= 1e9) return fmt::format("{:.2f} GB", value * 1e-9);
  if (value >= 1e6) return fmt::format("{:.2f} MB", value * 1e-6);
  if (value >= 1e3) return fmt::format("{:.1f} kB", value * 1e-3);
  return fmt::format("{} B", bytes);
}

std::string format_ms(double seconds) {
  const double ms = seconds * 1e3;
  return fmt::format("{:.{}f}", ms, ms >= 100 ? 0 : ms >= 10 ? 1 : ms >= 1 ? 2 : 3);
}

double now_seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  return quantile(std::move(values), 0.5);
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double rank = q * static_cast<double>(values.size() - 1);
  return values[static_cast<size_t>(std::lround(rank))];
}

double geometric_mean(std::span<const double> values) {
  double sum = 0;
  for (double value : values)
    sum += std::log(value);
  return values.empty() ? 0 : std::exp(sum / static_cast<double>(values.size()));
}

int effective_threads(int requested) {
  return requested > 0 ? requested : omp_get_max_threads();
}

}  // namespace hexpert::tools

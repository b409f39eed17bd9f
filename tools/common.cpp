#include "common.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>

#include "format/codec.hpp"

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
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || end != part.data() + part.size() || !std::isfinite(value)) {
      return false;
    }
    values->push_back(value);
  }
  return true;
}

// Position on the line of representable values: adjacent values differ by 1, both zeros are 0.
int64_t ordinal(uint32_t bits, int width) {
  const uint32_t sign = 1U << (width - 1);
  const auto magnitude = static_cast<int64_t>(bits & (sign - 1));
  return (bits & sign) != 0 ? -magnitude : magnitude;
}

}  // namespace

void require(const Status& status) {
  if (!status.ok()) throw Error(status);
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
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || end != part.data() + part.size() || value < 1 ||
        value > kMaxCount) {
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
  if (name == "swiglu-oai" && values.size() == 3) {
    return Activation{.type = ActivationType::kSwiGluOai,
                      .alpha = values[0],
                      .beta = values[1],
                      .limit = values[2]};
  }
  if (name == "situ" && (values.size() == 1 || values.size() == 2)) {
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

std::vector<uint16_t> random_bf16(int64_t count, float sigma, uint64_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  Random random(seed);
  for (uint16_t& value : values)
    value = bf16_from_f32(sigma * random.normal());
  return values;
}

MoeInputs RandomInputs::view() const {
  MoeInputs inputs;
  inputs.hidden_states = {hidden_states.data(), DType::kBF16, {tokens, hidden_size}};
  inputs.routing_map = {routing_map.data(), DType::kI32, {tokens, top_k}};
  inputs.probabilities = {probabilities.data(), DType::kF32, {tokens, top_k}};
  return inputs;
}

RandomInputs RandomInputs::select(std::span<const int64_t> rows) const {
  RandomInputs result;
  result.tokens = static_cast<int64_t>(rows.size());
  result.top_k = top_k;
  result.hidden_size = hidden_size;
  for (int64_t row : rows) {
    const auto append = [row](auto& to, const auto& from, int64_t width) {
      to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
    };
    append(result.hidden_states, hidden_states, hidden_size);
    append(result.routing_map, routing_map, top_k);
    append(result.probabilities, probabilities, top_k);
  }
  return result;
}

RandomInputs random_inputs(
    int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden_size, uint64_t seed) {
  RandomInputs inputs;
  inputs.tokens = tokens;
  inputs.top_k = top_k;
  inputs.hidden_size = hidden_size;
  inputs.hidden_states = random_bf16(tokens * hidden_size, 1.0F, seed);
  inputs.routing_map.reserve(static_cast<size_t>(tokens * top_k));
  inputs.probabilities.reserve(static_cast<size_t>(tokens * top_k));
  Random random(seed ^ 0x5DEECE66DU);
  std::vector<int32_t> experts(static_cast<size_t>(num_experts));
  for (size_t e = 0; e < experts.size(); ++e)
    experts[e] = static_cast<int32_t>(e);
  for (int64_t i = 0; i < tokens; ++i) {
    float sum = 0;
    for (int64_t s = 0; s < top_k; ++s) {
      const int64_t drawn = s % num_experts;  // a partial Fisher-Yates shuffle per token
      std::swap(experts[static_cast<size_t>(drawn)],
                experts[static_cast<size_t>(drawn + random.below(num_experts - drawn))]);
      inputs.routing_map.push_back(experts[static_cast<size_t>(drawn)]);
      inputs.probabilities.push_back(0.1F + static_cast<float>(random.below(1000)) * 1e-3F);
      sum += inputs.probabilities.back();
    }
    for (auto p = inputs.probabilities.end() - top_k; p != inputs.probabilities.end(); ++p)
      *p /= sum;
  }
  return inputs;
}

bool Agreement::ok() const {
  const int64_t outliers = rows - rows_within;
  const int64_t allowed = rows < 20 ? 1 : rows / 20;
  return outliers <= allowed && worst_row_l2 <= kWorstRow && wrong_zero_rows == 0 &&
         nan_mismatches == 0 && (rows < 64 || relative_l2 <= kWhole);
}

double Agreement::equal_share() const {
  return elements == 0 ? 1.0 : static_cast<double>(equal) / static_cast<double>(elements);
}

Agreement compare(const ConstTensorView& reference, const ConstTensorView& candidate) {
  const int64_t rows = reference.shape[0];
  const int64_t cols = reference.shape[1];
  const bool f32 = reference.dtype == DType::kF32;
  const auto bits_at = [f32](const ConstTensorView& view, int64_t i) -> uint32_t {
    return f32 ? view.as<uint32_t>()[i] : view.as<uint16_t>()[i];
  };
  const auto value_of = [f32](uint32_t bits) {
    return f32 ? std::bit_cast<float>(bits) : bf16_to_f32(static_cast<uint16_t>(bits));
  };
  Agreement a;
  a.elements = rows * cols;
  double all_noise = 0;
  double all_signal = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double noise = 0;
    double signal = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
      const uint32_t expected_bits = bits_at(reference, i);
      const uint32_t got_bits = bits_at(candidate, i);
      const float expected = value_of(expected_bits);
      const float got = value_of(got_bits);
      a.equal += static_cast<int64_t>(expected_bits == got_bits);
      if (!std::isfinite(expected) || !std::isfinite(got)) {
        const bool same = expected == got || (std::isnan(expected) && std::isnan(got));
        a.nan_mismatches += static_cast<int64_t>(!same);
        continue;
      }
      const int width = f32 ? 32 : 16;
      a.largest_ulp = std::max(a.largest_ulp,
                               std::abs(ordinal(expected_bits, width) - ordinal(got_bits, width)));
      const double difference = static_cast<double>(got) - static_cast<double>(expected);
      noise += difference * difference;
      signal += static_cast<double>(expected) * static_cast<double>(expected);
    }
    all_noise += noise;
    all_signal += signal;
    if (signal == 0) {
      a.wrong_zero_rows += static_cast<int64_t>(noise != 0);
      continue;
    }
    const double l2 = std::sqrt(noise / signal);
    ++a.rows;
    a.rows_within += static_cast<int64_t>(l2 <= Agreement::kRowL2);
    if (l2 > a.worst_row_l2 || a.worst_row < 0) {
      a.worst_row_l2 = l2;
      a.worst_row = r;
    }
  }
  a.relative_l2 = all_signal == 0 ? 0 : std::sqrt(all_noise / all_signal);
  return a;
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
  for (size_t i = 0; i < cells.size(); ++i)
    columns_[i].width = std::max(columns_[i].width, static_cast<int>(cells[i].size()));
  line(cells);
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

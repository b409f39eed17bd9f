#include "option_values.hpp"

#include <fmt/core.h>

#include <cstdint>

namespace hexpert::tools {

CLI::Validator number_in(double low, double high) {
  const auto check = [=](const std::string& text) {
    double value = 0;
    if (parse_number(text, &value) && value >= low && value <= high) return std::string();
    return fmt::format("expected a number in {}..{}, got '{}'", low, high, text);
  };
  return {check, fmt::format("in {}..{}", low, high)};
}

CLI::Validator any_seed() {
  const auto check = [](const std::string& text) {
    uint64_t value = 0;
    if (parse_number(text, &value)) return std::string();
    return fmt::format("expected a whole number in 0..2^64 - 1, got '{}'", text);
  };
  return {check, ""};
}

}  // namespace hexpert::tools

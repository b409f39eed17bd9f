// Values of options: names for enumerators, numbers that are in range.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hexpert::tools {

// The number that is all of a text.
template <typename Number>
bool parse_number(std::string_view text, Number* value) {
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && after == end;
}

// A number in low..high, which NaN is not: CLI::Range lets it pass.
CLI::Validator number_in(double low, double high);

// A whole number of 64 bits: the conversion of CLI11 clamps larger ones and wraps negative ones.
CLI::Validator any_seed();

// An option with a name for each value. CLI::CheckedTransformer does the same, but its messages show
// the values too, and those of an enum are control characters.
template <typename Value>
CLI::Option* add_choice(CLI::App* command,
                        const std::string& flag,
                        Value* value,
                        const std::vector<std::pair<std::string, Value>>& choices,
                        const std::string& help) {
  std::vector<std::string> names;
  for (const auto& choice : choices)
    names.push_back(choice.first);
  const auto store = [=](const std::string& name) {
    for (const auto& choice : choices) {
      if (choice.first == name) *value = choice.second;
    }
  };
  return command->add_option_function<std::string>(flag, store, help)
      ->transform(CLI::IsMember(names, CLI::ignore_case))
      ->option_text(CLI::detail::join(names, "|"));
}

}  // namespace hexpert::tools

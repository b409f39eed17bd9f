// The parsers of option values: any text gives a value that prints and reads back, or an error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "common.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hexpert;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto counts = tools::parse_counts(text);
  if (counts.ok()) {
    for (int64_t count : *counts) {
      if (count < 1 || count > tools::kMaxCount) std::abort();
    }
  }
  const auto activation = tools::parse_activation(text);
  if (activation.ok()) {
    const auto again = tools::parse_activation(tools::format_activation(*activation));
    if (!again.ok() || again->type != activation->type || again->alpha != activation->alpha ||
        again->beta != activation->beta || again->limit != activation->limit ||
        again->situ_b != activation->situ_b || again->situ_c != activation->situ_c) {
      std::abort();
    }
  }
  const auto model = tools::find_model(text);
  if (model.ok() && model->num_experts < model->top_k) std::abort();
  return 0;
}

// hexpert inspect: the experts of a checkpoint, their sizes, and what NVFP4 does to them.
#include <fmt/core.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint_options.hpp"
#include "commands.hpp"
#include "common.hpp"
#include "hexpert/checkpoint.hpp"

namespace hexpert::tools {
namespace {

struct InspectOptions {
  std::string path;
  std::vector<std::string> layers;
  StackedLayout stacked = StackedLayout::kAuto;
  bool experts = false;
  bool skip_error = false;
  bool json = false;
  int threads = 0;
};

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

nlohmann::json error_json(const ErrorStats& stats) {
  const double snr = stats.snr_db();
  return {{"snr_db", std::isfinite(snr) ? nlohmann::json(snr) : nlohmann::json()},
          {"relative_l2", stats.relative_l2()},
          {"max_error", stats.max_error},
          {"rounded_to_zero", stats.rounded_to_zero},
          {"nonzero", stats.nonzero},
          {"zero_scales", stats.zero_scales},
          {"saturated_scales", stats.saturated_scales},
          {"blocks", stats.blocks}};
}

std::vector<std::string> error_cells(const ErrorStats& stats) {
  return {fmt::format("{:.2f}", stats.snr_db()),
          fmt::format("{:.4f}", stats.relative_l2()),
          fmt::format("{:.3g}", stats.max_error),
          fmt::format("{:.2f}", share(stats.rounded_to_zero, stats.nonzero)),
          fmt::format("{}", stats.zero_scales),
          fmt::format("{}", stats.saturated_scales)};
}

std::string kind_of(const MoeLayerInfo& layer) {
  return fmt::format("{} {}", to_string(layer.naming), to_string(layer.format));
}

std::string shape_of(const ExpertShape& shape) {
  return fmt::format("{} x (H {} I {}{})",
                     shape.num_local_experts,
                     shape.hidden_size,
                     shape.intermediate_size,
                     shape.gated ? ", gated" : "");
}

// Error of each expert, of those that have one to measure.
std::vector<ErrorStats> measure(const Checkpoint& checkpoint,
                                const MoeLayerInfo& layer,
                                const InspectOptions& options) {
  std::vector<ErrorStats> experts;
  if (options.skip_error || is_nvfp4(layer.format)) return experts;
  for (int64_t e = 0; e < layer.shape.num_local_experts; ++e) {
    experts.push_back(expert_error(checkpoint, layer.prefix, e, options.threads).value());
  }
  return experts;
}

ErrorStats total_of(const std::vector<ErrorStats>& experts) {
  ErrorStats total;
  for (const ErrorStats& expert : experts)
    total.merge(expert);
  return total;
}

void print_json(const Checkpoint& checkpoint,
                const std::vector<const MoeLayerInfo*>& layers,
                const InspectOptions& options) {
  nlohmann::json out = {{"path", options.path}, {"layers", nlohmann::json::array()}};
  for (const MoeLayerInfo* layer : layers) {
    const std::vector<ErrorStats> experts = measure(checkpoint, *layer, options);
    nlohmann::json entry = {{"prefix", layer->prefix},
                            {"naming", to_string(layer->naming)},
                            {"format", to_string(layer->format)},
                            {"num_experts", layer->shape.num_local_experts},
                            {"hidden_size", layer->shape.hidden_size},
                            {"intermediate_size", layer->shape.intermediate_size},
                            {"gated", layer->shape.gated},
                            {"source_bytes", layer->source_bytes},
                            {"nvfp4_bytes", layer->nvfp4_bytes}};
    if (!experts.empty()) entry["error"] = error_json(total_of(experts));
    if (options.experts) {
      for (const ErrorStats& expert : experts)
        entry["experts"].push_back(error_json(expert));
    }
    out["layers"].push_back(std::move(entry));
  }
  // A path need not be UTF-8, JSON must be.
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_table(const Checkpoint& checkpoint,
                 const std::vector<const MoeLayerInfo*>& layers,
                 const InspectOptions& options) {
  std::vector<Table::Column> columns = {
      {"layer", 12, true}, {"experts", 24, true}, {"stored", 18, true}, {"bytes", 8}, {"NVFP4", 8}};
  if (!options.skip_error) {
    for (const char* title : {"SNR dB", "rel. L2", "max err", "to 0 %", "0-scale", "448-scale"})
      columns.push_back({title, 8});
  }
  for (const MoeLayerInfo* layer : layers) {
    const auto widen = [](Table::Column& column, const std::string& text) {
      column.width = std::max(column.width, static_cast<int>(text.size()));
    };
    widen(columns[0], printable(layer->prefix));
    widen(columns[1], shape_of(layer->shape));
    widen(columns[2], kind_of(*layer));
  }
  const std::size_t width = columns.size();
  Table table(stdout, std::move(columns));
  table.header();
  const auto row = [&](std::vector<std::string> cells, const std::vector<std::string>& more) {
    cells.insert(cells.end(), more.begin(), more.end());
    cells.resize(width);
    table.row(cells);
  };
  int64_t before = 0;
  int64_t after = 0;
  ErrorStats whole;
  for (const MoeLayerInfo* layer : layers) {
    const std::vector<ErrorStats> experts = measure(checkpoint, *layer, options);
    const ErrorStats total = total_of(experts);
    row({layer->prefix,
         shape_of(layer->shape),
         kind_of(*layer),
         format_bytes(layer->source_bytes),
         format_bytes(layer->nvfp4_bytes)},
        experts.empty() ? std::vector<std::string>() : error_cells(total));
    for (std::size_t e = 0; options.experts && e < experts.size(); ++e) {
      row({fmt::format("  expert {}", e), "", "", "", ""}, error_cells(experts[e]));
    }
    before += layer->source_bytes;
    after += layer->nvfp4_bytes;
    whole.merge(total);
  }
  if (layers.size() > 1) {
    row({"all",
         fmt::format("{} layers", layers.size()),
         "",
         format_bytes(before),
         format_bytes(after)},
        whole.elements == 0 ? std::vector<std::string>() : error_cells(whole));
  }
}

int inspect(const InspectOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(options.path, options.stacked).value();
  std::vector<const MoeLayerInfo*> layers;
  for (const std::string& prefix : options.layers)
    layers.push_back(checkpoint.layer(prefix).value());
  if (options.layers.empty()) {
    for (const MoeLayerInfo& layer : checkpoint.layers())
      layers.push_back(&layer);
  }
  if (layers.empty()) {
    require(Status(ErrorCode::kNotFound, fmt::format("{}: no experts found", options.path)));
  }
  if (options.json) {
    print_json(checkpoint, layers, options);
  } else {
    print_table(checkpoint, layers, options);
  }
  return kExitOk;
}

}  // namespace

void add_inspect(CLI::App& parent, int* exit_code) {
  CLI::App* command = parent.add_subcommand(
      "inspect", "Show the experts of a checkpoint, their sizes and the error of NVFP4.");
  command->footer(
      "One row a layer: experts, how they are stored, bytes in the file and as NVFP4 (4.5 bits a\n"
      "weight), and what quantizing does to the weights: signal to noise ratio, relative L2 and\n"
      "largest error, share of nonzero weights that become zero, block scales that are zero\n"
      "although a weight is not, and block scales at their maximum (448).\n"
      "\n"
      "Examples:\n"
      "  hexpert inspect model/                      a directory with an index or shards\n"
      "  hexpert inspect model.safetensors --experts one row an expert too\n"
      "  hexpert inspect model/ --no-error           headers only: fast");
  const auto options = std::make_shared<InspectOptions>();
  command->add_option("FILE", options->path, ".safetensors file, directory or .index.json")
      ->required();
  command->add_option("--layer", options->layers, "only this layer, by prefix; may be repeated")
      ->allow_extra_args(false);
  add_stacked_option(command, &options->stacked);
  command->add_flag("--experts", options->experts, "also one row for each expert");
  command->add_flag("--no-error", options->skip_error, "do not quantize, list only");
  command->add_flag("--json", options->json, "machine-readable output");
  command->add_option("--threads", options->threads, "threads; 0: all")->check(CLI::Range(0, 1024));
  command->callback([options, exit_code] { *exit_code = inspect(*options); });
}

}  // namespace hexpert::tools

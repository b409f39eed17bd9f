// hexpert run: recorded tokens through layers of a checkpoint, and what NVFP4 changed.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "agreement.hpp"
#include "commands.hpp"
#include "common.hpp"
#include "dense_layer.hpp"
#include "format/codec.hpp"
#include "hexpert/checkpoint.hpp"
#include "hexpert/moe.hpp"
#include "hexpert/safetensors.hpp"
#include "layer_io.hpp"

namespace hexpert::tools {
namespace {

constexpr const char* kFooter =
    "MODEL is a .safetensors file, a directory of shards or an index, BF16 (also FP16, FP32) or\n"
    "NVFP4. The tokens file holds, for each layer PREFIX,\n"
    "  PREFIX.hidden_states  [tokens, hidden_size] bf16\n"
    "  PREFIX.routing_map    [tokens, top_k] i32 or i64, expert ids; others are skipped\n"
    "  PREFIX.probabilities  [tokens, top_k] f32, applied as given\n"
    "  PREFIX.expected       [tokens, hidden_size] f32 or bf16, optional: the unquantized output\n"
    "\n"
    "  SNR dB       of the weights: signal to quantization noise\n"
    "  rel L2, cos  of the output against PREFIX.expected, or else the layer computed in FP32 "
    "from\n"
    "               the unquantized weights\n"
    "  equal, ulp   values with the bits of the reference backend; largest difference in bf16 "
    "steps\n"
    "\n"
    "Examples:\n"
    "  hexpert run model.safetensors --tokens tokens.safetensors --all-layers\n"
    "  hexpert run model.safetensors --tokens tokens.safetensors --prefix model.layers.3.mlp \\\n"
    "      --backend cpu-avx2 --output out.safetensors\n"
    "\n"
    "Exit codes: 0 ok, 1 disagrees with the reference, 2 usage, 3 bad input, 4 unsupported here.";

struct RunOptions {
  std::string model;
  std::string tokens;
  std::vector<std::string> prefixes;
  bool all_layers = false;
  std::string backend;
  std::string activation;
  std::string output;
  int threads = 0;
  int repeat = 5;
  bool skip_reference = false;
};

// What one layer gave.
struct LayerResult {
  std::vector<uint16_t> output;  // [tokens, hidden_size] bf16
  int64_t tokens = 0;
  int64_t hidden_size = 0;
  std::vector<std::string> cells;
  bool ok = true;
};

std::vector<const MoeLayerInfo*> choose_layers(const Checkpoint& checkpoint,
                                               const RunOptions& options) {
  std::vector<const MoeLayerInfo*> chosen;
  if (checkpoint.layers().empty()) {
    throw Error(Status(ErrorCode::kInvalidFile,
                       fmt::format("{}: no mixture-of-experts layer found", options.model)));
  }
  for (const std::string& prefix : options.prefixes) {
    const MoeLayerInfo* layer = checkpoint.layer(prefix).value();
    if (std::find(chosen.begin(), chosen.end(), layer) == chosen.end()) chosen.push_back(layer);
  }
  if (!chosen.empty()) return chosen;
  if (!options.all_layers && checkpoint.layers().size() > 1) {
    std::vector<std::string> prefixes;
    for (const MoeLayerInfo& layer : checkpoint.layers())
      prefixes.push_back(layer.prefix);
    throw CLI::ValidationError(
        "--prefix",
        fmt::format("{} has several layers; choose --all-layers or one of {}",
                    options.model,
                    fmt::join(prefixes, ", ")));
  }
  for (const MoeLayerInfo& layer : checkpoint.layers())
    chosen.push_back(&layer);
  return chosen;
}

Activation choose_activation(const RunOptions& options, const MoeLayerInfo& layer) {
  if (options.activation.empty()) {
    Activation activation;
    activation.type = layer.shape.gated ? ActivationType::kSwiGlu : ActivationType::kSquaredRelu;
    return activation;
  }
  const Result<Activation> activation = parse_activation(options.activation);
  if (!activation.ok()) throw CLI::ValidationError("--activation", activation.status().message());
  return *activation;
}

// "PREFIX.what"; layers at the root of a checkpoint have no prefix.
std::string tensor_name(const std::string& prefix, const char* what) {
  return prefix.empty() ? what : prefix + "." + what;
}

std::optional<ErrorStats> weight_error(const Checkpoint& checkpoint, const MoeLayerInfo& layer) {
  if (is_nvfp4(layer.format)) return std::nullopt;
  ErrorStats total;
  for (int64_t e = 0; e < layer.shape.num_local_experts; ++e)
    total.merge(expert_error(checkpoint, layer.prefix, e).value());
  return total;
}

// The output that an unquantized layer has, where it can be known.
std::optional<std::vector<float>> expected_output(const Checkpoint& checkpoint,
                                                  const MoeLayerInfo& layer,
                                                  const Activation& activation,
                                                  const SafetensorsFile& tokens,
                                                  const MoeInputs& inputs) {
  const std::string name = tensor_name(layer.prefix, "expected");
  if (tokens.find(name) == nullptr) {
    if (is_nvfp4(layer.format)) return std::nullopt;
    return dense_forward(checkpoint, layer, activation, inputs).value();
  }
  const HostTensor expected = tokens.load(name).value();
  const TensorView& view = expected.view();
  if (view.rank != 2 || view.shape[0] != inputs.hidden_states.shape[0] ||
      view.shape[1] != inputs.hidden_states.shape[1] ||
      (view.dtype != DType::kF32 && view.dtype != DType::kBF16)) {
    throw Error(Status(ErrorCode::kShapeMismatch,
                       fmt::format("{}: expected f32 or bf16 of the shape of hidden_states, got {}",
                                   name,
                                   describe(view))));
  }
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        view.dtype == DType::kF32 ? view.as<float>()[i] : bf16_to_f32(view.as<uint16_t>()[i]);
  }
  return values;
}

LayerResult run_layer(const Checkpoint& checkpoint,
                      const MoeLayerInfo& layer,
                      const SafetensorsFile& tokens,
                      const RunOptions& options,
                      const std::string& backend) {
  const HostTensor hidden_states = tokens.load(tensor_name(layer.prefix, "hidden_states")).value();
  const HostTensor routing_map = tokens.load(tensor_name(layer.prefix, "routing_map")).value();
  const HostTensor probabilities = tokens.load(tensor_name(layer.prefix, "probabilities")).value();
  MoeInputs inputs;
  inputs.hidden_states = hidden_states.view();
  inputs.routing_map = routing_map.view();
  inputs.probabilities = probabilities.view();
  if (inputs.routing_map.rank != 2) {
    throw Error(Status(ErrorCode::kInvalidShape,
                       fmt::format("{}: expected [tokens, top_k], got {}",
                                   tensor_name(layer.prefix, "routing_map"),
                                   describe(inputs.routing_map))));
  }

  PrepareOptions prepare;
  prepare.num_threads = options.threads;
  prepare.device = device_of(backend);
  const ExpertWeights weights = load_experts(checkpoint, layer.prefix, prepare).value();
  const Activation activation = choose_activation(options, layer);
  const MoeProblem problem{.max_tokens = inputs.routing_map.shape[0],
                           .top_k = inputs.routing_map.shape[1],
                           .num_experts = layer.shape.num_local_experts,
                           .activation = activation};
  RoutedMoe moe =
      RoutedMoe::create(problem, weights, {.backend = backend, .num_threads = options.threads})
          .value();
  LayerResult result;
  result.tokens = problem.max_tokens;
  result.hidden_size = layer.shape.hidden_size;
  result.output.resize(static_cast<size_t>(result.tokens * result.hidden_size));
  const TensorView out(result.output.data(), DType::kBF16, {result.tokens, result.hidden_size});
  const auto io = LayerIo::create(weights.device(), inputs, out);
  io->forward(moe);
  std::vector<double> seconds;
  seconds.reserve(static_cast<size_t>(options.repeat));
  for (int i = 0; i < options.repeat; ++i)
    seconds.push_back(io->forward(moe));
  io->fetch();
  const double time = median(seconds);

  std::string snr = "-";
  if (const auto error = weight_error(checkpoint, layer)) {
    snr = fmt::format("{:.1f}", error->snr_db());
  }
  std::string relative_l2 = "-";
  std::string cosine = "-";
  if (const auto expected = expected_output(checkpoint, layer, activation, tokens, inputs)) {
    const ErrorStats error = output_error(*expected, result.output.data());
    relative_l2 = fmt::format("{:.4f}", error.relative_l2());
    cosine = fmt::format("{:.5f}", error.cosine());
  }
  std::string equal = "-";
  std::string ulp = "-";
  std::string verdict = "-";
  if (!options.skip_reference) {
    std::optional<ExpertWeights> host_weights;
    if (weights.device() != Device::cpu()) {
      prepare.device = Device::cpu();
      host_weights = load_experts(checkpoint, layer.prefix, prepare).value();
    }
    RoutedMoe reference =
        RoutedMoe::create(problem,
                          host_weights ? *host_weights : weights,
                          {.backend = "reference", .num_threads = options.threads})
            .value();
    std::vector<uint16_t> exact(result.output.size());
    const TensorView exact_view(exact.data(), DType::kBF16, {result.tokens, result.hidden_size});
    require(reference.forward(inputs, exact_view));
    const Agreement agreement = compare(exact_view, out);
    result.ok = agreement.ok();
    equal = fmt::format("{:.2f}%", 100 * agreement.equal_share());
    ulp = std::to_string(agreement.largest_ulp);
    verdict = result.ok ? "ok" : "FAIL";
  }
  result.cells = {layer.prefix,
                  std::to_string(layer.shape.num_local_experts),
                  format_bytes(layer.source_bytes),
                  format_bytes(layer.nvfp4_bytes),
                  snr,
                  relative_l2,
                  cosine,
                  std::string(moe.backend_name()),
                  std::to_string(result.tokens),
                  format_ms(time),
                  fmt::format("{:.0f}", static_cast<double>(result.tokens) / time),
                  equal,
                  ulp,
                  verdict};
  return result;
}

// The file for the outputs of `layers`, opened before anything is run.
SafetensorsWriter open_output(const std::string& path,
                              const std::vector<const MoeLayerInfo*>& layers,
                              const SafetensorsFile& tokens) {
  std::vector<TensorSpec> specs;
  for (const MoeLayerInfo* layer : layers) {
    // Running the layer tells what is wrong with this one.
    const TensorInfo* map = tokens.find(tensor_name(layer->prefix, "routing_map"));
    const int64_t rows = map == nullptr || map->shape.empty() ? 0 : map->shape[0];
    specs.push_back(
        {tensor_name(layer->prefix, "output"), "BF16", {rows, layer->shape.hidden_size}});
  }
  return SafetensorsWriter::create(path, specs).value();
}

// An output in the place of an input would destroy it.
void check_output(const RunOptions& options,
                  const Checkpoint& checkpoint,
                  const SafetensorsFile& tokens) {
  std::vector<std::string> inputs = {tokens.path()};
  for (const SafetensorsFile& file : checkpoint.files())
    inputs.push_back(file.path());
  for (const std::string& input : inputs) {
    for (const std::string& output : {options.output, options.output + ".partial"}) {
      std::error_code ignored;
      if (!std::filesystem::equivalent(input, output, ignored)) continue;
      throw Error(Status(ErrorCode::kInvalidArgument,
                         fmt::format("--output: '{}' is the input '{}'", output, input)));
    }
  }
}

int run_run(const RunOptions& options) {
  const std::string backend = require_backend(options.backend);
  const Checkpoint checkpoint = Checkpoint::open(options.model).value();
  const SafetensorsFile tokens = SafetensorsFile::open(options.tokens).value();
  const std::vector<const MoeLayerInfo*> layers = choose_layers(checkpoint, options);
  std::optional<SafetensorsWriter> writer;
  if (!options.output.empty()) {
    check_output(options, checkpoint, tokens);
    writer = open_output(options.output, layers, tokens);
  }

  int prefix_width = 0;
  for (const MoeLayerInfo* layer : layers)
    prefix_width = std::max(prefix_width, static_cast<int>(printable(layer->prefix).size()));
  Table table(stdout,
              {{"layer", prefix_width, true},
               {"experts", 7},
               {"before", 9},
               {"NVFP4", 9},
               {"SNR dB", 6},
               {"rel L2", 6},
               {"cos", 7},
               {"backend", 15, true},
               {"tokens", 6},
               {"ms", 5},
               {"tokens/s", 8},
               {"equal", 7},
               {"ulp", 4},
               {"check", 5, true}});
  table.header();
  bool ok = true;
  for (const MoeLayerInfo* layer : layers) {
    const LayerResult result = run_layer(checkpoint, *layer, tokens, options, backend);
    table.row(result.cells);
    ok = ok && result.ok;
    if (!writer) continue;
    require(writer->write(
        tensor_name(layer->prefix, "output"),
        ConstTensorView(result.output.data(), DType::kBF16, {result.tokens, result.hidden_size})));
  }
  if (writer) {
    require(writer->finish());
    fmt::print("wrote {}\n", printable(options.output));
  }
  return ok ? kExitOk : kExitCheckFailed;
}

}  // namespace

void add_run(CLI::App& parent, int* exit_code) {
  CLI::App* command =
      parent.add_subcommand("run", "Run recorded tokens through layers of a checkpoint");
  auto o = std::make_shared<RunOptions>();
  command->add_option("model", o->model, "Checkpoint")->required();
  command->add_option("--tokens", o->tokens, "Safetensors file with tokens and routes")->required();
  CLI::Option* prefix =
      command->add_option("--prefix", o->prefixes, "Layer, as 'inspect' names it; repeatable")
          ->allow_extra_args(false);
  command->add_flag("--all-layers", o->all_layers, "Every layer of the checkpoint")
      ->excludes(prefix);
  command->add_option("--backend", o->backend, "Backend (default: the best here)");
  command->add_option(
      "--activation",
      o->activation,
      fmt::format("{} (default: swiglu if gated, else squared-relu)", kActivationHelp));
  command->add_option("--output", o->output, "Write PREFIX.output, bf16, to this safetensors file")
      ->check([](const std::string& path) { return path.empty() ? "expected a path" : ""; });
  command->add_option("--threads", o->threads, "Threads (default: OpenMP's)")
      ->check(CLI::Range(1, 1024));
  command->add_option("--repeat", o->repeat, "Timed calls; the median is shown")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_flag("--skip-reference", o->skip_reference, "Do not compare with the reference");
  command->footer(kFooter);
  command->callback([o, exit_code] { *exit_code = run_run(*o); });
}

}  // namespace hexpert::tools

// hexpert bench: checks, then times, each figure beside the ceilings of the same moment.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_options.hpp"
#include "bench_record.hpp"
#include "ceilings.hpp"
#include "commands.hpp"
#include "common.hpp"
#include "hexpert/quantize.hpp"
#include "layer_io.hpp"
#include "machine.hpp"
#include "option_values.hpp"
#include "random_layer.hpp"
#include "random_routing.hpp"

namespace hexpert::tools {
namespace {

constexpr const char* kFooter =
    "Before a row is timed, some of its tokens are compared with the exact reference. Weights are\n"
    "cold: calls rotate over copies of the layer that together exceed --rotate-gb. The ceilings\n"
    "(DRAM read bandwidth and the peak of the arithmetic unit) are measured before and after "
    "every\n"
    "sample; each sample is divided by its own, and the table shows medians.\n"
    "\n"
    "  GB/s         useful weight bytes: 4.5 bits a weight of the experts in use, no padding\n"
    "  of read      of the read bandwidth of all threads\n"
    "  GFLOP/s      2 x routes x weights of an expert / time\n"
    "  of peak      of AMX-BF16 (cpu-amx), VNNI (cpu-avx512-vnni) or AVX2 (cpu-avx2)\n"
    "  of roofline  the larger of the times that both ceilings allow / time\n"
    "  BF16 GB/s    BF16 bytes read by quantize_tokens, and by refresh of prepared weights\n"
    "\n"
    "On a GPU a row is one CUDA graph of several calls with their own routes and copies of the\n"
    "weights, so that no call finds its data in the L2 cache; the ceilings are those of the run.\n"
    "Rows are not checked there: 'hexpert check --backend cuda-sm90a' does that.\n"
    "\n"
    "  us           of one call, the whole layer; median of replays, after half a second of them\n"
    "  roofline us  the longer of: 4.5 bits for each weight of the active experts / read "
    "bandwidth,\n"
    "               operations / dense BF16 rate of cuBLAS (where the library is found)\n"
    "  quantize     bytes read and written against a copy; prepare: BF16 bytes read against a "
    "read\n"
    "\n"
    "Examples:\n"
    "  hexpert bench\n"
    "  hexpert bench --backend cuda-sm90a --model qwen3-30b --tokens 1,128,8192 --routing zipf\n"
    "  hexpert bench --model qwen3-30b --tokens 1,8,64 --backend cpu-avx2 --stage layer\n"
    "  hexpert bench --model deepseek-v3 --num-experts 32 --json result.json\n"
    "\n"
    "Exit codes: 0 ok, 1 a check failed, 2 usage, 3 cannot write, 4 backend or memory missing.";

constexpr int kFewestSamples = 3;

// Calls work(i), which fills everything but the ceilings, between measurements of the ceilings.
template <typename Work>
std::vector<Sample> measure(Ceilings& ceilings,
                            ComputeUnit unit,
                            const BenchOptions& options,
                            const Work& work) {
  std::vector<Sample> samples;
  double read = ceilings.read_gbs();
  double peak = ceilings.compute_gops(unit);
  const double start = now_seconds();
  for (int i = 0; i < options.samples; ++i) {
    if (i >= kFewestSamples && now_seconds() - start > options.max_seconds) break;
    Sample sample = work(i);
    const double peak_after = ceilings.compute_gops(unit);
    const double read_after = ceilings.read_gbs();
    sample.read_gbs = 0.5 * (read + read_after);
    sample.peak_gops = 0.5 * (peak + peak_after);
    read = read_after;
    peak = peak_after;
    samples.push_back(sample);
  }
  return samples;
}

int64_t active_experts(const RandomInputs& inputs) {
  std::vector<int32_t> ids = inputs.routing_map;
  std::sort(ids.begin(), ids.end());
  return std::unique(ids.begin(), ids.end()) - ids.begin();
}

void require_memory(double bytes, std::string_view what) {
  const auto available = static_cast<double>(describe_machine().available_bytes);
  if (available > 0 && bytes > 0.9 * available) {
    throw Error(Status(ErrorCode::kOutOfMemory,
                       fmt::format("bench: {} takes {:.1f} GB, {:.1f} GB are available; "
                                   "--num-experts N makes it smaller",
                                   what,
                                   bytes * 1e-9,
                                   available * 1e-9)));
  }
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : options_(options),
        threads_(effective_threads(options.threads)),
        out_(options.json == "-" ? stderr : stdout),
        ceilings_(Ceilings::create(threads_).value()) {}

  int run(const std::vector<ModelShape>& models, const std::vector<int64_t>& tokens) {
    fmt::print(out_,
               "{} threads; ceilings now: read {:.1f} GB/s ({}), VNNI {:.0f} GOP/s, AVX2 {:.0f} "
               "GOP/s, AMX-BF16 {:.0f} GFLOP/s (0: not here)\n\n",
               threads_,
               ceilings_.read_gbs(),
               ceilings_.read_variant(),
               ceilings_.compute_gops(ComputeUnit::kVnni),
               ceilings_.compute_gops(ComputeUnit::kAvx2),
               ceilings_.compute_gops(ComputeUnit::kAmx));
    if (wants("layer")) {
      Table table = layer_table(out_);
      table.header();
      for (const ModelShape& model : models)
        bench_layer(model, tokens, table);
      print_mean("layer");
    }
    if (wants("quantize") || wants("prepare")) {
      Table table = stage_table(out_);
      table.header();
      for (const ModelShape& model : models) {
        if (wants("quantize")) bench_quantize(model, table);
        if (wants("prepare")) bench_prepare(model, table);
      }
      print_mean("quantize");
      print_mean("prepare");
    }
    write_json();
    return exit_code_;
  }

 private:
  bool wants(std::string_view stage) const {
    return std::find(options_.stages.begin(), options_.stages.end(), stage) !=
           options_.stages.end();
  }

  void bench_layer(const ModelShape& model, const std::vector<int64_t>& tokens, Table& table) {
    const ExpertShape shape{model.num_experts,
                            model.hidden_size,
                            model.intermediate_size,
                            is_gated(model.activation.type)};
    PrepareOptions prepare;
    prepare.num_threads = options_.threads;
    const double expert_bytes = 0.5625 * static_cast<double>(parameters_per_expert(model));
    const double layer_bytes = expert_bytes * static_cast<double>(model.num_experts);
    const auto copies = std::max<int64_t>(
        1, static_cast<int64_t>(std::floor(options_.rotate_gb * 1e9 / layer_bytes)) + 1);
    require_memory(1.1 * layer_bytes * static_cast<double>(copies), model.name);
    const RandomExperts experts(shape, options_.seed);
    std::vector<ExpertWeights> layers;
    for (int64_t i = 0; i < copies; ++i)
      layers.push_back(experts.quantize(prepare).value());
    for (const std::string& backend : options_.backends) {
      for (int64_t count : tokens) {
        BenchRow row;
        row.stage = "layer";
        row.model = model.name;
        row.backend = backend;
        row.tokens = count;
        row.unit = compute_unit_of(backend);
        time_layer(model, layers, row, table);
      }
    }
  }

  void time_layer(const ModelShape& model,
                  const std::vector<ExpertWeights>& layers,
                  BenchRow& row,
                  Table& table) {
    const MoeProblem problem{.max_tokens = row.tokens,
                             .top_k = model.top_k,
                             .num_experts = model.num_experts,
                             .activation = model.activation};
    std::vector<RoutedMoe> moes;
    moes.reserve(layers.size());
    for (const ExpertWeights& weights : layers) {
      moes.push_back(RoutedMoe::create(problem,
                                       weights,
                                       {.backend = row.backend, .num_threads = options_.threads})
                         .value());
    }
    // Enough different routes that no call finds its experts in a cache.
    std::vector<RandomInputs> inputs;
    std::vector<double> active;
    const size_t variants = row.tokens <= 64 ? 16 : 3;
    for (size_t i = 0; i < variants; ++i) {
      inputs.push_back(random_inputs(
          row.tokens, model.top_k, model.num_experts, model.hidden_size, options_.seed + 100 + i));
      active.push_back(static_cast<double>(active_experts(inputs.back())));
    }
    std::vector<uint16_t> out(static_cast<size_t>(row.tokens * model.hidden_size));
    const TensorView out_view(out.data(), DType::kBF16, {row.tokens, model.hidden_size});

    double call_seconds = 0;
    for (size_t i = 0; i < std::max<size_t>(2, moes.size()); ++i) {  // warm-up
      const double start = now_seconds();
      require(moes[i % moes.size()].forward(inputs[0].view(), out_view));
      call_seconds = now_seconds() - start;
      if (call_seconds > options_.max_seconds) break;
    }
    require(moes[0].forward(inputs[0].view(), out_view));
    if (!check(problem, layers[0], inputs[0], out_view, row)) return;

    // Calls of one sample go to different layers, so none finds its weights in a cache.
    const auto calls = static_cast<size_t>(
        std::clamp<double>(std::ceil(3e-3 / call_seconds), 1, static_cast<double>(moes.size())));
    size_t next = 0;
    const double parameters = static_cast<double>(parameters_per_expert(model));
    row.samples = measure(ceilings_, row.unit, options_, [&](int) {
      Sample sample;
      double experts = 0;
      const double start = now_seconds();
      for (size_t i = 0; i < calls; ++i, ++next) {
        require(moes[next % moes.size()].forward(inputs[next % variants].view(), out_view));
        experts += active[next % variants];
      }
      const auto n = static_cast<double>(calls);
      sample.seconds = (now_seconds() - start) / n;
      sample.useful_bytes = experts / n * parameters * 4.5 / 8;
      sample.operations = 2 * static_cast<double>(row.tokens * model.top_k) * parameters;
      return sample;
    });
    table.row(layer_cells(row));
    rows_.push_back(row);
  }

  // Compares up to four tokens, spread over the call, with the reference.
  bool check(const MoeProblem& problem,
             const ExpertWeights& weights,
             const RandomInputs& inputs,
             const TensorView& out,
             BenchRow& row) {
    std::vector<int64_t> rows;
    const int64_t checked = std::min<int64_t>(4, inputs.tokens);
    for (int64_t i = 0; i < checked; ++i)
      rows.push_back(i * (inputs.tokens - 1) / std::max<int64_t>(1, checked - 1));
    const Agreement agreement =
        compare_with_reference(problem, weights, inputs, out, rows, options_.threads).value();
    row.check = agreement.describe();
    if (agreement.ok()) return true;
    fmt::print(out_,
               "FAIL {} tokens {} {}: {}\nreproduce: hexpert check --model {} --num-experts {} "
               "--tokens {} --backend {} --seed {} --threads {}\n",
               row.model,
               row.tokens,
               row.backend,
               row.check,
               row.model,
               problem.num_experts,
               row.tokens,
               row.backend,
               options_.seed,
               options_.threads);
    exit_code_ = kExitCheckFailed;
    return false;
  }

  void bench_quantize(const ModelShape& model, Table& table) {
    const int64_t hidden = model.hidden_size;
    const auto tokens =
        static_cast<int64_t>(options_.rotate_gb * 1e9 / static_cast<double>(2 * hidden)) + 1;
    require_memory(2.6 * static_cast<double>(tokens * hidden), "quantize");
    const RandomExperts source({1, hidden, tokens, false}, options_.seed);
    AlignedBuffer codes = AlignedBuffer::zeroed(tokens * hidden / 2);
    std::vector<uint8_t> scales(static_cast<size_t>(tokens * hidden / 16));
    std::vector<float> outer(static_cast<size_t>(tokens));
    if (!codes) throw std::bad_alloc();
    const Nvfp4View out{codes.data(), scales.data(), outer.data(), tokens, hidden};
    QuantizeOptions quantize;
    quantize.num_threads = options_.threads;
    time_stage(model, "quantize", tokens, static_cast<double>(2 * tokens * hidden), table, [&] {
      require(quantize_tokens(source.fc1(0), hidden, out, quantize));
    });
  }

  void bench_prepare(const ModelShape& model, Table& table) {
    const int64_t parameters = parameters_per_expert(model);
    ExpertShape shape{
        1, model.hidden_size, model.intermediate_size, is_gated(model.activation.type)};
    shape.num_local_experts =
        static_cast<int64_t>(options_.rotate_gb * 1e9 / static_cast<double>(2 * parameters)) + 1;
    const int64_t experts = shape.num_local_experts;
    const double bytes = static_cast<double>(2 * parameters * experts);
    require_memory(1.5 * bytes, "prepare");
    const int64_t fc1_rows = shape.intermediate_size * (shape.gated ? 2 : 1);
    const int64_t fc1_elements = fc1_rows * shape.hidden_size;
    const int64_t fc2_elements = shape.intermediate_size * shape.hidden_size;
    std::vector<uint16_t> fc1(static_cast<size_t>(experts * fc1_elements));
    std::vector<uint16_t> fc2(static_cast<size_t>(experts * fc2_elements));
    const RandomExperts source(shape, options_.seed);
    for (int64_t e = 0; e < experts; ++e) {
      std::copy_n(source.fc1(e).as<uint16_t>(), fc1_elements, fc1.data() + e * fc1_elements);
      std::copy_n(source.fc2(e).as<uint16_t>(), fc2_elements, fc2.data() + e * fc2_elements);
    }
    const ConstTensorView fc1_view(
        fc1.data(), DType::kBF16, {experts, fc1_rows, shape.hidden_size});
    const ConstTensorView fc2_view(
        fc2.data(), DType::kBF16, {experts, shape.hidden_size, shape.intermediate_size});
    PrepareOptions prepare;
    prepare.num_threads = options_.threads;
    ExpertWeights weights = ExpertWeights::allocate(shape, prepare).value();
    time_stage(
        model, "prepare", 0, bytes, table, [&] { require(weights.refresh(fc1_view, fc2_view)); });
  }

  template <typename Work>
  void time_stage(const ModelShape& model,
                  std::string_view stage,
                  int64_t tokens,
                  double bytes,
                  Table& table,
                  const Work& work) {
    work();  // warm-up: page faults of the output
    BenchRow row;
    row.stage = stage;
    row.model = model.name;
    row.tokens = tokens;
    row.samples = measure(ceilings_, row.unit, options_, [&](int) {
      Sample sample;
      const double start = now_seconds();
      work();
      sample.seconds = now_seconds() - start;
      sample.useful_bytes = bytes;
      return sample;
    });
    table.row(stage_cells(row));
    rows_.push_back(row);
  }

  void print_mean(std::string_view stage) {
    std::vector<double> ratios;
    for (const BenchRow& row : rows_) {
      if (row.stage == stage) ratios.push_back(row.roofline_ratio());
    }
    if (ratios.empty()) return;
    const double mean = geometric_mean(ratios);
    means_[std::string(stage)] = mean;
    fmt::print(out_,
               "geometric mean of {}, {} rows: {:.0f}% of {}\n\n",
               stage,
               ratios.size(),
               100 * mean,
               stage == "layer" ? "the roofline" : "the read bandwidth");
  }

  void write_json() const {
    if (options_.json.empty()) return;
    nlohmann::json document{{"machine", machine_json(describe_machine())},
                            {"threads", threads_},
                            {"rotate_gb", options_.rotate_gb},
                            {"read_variant", ceilings_.read_variant()},
                            {"geometric_means", means_},
                            {"rows", nlohmann::json::array()}};
    for (const BenchRow& row : rows_)
      document["rows"].push_back(row.json());
    if (options_.json == "-") {
      fmt::print("{}\n", document.dump(2));
      return;
    }
    std::ofstream file(options_.json);
    file << document.dump(2) << '\n';
    file.close();
    if (!file) {
      throw Error(
          Status(ErrorCode::kIoError, fmt::format("--json: cannot write '{}'", options_.json)));
    }
  }

  const BenchOptions& options_;
  int threads_;
  std::FILE* out_;
  Ceilings ceilings_;
  std::vector<BenchRow> rows_;
  nlohmann::json means_ = nlohmann::json::object();
  int exit_code_ = kExitOk;
};

void list_models() {
  Table table(stdout,
              {{"model", 18, true},
               {"experts", 7},
               {"top_k", 5},
               {"hidden", 6},
               {"intermediate", 12},
               {"activation", 12, true}});
  table.header();
  for (const ModelShape& model : model_shapes()) {
    table.row(std::vector<std::string>{std::string(model.name),
                                       std::to_string(model.num_experts),
                                       std::to_string(model.top_k),
                                       std::to_string(model.hidden_size),
                                       std::to_string(model.intermediate_size),
                                       format_activation(model.activation)});
  }
}

int run_bench(BenchOptions options) {
  if (options.list_models) {
    list_models();
    return kExitOk;
  }
  if (options.backends.empty()) options.backends.emplace_back();
  for (std::string& backend : options.backends)
    backend = require_backend(backend);
  std::vector<ModelShape> models;
  for (const std::string& name : options.models) {
    Result<ModelShape> model = find_model(name);
    if (!model.ok()) throw CLI::ValidationError("--model", model.status().message());
    if (options.num_experts > 0) {
      model->num_experts = options.num_experts;
      model->top_k = std::min(model->top_k, options.num_experts);
    }
    models.push_back(*model);
  }
  const Result<std::vector<int64_t>> tokens = parse_counts(options.tokens);
  if (!tokens.ok()) throw CLI::ValidationError("--tokens", tokens.status().message());
  // Now, not after minutes of measurements.
  if (!options.json.empty() && options.json != "-" && !std::ofstream(options.json, std::ios::app)) {
    throw Error(
        Status(ErrorCode::kIoError, fmt::format("--json: cannot write '{}'", options.json)));
  }
  const auto on_gpu = [](const std::string& backend) {
    return device_of(backend).type == DeviceType::kCuda;
  };
  if (!std::any_of(options.backends.begin(), options.backends.end(), on_gpu)) {
    if (options.routings != BenchOptions().routings || options.batch_invariant ||
        options.local_experts != 0) {
      throw CLI::ValidationError(
          "--backend", "--routing, --batch-invariant and --local-experts are for GPU backends");
    }
    return Bench(options).run(models, *tokens);
  }
  if (options.backends.size() > 1) {
    throw CLI::ValidationError("--backend", "a GPU backend is benchmarked alone");
  }
  return run_cuda_bench(options, options.backends.front(), models, *tokens);
}

}  // namespace

void add_bench(CLI::App& parent, int* exit_code) {
  CLI::App* command =
      parent.add_subcommand("bench", "Check, then time, against this machine's ceilings");
  auto o = std::make_shared<BenchOptions>();
  command->add_option("--model", o->models, "Model shape by name or unique prefix, repeatable")
      ->capture_default_str();
  command->add_flag("--list-models", o->list_models, "Print the known model shapes and stop");
  command->add_option("--tokens", o->tokens, "Tokens of a call, separated by commas")
      ->capture_default_str();
  command->add_option("--backend", o->backends, "Backend, repeatable (default: the best here)");
  command->add_option("--stage", o->stages, "layer, quantize or prepare, repeatable")
      ->check(CLI::IsMember({"layer", "quantize", "prepare"}))
      ->capture_default_str();
  command
      ->add_option(
          "--num-experts,--experts", o->num_experts, "Experts of a layer, in place of the model's")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  command
      ->add_option(
          "--local-experts", o->local_experts, "GPU: experts held, from 0 on (default: all)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  command->add_option("--routing", o->routings, "GPU: uniform, one, zipf or half-empty, repeatable")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kRoutings), std::end(kRoutings))))
      ->capture_default_str();
  command->add_flag(
      "--batch-invariant", o->batch_invariant, "GPU: bits that do not depend on the batch");
  command->add_option("--threads", o->threads, "Threads (default: OpenMP's)")
      ->check(CLI::Range(1, 1024));
  command->add_option("--samples", o->samples, "Samples of a row")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--max-seconds", o->max_seconds, "Stop a row after this time and 3 samples")
      ->check(number_in(0, 1e6))
      ->capture_default_str();
  command->add_option("--rotate-gb", o->rotate_gb, "Rotate over more than this much data")
      ->check(number_in(0, 1000))
      ->capture_default_str();
  command->add_option("--json", o->json, "Also write JSON to FILE; '-': stdout, tables to stderr");
  command->add_option("--seed", o->seed, "Seed of weights, tokens and routes")
      ->check(any_seed())
      ->capture_default_str();
  command->footer(kFooter);
  command->callback([o, exit_code] { *exit_code = run_bench(*o); });
}

}  // namespace hexpert::tools

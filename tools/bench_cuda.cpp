// hexpert bench on a GPU: whole layers as CUDA graphs, each figure beside the ceilings of the same run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench_options.hpp"
#include "commands.hpp"
#include "cuda/device_weights.hpp"
#include "cuda_ceilings.hpp"
#include "cuda_kernels.hpp"
#include "hexpert/quantize.hpp"
#include "machine.hpp"
#include "random_layer.hpp"
#include "random_routing.hpp"
#include "weights/storage.hpp"

namespace hexpert::tools {
namespace {

constexpr double kSettleSeconds = 0.5;  // of replays before the samples: clocks follow the load
constexpr double kColdBytes = 400e6;    // several times the L2 cache: what lies between two uses
constexpr int64_t kMostCalls = 64;      // of one graph
constexpr double kBitsPerWeight = 4.5;

struct Row {
  std::string stage;
  std::string model;
  std::string routing;
  int64_t tokens = 0;
  int64_t calls = 0;  // of one graph
  double us = 0;      // median, of one call
  double p90_us = 0;
  double memory_us = 0;   // bytes that must move / bandwidth
  double compute_us = 0;  // operations / dense rate; 0 without a rate
  double gbs = 0;         // of these bytes
  double tflops = 0;
  std::string plan;

  double roofline_us() const { return std::max(memory_us, compute_us); }
  double fraction() const { return roofline_us() / us; }
  nlohmann::json json() const {
    return {{"stage", stage},
            {"model", model},
            {"routing", routing},
            {"tokens", tokens},
            {"calls", calls},
            {"us", us},
            {"p90_us", p90_us},
            {"roofline_us", roofline_us()},
            {"bound", memory_us >= compute_us ? "memory" : "compute"},
            {"fraction", fraction()},
            {"gbs", gbs},
            {"tflops", tflops},
            {"plan", plan}};
  }
};

// One routing on the device, and what it costs at least.
struct RoutedInputs {
  CudaArray<uint16_t> hidden_states;
  CudaArray<int32_t> routing_map;
  CudaArray<float> probabilities;
  MoeInputs view;
  int64_t routes = 0;          // to local experts
  int64_t active_experts = 0;  // local ones with a token
};

class CudaBench {
 public:
  CudaBench(const BenchOptions& options, std::string backend)
      : options_(options),
        backend_(std::move(backend)),
        out_(options.json == "-" ? stderr : stdout) {
    cuda_require(cudaSetDevice(device_.index));
    ceilings_ = measure_ceilings(stream_);
  }

  int run(const std::vector<ModelShape>& models, const std::vector<int64_t>& tokens) {
    cudaDeviceProp properties{};
    cuda_require(cudaGetDeviceProperties(&properties, device_.index));
    name_ = properties.name;
    fmt::print(out_,
               "{}, {} SMs; now: read {:.0f} GB/s, copy {:.0f} GB/s, dense BF16 {}\n\n",
               name_,
               properties.multiProcessorCount,
               ceilings_.read_gbs,
               ceilings_.copy_gbs,
               ceilings_.dense_tflops > 0 ? fmt::format("{:.0f} TFLOP/s", ceilings_.dense_tflops)
                                          : "unknown (no cuBLAS found)");
    Table table(out_,
                {{"stage", 8, true},
                 {"model", 16, true},
                 {"routing", 10, true},
                 {"tokens", 6},
                 {"us", 9},
                 {"p90", 9},
                 {"roofline us", 11},
                 {"bound", 7, true},
                 {"of roofline", 11},
                 {"GB/s", 6},
                 {"TFLOP/s", 7}});
    table.header();
    for (const ModelShape& model : models) {
      if (wants("layer")) bench_layers(model, tokens, table);
      if (wants("quantize")) {
        for (int64_t count : tokens)
          bench_quantize(model, count, table);
      }
      if (wants("prepare")) bench_prepare(model, table);
    }
    print_mean();
    write_json();
    return kExitOk;
  }

 private:
  bool wants(std::string_view stage) const {
    return std::find(options_.stages.begin(), options_.stages.end(), stage) !=
           options_.stages.end();
  }
  int64_t local_experts(const ModelShape& model) const {
    return options_.local_experts > 0 ? std::min(options_.local_experts, model.num_experts)
                                      : model.num_experts;
  }
  PrepareOptions on_device() const {
    PrepareOptions prepare;
    prepare.backend = backend_;
    prepare.device = device_;
    return prepare;
  }

  // Random experts, made where they are: any code, block scales around 1.
  ExpertWeights random_weights(const ExpertShape& shape, uint64_t seed) {
    ExpertWeights weights = ExpertWeights::allocate(shape, on_device()).value();
    const auto& device = static_cast<const cuda::HopperWeights&>(*weights.storage().on_device);
    const cuda::FragmentWeights& w = device.view();
    const int64_t experts = shape.num_local_experts;
    const auto alpha = [](int64_t k) { return 0.2F / std::sqrt(static_cast<float>(k)); };
    cudaStream_t stream = stream_.get();
    cuda_require(fill_fragments(w.fc1, experts * w.fc1_bytes(), seed, stream));
    cuda_require(fill_fragments(w.fc2, experts * w.fc2_bytes(), seed + 1, stream));
    cuda_require(fill_f32(w.fc1_up_alpha, experts, alpha(shape.hidden_size), stream));
    cuda_require(fill_f32(w.fc1_gate_alpha, experts, alpha(shape.hidden_size), stream));
    cuda_require(fill_f32(w.fc2_alpha, experts, alpha(shape.intermediate_size), stream));
    cuda_require(cudaStreamSynchronize(stream));
    return weights;
  }

  RoutedInputs random_call(const ModelShape& model,
                           std::string_view kind,
                           int64_t tokens,
                           uint64_t seed) {
    const RandomRouting routing =
        random_routing(kind, tokens, model.top_k, model.num_experts, seed);
    RoutedInputs call;
    call.hidden_states = CudaArray<uint16_t>(tokens * model.hidden_size);
    cuda_require(
        fill_bf16(call.hidden_states.data(), call.hidden_states.size(), 1, seed, stream_.get()));
    call.routing_map = CudaArray<int32_t>(tokens * model.top_k);
    call.routing_map.upload(routing.ids.data());
    call.probabilities = CudaArray<float>(tokens * model.top_k);
    call.probabilities.upload(routing.probabilities.data());
    call.view.hidden_states = {
        call.hidden_states.data(), DType::kBF16, {tokens, model.hidden_size}, device_};
    call.view.routing_map = {call.routing_map.data(), DType::kI32, {tokens, model.top_k}, device_};
    call.view.probabilities = {
        call.probabilities.data(), DType::kF32, {tokens, model.top_k}, device_};
    const RoutingLoad load = load_of(routing, local_experts(model));
    call.routes = load.routes;
    call.active_experts = load.active_experts;
    return call;
  }

  void bench_layers(const ModelShape& model, const std::vector<int64_t>& tokens, Table& table) {
    const ExpertShape shape{local_experts(model),
                            model.hidden_size,
                            model.intermediate_size,
                            is_gated(model.activation.type)};
    const double layer_bytes = kBitsPerWeight / 8 *
                               static_cast<double>(parameters_per_expert(model)) *
                               static_cast<double>(shape.num_local_experts);
    // Two copies at least: then every call of a graph finds its experts cold.
    const auto copies = std::max<int64_t>(2, static_cast<int64_t>(kColdBytes / layer_bytes) + 1);
    std::vector<ExpertWeights> layers;
    for (int64_t i = 0; i < copies; ++i)
      layers.push_back(random_weights(shape, options_.seed + 10 * static_cast<uint64_t>(i)));
    for (const std::string& routing : options_.routings) {
      for (int64_t count : tokens)
        bench_layer(model, layers, routing, count, table);
    }
  }

  void bench_layer(const ModelShape& model,
                   const std::vector<ExpertWeights>& layers,
                   const std::string& routing,
                   int64_t tokens,
                   Table& table) {
    const MoeProblem problem{.max_tokens = tokens,
                             .top_k = model.top_k,
                             .num_experts = model.num_experts,
                             .activation = model.activation};
    MoeOptions moe_options;
    moe_options.backend = backend_;
    moe_options.batch_invariant = options_.batch_invariant;
    const int64_t workspace_bytes =
        RoutedMoe::workspace_bytes_for(problem, layers[0], moe_options).value();
    const CudaArray<std::byte> workspace(std::max<int64_t>(1, workspace_bytes));
    moe_options.workspace = {workspace.data(), workspace_bytes};
    std::vector<RoutedMoe> moes;
    moes.reserve(layers.size());
    for (const ExpertWeights& weights : layers)
      moes.push_back(RoutedMoe::create(problem, weights, moe_options).value());

    const double parameters = static_cast<double>(parameters_per_expert(model));
    std::vector<RoutedInputs> calls;
    double bytes = 0;
    double operations = 0;
    while (calls.size() < layers.size() * 2 ||
           (bytes < kColdBytes && calls.size() < static_cast<size_t>(kMostCalls))) {
      calls.push_back(random_call(model, routing, tokens, options_.seed + 1000 + calls.size()));
      bytes += kBitsPerWeight / 8 * parameters * static_cast<double>(calls.back().active_experts);
      operations += 2 * parameters * static_cast<double>(calls.back().routes);
    }
    const CudaArray<uint16_t> out(tokens * model.hidden_size);
    const TensorView out_view(out.data(), DType::kBF16, {tokens, model.hidden_size}, device_);
    const auto forward_all = [&] {
      for (size_t i = 0; i < calls.size(); ++i)
        require(moes[i % moes.size()].forward(calls[i].view, out_view, {stream_.get()}));
    };
    forward_all();  // what a first launch loads
    cuda_require(cudaStreamSynchronize(stream_.get()));
    Row row;
    row.stage = "layer";
    row.model = model.name;
    row.routing = routing;
    row.tokens = tokens;
    row.plan = moes[0].plan();
    finish(row, calls.size(), bytes, ceilings_.read_gbs, operations, table, forward_all);
  }

  // Bytes read and written, against a copy.
  void bench_quantize(const ModelShape& model, int64_t tokens, Table& table) {
    const int64_t cols = model.hidden_size;
    const double bytes = static_cast<double>(tokens * cols) * (2 + kBitsPerWeight / 8) +
                         4.0 * static_cast<double>(tokens);
    const auto buffers = static_cast<size_t>(
        std::clamp<double>(std::ceil(kColdBytes / bytes), 2, static_cast<double>(kMostCalls)));
    struct Buffers {
      CudaArray<uint16_t> source;
      CudaArray<uint8_t> codes, scales;
      CudaArray<float> outer;
    };
    std::vector<Buffers> all;
    const int64_t padded = round_up(cols, kBlockSize);
    for (size_t i = 0; i < buffers; ++i) {
      all.push_back({CudaArray<uint16_t>(tokens * cols),
                     CudaArray<uint8_t>(tokens * padded / 2),
                     CudaArray<uint8_t>(tokens * padded / kBlockSize),
                     CudaArray<float>(tokens)});
      cuda_require(fill_bf16(all[i].source.data(), tokens * cols, 1, i, stream_.get()));
    }
    const auto quantize_all = [&] {
      QuantizeOptions options;
      options.stream = {stream_.get()};
      for (const Buffers& b : all) {
        require(
            quantize_tokens({b.source.data(), DType::kBF16, {tokens, cols}, device_},
                            padded,
                            {b.codes.data(), b.scales.data(), b.outer.data(), tokens, padded, true},
                            options));
      }
    };
    Row row;
    row.stage = "quantize";
    row.model = model.name;
    row.tokens = tokens;
    finish(row,
           buffers,
           bytes * static_cast<double>(buffers),
           ceilings_.copy_gbs,
           0,
           table,
           quantize_all);
  }

  // BF16 stacks on the device, about 2 GB of them, quantized in place.
  void bench_prepare(const ModelShape& model, Table& table) {
    const int64_t parameters = parameters_per_expert(model);
    ExpertShape shape{
        1, model.hidden_size, model.intermediate_size, is_gated(model.activation.type)};
    shape.num_local_experts =
        std::clamp<int64_t>(1'000'000'000 / parameters, 1, local_experts(model));
    const int64_t experts = shape.num_local_experts;
    const int64_t fc1_rows = shape.intermediate_size * (shape.gated ? 2 : 1);
    const CudaArray<uint16_t> fc1(experts * fc1_rows * shape.hidden_size);
    const CudaArray<uint16_t> fc2(experts * shape.hidden_size * shape.intermediate_size);
    cuda_require(fill_bf16(fc1.data(), fc1.size(), 0.02F, 1, stream_.get()));
    cuda_require(fill_bf16(fc2.data(), fc2.size(), 0.02F, 2, stream_.get()));
    ExpertWeights weights = ExpertWeights::allocate(shape, on_device()).value();
    const auto refresh = [&] {
      require(weights.refresh(
          {fc1.data(), DType::kBF16, {experts, fc1_rows, shape.hidden_size}, device_},
          {fc2.data(),
           DType::kBF16,
           {experts, shape.hidden_size, shape.intermediate_size},
           device_},
          {stream_.get()}));
    };
    Row row;
    row.stage = "prepare";
    row.model = model.name;
    finish(row,
           1,
           2.0 * static_cast<double>(parameters * experts),
           ceilings_.read_gbs,
           0,
           table,
           refresh);
  }

  // Times `enqueue`, which makes `calls` calls, and completes the row. `bytes` and `operations` are of all
  // calls together.
  template <typename Enqueue>
  void finish(Row& row,
              size_t calls,
              double bytes,
              double bandwidth_gbs,
              double operations,
              Table& table,
              const Enqueue& enqueue) {
    const auto n = static_cast<double>(calls);
    const CudaGraph graph(stream_, enqueue);
    double start = now_seconds();
    while (now_seconds() - start < kSettleSeconds)
      graph.replay();
    std::vector<double> us;
    start = now_seconds();
    for (int i = 0; i < options_.samples; ++i) {
      if (i >= 3 && now_seconds() - start > options_.max_seconds) break;
      us.push_back(graph.replay() / n * 1e6);
    }
    row.calls = static_cast<int64_t>(calls);
    row.us = median(us);
    row.p90_us = quantile(us, 0.9);
    row.memory_us = bytes / n / bandwidth_gbs * 1e-3;
    if (ceilings_.dense_tflops > 0) {
      row.compute_us = operations / n / ceilings_.dense_tflops * 1e-6;
    }
    row.gbs = bytes / n / row.us * 1e-3;
    row.tflops = operations / n / row.us * 1e-6;
    table.row(std::vector<std::string>{row.stage,
                                       row.model,
                                       row.routing.empty() ? "-" : row.routing,
                                       row.tokens > 0 ? std::to_string(row.tokens) : "-",
                                       fmt::format("{:.1f}", row.us),
                                       fmt::format("{:.1f}", row.p90_us),
                                       fmt::format("{:.1f}", row.roofline_us()),
                                       row.memory_us >= row.compute_us ? "memory" : "compute",
                                       fmt::format("{:.1f}%", 100 * row.fraction()),
                                       fmt::format("{:.0f}", row.gbs),
                                       row.tflops > 0 ? fmt::format("{:.1f}", row.tflops) : "-"});
    rows_.push_back(row);
  }

  void print_mean() const {
    std::vector<double> fractions;
    for (const Row& row : rows_) {
      if (row.stage == "layer") fractions.push_back(row.fraction());
    }
    if (fractions.empty()) return;
    fmt::print(out_,
               "\ngeometric mean of {} layers: {:.1f}% of the roofline{}\n",
               fractions.size(),
               100 * geometric_mean(fractions),
               options_.batch_invariant ? ", batch invariant" : "");
  }

  void write_json() const {
    if (options_.json.empty()) return;
    nlohmann::json document{{"machine", machine_json(describe_machine())},
                            {"device", name_},
                            {"backend", backend_},
                            {"batch_invariant", options_.batch_invariant},
                            {"local_experts", options_.local_experts},
                            {"ceilings",
                             {{"read_gbs", ceilings_.read_gbs},
                              {"copy_gbs", ceilings_.copy_gbs},
                              {"dense_tflops", ceilings_.dense_tflops}}},
                            {"rows", nlohmann::json::array()}};
    for (const Row& row : rows_)
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
  std::string backend_;
  std::FILE* out_;
  Device device_ = Device::cuda(0);
  CudaStream stream_;
  CudaCeilings ceilings_;
  std::string name_;
  std::vector<Row> rows_;
};

}  // namespace

int run_cuda_bench(const BenchOptions& options,
                   const std::string& backend,
                   const std::vector<ModelShape>& models,
                   const std::vector<int64_t>& tokens) {
  return CudaBench(options, backend).run(models, tokens);
}

}  // namespace hexpert::tools

// hexpert check: backends against the reference, at any shape.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "commands.hpp"
#include "common.hpp"
#include "layer_io.hpp"
#include "option_values.hpp"
#include "random_layer.hpp"

namespace hexpert::tools {
namespace {

constexpr const char* kFooter =
    "A random layer runs on each backend and on the reference, which computes every sum exactly.\n"
    "A backend passes when 95 % of the rows (all but one below 20 rows) are within 4e-3 of the\n"
    "reference in relative L2, every row within 0.12 and, from 64 rows on, the whole within 1e-2,\n"
    "and zeros, NaN and infinities agree. A failure is followed by the command that reproduces "
    "it.\n"
    "\n"
    "Examples:\n"
    "  hexpert check                                        every backend, a small layer\n"
    "  hexpert check --model nemotron-3-nano --num-experts 8 --tokens 32\n"
    "  hexpert check --backend cpu-avx2 --hidden 100 --intermediate 72 --activation squared-relu\n"
    "  hexpert check --num-experts 8 --local-experts 2 --offset 6   one rank of an expert-parallel "
    "layer\n"
    "\n"
    "Exit codes: 0 all pass, 1 a check failed, 2 usage, 4 backend not available here.";

struct CheckOptions {
  std::vector<std::string> backends;
  std::string model;
  std::string activation = "swiglu";
  std::string out = "bf16";
  int64_t tokens = 64;
  int64_t num_experts = 16;
  int64_t top_k = 4;
  int64_t hidden = 256;
  int64_t intermediate = 192;
  int64_t local_experts = 0;
  int64_t offset = 0;
  uint64_t seed = 1;
  int threads = 0;
};

// Everything of a check but the backend.
struct CheckCase {
  MoeProblem problem;
  ExpertShape shape;
  DType out_dtype = DType::kBF16;
  uint64_t seed = 1;
  int num_threads = 0;
};

CheckCase make_case(const CheckOptions& options) {
  CheckCase c;
  const Result<Activation> activation = parse_activation(options.activation);
  if (!activation.ok()) {
    throw CLI::ValidationError("--activation", activation.status().message());
  }
  c.problem = {.max_tokens = options.tokens,
               .top_k = options.top_k,
               .num_experts = options.num_experts,
               .local_expert_offset = options.offset,
               .activation = *activation};
  c.shape = {
      options.local_experts == 0 ? options.num_experts - options.offset : options.local_experts,
      options.hidden,
      options.intermediate,
      is_gated(activation->type)};
  if (c.shape.num_local_experts < 1 ||
      options.offset > options.num_experts - c.shape.num_local_experts) {
    throw CLI::ValidationError("--offset", "offset + local experts must lie in 1..num-experts");
  }
  c.out_dtype = options.out == "f32" ? DType::kF32 : DType::kBF16;
  c.seed = options.seed;
  c.num_threads = options.threads;
  return c;
}

// The command line that runs this case again.
std::string reproduce(const CheckCase& c, const std::string& backend) {
  return fmt::format(
      "hexpert check --backend {} --tokens {} --num-experts {} --top-k {} --hidden {} "
      "--intermediate {} --activation {} --offset {} --local-experts {} --out {} --seed {} "
      "--threads {}",
      backend,
      c.problem.max_tokens,
      c.problem.num_experts,
      c.problem.top_k,
      c.shape.hidden_size,
      c.shape.intermediate_size,
      format_activation(c.problem.activation),
      c.problem.local_expert_offset,
      c.shape.num_local_experts,
      to_string(c.out_dtype),
      c.seed,
      c.num_threads);
}

// Output [tokens, H], poisoned with NaN first, and the time of the call.
struct Run {
  std::vector<uint8_t> bytes;
  TensorView view;
  double seconds = 0;
};

Run run_backend(const CheckCase& c,
                const ExpertWeights& weights,
                const RandomInputs& inputs,
                const std::string& backend) {
  RoutedMoe moe =
      RoutedMoe::create(c.problem, weights, {.backend = backend, .num_threads = c.num_threads})
          .value();
  Run run;
  run.bytes.assign(static_cast<size_t>(inputs.tokens * inputs.hidden_size * size_of(c.out_dtype)),
                   0xFF);
  run.view = {run.bytes.data(), c.out_dtype, {inputs.tokens, inputs.hidden_size}};
  const auto io = LayerIo::create(weights.device(), inputs.view(), run.view);
  run.seconds = io->forward(moe);
  io->fetch();
  return run;
}

int run_check(CheckOptions options) {
  if (options.backends.empty()) {
    for (const BackendInfo& backend : list_backends()) {
      if (backend.available && backend.name != "reference") {
        options.backends.emplace_back(backend.name);
      }
    }
  }
  for (std::string& backend : options.backends)
    backend = require_backend(backend);
  const CheckCase c = make_case(options);

  PrepareOptions prepare;
  prepare.num_threads = c.num_threads;
  const RandomExperts experts(c.shape, c.seed);
  const ExpertWeights weights = experts.quantize(prepare).value();
  const RandomInputs inputs = random_inputs(
      options.tokens, options.top_k, options.num_experts, options.hidden, c.seed + 100);
  const Run reference = run_backend(c, weights, inputs, "reference");

  int exit_code = kExitOk;
  for (const std::string& backend : options.backends) {
    prepare.device = device_of(backend);
    const bool on_cpu = prepare.device == Device::cpu();
    const Run run = on_cpu ? run_backend(c, weights, inputs, backend)
                           : run_backend(c, experts.quantize(prepare).value(), inputs, backend);
    const Agreement agreement = compare(reference.view, run.view);
    fmt::print("{} {:<16} tokens {} {} | {} | {} ms, reference {} ms\n",
               agreement.ok() ? "PASS" : "FAIL",
               backend,
               options.tokens,
               to_string(c.out_dtype),
               agreement.describe(),
               format_ms(run.seconds),
               format_ms(reference.seconds));
    if (!agreement.ok()) {
      fmt::print("reproduce: {}\n", reproduce(c, backend));
      exit_code = kExitCheckFailed;
    }
  }
  return exit_code;
}

}  // namespace

void add_check(CLI::App& parent, int* exit_code) {
  CLI::App* command = parent.add_subcommand("check", "Compare backends with the exact reference");
  auto o = std::make_shared<CheckOptions>();
  const CLI::Range size(int64_t{1}, int64_t{1} << 20);
  command->add_option("--backend", o->backends, "Backend, repeatable (default: all available)");
  command->add_option(
      "--model", o->model, "Shape of a published model: see 'hexpert bench --list-models'");
  command->add_option("--tokens", o->tokens, "Tokens of the call")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  CLI::Option* experts =
      command->add_option("--num-experts,--experts", o->num_experts, "Experts of the whole layer")
          ->check(size)
          ->capture_default_str();
  CLI::Option* top_k = command->add_option("--top-k", o->top_k, "Experts of a token")
                           ->check(CLI::Range(int64_t{1}, int64_t{1} << 10))
                           ->capture_default_str();
  CLI::Option* hidden = command->add_option("--hidden", o->hidden, "hidden_size, any value")
                            ->check(size)
                            ->capture_default_str();
  CLI::Option* intermediate =
      command->add_option("--intermediate", o->intermediate, "intermediate_size, any value")
          ->check(size)
          ->capture_default_str();
  CLI::Option* activation =
      command->add_option("--activation", o->activation, kActivationHelp)->capture_default_str();
  command
      ->add_option(
          "--local-experts", o->local_experts, "Experts held here (default: all from --offset on)")
      ->check(size);
  command->add_option("--offset", o->offset, "First expert held here")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--out", o->out, "Output dtype")
      ->check(CLI::IsMember({"bf16", "f32"}))
      ->capture_default_str();
  command->add_option("--seed", o->seed, "Seed of weights, tokens and routes")
      ->check(any_seed())
      ->capture_default_str();
  command->add_option("--threads", o->threads, "Threads (default: OpenMP's)")
      ->check(CLI::Range(0, 1024));
  command->footer(kFooter);
  command->callback([=] {
    if (!o->model.empty()) {
      const Result<ModelShape> shape = find_model(o->model);
      if (!shape.ok()) throw CLI::ValidationError("--model", shape.status().message());
      if (experts->empty()) o->num_experts = shape->num_experts;
      if (top_k->empty()) o->top_k = std::min(shape->top_k, o->num_experts);
      if (hidden->empty()) o->hidden = shape->hidden_size;
      if (intermediate->empty()) o->intermediate = shape->intermediate_size;
      if (activation->empty()) o->activation = format_activation(shape->activation);
    }
    *exit_code = run_check(*o);
  });
}

}  // namespace hexpert::tools

// The command line: exit codes, messages, and what the commands print.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli.hpp"
#include "commands.hpp"
#include "common.hpp"
#include "hexpert/checkpoint.hpp"
#include "random_layer.hpp"
#include "random_routing.hpp"

namespace hexpert::tools {
namespace {

using test::contains;
using test::hexpert_cli;
using test::Outcome;

std::string temporary(const char* name) {
  return ::testing::TempDir() + "hexpert_cli_" + name;
}

// A squared-ReLU layer "moe" of 4 experts and tokens for it.
void write_layer(const std::string& model, const std::string& tokens, bool with_routes = true) {
  constexpr int64_t kExperts = 4;
  constexpr int64_t kHidden = 48;
  constexpr int64_t kIntermediate = 40;
  std::vector<TensorSpec> specs;
  for (int64_t e = 0; e < kExperts; ++e) {
    const std::string prefix = "moe.experts." + std::to_string(e);
    specs.push_back({prefix + ".up_proj.weight", "BF16", {kIntermediate, kHidden}});
    specs.push_back({prefix + ".down_proj.weight", "BF16", {kHidden, kIntermediate}});
  }
  SafetensorsWriter writer = SafetensorsWriter::create(model, specs).value();
  uint64_t seed = 1;
  for (const TensorSpec& spec : specs) {
    const std::vector<uint16_t> values = random_bf16(kHidden * kIntermediate, 0.15F, seed++);
    require(writer.write(spec.name, values.data(), static_cast<int64_t>(2 * values.size())));
  }
  require(writer.finish());

  const RandomInputs inputs = random_inputs(6, 2, kExperts, kHidden, 7);
  std::vector<TensorSpec> token_specs = {{"moe.hidden_states", "BF16", {6, kHidden}}};
  if (with_routes) {
    token_specs.push_back({"moe.routing_map", "I32", {6, 2}});
    token_specs.push_back({"moe.probabilities", "F32", {6, 2}});
  }
  SafetensorsWriter token_writer = SafetensorsWriter::create(tokens, token_specs).value();
  require(token_writer.write("moe.hidden_states", inputs.view().hidden_states));
  if (with_routes) {
    require(token_writer.write("moe.routing_map", inputs.view().routing_map));
    require(token_writer.write("moe.probabilities", inputs.view().probabilities));
  }
  require(token_writer.finish());
}

TEST(Cli, HelpTeachesAndSucceeds) {
  for (const char* command : {"info", "inspect", "quantize", "run", "check", "bench"}) {
    const Outcome help = hexpert_cli({command, "--help"});
    EXPECT_EQ(help.exit_code, kExitOk) << command;
    EXPECT_TRUE(contains(help.out, "hexpert " + std::string(command))) << command;
    EXPECT_TRUE(contains(help.out, "Examples:")) << command;
  }
  EXPECT_TRUE(contains(hexpert_cli({"--help"}).out, "Exit codes: 0 ok"));
  EXPECT_TRUE(contains(hexpert_cli({"--version"}).out, "hexpert 0."));
}

TEST(Cli, UsageErrorsExitWithTwoAndSayHowToGetHelp) {
  EXPECT_EQ(hexpert_cli({}).exit_code, kExitUsage);
  const Outcome command = hexpert_cli({"frobnicate", "x"});
  EXPECT_EQ(command.exit_code, kExitUsage);
  EXPECT_TRUE(contains(command.err, "'frobnicate' is no command")) << command.err;
  EXPECT_EQ(hexpert_cli({"run"}).exit_code, kExitUsage);
  EXPECT_EQ(hexpert_cli({"check", "--tokens", "many"}).exit_code, kExitUsage);
  EXPECT_EQ(hexpert_cli({"check", "--out", "f64"}).exit_code, kExitUsage);
  EXPECT_EQ(hexpert_cli({"check", "--activation", "relu"}).exit_code, kExitUsage);
  EXPECT_EQ(hexpert_cli({"check", "--offset", "16"}).exit_code, kExitUsage);
  EXPECT_EQ(hexpert_cli({"check", "--activation", "situ:0"}).exit_code, kExitUsage);
  EXPECT_EQ(hexpert_cli({"bench", "--tokens", "0"}).exit_code, kExitUsage);
  for (const char* number : {"nan", "-nan", "inf", "-1", "1e9", "0x1", "", "1 "}) {
    for (const char* option : {"--rotate-gb", "--max-seconds"}) {
      const Outcome outcome = hexpert_cli({"bench", option, number});
      EXPECT_EQ(outcome.exit_code, kExitUsage) << option << " " << number;
      EXPECT_TRUE(contains(outcome.err, option)) << outcome.err;
    }
  }
  for (const char* seed : {"-1", "18446744073709551616", "1.5", "nan"}) {
    for (const char* sub : {"check", "bench"})
      EXPECT_EQ(hexpert_cli({sub, "--seed", seed}).exit_code, kExitUsage) << sub << " " << seed;
  }
  const Outcome unknown = hexpert_cli({"info", "--no-such-option"});
  EXPECT_EQ(unknown.exit_code, kExitUsage);
  EXPECT_TRUE(contains(unknown.err, "--no-such-option"));
  EXPECT_TRUE(contains(unknown.err, "Try 'hexpert info --help'"));
  const Outcome backend = hexpert_cli({"check", "--backend", "abacus"});
  EXPECT_EQ(backend.exit_code, kExitUsage);
  EXPECT_TRUE(contains(backend.err, "known are"));
  const Outcome model = hexpert_cli({"check", "--model", "qwen3"});
  EXPECT_EQ(model.exit_code, kExitUsage);
  EXPECT_TRUE(contains(model.err, "qwen3-235b-a22b"));
}

TEST(Cli, BackendThatCannotRunHereExitsWithFour) {
  for (const BackendInfo& backend : list_backends()) {
    if (backend.available) continue;
    const std::string name(backend.name);
    const Outcome outcome = hexpert_cli({"check", "--backend", name.c_str()});
    EXPECT_EQ(outcome.exit_code, kExitUnsupported) << name;
    EXPECT_TRUE(contains(outcome.err, backend.reason)) << outcome.err;
  }
}

TEST(Cli, GpuOptionsOfBenchNeedAGpuBackend) {
  for (const char* option : {"--batch-invariant", "--routing=zipf", "--local-experts=4"}) {
    const Outcome outcome = hexpert_cli({"bench", "--backend", "cpu-scalar", option});
    EXPECT_EQ(outcome.exit_code, kExitUsage) << option;
    EXPECT_TRUE(contains(outcome.err, "are for GPU backends")) << outcome.err;
  }
  EXPECT_EQ(hexpert_cli({"bench", "--routing", "round-robin"}).exit_code, kExitUsage);
}

TEST(Cli, BenchRefusesAnUnwritableJsonBeforeItMeasures) {
  const Outcome outcome = hexpert_cli({"bench", "--json", "/no/such/place/out.json"});
  EXPECT_EQ(outcome.exit_code, kExitBadInput);
  EXPECT_TRUE(contains(outcome.err, "cannot write '/no/such/place/out.json'")) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

TEST(RandomRouting, KindsAreWhatTheySay) {
  constexpr int64_t kTokens = 3000;
  constexpr int64_t kTopK = 4;
  constexpr int64_t kExperts = 32;
  for (const char* kind : kRoutings) {
    SCOPED_TRACE(kind);
    const RandomRouting routing = random_routing(kind, kTokens, kTopK, kExperts, 5);
    ASSERT_EQ(routing.ids.size(), static_cast<size_t>(kTokens * kTopK));
    EXPECT_EQ(routing.ids, random_routing(kind, kTokens, kTopK, kExperts, 5).ids);
    std::vector<int64_t> slots(kExperts);
    int64_t empty = 0;
    for (size_t i = 0; i < routing.ids.size(); ++i) {
      const int32_t id = routing.ids[i];
      ASSERT_TRUE(id >= -1 && id < kExperts);
      if (id < 0) {
        ++empty;
        continue;
      }
      ++slots[static_cast<size_t>(id)];
      for (size_t j = i / kTopK * kTopK; j < i && std::string(kind) != "one"; ++j)
        ASSERT_NE(routing.ids[j], id) << "an expert twice in token " << i / kTopK;
    }
    const auto most = static_cast<double>(*std::max_element(slots.begin(), slots.end()));
    const auto all = static_cast<double>(kTokens * kTopK);
    const std::string name = kind;
    EXPECT_NEAR(static_cast<double>(empty) / all, name == "half-empty" ? 0.5 : 0.0, 0.02);
    if (name == "uniform") {
      EXPECT_LT(most, 1.3 * all / kExperts);
    } else if (name == "zipf") {
      EXPECT_GT(most, 4 * all / kExperts);
    } else if (name == "one") {
      EXPECT_EQ(most, all);
    }
    const RoutingLoad load = load_of(routing, kExperts);
    EXPECT_EQ(load.routes, kTokens * kTopK - empty);
    EXPECT_EQ(load.active_experts, kExperts - std::count(slots.begin(), slots.end(), int64_t{0}));
    const RoutingLoad half = load_of(routing, kExperts / 2);
    EXPECT_LE(half.routes, load.routes);
    EXPECT_LE(half.active_experts, kExperts / 2);
  }
}

// More slots than experts: repeated ones, and no endless search.
TEST(RandomRouting, MoreSlotsThanExperts) {
  EXPECT_EQ(random_routing("uniform", 10, 5, 2, 1).ids.size(), 50U);
}

TEST(Cli, ExitCodesOfLibraryErrors) {
  EXPECT_EQ(exit_code_of(ErrorCode::kOk), kExitOk);
  EXPECT_EQ(exit_code_of(ErrorCode::kInvalidFile), kExitBadInput);
  EXPECT_EQ(exit_code_of(ErrorCode::kNotFound), kExitBadInput);
  EXPECT_EQ(exit_code_of(ErrorCode::kNonFiniteWeights), kExitBadInput);
  EXPECT_EQ(exit_code_of(ErrorCode::kUnsupported), kExitUnsupported);
  EXPECT_EQ(exit_code_of(ErrorCode::kUnsupportedDevice), kExitUnsupported);
  EXPECT_EQ(exit_code_of(ErrorCode::kOutOfMemory), kExitUnsupported);
}

TEST(Cli, InfoListsEveryBackend) {
  const Outcome text = hexpert_cli({"info"});
  EXPECT_EQ(text.exit_code, kExitOk);
  const auto json = nlohmann::json::parse(hexpert_cli({"info", "--json"}).out);
  ASSERT_EQ(json["backends"].size(), list_backends().size());
  for (const BackendInfo& backend : list_backends())
    EXPECT_TRUE(contains(text.out, std::string(backend.name)));
  EXPECT_EQ(json["backends"].back()["name"], "reference");
}

TEST(Cli, CheckPassesEveryBackendAtOddShapes) {
  const Outcome swiglu = hexpert_cli({"check",
                                      "--tokens",
                                      "21",
                                      "--hidden",
                                      "100",
                                      "--intermediate",
                                      "72",
                                      "--local-experts",
                                      "5",
                                      "--offset",
                                      "7",
                                      "--out",
                                      "f32"});
  EXPECT_EQ(swiglu.exit_code, kExitOk) << swiglu.out << swiglu.err;
  EXPECT_TRUE(contains(swiglu.out, "PASS cpu-scalar"));
  EXPECT_FALSE(contains(swiglu.out, "FAIL"));
  const Outcome none = hexpert_cli({"check", "--tokens", "0", "--activation", "squared-relu"});
  EXPECT_EQ(none.exit_code, kExitOk) << none.out << none.err;
}

TEST(Cli, RunReportsAndWritesOutputs) {
  const std::string model = temporary("model.safetensors");
  const std::string tokens = temporary("tokens.safetensors");
  const std::string output = temporary("output.safetensors");
  write_layer(model, tokens);
  const Outcome run = hexpert_cli({"run",
                                   model.c_str(),
                                   "--tokens",
                                   tokens.c_str(),
                                   "--all-layers",
                                   "--output",
                                   output.c_str()});
  ASSERT_EQ(run.exit_code, kExitOk) << run.err;
  EXPECT_TRUE(contains(run.out, "rel L2"));
  EXPECT_TRUE(contains(run.out, " ok"));
  const SafetensorsFile file = SafetensorsFile::open(output).value();
  const TensorInfo* info = file.find("moe.output");
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->shape, (std::vector<int64_t>{6, 48}));
}

TEST(Cli, RunRefusesBadInput) {
  const std::string model = temporary("model2.safetensors");
  const std::string tokens = temporary("tokens2.safetensors");
  write_layer(model, tokens, false);
  const Outcome incomplete = hexpert_cli({"run", model.c_str(), "--tokens", tokens.c_str()});
  EXPECT_EQ(incomplete.exit_code, kExitBadInput);
  EXPECT_TRUE(contains(incomplete.err, "moe.routing_map")) << incomplete.err;
  const Outcome missing = hexpert_cli({"run", "/no/such/file", "--tokens", tokens.c_str()});
  EXPECT_EQ(missing.exit_code, kExitBadInput);
  EXPECT_TRUE(contains(missing.err, "/no/such/file"));
  const Outcome layer =
      hexpert_cli({"run", model.c_str(), "--tokens", tokens.c_str(), "--prefix", "other"});
  EXPECT_EQ(layer.exit_code, kExitBadInput);
  const std::string garbage = temporary("garbage.safetensors");
  std::ofstream(garbage) << "this is not a safetensors file";
  EXPECT_EQ(hexpert_cli({"run", garbage.c_str(), "--tokens", tokens.c_str()}).exit_code,
            kExitBadInput);
}

TEST(CliParsers, Counts) {
  EXPECT_EQ(parse_counts("1,8,64").value(), (std::vector<int64_t>{1, 8, 64}));
  for (const char* bad : {"", ",", "1,", "0", "-1", "1.5", " 1", "1e3", "99999999999999999999"})
    EXPECT_FALSE(parse_counts(bad).ok()) << bad;
}

TEST(CliParsers, ActivationsReadBack) {
  for (const char* text : {"swiglu",
                           "squared-relu",
                           "geglu-tanh",
                           "swiglu-oai:1.5,0.5,7",
                           "situ:1.75",
                           "situ:0.8,1.5"})
    EXPECT_EQ(format_activation(parse_activation(text).value()), text);
  EXPECT_EQ(parse_activation("SwiGLU-OAI").value().limit, 7.0F);
  for (const char* bad : {"",
                          "relu",
                          "swiglu:1",
                          "situ",
                          "situ:",
                          "situ:nan",
                          "situ:0",
                          "situ:1,-1",
                          "swiglu-oai:1,2",
                          "swiglu-oai:1,1,0"})
    EXPECT_FALSE(parse_activation(bad).ok()) << bad;
}

TEST(CliParsers, ModelsByPrefix) {
  EXPECT_EQ(find_model("qwen3-30b").value().intermediate_size, 768);
  EXPECT_EQ(find_model("Nemotron-3-Nano").value().hidden_size, 2688);
  EXPECT_FALSE(find_model("").ok());
  EXPECT_FALSE(find_model("deepseek").ok());
}

TEST(CliAgreement, TellsRoundingFromErrors) {
  constexpr int64_t kRows = 32;
  constexpr int64_t kCols = 64;
  const std::vector<uint16_t> reference = random_bf16(kRows * kCols, 1.0F, 3);
  const auto view = [](const std::vector<uint16_t>& v) {
    return ConstTensorView(v.data(), DType::kBF16, {kRows, kCols});
  };
  EXPECT_TRUE(compare(view(reference), view(reference)).ok());
  EXPECT_EQ(compare(view(reference), view(reference)).equal_share(), 1.0);
  std::vector<uint16_t> rounded = reference;
  rounded[5] ^= 1;
  EXPECT_TRUE(compare(view(reference), view(rounded)).ok());
  EXPECT_EQ(compare(view(reference), view(rounded)).largest_ulp, 1);
  std::vector<uint16_t> wrong_row = reference;
  for (int64_t i = 0; i < kCols; ++i)
    wrong_row[static_cast<size_t>(i)] = reference[static_cast<size_t>(i + kCols)];
  EXPECT_FALSE(compare(view(reference), view(wrong_row)).ok());
  std::vector<uint16_t> nan = reference;
  nan[7] = 0x7FC0;
  EXPECT_FALSE(compare(view(reference), view(nan)).ok());
}

}  // namespace
}  // namespace hexpert::tools

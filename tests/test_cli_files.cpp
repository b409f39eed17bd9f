// The commands that read and write checkpoints: what they print, what they write, how they refuse.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "cli.hpp"
#include "common.hpp"
#include "files.hpp"
#include "hexpert/checkpoint.hpp"

namespace hexpert {
namespace {

using test::contains;
using test::Experts;
using test::FileTensors;
using test::hexpert_cli;
using test::Outcome;
using test::TempDir;
using test::write_safetensors;
using tools::kExitBadInput;
using tools::kExitOk;
using tools::kExitUnsupported;
using tools::kExitUsage;
namespace fs = std::filesystem;

const std::string kFirst = "model.layers.0.mlp";
const std::string kSecond = "model.layers.1.mlp";

// Two layers, one gated and one not, and another tensor.
struct Model {
  TempDir dir;
  Experts gated{3, 72, 40, true, 1};
  Experts plain{2, 48, 64, false, 2};
  std::string path = dir / "model.safetensors";

  Model() {
    FileTensors tensors;
    gated.add_to(&tensors, kFirst);
    plain.add_to(&tensors, kSecond);
    tensors["lm_head.weight"] = test::f32_tensor({2, 2}, {1, 2, 3, 4});
    write_safetensors(path, tensors);
  }
};

void expect_failure(const Outcome& outcome, int exit_code, const std::string& message) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, message)) << outcome.err;
  EXPECT_EQ(outcome.err.rfind("hexpert: ", 0), 0U) << outcome.err;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t end = text.find('\n'); end != std::string::npos;
       begin = end + 1, end = text.find('\n', begin)) {
    lines.push_back(text.substr(begin, end - begin));
  }
  return lines;
}

// --- inspect ---

TEST(CliInspect, TableHasALineALayerAndTheSum) {
  const Model model;
  const Outcome outcome = hexpert_cli({"inspect", model.path});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  const std::vector<std::string> lines = lines_of(outcome.out);
  ASSERT_EQ(lines.size(), 4U) << outcome.out;
  for (const char* title : {"layer", "experts", "NVFP4", "SNR dB", "rel. L2", "448-scale"})
    EXPECT_TRUE(contains(lines[0], title)) << lines[0];
  EXPECT_TRUE(contains(lines[1], kFirst + "  3 x (H 72 I 40, gated)")) << lines[1];
  EXPECT_TRUE(contains(lines[1], "per-expert bf16")) << lines[1];
  EXPECT_TRUE(contains(lines[1], "51.8 kB")) << lines[1];  // 3 * 3 * 72 * 40 * 2
  EXPECT_TRUE(contains(lines[2], "2 x (H 48 I 64)")) << lines[2];
  EXPECT_EQ(lines[3].rfind("all", 0), 0U) << lines[3];
  EXPECT_TRUE(contains(lines[3], "76.4 kB")) << lines[3];
}

TEST(CliInspect, JsonHasTheNumbersOfTheLibrary) {
  const Model model;
  const Outcome outcome = hexpert_cli({"inspect", model.path, "--json", "--experts"});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["path"], model.path);
  ASSERT_EQ(json["layers"].size(), 2U);
  const auto& layer = json["layers"][0];
  EXPECT_EQ(layer["prefix"], kFirst);
  EXPECT_EQ(layer["naming"], "per-expert");
  EXPECT_EQ(layer["format"], "bf16");
  EXPECT_EQ(layer["num_experts"], 3);
  EXPECT_EQ(layer["hidden_size"], 72);
  EXPECT_EQ(layer["intermediate_size"], 40);
  EXPECT_EQ(layer["gated"], true);
  EXPECT_EQ(json["layers"][1]["gated"], false);
  EXPECT_EQ(layer["source_bytes"], 3 * 3 * 72 * 40 * 2);
  // gate, up [40, 72 -> 80], down [72, 40 -> 48]: 4.5 bits an element, one FP32 each.
  EXPECT_EQ(layer["nvfp4_bytes"], 3 * (2 * (40 * 80 * 9 / 16 + 4) + 72 * 48 * 9 / 16 + 4));
  const Checkpoint checkpoint = Checkpoint::open(model.path).value();
  ErrorStats total;
  ASSERT_EQ(layer["experts"].size(), 3U);
  for (int64_t e = 0; e < 3; ++e) {
    const ErrorStats stats = expert_error(checkpoint, kFirst, e).value();
    EXPECT_EQ(layer["experts"][static_cast<std::size_t>(e)]["snr_db"], stats.snr_db());
    total.merge(stats);
  }
  EXPECT_EQ(layer["error"]["snr_db"], total.snr_db());
  EXPECT_EQ(layer["error"]["relative_l2"], total.relative_l2());
  EXPECT_EQ(layer["error"]["max_error"], total.max_error);
  EXPECT_EQ(layer["error"]["blocks"], total.blocks);
  EXPECT_EQ(layer["error"]["nonzero"], total.nonzero);
  EXPECT_EQ(layer["error"]["rounded_to_zero"], total.rounded_to_zero);
  EXPECT_EQ(layer["error"]["saturated_scales"], total.saturated_scales);
}

TEST(CliInspect, Options) {
  const Model model;
  const Outcome experts = hexpert_cli({"inspect", model.path, "--layer", kSecond, "--experts"});
  EXPECT_EQ(experts.exit_code, kExitOk) << experts.err;
  EXPECT_EQ(lines_of(experts.out).size(), 4U) << experts.out;  // title, layer, two experts
  EXPECT_TRUE(contains(experts.out, "  expert 1"));
  EXPECT_FALSE(contains(experts.out, kFirst));
  const Outcome fast = hexpert_cli({"inspect", model.path, "--no-error"});
  EXPECT_EQ(fast.exit_code, kExitOk);
  EXPECT_FALSE(contains(fast.out, "SNR"));
  const auto json =
      nlohmann::json::parse(hexpert_cli({"inspect", model.path, "--no-error", "--json"}).out);
  EXPECT_FALSE(json["layers"][0].contains("error"));
  expect_failure(
      hexpert_cli({"inspect", model.path, "--threads", "1025"}), kExitUsage, "--threads");
  expect_failure(hexpert_cli({"inspect", model.path, "--layout", "diagonal"}),
                 kExitUsage,
                 "--layout: diagonal not in {auto,rows,transposed}");
}

// NVFP4 has nothing to be compared with.
TEST(CliInspect, QuantizedCheckpointsHaveNoError) {
  const Model model;
  for (const std::string arrangement : {"modelopt", "canonical"}) {
    const std::string out = model.dir / (arrangement + ".safetensors");
    ASSERT_EQ(hexpert_cli({"quantize", model.path, out, "--arrangement", arrangement}).exit_code,
              kExitOk);
    const Outcome outcome = hexpert_cli({"inspect", out, "--json"});
    ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
    const auto json = nlohmann::json::parse(outcome.out);
    EXPECT_EQ(json["layers"][0]["format"], "nvfp4 (" + arrangement + ")");
    EXPECT_EQ(json["layers"][0]["hidden_size"], 72);
    EXPECT_FALSE(json["layers"][0].contains("error"));
    EXPECT_EQ(hexpert_cli({"inspect", out}).exit_code, kExitOk);
  }
}

TEST(CliInspect, BadInput) {
  const Model model;
  expect_failure(hexpert_cli({"inspect", model.path, "--layer", "nowhere"}),
                 kExitBadInput,
                 "'" + kFirst + "', '" + kSecond + "'");
  expect_failure(hexpert_cli({"inspect", model.dir / "absent"}), kExitBadInput, "absent");
  const std::string plain = model.dir / "plain.safetensors";
  write_safetensors(plain, {{"a", {"U8", {1}, "a"}}});
  expect_failure(hexpert_cli({"inspect", plain}), kExitBadInput, "no experts found");
  const std::string garbage = model.dir / "garbage.safetensors";
  test::write_bytes(garbage, "not a safetensors file");
  expect_failure(hexpert_cli({"inspect", garbage}), kExitBadInput, "header length");
  expect_failure(hexpert_cli({"inspect", "/dev/null"}), kExitBadInput, "regular file");
  expect_failure(hexpert_cli({"inspect", ""}), kExitBadInput, "''");
  Experts poisoned(2, 32, 32, true, 1);
  poisoned.fc1[5] = 0x7FC0;
  FileTensors tensors;
  poisoned.add_to(&tensors, kFirst);
  write_safetensors(plain, tensors);
  expect_failure(hexpert_cli({"inspect", plain}), kExitBadInput, "expert 0 gate: [0, 5]");
}

TEST(CliInspect, UnsupportedLayouts) {
  const TempDir dir;
  const std::string path = dir / "stacked.safetensors";
  const test::Bf16Vector values = test::gaussian_bf16(2 * 64 * 32, 1);
  write_safetensors(path,
                    {{"mlp.experts.up_proj", test::bf16_tensor({2, 32, 32}, values.data())},
                     {"mlp.experts.down_proj", test::bf16_tensor({2, 32, 32}, values.data())}});
  expect_failure(hexpert_cli({"inspect", path}), kExitUnsupported, "state the stacked layout");
  EXPECT_EQ(hexpert_cli({"inspect", path, "--layout", "rows"}).exit_code, kExitOk);
  EXPECT_EQ(hexpert_cli({"inspect", path, "--layout", "transposed"}).exit_code, kExitOk);
}

// Names and paths come from elsewhere: they never reach the terminal raw, nor break the JSON.
TEST(CliInspect, HostileNames) {
  const TempDir dir;
  const std::string prefix = "evil\n\x1b[2J\xC3\xA9";
  FileTensors tensors;
  Experts(1, 16, 16, false, 1).add_to(&tensors, prefix);
  const std::string path = dir / "caf\xE9.safetensors";  // no UTF-8
  write_safetensors(path, tensors);
  const Outcome table = hexpert_cli({"inspect", path});
  EXPECT_EQ(table.exit_code, kExitOk) << table.err;
  EXPECT_EQ(lines_of(table.out).size(), 2U) << table.out;
  EXPECT_TRUE(contains(table.out, "evil\\x0a\\x1b[2J\xC3\xA9")) << table.out;
  const Outcome json = hexpert_cli({"inspect", path, "--json"});
  ASSERT_EQ(json.exit_code, kExitOk) << json.err;
  EXPECT_EQ(nlohmann::json::parse(json.out)["layers"][0]["prefix"], prefix);
  const Outcome unknown = hexpert_cli({"inspect", path, "--layer", "\x1b[2J"});
  EXPECT_EQ(unknown.exit_code, kExitBadInput);
  EXPECT_EQ(unknown.err.find('\x1b'), std::string::npos) << unknown.err;
  const std::string out = dir / "out.safetensors";
  const Outcome quantized = hexpert_cli({"quantize", path, out, "--progress"});
  EXPECT_EQ(quantized.exit_code, kExitOk) << quantized.err;
  EXPECT_EQ(quantized.err.find('\x1b'), std::string::npos);
}

// --- quantize ---

TEST(CliQuantize, WritesTheCheckpointAndSaysWhatItDid) {
  const Model model;
  const std::string out = model.dir / "out.safetensors";
  const Outcome outcome = hexpert_cli({"quantize", model.path, out});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, out + ": 5 experts of 2 layers, 76.4 kB -> ")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "16 B of other tensors copied, 1 files")) << outcome.out;
  EXPECT_EQ(outcome.err, "");  // no progress bar in a pipe
  const Checkpoint checkpoint = Checkpoint::open(out).value();
  ASSERT_EQ(checkpoint.layers().size(), 2U);
  EXPECT_EQ(checkpoint.layers()[0].format, WeightFormat::kModelOpt);
  EXPECT_NE(checkpoint.files()[0].find("lm_head.weight"), nullptr);
  EXPECT_FALSE(fs::exists(out + ".partial"));
}

TEST(CliQuantize, EveryArrangementHasTheSameWeights) {
  const Model model;
  const auto down_codes = [&](const std::string& path) {
    const ExpertWeights weights = load_experts(Checkpoint::open(path).value(), kFirst).value();
    std::vector<uint8_t> bytes(72 * 24 + 72 * 3);
    float alpha = 0;
    EXPECT_TRUE(
        weights
            .export_projection(
                2, ExpertWeights::Projection::kDown, bytes.data(), bytes.data() + 72 * 24, &alpha)
            .ok());
    bytes.push_back(static_cast<uint8_t>(test::f32_bits(alpha) & 0xFF));
    return bytes;
  };
  const std::vector<uint8_t> expected = down_codes(model.path);
  const std::string modelopt = model.dir / "modelopt";
  const std::string canonical = model.dir / "canonical.safetensors";
  const std::string back = model.dir / "back";
  ASSERT_EQ(hexpert_cli({"quantize", model.path, modelopt, "--arrangement", "ModelOpt"}).exit_code,
            kExitOk);
  ASSERT_EQ(hexpert_cli({"quantize", modelopt, canonical, "--arrangement", "canonical"}).exit_code,
            kExitOk);
  ASSERT_EQ(hexpert_cli({"quantize", canonical, back}).exit_code, kExitOk);
  for (const std::string& path : {modelopt, canonical, back})
    EXPECT_EQ(down_codes(path), expected) << path;
  EXPECT_EQ(Checkpoint::open(canonical)->layers()[0].format, WeightFormat::kCanonical);
}

TEST(CliQuantize, LayersShardsAndExpertsOnly) {
  const Model model;
  const std::string out = model.dir / "out";
  const Outcome outcome = hexpert_cli({"quantize",
                                       model.path,
                                       out,
                                       "--layer",
                                       kFirst,
                                       "--experts-only",
                                       "--shard-bytes",
                                       "6000",
                                       "--threads",
                                       "2"});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "3 experts of 1 layers")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "0 B of other tensors copied, 3 files")) << outcome.out;
  EXPECT_TRUE(fs::exists(out + "/model-00001-of-00003.safetensors"));
  EXPECT_TRUE(fs::exists(out + "/model.safetensors.index.json"));
  const Checkpoint checkpoint = Checkpoint::open(out).value();
  ASSERT_EQ(checkpoint.layers().size(), 1U);
  EXPECT_EQ(checkpoint.layers()[0].shape.num_local_experts, 3);
}

TEST(CliQuantize, QuietAndProgress) {
  const Model model;
  const Outcome quiet =
      hexpert_cli({"quantize", model.path, model.dir / "a", "--quiet", "--progress"});
  EXPECT_EQ(quiet.exit_code, kExitOk);
  EXPECT_EQ(quiet.out + quiet.err, "");
  const Outcome bar = hexpert_cli({"quantize", model.path, model.dir / "b", "--progress"});
  EXPECT_EQ(bar.exit_code, kExitOk);
  EXPECT_TRUE(contains(bar.err, "100.0 %")) << bar.err;
  EXPECT_TRUE(contains(bar.err, "GB/s")) << bar.err;
  EXPECT_TRUE(contains(bar.err, "left")) << bar.err;
}

TEST(CliQuantize, UsageErrors) {
  const Model model;
  const std::string out = model.dir / "out";
  expect_failure(hexpert_cli({"quantize", model.path}), kExitUsage, "OUT is required");
  expect_failure(hexpert_cli({"quantize", model.path, out, "--arrangement", "tall"}),
                 kExitUsage,
                 "--arrangement: tall not in {modelopt,canonical}");
  for (const char* bytes : {"0", "-1", "many", "99999999999999999999"}) {
    expect_failure(hexpert_cli({"quantize", model.path, out, "--shard-bytes", bytes}),
                   kExitUsage,
                   "--shard-bytes");
  }
  expect_failure(
      hexpert_cli({"quantize", model.path, out, "--threads", "-1"}), kExitUsage, "--threads");
  expect_failure(hexpert_cli({"quantize", model.path, out, "surplus"}), kExitUsage, "surplus");
  EXPECT_FALSE(fs::exists(out));
}

TEST(CliQuantize, RefusesToReplaceAndToOverwriteItsInput) {
  const Model model;
  const std::string before = test::read_bytes(model.path);
  expect_failure(hexpert_cli({"quantize", model.path, model.path, "--overwrite"}),
                 kExitBadInput,
                 "the output is the input");
  const std::string link = model.dir / "link.safetensors";
  fs::create_symlink(model.path, link);
  expect_failure(hexpert_cli({"quantize", model.path, link, "--overwrite"}),
                 kExitBadInput,
                 "the output is the input");
  EXPECT_TRUE(test::read_bytes(model.path) == before);

  const std::string file = model.dir / "file.safetensors";
  test::write_bytes(file, "mine");
  expect_failure(hexpert_cli({"quantize", model.path, file}), kExitBadInput, "say overwrite");
  EXPECT_EQ(test::read_bytes(file), "mine");
  EXPECT_EQ(hexpert_cli({"quantize", model.path, file, "--overwrite"}).exit_code, kExitOk);
  EXPECT_TRUE(Checkpoint::open(file).ok());

  // A directory of something else stays, and so does a file where a directory was meant.
  expect_failure(hexpert_cli({"quantize", model.path, model.dir.path(), "--overwrite"}),
                 kExitBadInput,
                 "the output is the input");
  const std::string other = model.dir / "other";
  fs::create_directory(other);
  test::write_bytes(other + "/notes", "mine");
  expect_failure(hexpert_cli({"quantize", model.path, other, "--overwrite"}),
                 kExitBadInput,
                 "the directory exists");
  expect_failure(hexpert_cli({"quantize", model.path, other + "/notes", "--overwrite"}),
                 kExitBadInput,
                 "expected a new directory, the file exists");
  EXPECT_EQ(test::read_bytes(other + "/notes"), "mine");
}

// Where the output is built must not be where the input lies.
TEST(CliQuantize, InputUnderTheNameOfThePartialOutput) {
  const Model model;
  const std::string file = model.dir / "x.safetensors";
  fs::rename(model.path, file + ".partial");
  const std::string before = test::read_bytes(file + ".partial");
  expect_failure(
      hexpert_cli({"quantize", file + ".partial", file}), kExitBadInput, "the output is the input");
  EXPECT_TRUE(test::read_bytes(file + ".partial") == before);

  const std::string directory = model.dir / "d";
  fs::create_directory(directory + ".partial");
  fs::rename(file + ".partial", directory + ".partial/model.safetensors");
  expect_failure(hexpert_cli({"quantize", directory + ".partial", directory}),
                 kExitBadInput,
                 "the output is the input");
  EXPECT_TRUE(test::read_bytes(directory + ".partial/model.safetensors") == before);
}

TEST(CliQuantize, BadInputAndUnwritablePlaces) {
  const Model model;
  const std::string out = model.dir / "out.safetensors";
  expect_failure(hexpert_cli({"quantize", model.dir / "absent", out}), kExitBadInput, "absent");
  expect_failure(hexpert_cli({"quantize", model.path, out, "--layer", "nowhere"}),
                 kExitBadInput,
                 "layer 'nowhere' does not exist");
  expect_failure(hexpert_cli({"quantize", model.path, "/no/such/place/out.safetensors"}),
                 kExitBadInput,
                 "/no/such");
  expect_failure(hexpert_cli({"quantize", model.path, "/proc/hexpert/out"}),
                 kExitBadInput,
                 "'/proc/hexpert/out.partial': cannot create directory");
  expect_failure(hexpert_cli({"quantize", model.path, "/dev/full"}), kExitBadInput, "/dev/full");
  expect_failure(hexpert_cli({"quantize", model.path, ""}), kExitBadInput, "expected a path");
  expect_failure(hexpert_cli({"quantize", model.path, "/"}), kExitBadInput, "expected a path");
  const std::string empty = model.dir / "empty";
  fs::create_directory(empty);
  expect_failure(hexpert_cli({"quantize", empty, out}), kExitBadInput, "found neither");
  EXPECT_FALSE(fs::exists(out));

  Experts infinite(2, 32, 32, false, 1);
  infinite.fc2[33] = 0x7F80;
  FileTensors tensors;
  infinite.add_to(&tensors, kFirst);
  const std::string bad = model.dir / "bad.safetensors";
  write_safetensors(bad, tensors);
  expect_failure(hexpert_cli({"quantize", bad, out}),
                 kExitBadInput,
                 "layer '" + kFirst + "': expert 0 down: [1, 1]: expected finite, got infinity");
  EXPECT_FALSE(fs::exists(out) || fs::exists(out + ".partial"));
}

// A pipe or a link in the place of the partial file: refused at once, and what it points to stays.
TEST(CliQuantize, PartialFileThatIsSomethingElse) {
  const Model model;
  const std::string out = model.dir / "out.safetensors";
  ASSERT_EQ(::mkfifo((out + ".partial").c_str(), 0600), 0);
  expect_failure(hexpert_cli({"quantize", model.path, out}), kExitBadInput, "cannot create");
  fs::remove(out + ".partial");
  const std::string precious = model.dir / "precious";
  test::write_bytes(precious, "mine");
  fs::create_symlink(precious, out + ".partial");
  expect_failure(hexpert_cli({"quantize", model.path, out}), kExitBadInput, "cannot create");
  EXPECT_EQ(test::read_bytes(precious), "mine");
  EXPECT_FALSE(fs::exists(out));
}

// --- run ---

// The smallest run: one layer "m" of one expert, one token.
struct SmallRun {
  TempDir dir;
  std::string model = dir / "model.safetensors";
  std::string tokens = dir / "tokens.safetensors";

  SmallRun() {
    FileTensors experts;
    Experts(1, 16, 16, false, 1).add_to(&experts, "m");
    write_safetensors(model, experts);
    const test::Bf16Vector x = test::gaussian_bf16(16, 4);
    const int32_t id = 0;
    write_safetensors(tokens,
                      {{"m.hidden_states", test::bf16_tensor({1, 16}, x.data())},
                       {"m.routing_map", {"I32", {1, 1}, test::bytes_of(&id, 1)}},
                       {"m.probabilities", test::f32_tensor({1, 1}, {1})}});
  }
  Outcome run(const std::string& output) const {
    return hexpert_cli({"run", model, "--tokens", tokens, "--repeat", "1", "--output", output});
  }
};

TEST(CliRun, OutputNeverTakesThePlaceOfAnInputOrADevice) {
  const SmallRun small;
  const std::string model = test::read_bytes(small.model);
  const std::string tokens = test::read_bytes(small.tokens);
  expect_failure(small.run(small.model), kExitBadInput, "is the input");
  expect_failure(small.run(small.tokens), kExitBadInput, "is the input");
  const std::string link = small.dir / "link";
  fs::create_hard_link(small.tokens, link + ".partial");
  expect_failure(small.run(link), kExitBadInput, "is the input");
  EXPECT_TRUE(test::read_bytes(small.model) == model);
  EXPECT_TRUE(test::read_bytes(small.tokens) == tokens);

  const std::string pipe = small.dir / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string to_pipe = small.dir / "to_pipe";
  fs::create_symlink(pipe, to_pipe);
  for (const std::string& output : {pipe, to_pipe, small.dir.path()})
    expect_failure(small.run(output), kExitBadInput, "expected a regular file to replace");
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_TRUE(fs::is_symlink(to_pipe));
  expect_failure(small.run(""), kExitUsage, "expected a path");
  const Outcome nowhere = small.run(small.dir / "no/folder");
  expect_failure(nowhere, kExitBadInput, "folder");
  EXPECT_EQ(nowhere.out, "") << "nothing is run when the output cannot be written";
  EXPECT_EQ(small.run(small.dir / "out").exit_code, kExitOk);
  EXPECT_EQ(small.run(small.dir / "out").exit_code, kExitOk) << "an earlier output is replaced";
}

// A repeatable option takes one value: the words after it are not its own.
TEST(CliRun, OptionsMayStandBeforeTheModel) {
  const SmallRun small;
  EXPECT_EQ(hexpert_cli({"run", "--prefix", "m", small.model, "--tokens", small.tokens}).exit_code,
            kExitOk);
  EXPECT_EQ(
      hexpert_cli({"inspect", "--layer", "m", "--layer", "m", small.model, "--no-error"}).exit_code,
      kExitOk);
  EXPECT_EQ(hexpert_cli({"quantize", "--layer", "m", small.model, "--quiet", small.dir / "out"})
                .exit_code,
            kExitOk);
}

TEST(CliRun, LayersAtTheRootOfACheckpoint) {
  const TempDir dir;
  FileTensors tensors;
  for (const auto& [name, rows, cols] :
       {std::tuple{"experts.0.up_proj.weight", 32, 48}, {"experts.0.down_proj.weight", 48, 32}}) {
    const test::Bf16Vector values = test::gaussian_bf16(32 * 48, 3, 0.1);
    tensors[name] = test::bf16_tensor({rows, cols}, values.data());
  }
  write_safetensors(dir / "model.safetensors", tensors);
  const test::Bf16Vector x = test::gaussian_bf16(2 * 48, 4);
  const std::vector<int32_t> ids = {0, 0};
  write_safetensors(dir / "tokens.safetensors",
                    {{"hidden_states", test::bf16_tensor({2, 48}, x.data())},
                     {"routing_map", {"I32", {2, 1}, test::bytes_of(ids.data(), 2)}},
                     {"probabilities", test::f32_tensor({2, 1}, {1, 0.5F})}});
  const std::string out = dir / "out.safetensors";
  const Outcome outcome = hexpert_cli({"run",
                                       dir / "model.safetensors",
                                       "--tokens",
                                       dir / "tokens.safetensors",
                                       "--output",
                                       out,
                                       "--prefix",
                                       "",
                                       "--prefix",
                                       ""});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  EXPECT_NE(SafetensorsFile::open(out)->find("output"), nullptr);
}

}  // namespace
}  // namespace hexpert

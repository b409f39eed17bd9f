// quantize_checkpoint: bytes of both arrangements, shards, interruption, a full disk, memory.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <string>

#include "files.hpp"
#include "hexpert/checkpoint.hpp"
#include "hexpert/weights.hpp"

namespace hexpert {
namespace {

using test::Experts;
using test::FileTensors;
using test::TempDir;
using test::write_safetensors;
namespace fs = std::filesystem;

const std::string kPrefix = "model.layers.0.mlp";

ExpertWeights prepared(const Experts& x) {
  return ExpertWeights::prepare(
             ConstTensorView(x.fc1.data(), DType::kBF16, {x.num_experts, x.fc1_rows(), x.hidden}),
             ConstTensorView(x.fc2.data(), DType::kBF16, {x.num_experts, x.hidden, x.intermediate}))
      .value();
}

struct Canonical {
  std::vector<uint8_t> fc1_data, fc1_scale, fc2_data, fc2_scale;
  std::vector<float> fc1_alpha, fc1_gate_alpha, fc2_alpha;

  explicit Canonical(const ExpertWeights& weights) {
    const ExpertShape& s = weights.shape();
    const int64_t fc1 = s.num_local_experts * s.canonical_fc1_rows() * s.padded_hidden_size();
    const int64_t fc2 = s.num_local_experts * s.padded_hidden_size() * s.padded_intermediate_size();
    fc1_data.resize(static_cast<std::size_t>(fc1 / 2));
    fc1_scale.resize(static_cast<std::size_t>(fc1 / 16));
    fc2_data.resize(static_cast<std::size_t>(fc2 / 2));
    fc2_scale.resize(static_cast<std::size_t>(fc2 / 16));
    const auto experts = static_cast<std::size_t>(s.num_local_experts);
    fc1_alpha.resize(experts);
    fc1_gate_alpha.resize(experts);
    fc2_alpha.resize(experts);
    const Status status = weights.export_canonical({fc1_data.data(),
                                                    fc1_scale.data(),
                                                    fc1_alpha.data(),
                                                    fc1_gate_alpha.data(),
                                                    fc2_data.data(),
                                                    fc2_scale.data(),
                                                    fc2_alpha.data()});
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  bool operator==(const Canonical&) const = default;
};

Canonical loaded(const std::string& path, const std::string& prefix = kPrefix) {
  const Checkpoint checkpoint = Checkpoint::open(path).value();
  return Canonical(load_experts(checkpoint, prefix).value());
}

template <typename T>
std::string file_bytes(const SafetensorsFile& file,
                       const std::string& name,
                       const std::vector<T>&) {
  const TensorInfo* info = file.find(name);
  if (info == nullptr) return "missing";
  return test::bytes_of(file.data(*info), static_cast<std::size_t>(info->size_bytes));
}

FileTensors tensors_of(const std::string& path) {
  FileTensors tensors;
  const SafetensorsFile file = SafetensorsFile::open(path).value();
  for (const TensorInfo& info : file.tensors()) {
    tensors[info.name] = {
        info.dtype,
        info.shape,
        test::bytes_of(file.data(info), static_cast<std::size_t>(info.size_bytes))};
  }
  return tensors;
}

// Two layers and another tensor.
struct Source {
  TempDir dir;
  Experts first{4, 72, 40, true, 1};
  Experts second{4, 72, 40, true, 2};
  std::string path = dir / "source.safetensors";

  Source() {
    FileTensors tensors;
    first.add_to(&tensors, kPrefix);
    second.add_to(&tensors, "model.layers.1.mlp");
    tensors["lm_head.weight"] = test::f32_tensor({2, 2}, {1, 2, 3, 4});
    write_safetensors(path, tensors, {{"format", "pt"}});
  }
  Checkpoint open() const { return Checkpoint::open(path).value(); }
};

TEST(QuantizeCheckpoint, ModelOptReadsBackExactly) {
  const Source source;
  const std::string out = source.dir / "out.safetensors";
  const Result<QuantizeSummary> summary = quantize_checkpoint(source.open(), out);
  ASSERT_TRUE(summary.ok()) << summary.status().to_string();
  EXPECT_EQ(summary->layers, 2);
  EXPECT_EQ(summary->experts, 8);
  EXPECT_EQ(summary->other_bytes, 16);
  EXPECT_TRUE(loaded(out) == Canonical(prepared(source.first)));
  EXPECT_TRUE(loaded(out, "model.layers.1.mlp") == Canonical(prepared(source.second)));

  const SafetensorsFile file = SafetensorsFile::open(out).value();
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.load("lm_head.weight")->as<float>()[3], 4.0F);
  const std::string expert = kPrefix + ".experts.2.";
  // 72 columns are padded to 80; gate and up share one scale.
  EXPECT_EQ(file.find(expert + "gate_proj.weight")->shape, (std::vector<int64_t>{40, 40}));
  EXPECT_EQ(file.find(expert + "up_proj.weight_scale")->shape, (std::vector<int64_t>{40, 5}));
  EXPECT_EQ(file.load(expert + "gate_proj.weight_scale_2")->as<float>()[0],
            file.load(expert + "up_proj.weight_scale_2")->as<float>()[0]);
  EXPECT_EQ(file.find(expert + "gate_proj.weight_scale_2")->dtype, "F32");
}

TEST(QuantizeCheckpoint, CanonicalBytesAreThoseOfPrepare) {
  for (const bool gated : {true, false}) {
    const TempDir dir;
    const Experts experts(3, 72, 300, gated, 7);
    FileTensors tensors;
    experts.add_to(&tensors, kPrefix);
    write_safetensors(dir / "in.safetensors", tensors);
    QuantizeCheckpointOptions options;
    options.arrangement = Arrangement::kCanonical;
    const std::string out = dir / "out.safetensors";
    ASSERT_TRUE(
        quantize_checkpoint(Checkpoint::open(dir / "in.safetensors").value(), out, options).ok());
    const Canonical expected(prepared(experts));
    const SafetensorsFile file = SafetensorsFile::open(out).value();
    const auto expect_field = [&](const char* field, const auto& values) {
      EXPECT_TRUE(file_bytes(file, kPrefix + ".experts." + field, values) ==
                  test::bytes_of(values.data(), values.size()))
          << field;
    };
    expect_field("fc1_data", expected.fc1_data);
    expect_field("fc1_scale_swizzled", expected.fc1_scale);
    expect_field("fc1_alpha", expected.fc1_alpha);
    expect_field("fc2_data", expected.fc2_data);
    expect_field("fc2_scale_swizzled", expected.fc2_scale);
    expect_field("fc2_alpha", expected.fc2_alpha);
    EXPECT_EQ(file.find(kPrefix + ".experts.fc1_gate_alpha"), nullptr);
    EXPECT_EQ(test::f32_bits(file.load(kPrefix + ".experts.fc2_input_scale")->as<float>()[0]),
              0x39C30C31U);
    EXPECT_TRUE(loaded(out) == expected);
  }
}

TEST(QuantizeCheckpoint, ArrangementsConvertWithoutLoss) {
  const Source source;
  const std::string modelopt = source.dir / "m.safetensors";
  const std::string canonical = source.dir / "c.safetensors";
  const std::string again = source.dir / "m2.safetensors";
  QuantizeCheckpointOptions to_canonical;
  to_canonical.arrangement = Arrangement::kCanonical;
  ASSERT_TRUE(quantize_checkpoint(source.open(), modelopt).ok());
  // Gate and up get scales that differ.
  FileTensors tensors = tensors_of(modelopt);
  tensors[kPrefix + ".experts.1.gate_proj.weight_scale_2"] = test::f32_tensor({}, {0.125F});
  write_safetensors(modelopt, tensors);
  ASSERT_TRUE(
      quantize_checkpoint(Checkpoint::open(modelopt).value(), canonical, to_canonical).ok());
  EXPECT_EQ(
      SafetensorsFile::open(canonical)->load(kPrefix + ".experts.fc1_gate_alpha")->as<float>()[1],
      0.125F);
  EXPECT_TRUE(loaded(canonical) == loaded(modelopt));
  ASSERT_TRUE(quantize_checkpoint(Checkpoint::open(canonical).value(), again).ok());
  const SafetensorsFile back = SafetensorsFile::open(again).value();
  ASSERT_EQ(back.tensors().size(), tensors.size());
  for (const auto& [name, tensor] : tensors)
    EXPECT_TRUE(file_bytes(back, name, tensor.shape) == tensor.bytes) << name;
}

// A canonical file needs the sizes that its padding hides, and fields that fit them.
TEST(QuantizeCheckpoint, BadCanonicalFilesAreRefused) {
  const TempDir dir;
  const Experts experts(2, 72, 40, true, 7);
  FileTensors tensors;
  experts.add_to(&tensors, kPrefix);
  write_safetensors(dir / "in.safetensors", tensors);
  QuantizeCheckpointOptions options;
  options.arrangement = Arrangement::kCanonical;
  const std::string path = dir / "x.safetensors";
  ASSERT_TRUE(
      quantize_checkpoint(Checkpoint::open(dir / "in.safetensors").value(), path, options).ok());
  const FileTensors good = tensors_of(path);
  const std::string key = "hexpert.layer." + kPrefix;
  const std::string sizes =
      R"({"num_experts":2,"hidden_size":72,"intermediate_size":40,"gated":true})";
  const auto expect =
      [&](const FileTensors& changed, const std::string& text, ErrorCode code, const char* words) {
        write_safetensors(path, changed, {{key, text}});
        const Result<Checkpoint> checkpoint = Checkpoint::open(path);
        const Status status =
            checkpoint.ok() ? load_experts(*checkpoint, kPrefix).status() : checkpoint.status();
        EXPECT_EQ(status.code(), code) << status.to_string();
        EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
      };
  expect(good, sizes, ErrorCode::kOk, "");
  write_safetensors(path, good);
  EXPECT_NE(Checkpoint::open(path).status().message().find("'" + key + "' is missing"),
            std::string::npos);
  const std::pair<const char*, const char*> bad_sizes[] = {
      {"", "expected num_experts in 1.."},
      {"[]", "expected num_experts in 1.."},
      {R"({"num_experts":0})", "expected num_experts in 1.."},
      {R"({"num_experts":2,"hidden_size":-72})", "expected hidden_size in 1.."},
      {R"({"num_experts":2,"hidden_size":72,"intermediate_size":1e18})",
       "expected intermediate_size in 1.."},
      {R"({"num_experts":2,"hidden_size":72,"intermediate_size":40,"gated":1})",
       "expected gated to be true or false"},
      {R"({"num_experts":2,"hidden_size":257,"intermediate_size":40,"gated":true})",
       "expected fc1_data [2, 512, 256] U8"},
      {R"({"num_experts":2,"hidden_size":72,"intermediate_size":40,"gated":false})",
       "expected fc1_data [2, 256, 128] U8"},
      {R"({"num_experts":2,"hidden_size":72,"intermediate_size":39,"gated":true})",
       "expert 0 down: expected zeros past column 39"},
  };
  for (const auto& [text, words] : bad_sizes)
    expect(good, text, ErrorCode::kInvalidFile, words);

  const std::string fields = kPrefix + ".experts.";
  FileTensors bad = good;
  bad.erase(fields + "fc2_alpha");
  expect(bad, sizes, ErrorCode::kInvalidFile, "fc2_alpha is missing");
  bad = good;
  bad[fields + "fc1_alpha"] = test::f32_tensor({2}, {1, INFINITY});
  expect(bad,
         sizes,
         ErrorCode::kNonFiniteWeights,
         "expert 1 gate: expected a finite global scale, not negative, got inf");
  bad = good;
  bad[fields + "fc2_scale_swizzled"].bytes[0] = '\x7F';
  expect(bad, sizes, ErrorCode::kNonFiniteWeights, "expert 0 down: block scale [0, 0]");
}

TEST(QuantizeCheckpoint, ShardsLayersAndMixtralNames) {
  const TempDir dir;
  const Experts experts(4, 64, 32, true, 1);
  FileTensors tensors;
  experts.add_to(&tensors, kPrefix, true);
  experts.add_to(&tensors, "model.layers.1.mlp", true);
  write_safetensors(dir / "in.safetensors", tensors);
  QuantizeCheckpointOptions options;
  options.layers = {kPrefix};
  options.max_shard_bytes = 8000;
  const std::string out = dir / "out";
  const Checkpoint input = Checkpoint::open(dir / "in.safetensors").value();
  const QuantizeSummary summary = quantize_checkpoint(input, out + "/", options).value();
  EXPECT_GT(summary.files, 3);
  EXPECT_EQ(summary.experts, 4);
  EXPECT_TRUE(loaded(out) == Canonical(prepared(experts)));
  EXPECT_FALSE(fs::exists(out + ".partial"));
  const Checkpoint result = Checkpoint::open(out).value();
  ASSERT_EQ(result.layers().size(), 2U);
  EXPECT_EQ(result.layers()[0].naming, ExpertNaming::kMixtral);
  EXPECT_EQ(result.layers()[0].format, WeightFormat::kModelOpt);
  EXPECT_EQ(result.layers()[1].format, WeightFormat::kBF16);  // copied

  options.copy_other_tensors = false;
  ASSERT_TRUE(quantize_checkpoint(input, dir / "one", options).ok());
  EXPECT_EQ(Checkpoint::open(dir / "one")->layers().size(), 1U);
}

TEST(QuantizeCheckpoint, RefusesWhatItMustNotReplace) {
  const Source source;
  const Checkpoint input = source.open();
  const auto code = [&](const std::string& out, const QuantizeCheckpointOptions& options = {}) {
    return quantize_checkpoint(input, out, options).status().code();
  };
  QuantizeCheckpointOptions overwrite;
  overwrite.overwrite = true;
  const std::string before = test::read_bytes(source.path);
  EXPECT_EQ(code(source.path, overwrite), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(source.dir.path(), overwrite), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(test::read_bytes(source.path) == before);
  const std::string out = source.dir / "out.safetensors";
  test::write_bytes(out, "mine");
  EXPECT_EQ(code(out), ErrorCode::kInvalidArgument);
  EXPECT_EQ(test::read_bytes(out), "mine");
  EXPECT_EQ(code(out, overwrite), ErrorCode::kOk);
  EXPECT_TRUE(Checkpoint::open(out).ok());
  EXPECT_EQ(code(""), ErrorCode::kInvalidArgument);
  QuantizeCheckpointOptions unknown;
  unknown.layers = {"model.layers.7.mlp"};
  EXPECT_EQ(code(source.dir / "o", unknown), ErrorCode::kNotFound);
  QuantizeCheckpointOptions no_room;
  no_room.max_shard_bytes = 0;
  EXPECT_EQ(code(source.dir / "o", no_room), ErrorCode::kInvalidArgument);
  write_safetensors(source.dir / "plain.safetensors", {{"a", {"U8", {1}, "a"}}});
  EXPECT_EQ(quantize_checkpoint(Checkpoint::open(source.dir / "plain.safetensors").value(),
                                source.dir / "o")
                .status()
                .code(),
            ErrorCode::kInvalidArgument);
}

TEST(QuantizeCheckpoint, NonFiniteExpertLeavesNothing) {
  const TempDir dir;
  Experts experts(3, 32, 32, true, 1);
  experts.fc2[static_cast<std::size_t>(32 * 32 * 2)] = 0x7F80;
  FileTensors tensors;
  experts.add_to(&tensors, kPrefix);
  write_safetensors(dir / "in.safetensors", tensors);
  const Checkpoint input = Checkpoint::open(dir / "in.safetensors").value();
  for (const char* name : {"out.safetensors", "out"}) {
    const Status status = quantize_checkpoint(input, dir / name).status();
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_NE(status.message().find("expert 2 down: [0, 0]"), std::string::npos)
        << status.message();
    EXPECT_FALSE(fs::exists(dir / name));
    EXPECT_FALSE(fs::exists((dir / name) + ".partial"));
  }
}

// Runs quantize_checkpoint in a child; `at_step` may end it from inside the progress callback.
template <typename Prepare>
int run_child(const std::string& in,
              const std::string& out,
              int64_t shard_bytes,
              int kill_at,
              const Prepare& prepare) {
  const pid_t child = ::fork();
  if (child == 0) {
    prepare();
    QuantizeCheckpointOptions options;
    options.max_shard_bytes = shard_bytes;
    options.num_threads = 1;
    int steps = 0;
    options.progress = [&](const QuantizeProgress&) {
      if (++steps == kill_at) ::kill(::getpid(), SIGKILL);
    };
    const Result<Checkpoint> input = Checkpoint::open(in);
    if (!input.ok()) ::_exit(100);
    const Status status = quantize_checkpoint(*input, out, options).status();
    ::_exit(static_cast<int>(status.code()));
  }
  int wait_status = 0;
  ::waitpid(child, &wait_status, 0);
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -WTERMSIG(wait_status);
}

TEST(QuantizeCheckpoint, KilledAtEveryStepThenWhole) {
  const Source source;
  for (const int64_t shard_bytes : {int64_t{15000}, int64_t{1} << 40}) {
    for (int step = 1; step <= 9; ++step) {
      const std::string out = source.dir / ("out" + std::to_string(step));
      ASSERT_EQ(run_child(source.path, out, shard_bytes, step, [] {}), -SIGKILL) << step;
      EXPECT_FALSE(fs::exists(out));
      // What is left is never taken for a checkpoint.
      EXPECT_FALSE(Checkpoint::open(out + ".partial").ok());
      QuantizeCheckpointOptions options;
      options.max_shard_bytes = shard_bytes;
      const Result<QuantizeSummary> summary = quantize_checkpoint(source.open(), out, options);
      ASSERT_TRUE(summary.ok()) << summary.status().to_string();
      if (shard_bytes < 20000) {
        EXPECT_EQ(summary->files_reused > 0, step > 3) << step;  // two experts a shard
      }
      EXPECT_FALSE(fs::exists(out + ".partial"));
      EXPECT_TRUE(loaded(out) == Canonical(prepared(source.first)));
      EXPECT_TRUE(loaded(out, "model.layers.1.mlp") == Canonical(prepared(source.second)));
      fs::remove_all(out);
    }
  }
}

TEST(QuantizeCheckpoint, KilledSingleFileIsNotThere) {
  const Source source;
  const std::string out = source.dir / "out.safetensors";
  ASSERT_EQ(run_child(source.path, out, 1, 4, [] {}), -SIGKILL);
  EXPECT_FALSE(fs::exists(out));
  EXPECT_TRUE(fs::exists(out + ".partial"));
  ASSERT_TRUE(quantize_checkpoint(source.open(), out).ok());
  EXPECT_FALSE(fs::exists(out + ".partial"));
  EXPECT_TRUE(loaded(out) == Canonical(prepared(source.first)));
}

// Shards of an interrupted run are not reused when the source or the options have changed.
TEST(QuantizeCheckpoint, ChangedSourceOrOptionsStartAnew) {
  const Source source;
  const std::string out = source.dir / "out";
  ASSERT_EQ(run_child(source.path, out, 15000, 6, [] {}), -SIGKILL);
  QuantizeCheckpointOptions options;
  options.max_shard_bytes = 20000;
  EXPECT_EQ(quantize_checkpoint(source.open(), out, options).value().files_reused, 0);
  fs::remove_all(out);

  ASSERT_EQ(run_child(source.path, out, 15000, 6, [] {}), -SIGKILL);
  Experts other(4, 72, 40, true, 99);
  FileTensors tensors;
  other.add_to(&tensors, kPrefix);
  source.second.add_to(&tensors, "model.layers.1.mlp");
  tensors["lm_head.weight"] = test::f32_tensor({2, 2}, {1, 2, 3, 4});
  write_safetensors(source.path, tensors, {{"format", "pt"}});
  options.max_shard_bytes = 15000;
  EXPECT_EQ(quantize_checkpoint(source.open(), out, options).value().files_reused, 0);
  EXPECT_TRUE(loaded(out) == Canonical(prepared(other)));
}

TEST(QuantizeCheckpoint, FullDiskIsAnErrorAndLeavesNothing) {
  const Source source;
  const auto limit_files = [] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{20000, 20000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  };
  const std::string out = source.dir / "out.safetensors";
  EXPECT_EQ(run_child(source.path, out, 1, -1, limit_files), static_cast<int>(ErrorCode::kIoError));
  EXPECT_FALSE(fs::exists(out));
  EXPECT_FALSE(fs::exists(out + ".partial"));
  // Shards under the limit succeed.
  EXPECT_EQ(run_child(source.path, source.dir / "out", 12000, -1, limit_files), 0);
}

TEST(QuantizeCheckpoint, ProgressReachesTheTotal) {
  const Source source;
  QuantizeCheckpointOptions options;
  int64_t last = 0;
  int64_t total = -1;
  options.progress = [&](const QuantizeProgress& progress) {
    EXPECT_GT(progress.bytes_done, last);
    EXPECT_FALSE(progress.item.empty());
    last = progress.bytes_done;
    total = progress.bytes_total;
  };
  ASSERT_TRUE(quantize_checkpoint(source.open(), source.dir / "out", options).ok());
  EXPECT_EQ(last, total);
}

// An exception of the callback passes through and leaves no file behind.
TEST(QuantizeCheckpoint, CallbackMayThrow) {
  const Source source;
  QuantizeCheckpointOptions options;
  options.progress = [](const QuantizeProgress&) { throw std::runtime_error("stop"); };
  const std::string out = source.dir / "out.safetensors";
  EXPECT_THROW((void)quantize_checkpoint(source.open(), out, options), std::runtime_error);
  EXPECT_FALSE(fs::exists(out + ".partial"));
}

}  // namespace
}  // namespace hexpert

// Checkpoints: experts found under every naming, loaded exactly, refused with the right words.
#include "hexpert/checkpoint.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <string>

#include "files.hpp"
#include "format/codec.hpp"
#include "hexpert/weights.hpp"

namespace hexpert {
namespace {

using test::Experts;
using test::FileTensors;
using test::TempDir;
using test::write_bytes;
using test::write_safetensors;

constexpr const char* kPrefix = "model.layers.3.mlp";

struct Projected {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  float alpha = 0;
  bool operator==(const Projected&) const = default;
};

// All projections of all experts in checkpoint order.
std::vector<Projected> export_all(const ExpertWeights& weights) {
  using Projection = ExpertWeights::Projection;
  const ExpertShape& shape = weights.shape();
  std::vector<Projected> out;
  for (int64_t e = 0; e < shape.num_local_experts; ++e) {
    for (const Projection p : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      if (p == Projection::kGate && !shape.gated) continue;
      const bool down = p == Projection::kDown;
      const int64_t rows = down ? shape.hidden_size : shape.intermediate_size;
      const int64_t cols = down ? shape.intermediate_size : shape.hidden_size;
      const auto blocks = static_cast<std::size_t>(rows * ((cols + 15) / 16));
      Projected one{std::vector<uint8_t>(blocks * 8), std::vector<uint8_t>(blocks), 0};
      EXPECT_TRUE(
          weights.export_projection(e, p, one.codes.data(), one.scales.data(), &one.alpha).ok());
      out.push_back(std::move(one));
    }
  }
  return out;
}

ExpertWeights prepared(const Experts& x) {
  return ExpertWeights::prepare(
             ConstTensorView(x.fc1.data(), DType::kBF16, {x.num_experts, x.fc1_rows(), x.hidden}),
             ConstTensorView(x.fc2.data(), DType::kBF16, {x.num_experts, x.hidden, x.intermediate}))
      .value();
}

void expect_loads_as(const std::string& path, const Experts& experts, StackedLayout stacked = {}) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(path, stacked);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  ASSERT_EQ(checkpoint->layers().size(), 1U);
  const MoeLayerInfo& info = checkpoint->layers()[0];
  EXPECT_EQ(info.prefix, kPrefix);
  EXPECT_EQ(
      info.shape,
      (ExpertShape{experts.num_experts, experts.hidden, experts.intermediate, experts.gated}));
  const Result<ExpertWeights> loaded = load_experts(*checkpoint, kPrefix);
  ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
  EXPECT_TRUE(export_all(*loaded) == export_all(prepared(experts)));
}

// The message of a checkpoint that must be refused.
std::string refusal(const std::string& path, ErrorCode code, StackedLayout stacked = {}) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(path, stacked);
  if (checkpoint.ok()) {
    ADD_FAILURE() << path << " was accepted";
    return {};
  }
  EXPECT_EQ(checkpoint.status().code(), code) << checkpoint.status().to_string();
  return checkpoint.status().message();
}

#define EXPECT_HAS(text, words) EXPECT_NE((text).find(words), std::string::npos) << (text)

TEST(Checkpoint, PerExpertNamesGatedAndNot) {
  const TempDir dir;
  for (const bool gated : {true, false}) {
    for (const bool mixtral : {false, true}) {
      if (mixtral && !gated) continue;
      const Experts experts(3, 72, 40, gated, 1);
      FileTensors tensors;
      experts.add_to(&tensors, kPrefix, mixtral);
      tensors["model.layers.3.mlp.shared_experts.up_proj.weight"] = test::f32_tensor({1}, {1});
      write_safetensors(dir / "x.safetensors", tensors);
      expect_loads_as(dir / "x.safetensors", experts);
      const ExpertNaming naming = Checkpoint::open(dir / "x.safetensors")->layers()[0].naming;
      EXPECT_EQ(naming, mixtral ? ExpertNaming::kMixtral : ExpertNaming::kPerExpert);
    }
  }
}

TEST(Checkpoint, OtherSourceDtypesAreRoundedToBf16) {
  const TempDir dir;
  Experts experts(2, 48, 32, true, 5);
  FileTensors f32;
  FileTensors f16;
  FileTensors bf16;
  experts.add_to(&bf16, kPrefix);
  for (const auto& [name, tensor] : bf16) {
    std::string wide;
    for (std::size_t i = 0; i < tensor.bytes.size(); i += 2) {
      uint16_t half = 0;
      std::memcpy(&half, tensor.bytes.data() + i, 2);
      // A quarter of a BF16 step more: rounds back.
      const uint32_t bits = static_cast<uint32_t>(half) << 16 | 0x4000;
      wide += test::bytes_of(&bits, 1);
    }
    f32[name] = {"F32", tensor.shape, wide};
    // Powers of two have the same value in both 16-bit formats.
    std::string small;
    for (std::size_t i = 0; i < tensor.bytes.size(); i += 2)
      small += test::bytes_of(std::array<uint16_t, 1>{0x3800}.data(), 1);  // 0.5
    f16[name] = {"F16", tensor.shape, small};
  }
  write_safetensors(dir / "f32.safetensors", f32);
  expect_loads_as(dir / "f32.safetensors", experts);
  write_safetensors(dir / "f16.safetensors", f16);
  std::fill(experts.fc1.begin(), experts.fc1.end(), test::bf16(0.5));
  std::fill(experts.fc2.begin(), experts.fc2.end(), test::bf16(0.5));
  expect_loads_as(dir / "f16.safetensors", experts);
}

FileTensors stacked_tensors(const Experts& x, bool transposed) {
  const auto stack = [&](const test::Bf16Vector& data, int64_t rows, int64_t cols) {
    test::Bf16Vector out(data);
    if (transposed) {
      for (int64_t e = 0; e < x.num_experts; ++e)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c)
            out[static_cast<std::size_t>((e * cols + c) * rows + r)] =
                data[static_cast<std::size_t>((e * rows + r) * cols + c)];
    }
    return test::bf16_tensor({x.num_experts, transposed ? cols : rows, transposed ? rows : cols},
                             out.data());
  };
  FileTensors tensors;
  const std::string experts = std::string(kPrefix) + ".experts.";
  tensors[experts + (x.gated ? "gate_up_proj" : "up_proj")] = stack(x.fc1, x.fc1_rows(), x.hidden);
  tensors[experts + "down_proj"] = stack(x.fc2, x.hidden, x.intermediate);
  return tensors;
}

TEST(Checkpoint, StackedBothOrientations) {
  const TempDir dir;
  // H == 2 I, H == I and I == 2 H: the shapes that could be confused.
  for (const auto& [h, i] : {std::pair<int64_t, int64_t>{72, 40}, {64, 32}, {48, 48}, {32, 64}}) {
    const Experts experts(3, h, i, true, 9);
    for (const bool transposed : {false, true}) {
      write_safetensors(dir / "x.safetensors", stacked_tensors(experts, transposed));
      expect_loads_as(dir / "x.safetensors", experts);
    }
  }
}

TEST(Checkpoint, AmbiguousStackNeedsTheLayout) {
  const TempDir dir;
  const Experts experts(2, 72, 40, false, 11);
  for (const bool transposed : {false, true}) {
    write_safetensors(dir / "x.safetensors", stacked_tensors(experts, transposed));
    const std::string words = refusal(dir / "x.safetensors", ErrorCode::kUnsupported);
    EXPECT_HAS(words, "hidden_size 72, intermediate_size 40");
    EXPECT_HAS(words, "hidden_size 40, intermediate_size 72");
    expect_loads_as(dir / "x.safetensors",
                    experts,
                    transposed ? StackedLayout::kInputRows : StackedLayout::kOutputRows);
  }
  write_safetensors(dir / "x.safetensors", stacked_tensors(Experts(2, 72, 40, true, 1), false));
  EXPECT_HAS(refusal(dir / "x.safetensors", ErrorCode::kInvalidFile, StackedLayout::kInputRows),
             "in the stated layout");
}

// Gate and up in stacks of their own.
FileTensors separate_stacks(const Experts& x) {
  test::Bf16Vector gate;
  test::Bf16Vector up;
  const int64_t half = x.intermediate * x.hidden;
  for (int64_t e = 0; e < x.num_experts; ++e) {
    gate.insert(gate.end(), x.gate(e), x.gate(e) + half);
    up.insert(up.end(), x.up(e), x.up(e) + half);
  }
  const std::string experts = std::string(kPrefix) + ".experts.";
  return {{experts + "gate_proj",
           test::bf16_tensor({x.num_experts, x.intermediate, x.hidden}, gate.data())},
          {experts + "up_proj",
           test::bf16_tensor({x.num_experts, x.intermediate, x.hidden}, up.data())},
          {experts + "down_proj",
           test::bf16_tensor({x.num_experts, x.hidden, x.intermediate}, x.fc2.data())}};
}

TEST(Checkpoint, SeparateStacks) {
  const TempDir dir;
  const Experts experts(3, 72, 40, true, 9);
  write_safetensors(dir / "x.safetensors", separate_stacks(experts));
  expect_loads_as(dir / "x.safetensors", experts, StackedLayout::kOutputRows);
}

TEST(Checkpoint, RefusesStacksThatDoNotFit) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const Experts experts(4, 72, 40, true, 1);
  const FileTensors good = stacked_tensors(experts, false);
  const std::string gate_up = std::string(kPrefix) + ".experts.gate_up_proj";
  const std::string up = std::string(kPrefix) + ".experts.up_proj";
  const std::string down = std::string(kPrefix) + ".experts.down_proj";
  const auto expect = [&](const FileTensors& tensors, ErrorCode code, const std::string& words) {
    write_safetensors(path, tensors);
    EXPECT_HAS(refusal(path, code), words);
  };
  FileTensors bad = good;
  bad.erase(down);
  expect(bad, ErrorCode::kInvalidFile, "down_proj is missing");
  bad = good;
  bad.erase(gate_up);
  expect(bad, ErrorCode::kInvalidFile, "expected gate_up_proj or up_proj");
  bad = good;
  bad[down].shape[0] = 3;
  bad[down].bytes.resize(3 * 72 * 40 * 2);
  expect(bad, ErrorCode::kInvalidFile, "expected the dtype and the experts of '" + down);
  bad = good;
  bad[down].dtype = "F16";
  expect(bad, ErrorCode::kInvalidFile, "expected the dtype and the experts of '" + down);
  bad = good;
  bad[down].shape = {4 * 72, 40};
  expect(bad, ErrorCode::kInvalidFile, "expected [experts, rows, cols]");
  bad = good;
  bad[down].dtype = "I16";
  expect(bad, ErrorCode::kUnsupported, "expected BF16, F16 or F32");
  bad = good;
  bad[down].shape = {4, 40, 72};
  expect(bad, ErrorCode::kInvalidFile, "do not fit together");
  bad = good;
  bad[up] = good.at(down);
  expect(bad, ErrorCode::kInvalidFile, "gate_up_proj stands next to");
  bad = good;
  bad[down + ".weight"] = good.at(down);
  expect(bad, ErrorCode::kUnsupported, "which would change what the experts compute");
  bad = separate_stacks(experts);
  bad[up].shape = {4, 72, 40};
  expect(bad, ErrorCode::kInvalidFile, "expected equal shapes");
}

TEST(Checkpoint, RefusesIncompleteAndUnequalExperts) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const Experts experts(4, 32, 48, true, 3);
  FileTensors good;
  experts.add_to(&good, kPrefix);
  const std::string e2 = std::string(kPrefix) + ".experts.2.";
  const auto expect = [&](const FileTensors& tensors, ErrorCode code, const std::string& words) {
    write_safetensors(path, tensors);
    EXPECT_HAS(refusal(path, code), words);
  };

  FileTensors bad = good;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"})
    bad.erase(e2 + name + ".weight");
  expect(bad, ErrorCode::kInvalidFile, "expected experts 0..3, 1 missing: 2");
  bad = good;
  bad[std::string(kPrefix) + ".experts.1000000000000.up_proj.weight"] = good[e2 + "up_proj.weight"];
  expect(bad, ErrorCode::kInvalidFile, "4, 5, 6, 7, 8, 9, 10, 11, ...");
  bad = good;
  bad.erase(e2 + "gate_proj.weight");
  expect(bad, ErrorCode::kInvalidFile, "expert 2 gate_proj: has no weight");
  bad = good;
  bad[e2 + "up_proj.weight"] = bad[e2 + "down_proj.weight"];
  expect(bad, ErrorCode::kInvalidFile, "expert 2 up_proj: expected [48, 32]");
  bad = good;
  bad[e2 + "down_proj.weight"] = bad[e2 + "up_proj.weight"];
  expect(bad, ErrorCode::kInvalidFile, "expert 2 down_proj: expected [32, 48]");
  bad = good;
  bad[e2 + "up_proj.weight"].dtype = "F16";
  expect(bad, ErrorCode::kInvalidFile, "expert 2 up_proj: expected bf16");
  bad = good;
  bad[e2 + "up_proj.weight"].shape = {48 * 32};
  expect(bad, ErrorCode::kInvalidFile, "expected a matrix");
  bad = good;
  bad[e2 + "up_proj.bias"] = test::f32_tensor({1}, {0});
  expect(bad, ErrorCode::kUnsupported, "up_proj.bias");
  bad = good;
  bad[e2 + "up_proj.weight"].dtype = "I16";
  expect(bad, ErrorCode::kUnsupported, "'I16'");
  bad = good;
  bad[std::string(kPrefix) + ".experts.2.w1.weight"] = good[e2 + "up_proj.weight"];
  expect(bad, ErrorCode::kInvalidFile, "more than one kind");
}

TEST(Checkpoint, RefusesNonFiniteWeightsNamingTheExpert) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  for (const uint16_t value : {uint16_t{0x7FC0}, uint16_t{0xFF80}}) {
    Experts experts(3, 32, 16, true, 3);
    experts.fc1[static_cast<std::size_t>(experts.up(1) - experts.fc1.data()) + 33] = value;
    FileTensors tensors;
    experts.add_to(&tensors, kPrefix);
    write_safetensors(path, tensors);
    const Checkpoint checkpoint = Checkpoint::open(path).value();
    const Status status = load_experts(checkpoint, kPrefix).status();
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_HAS(status.message(), "expert 1 up: [1, 1]: expected finite");
    EXPECT_TRUE(load_experts(checkpoint, kPrefix, {}, 2, 1).ok());
    EXPECT_EQ(expert_error(checkpoint, kPrefix, 1).status().code(), ErrorCode::kNonFiniteWeights);
  }
  FileTensors tensors;
  const std::string names = std::string(kPrefix) + ".experts.0.";
  tensors[names + "up_proj.weight"] = test::f32_tensor({1, 1}, {3.4e38F});  // BF16 ends at 3.39e38
  tensors[names + "down_proj.weight"] = test::f32_tensor({1, 1}, {1});
  write_safetensors(path, tensors);
  const Status status = load_experts(Checkpoint::open(path).value(), kPrefix).status();
  EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
  EXPECT_HAS(status.message(), "past the largest BF16");
}

TEST(Checkpoint, RangesOfExpertsAndDenseCopies) {
  const TempDir dir;
  const Experts experts(5, 20, 24, true, 3);
  FileTensors tensors;
  experts.add_to(&tensors, kPrefix);
  write_safetensors(dir / "x.safetensors", tensors);
  const Checkpoint checkpoint = Checkpoint::open(dir / "x.safetensors").value();
  const auto all = export_all(load_experts(checkpoint, kPrefix).value());
  const auto some = export_all(load_experts(checkpoint, kPrefix, {}, 1, 2).value());
  EXPECT_TRUE(some == std::vector<Projected>(all.begin() + 3, all.begin() + 9));
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{-1, 1}, {5, 1}, {0, 6}, {2, 0}}) {
    EXPECT_EQ(load_experts(checkpoint, kPrefix, {}, first, count).status().code(),
              ErrorCode::kInvalidArgument);
  }
  const Status unknown = load_experts(checkpoint, "model.layers.4.mlp").status();
  EXPECT_EQ(unknown.code(), ErrorCode::kNotFound);
  EXPECT_HAS(unknown.message(), kPrefix);

  const DenseExpert dense = load_dense_expert(checkpoint, kPrefix, 4).value();
  EXPECT_EQ(std::memcmp(dense.fc1.view().data, experts.gate(4), 48 * 20 * 2), 0);
  EXPECT_EQ(std::memcmp(dense.fc2.view().data, experts.down(4), 20 * 24 * 2), 0);
  const ErrorStats stats = expert_error(checkpoint, kPrefix, 4).value();
  EXPECT_EQ(stats.elements, 3 * 20 * 24);
  EXPECT_GT(stats.snr_db(), 15);
  EXPECT_LT(stats.snr_db(), 30);
}

// --- NVFP4 sources ---

// ModelOpt or compressed-tensors, gate and up with scales of their own.
FileTensors nvfp4_tensors(const std::vector<Projected>& experts,
                          bool compressed,
                          float gate_factor) {
  FileTensors tensors;
  const char* names[] = {"gate_proj", "up_proj", "down_proj"};
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::string name =
        std::string(kPrefix) + ".experts." + std::to_string(i / 3) + "." + names[i % 3] + ".";
    const int64_t rows = i % 3 == 2 ? 32 : 48;
    const int64_t cols = i % 3 == 2 ? 48 : 32;
    const float alpha = experts[i].alpha * (i % 3 == 0 ? gate_factor : 1);
    tensors[name + (compressed ? "weight_packed" : "weight")] = {
        "U8", {rows, cols / 2}, test::bytes_of(experts[i].codes.data(), experts[i].codes.size())};
    tensors[name + "weight_scale"] = {
        "F8_E4M3",
        {rows, cols / 16},
        test::bytes_of(experts[i].scales.data(), experts[i].scales.size())};
    if (compressed) {
      tensors[name + "weight_global_scale"] = test::f32_tensor({1}, {1 / alpha});
      tensors[name + "input_global_scale"] = test::f32_tensor({1}, {1});
    } else {
      tensors[name + "weight_scale_2"] = test::f32_tensor({}, {alpha});
      tensors[name + "input_scale"] = test::f32_tensor({}, {1});
    }
  }
  return tensors;
}

TEST(Checkpoint, Nvfp4KeepsBytesAndBothScales) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const auto source = export_all(prepared(Experts(3, 32, 48, true, 21)));
  for (const bool compressed : {false, true}) {
    write_safetensors(path, nvfp4_tensors(source, compressed, 10.0F));
    const Checkpoint checkpoint = Checkpoint::open(path).value();
    EXPECT_EQ(checkpoint.layers()[0].format,
              compressed ? WeightFormat::kCompressedTensors : WeightFormat::kModelOpt);
    const auto loaded = export_all(load_experts(checkpoint, kPrefix).value());
    ASSERT_EQ(loaded.size(), source.size());
    for (std::size_t i = 0; i < source.size(); ++i) {
      EXPECT_EQ(loaded[i].codes, source[i].codes);
      EXPECT_EQ(loaded[i].scales, source[i].scales);
      const float alpha = source[i].alpha * (i % 3 == 0 ? 10.0F : 1.0F);
      EXPECT_EQ(loaded[i].alpha, compressed ? 1 / (1 / alpha) : alpha);
    }
    EXPECT_EQ(load_dense_expert(checkpoint, kPrefix, 0).status().code(), ErrorCode::kUnsupported);
    EXPECT_EQ(expert_error(checkpoint, kPrefix, 0).status().code(), ErrorCode::kUnsupported);
  }
}

TEST(Checkpoint, Nvfp4BadScalesAreRefusedNamingTheExpert) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const auto source = export_all(prepared(Experts(3, 32, 48, true, 21)));
  const std::string name = std::string(kPrefix) + ".experts.1.up_proj.";
  const auto status_of = [&](const FileTensors& tensors) {
    write_safetensors(path, tensors);
    return load_experts(Checkpoint::open(path).value(), kPrefix).status();
  };
  for (const char byte : {'\x7F', '\xFF', '\x80', '\xB8'}) {
    FileTensors tensors = nvfp4_tensors(source, false, 1);
    tensors[name + "weight_scale"].bytes[5] = byte;
    const Status status = status_of(tensors);
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights);
    EXPECT_HAS(status.message(), "expert 1 up: block scale [2, 1]");
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {infinity, -infinity, std::nanf(""), -1.0F}) {
    FileTensors tensors = nvfp4_tensors(source, false, 1);
    tensors[name + "weight_scale_2"] = test::f32_tensor({}, {scale});
    const Status status = status_of(tensors);
    EXPECT_EQ(status.code(), ErrorCode::kNonFiniteWeights) << scale;
    EXPECT_HAS(status.message(), "expert 1 up: expected a finite global scale");
  }
  for (const float scale : {infinity, 0.0F, 1e-39F, std::nanf("")}) {  // fl(1 / 1e-39) overflows
    FileTensors tensors = nvfp4_tensors(source, true, 1);
    tensors[name + "weight_global_scale"] = test::f32_tensor({1}, {scale});
    EXPECT_EQ(status_of(tensors).code(), ErrorCode::kNonFiniteWeights) << scale;
  }
}

TEST(Checkpoint, Nvfp4WrongTensorsAreRefused) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const auto source = export_all(prepared(Experts(2, 32, 48, true, 21)));
  const FileTensors good = nvfp4_tensors(source, false, 1);
  const std::string name = std::string(kPrefix) + ".experts.1.up_proj.";
  FileTensors bad = good;
  bad.erase(name + "weight_scale");
  write_safetensors(path, bad);
  EXPECT_HAS(refusal(path, ErrorCode::kInvalidFile), "weight, weight_scale and weight_scale_2");
  bad = good;
  bad[name + "weight_scale_2"] = {"BF16", {1}, "ab"};
  write_safetensors(path, bad);
  EXPECT_HAS(refusal(path, ErrorCode::kInvalidFile), "expected one F32");
  bad = good;
  bad[name + "weight_scale"].shape = {24, 4};
  write_safetensors(path, bad);
  EXPECT_HAS(refusal(path, ErrorCode::kInvalidFile), "[rows, cols / 16]");
  bad = good;
  bad[name + "weight_scale"].dtype = "U8";
  write_safetensors(path, bad);
  EXPECT_HAS(refusal(path, ErrorCode::kInvalidFile), "F8_E4M3");
}

// --- shards ---

TEST(Checkpoint, ShardsWithAndWithoutIndex) {
  const TempDir dir;
  const Experts experts(3, 32, 48, true, 3);
  FileTensors tensors;
  experts.add_to(&tensors, kPrefix);
  FileTensors parts[2];
  std::string map;
  int count = 0;
  for (const auto& [name, tensor] : tensors) {
    const int part = count++ % 2;
    parts[part][name] = tensor;
    map += (map.empty() ? "\"" : ",\"") + name + "\":\"model-0000" + std::to_string(part + 1) +
           "-of-00002.safetensors\"";
  }
  write_safetensors(dir / "model-00001-of-00002.safetensors", parts[0]);
  const std::string index = dir / "model.safetensors.index.json";
  EXPECT_HAS(refusal(dir.path(), ErrorCode::kNotFound), "expected 2 shards of 'model', found 1");
  write_bytes(index, "{\"weight_map\":{" + map + "}}");
  EXPECT_HAS(refusal(dir.path(), ErrorCode::kNotFound), "model-00002-of-00002.safetensors");
  write_safetensors(dir / "model-00002-of-00002.safetensors", parts[1]);
  expect_loads_as(dir.path(), experts);
  expect_loads_as(index, experts);
  std::filesystem::remove(index);
  expect_loads_as(dir.path(), experts);

  write_bytes(index,
              "{\"weight_map\":{\"not.there\":\"model-00001-of-00002.safetensors\"," + map + "}}");
  EXPECT_HAS(refusal(dir.path(), ErrorCode::kInvalidFile), "'not.there' is not in its shard");
  std::filesystem::copy_file(index, dir / "other.index.json");
  EXPECT_HAS(refusal(dir.path(), ErrorCode::kInvalidArgument), "expected one index");
  std::filesystem::remove(index);
  std::filesystem::remove(dir / "other.index.json");
  write_safetensors(dir / "model-00002-of-00002.safetensors", tensors);
  EXPECT_HAS(refusal(dir.path(), ErrorCode::kInvalidFile), "lies in");
}

TEST(Checkpoint, EmptyPlaces) {
  const TempDir dir;
  EXPECT_HAS(refusal(dir.path(), ErrorCode::kNotFound), "found neither");
  refusal(dir / "missing.safetensors", ErrorCode::kNotFound);
  refusal(dir / "missing.index.json", ErrorCode::kNotFound);
  write_safetensors(dir / "x.safetensors", {{"a.experts.gate_up_proj_blocks", {"U8", {1}, "a"}}});
  EXPECT_TRUE(Checkpoint::open(dir.path()).value().layers().empty());
}

TEST(Checkpoint, LayersInNaturalOrder) {
  const TempDir dir;
  FileTensors tensors;
  for (const char* prefix : {"l.10.mlp", "l.2.mlp", "l.1.mlp"})
    Experts(1, 16, 16, false, 1).add_to(&tensors, prefix);
  const Experts plain(1, 16, 16, false, 1);
  tensors["experts.0.up_proj.weight"] = test::bf16_tensor({16, 16}, plain.up(0));
  tensors["experts.0.down_proj.weight"] = test::bf16_tensor({16, 16}, plain.down(0));
  write_safetensors(dir / "x.safetensors", tensors);
  const Checkpoint checkpoint = Checkpoint::open(dir / "x.safetensors").value();
  std::vector<std::string> prefixes;
  for (const MoeLayerInfo& layer : checkpoint.layers())
    prefixes.push_back(layer.prefix);
  EXPECT_EQ(prefixes, (std::vector<std::string>{"", "l.1.mlp", "l.2.mlp", "l.10.mlp"}));
  EXPECT_TRUE(load_experts(checkpoint, "").ok());
}

}  // namespace
}  // namespace hexpert

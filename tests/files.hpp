// Files for tests: a temporary directory, raw safetensors texts, checkpoints made of BF16 experts.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "hexpert/safetensors.hpp"
#include "support.hpp"

namespace hexpert::test {

/// A directory that goes away with the object.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "hexpert-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path);
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Length, header, data: a safetensors file that may break any rule.
inline std::string raw_safetensors(const std::string& header, std::size_t data_bytes) {
  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i)
    text[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return text + header + std::string(data_bytes, '\1');
}

/// Tensors by name, written in one go.
struct FileTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using FileTensors = std::map<std::string, FileTensor>;

template <typename T>
std::string bytes_of(const T* data, std::size_t count) {
  return {reinterpret_cast<const char*>(data), count * sizeof(T)};
}

inline FileTensor bf16_tensor(std::vector<int64_t> shape, const uint16_t* data) {
  std::size_t count = 1;
  for (const int64_t extent : shape)
    count *= static_cast<std::size_t>(extent);
  return {"BF16", std::move(shape), bytes_of(data, count)};
}

inline FileTensor f32_tensor(std::vector<int64_t> shape, const std::vector<float>& values) {
  return {"F32", std::move(shape), bytes_of(values.data(), values.size())};
}

inline void write_safetensors(const std::string& path,
                              const FileTensors& tensors,
                              const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors)
    specs.push_back({name, tensor.dtype, tensor.shape});
  SafetensorsWriter writer = SafetensorsWriter::create(path, specs, metadata).value();
  for (const auto& [name, tensor] : tensors) {
    const auto size = static_cast<int64_t>(tensor.bytes.size());
    const Status written = writer.write(name, tensor.bytes.data(), size);
    if (!written.ok()) throw Error(written);
  }
  const Status finished = writer.finish();
  if (!finished.ok()) throw Error(finished);
}

/// BF16 experts of one layer: stacks as prepare() takes them.
struct Experts {
  int64_t num_experts;
  int64_t hidden;
  int64_t intermediate;
  bool gated;
  Bf16Vector fc1;  // [L, I or 2 I, H]
  Bf16Vector fc2;  // [L, H, I]

  Experts(int64_t l, int64_t h, int64_t i, bool gated_in, uint64_t seed)
      : num_experts(l),
        hidden(h),
        intermediate(i),
        gated(gated_in),
        fc1(outlier_bf16(l * (gated_in ? 2 : 1) * i * h, seed, 0.05)),
        fc2(outlier_bf16(l * h * i, seed + 1, 0.05)) {}

  int64_t fc1_rows() const { return intermediate * (gated ? 2 : 1); }
  const uint16_t* gate(int64_t e) const { return fc1.data() + e * fc1_rows() * hidden; }
  const uint16_t* up(int64_t e) const { return gate(e) + (gated ? intermediate * hidden : 0); }
  const uint16_t* down(int64_t e) const { return fc2.data() + e * hidden * intermediate; }

  /// experts.N.gate_proj.weight and so on, or w1, w3, w2.
  void add_to(FileTensors* tensors, const std::string& prefix, bool mixtral = false) const {
    for (int64_t e = 0; e < num_experts; ++e) {
      const std::string name = prefix + ".experts." + std::to_string(e) + ".";
      const auto put = [&](const char* projection, int64_t r, int64_t c, const uint16_t* data) {
        (*tensors)[name + projection + ".weight"] = bf16_tensor({r, c}, data);
      };
      if (gated) put(mixtral ? "w1" : "gate_proj", intermediate, hidden, gate(e));
      put(mixtral ? "w3" : "up_proj", intermediate, hidden, up(e));
      put(mixtral ? "w2" : "down_proj", hidden, intermediate, down(e));
    }
  }
};

}  // namespace hexpert::test

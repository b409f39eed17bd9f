// Reader of the golden vectors in tests/golden: manifest.tsv names every array of the .bin files.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "support.hpp"

namespace hexpert::test {

/// One array: raw little-endian values on a 64-byte boundary.
struct GoldenArray {
  std::string dtype;  // u8, u32, i32, f32, f64, bf16
  std::vector<int64_t> shape;
  AlignedVector<uint8_t> bytes;

  int64_t count() const {
    int64_t n = 1;
    for (int64_t extent : shape)
      n *= extent;
    return n;
  }
  /// The values; T must have the size of the dtype (bf16: uint16_t; f32: float, or uint32_t to
  /// compare bits).
  template <typename T>
  const T* data() const {
    if (static_cast<std::size_t>(count()) * sizeof(T) != bytes.size()) {
      throw std::runtime_error("golden array of dtype " + dtype + " read with another size");
    }
    return reinterpret_cast<const T*>(bytes.data());
  }
  template <typename T>
  std::vector<T> values() const {
    return {data<T>(), data<T>() + count()};
  }
};

inline uint32_t crc32(const uint8_t* data, std::size_t size) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit)
        c = (c & 1) != 0 ? 0xEDB88320U ^ c >> 1 : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  uint32_t crc = ~0U;
  for (std::size_t i = 0; i < size; ++i)
    crc = table[(crc ^ data[i]) & 0xFF] ^ crc >> 8;
  return ~crc;
}

/// All vectors, in the directory of the sources or in HEXPERT_TEST_DATA. Throws std::runtime_error, which
/// fails the test, for anything missing or damaged.
class Golden {
 public:
  static const Golden& instance() {
    const char* moved = std::getenv("HEXPERT_TEST_DATA");
    static const Golden golden(moved != nullptr ? moved : HEXPERT_GOLDEN_DIR);
    return golden;
  }

  GoldenArray read(const std::string& group,
                   const std::string& name,
                   const std::string& array) const {
    const auto found = entries_.find({group, name, array});
    if (found == entries_.end()) {
      throw std::runtime_error("no golden array " + group + "/" + name + "/" + array);
    }
    const Entry& entry = found->second;
    GoldenArray result{entry.dtype, entry.shape, AlignedVector<uint8_t>(entry.size)};
    std::ifstream file(directory_ + "/" + entry.file, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(entry.offset));
    file.read(reinterpret_cast<char*>(result.bytes.data()),
              static_cast<std::streamsize>(entry.size));
    if (!file || crc32(result.bytes.data(), result.bytes.size()) != entry.crc) {
      throw std::runtime_error("golden array damaged: " + group + "/" + name + "/" + array);
    }
    return result;
  }
  bool has(const std::string& group, const std::string& name, const std::string& array) const {
    return entries_.count({group, name, array}) != 0;
  }
  /// Case names of a group, in the order of the manifest.
  std::vector<std::string> cases(const std::string& group) const {
    std::vector<std::string> names;
    for (const auto& [case_group, name] : cases_) {
      if (case_group == group) names.push_back(name);
    }
    return names;
  }

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string file;
    std::size_t offset = 0;
    std::size_t size = 0;
    uint32_t crc = 0;
  };

  explicit Golden(std::string directory) : directory_(std::move(directory)) {
    std::ifstream manifest(directory_ + "/manifest.tsv");
    std::string line;
    std::getline(manifest, line);
    while (std::getline(manifest, line)) {
      std::istringstream fields(line);
      std::string group, name, array, shape, crc, extent;
      Entry entry;
      fields >> group >> name >> array >> entry.dtype >> shape >> entry.file >> entry.offset >>
          entry.size >> crc;
      if (!fields) throw std::runtime_error("golden manifest: bad line: " + line);
      std::istringstream extents(shape);
      while (std::getline(extents, extent, 'x'))
        entry.shape.push_back(std::stoll(extent));
      entry.crc = static_cast<uint32_t>(std::stoul(crc, nullptr, 16));
      entries_[{group, name, array}] = entry;
      const std::pair key{group, name};
      if (std::find(cases_.begin(), cases_.end(), key) == cases_.end()) cases_.push_back(key);
    }
    if (entries_.empty()) throw std::runtime_error("no golden manifest in " + directory_);
  }

  std::string directory_;
  std::map<std::tuple<std::string, std::string, std::string>, Entry> entries_;
  std::vector<std::pair<std::string, std::string>> cases_;
};

/// golden("per_token", "random", "x").
inline GoldenArray golden(const std::string& group,
                          const std::string& name,
                          const std::string& array) {
  return Golden::instance().read(group, name, array);
}

}  // namespace hexpert::test

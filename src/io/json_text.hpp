// The two JSON texts of a checkpoint, read without trust: nothing is used before it is checked.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hexpert/safetensors.hpp"
#include "hexpert/status.hpp"

namespace hexpert::io {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // sorted by name
  std::map<std::string, std::string> metadata;
  int64_t data_offset = 0;  // of the data section in the file
};

// Bits of one element of a dtype in the safetensors spelling; 0 for one that is not known.
int64_t dtype_bits(std::string_view dtype);

// Reads and checks the header of a whole safetensors file in memory. Tensors must tile the data
// section without holes or overlaps, and their sizes must agree with dtype and shape.
// `file_name` is for messages.
Result<SafetensorsHeader> parse_safetensors_header(const std::string& file_name,
                                                   const uint8_t* file,
                                                   int64_t file_bytes);

// Reads an index: tensor name -> name of the shard, a plain file name next to the index.
Result<std::map<std::string, std::string>> parse_index(const std::string& file_name,
                                                       const uint8_t* text,
                                                       int64_t bytes);

}  // namespace hexpert::io

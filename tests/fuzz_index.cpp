// Fuzzes the shard index: a shard name that is accepted must not leave its directory.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "io/json_text.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto index = hexpert::io::parse_index("fuzz", data, static_cast<int64_t>(size));
  if (!index.ok()) {
    if (index.status().code() != hexpert::ErrorCode::kInvalidFile) std::abort();
    return 0;
  }
  for (const auto& [tensor, shard] : *index) {
    if (shard.empty() || shard == "." || shard == "..") std::abort();
    if (shard.find('/') != std::string::npos || shard.find('\0') != std::string::npos) std::abort();
  }
  return 0;
}

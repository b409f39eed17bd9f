// Fuzzes the safetensors header: whatever is accepted must lie inside the file.
#include <cstdint>
#include <cstdlib>

#include "io/json_text.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto bytes = static_cast<int64_t>(size);
  const auto header = hexpert::io::parse_safetensors_header("fuzz", data, bytes);
  if (!header.ok()) {
    if (header.status().code() != hexpert::ErrorCode::kInvalidFile) std::abort();
    return 0;
  }
  int64_t total = 0;
  for (const hexpert::TensorInfo& tensor : header->tensors) {
    if (tensor.offset < 0 || tensor.size_bytes < 0) std::abort();
    if (header->data_offset + tensor.offset + tensor.size_bytes > bytes) std::abort();
    total += tensor.size_bytes;
  }
  if (header->data_offset + total != bytes) std::abort();  // no holes, no overlaps
  return 0;
}

// Fuzzes finding and reading experts: a file of any header and any bytes is loaded or refused.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "hexpert/checkpoint.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const int file = ::memfd_create("fuzz", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) < 0) return 0;
  const auto checkpoint = hexpert::Checkpoint::open(path);
  if (!checkpoint.ok()) return 0;
  for (const hexpert::MoeLayerInfo& layer : checkpoint->layers()) {
    if (layer.shape.hidden_size > 64 || layer.shape.intermediate_size > 64) continue;
    hexpert::PrepareOptions options;
    options.num_threads = 1;
    const auto weights = hexpert::load_experts(*checkpoint, layer.prefix, options, 0, 1);
    if (weights.ok() && weights->shape().hidden_size != layer.shape.hidden_size) std::abort();
  }
  return 0;
}

// Stands for the GPU side of the commands in a build without CUDA. No backend leads here.
#include "bench_options.hpp"
#include "layer_io.hpp"

namespace hexpert::tools {
namespace {

[[noreturn]] void refuse() {
  throw Error(Status(ErrorCode::kUnsupportedDevice, "this build has no CUDA"));
}

}  // namespace

std::unique_ptr<LayerIo> create_cuda_io(const Device&, const MoeInputs&, const TensorView&) {
  refuse();
}

int run_cuda_bench(const BenchOptions&,
                   const std::string&,
                   const std::vector<ModelShape>&,
                   const std::vector<int64_t>&) {
  refuse();
}

}  // namespace hexpert::tools

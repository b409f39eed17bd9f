// Stands for the CUDA backends in a build without them.
#include "cuda/cuda_backend.hpp"

namespace hexpert::cuda {
namespace {

Support absent() {
  return Support::no("this build has no CUDA");
}

}  // namespace

const Backend cuda_sm90a_backend = {
    .name = "cuda-sm90a",
    .device = DeviceType::kCuda,
    .available = [](const Device&) { return absent(); },
    .supports = [](const MoeProblem&, const ExpertShape&) { return absent(); },
    .workspace_bytes =
        [](const MoeProblem&, const ExpertShape&, const MoeOptions&) { return int64_t{0}; },
    .describe = [](const MoeProblem&, const ExpertShape&, const MoeOptions&) -> std::string {
      return "absent";
    },
    .forward = [](const ForwardArgs&) -> Status {
      return {ErrorCode::kUnsupportedDevice, "cuda-sm90a: this build has no CUDA"};
    },
};

}  // namespace hexpert::cuda

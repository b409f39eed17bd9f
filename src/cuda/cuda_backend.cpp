#include "cuda/cuda_backend.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <limits>

#include "cuda/device_memory.hpp"
#include "cuda/device_weights.hpp"
#include "cuda/forward.hpp"
#include "cuda/hopper_plan.hpp"

namespace hexpert::cuda {
namespace {

constexpr int kMajor = 9;
constexpr int kMinor = 0;

Support available(const Device& device) {
  int count = 0;
  int major = 0;
  int minor = 0;
  Status status = check(cudaGetDeviceCount(&count), "the CUDA driver reports");
  if (!status.ok()) return Support::no(status.message());
  if (device.index < 0 || device.index >= count) {
    return Support::no(fmt::format("no {}, {} found", to_string(device), count));
  }
  status = check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index),
                 to_string(device));
  if (status.ok()) {
    status = check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index),
                   to_string(device));
  }
  if (!status.ok()) return Support::no(status.message());
  if (major == kMajor && minor == kMinor) return Support::yes();
  return Support::no(fmt::format("needs a GPU of compute capability {}.{}, {} has {}.{}",
                                 kMajor,
                                 kMinor,
                                 to_string(device),
                                 major,
                                 minor));
}

Support supports(const MoeProblem& problem, const ExpertShape& shape) {
  const FragmentWeights sizes = fragment_sizes(shape);
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  if (shape.num_local_experts > kMaxRoutedExperts) {
    return Support::no(fmt::format(
        "at most {} local experts, got {}", kMaxRoutedExperts, shape.num_local_experts));
  }
  const int64_t slots = problem.max_tokens * problem.top_k;
  const int64_t items = (sizes.shape.num_local_experts + slots / 8) *
                        std::max(sizes.fc1_rows, sizes.fc2_rows) / 128 * 8;
  if (items > kMaxInt32) {
    return Support::no(fmt::format("at most {} tiles, got up to {}", kMaxInt32, items));
  }
  return Support::yes();
}

int64_t workspace_bytes(const MoeProblem& problem,
                        const ExpertShape& shape,
                        const MoeOptions& options) {
  return lay_out_workspace(problem, fragment_sizes(shape), options.batch_invariant, nullptr).bytes;
}

std::string describe(const MoeProblem& problem,
                     const ExpertShape& shape,
                     const MoeOptions& options) {
  const ForwardPlan plan =
      plan_forward(problem, fragment_sizes(shape), problem.max_tokens, options.batch_invariant);
  if (plan.decode) return "one kernel for the layer";
  const std::string narrow = plan.narrow_gemm == nullptr
                                 ? ""
                                 : fmt::format(" (up to {} routes: {} x {})",
                                               plan.max_narrow_routes,
                                               plan.narrow_gemm->item_rows,
                                               plan.narrow_gemm->max_width);
  return fmt::format("tiles of {} x {} tokens{}, K of FC1 in {} parts, of FC2 in {}",
                     plan.gemm->item_rows,
                     plan.gemm->max_width,
                     narrow,
                     plan.fc1_splits,
                     plan.fc2_splits);
}

}  // namespace

const Backend cuda_sm90a_backend = {
    .name = "cuda-sm90a",
    .device = DeviceType::kCuda,
    .available = available,
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .describe = describe,
    .forward = forward,
    .allocate_weights = HopperWeights::allocate,
    .allocate = allocate_memory,
    .plan = make_plan,
    .check_memory = check_memory,
    .synchronize = synchronize,
    .quantize_tokens = quantize_tokens_on_device,
};

}  // namespace hexpert::cuda

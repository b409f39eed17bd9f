// How a kernel of a layer is launched.
#pragma once

#include <cuda_runtime_api.h>

namespace hexpert::cuda {

struct LaunchOptions {
  cudaStream_t stream = nullptr;
  // The kernel may start while its predecessor in the stream still runs; it waits by itself
  // (griddepcontrol.wait) before it reads results.
  bool overlap_predecessor = false;
};

// Launches `kernel` with the attributes that `options` ask for.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...),
                   dim3 grid,
                   dim3 block,
                   size_t shared_bytes,
                   const LaunchOptions& options,
                   Arguments&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.overlap_predecessor ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
}

}  // namespace hexpert::cuda

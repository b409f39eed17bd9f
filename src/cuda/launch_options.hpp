// How a kernel of a layer is launched.
#pragma once

#include <cuda_runtime_api.h>

namespace hexpert::cuda {

struct LaunchOptions {
  cudaStream_t stream = nullptr;
  // The kernel may start while its predecessor in the stream still runs; it waits by itself
  // (griddepcontrol.wait) before it reads results.
  bool overlap_predecessor = false;
  int cluster_blocks = 1;    // blocks of a cluster
  bool cooperative = false;  // all blocks run at once, or the launch is refused
};

// Loads `kernel` into the current device. Without this its first launch does, which may allocate and
// synchronize: not while a graph is captured.
template <typename... Parameters>
cudaError_t load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// The same for a kernel of a layer, which may have that much dynamic shared memory. All of them want the
// same division between shared memory and L1 cache: a multiprocessor must be idle to change it, and a
// kernel could not start there while its predecessor runs.
template <typename... Parameters>
cudaError_t configure(void (*kernel)(Parameters...), int shared_bytes = 0) {
  cudaError_t error = load(kernel);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess || shared_bytes == 0) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// The first error of several kernels.
template <typename... Kernels>
cudaError_t configure_all(Kernels*... kernels) {
  cudaError_t error = cudaSuccess;
  (void)(((error = configure(kernels)) == cudaSuccess) && ...);
  return error;
}

// Launches `kernel` with the attributes that `options` ask for.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...),
                   dim3 grid,
                   dim3 block,
                   size_t shared_bytes,
                   const LaunchOptions& options,
                   Arguments&&... arguments) {
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (options.overlap_predecessor) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (options.cluster_blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(options.cluster_blocks), 1, 1};
  }
  if (options.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
}

}  // namespace hexpert::cuda

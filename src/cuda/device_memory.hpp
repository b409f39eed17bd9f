// CUDA errors, the current device, and memory with an owner.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>

#include "backend/device_weights.hpp"

namespace hexpert::cuda {

// kDeviceError, or kOutOfMemory when memory was the reason: "what: name and text of the error".
// Takes the error from the runtime, so that it does not surface a second time elsewhere.
Status check(cudaError_t error, std::string_view what);

inline cudaStream_t to_cuda(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

// Makes a device current until the end of the scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Device& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  int former_ = -1;
  Status status_;
};

// Backend::allocate. Content unspecified, aligned to 256 bytes.
Result<std::unique_ptr<Memory>> allocate_memory(int64_t bytes, const Device& device);

// Backend::check_memory: host memory that is mapped into the device passes too.
Status check_memory(std::string_view name, const void* data, const Device& device);

// Backend::synchronize.
Status synchronize(Stream stream, const Device& device);

// For tests: the n-th allocation from now on fails, once. 0: none does.
void fail_allocation(int n);

}  // namespace hexpert::cuda

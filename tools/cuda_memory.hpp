// CUDA for the commands: errors as exceptions, memory and streams with owners.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hexpert/status.hpp"

namespace hexpert::tools {

// Throws Error: kOutOfMemory or kDeviceError with the text of CUDA.
void cuda_require(cudaError_t error);

template <typename T>
class CudaArray {
 public:
  CudaArray() = default;
  explicit CudaArray(int64_t count) : count_(count) {
    cuda_require(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)));
  }
  CudaArray(CudaArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  CudaArray& operator=(CudaArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~CudaArray() { cudaFree(data_); }
  T* data() const { return static_cast<T*>(data_); }
  int64_t size() const { return count_; }
  void upload(const void* from) {
    cuda_require(
        cudaMemcpy(data_, from, static_cast<size_t>(count_) * sizeof(T), cudaMemcpyHostToDevice));
  }

 private:
  void* data_ = nullptr;
  int64_t count_ = 0;
};

class CudaStream {
 public:
  CudaStream() { cuda_require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `body` enqueues on a stream, as one graph. Replays are timed by the device.
class CudaGraph {
 public:
  template <typename Body>
  CudaGraph(const CudaStream& stream, const Body& body) : stream_(stream) {
    cuda_require(cudaEventCreate(&start_));
    cuda_require(cudaEventCreate(&end_));
    cudaGraph_t graph = nullptr;
    cuda_require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    body();
    cuda_require(cudaStreamEndCapture(stream.get(), &graph));
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    cuda_require(error);
  }
  ~CudaGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  // Seconds of one replay.
  double replay() const {
    cuda_require(cudaEventRecord(start_, stream_.get()));
    cuda_require(cudaGraphLaunch(executable_, stream_.get()));
    cuda_require(cudaEventRecord(end_, stream_.get()));
    cuda_require(cudaEventSynchronize(end_));
    float ms = 0;
    cuda_require(cudaEventElapsedTime(&ms, start_, end_));
    return static_cast<double>(ms) * 1e-3;
  }

 private:
  const CudaStream& stream_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace hexpert::tools

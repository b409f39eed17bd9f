// Device memory for tests of the CUDA backends, fenced and poisoned, and layers run on it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hexpert/moe.hpp"
#include "moe_case.hpp"

namespace hexpert::test {

inline const Device kGpu = Device::cuda(0);
inline constexpr const char* kHopper = "cuda-sm90a";

// Throws, which fails the test.
inline void cuda_ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// `count` elements on the device between two fences. Elements and fences hold `fill` bytes: 0xFF is NaN
// in every format, so that what a kernel reads beside its input shows.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t count, uint8_t fill = 0xA5) : count_(count), fill_(fill) {
    cuda_ok(cudaMalloc(&base_, bytes() + 2 * kFence));
    cuda_ok(cudaMemset(base_, fill, bytes() + 2 * kFence));
    cuda_ok(cudaDeviceSynchronize());
  }
  template <typename Vector>
  static DeviceBuffer copy_of(const Vector& values) {
    DeviceBuffer buffer(static_cast<int64_t>(values.size()), 0xFF);
    buffer.upload(values.data());
    return buffer;
  }
  ~DeviceBuffer() { cudaFree(base_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), count_(other.count_), fill_(other.fill_) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  T* data() const { return reinterpret_cast<T*>(static_cast<std::byte*>(base_) + kFence); }
  int64_t size() const { return count_; }
  void upload(const T* from) { cuda_ok(cudaMemcpy(data(), from, bytes(), cudaMemcpyDefault)); }
  void download(T* to) const { cuda_ok(cudaMemcpy(to, data(), bytes(), cudaMemcpyDefault)); }
  std::vector<T> to_vector() const {
    std::vector<T> values(static_cast<size_t>(count_));
    download(values.data());
    return values;
  }
  void poison() { cuda_ok(cudaMemset(data(), 0xFF, bytes())); }
  // Nothing was written beside the elements.
  bool fences_intact() const {
    std::vector<uint8_t> fences(2 * kFence);
    const auto* begin = static_cast<const std::byte*>(base_);
    cuda_ok(cudaMemcpy(fences.data(), begin, kFence, cudaMemcpyDefault));
    cuda_ok(
        cudaMemcpy(fences.data() + kFence, begin + kFence + bytes(), kFence, cudaMemcpyDefault));
    return std::count(fences.begin(), fences.end(), fill_) ==
           static_cast<std::ptrdiff_t>(fences.size());
  }

 private:
  static constexpr size_t kFence = 1024;
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }
  void* base_ = nullptr;
  int64_t count_;
  uint8_t fill_;
};

// A stream that waits for no other.
class TestStream {
 public:
  TestStream() { cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  cudaStream_t get() const { return stream_; }
  Stream view() const { return {stream_}; }
  void wait() const { cuda_ok(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `body` enqueues on a stream, to be replayed.
class TestGraph {
 public:
  template <typename Body>
  TestGraph(const TestStream& stream, const Body& body) {
    cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    body();
    cuda_ok(cudaStreamEndCapture(stream.get(), &graph_));
    cuda_ok(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~TestGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  TestGraph(const TestGraph&) = delete;
  TestGraph& operator=(const TestGraph&) = delete;
  void replay(const TestStream& stream) const {
    cuda_ok(cudaGraphLaunch(executable_, stream.get()));
    stream.wait();
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// The same experts on the device, copied byte by byte: the quantizer there has tests of its own.
ExpertWeights copy_to_device(const ExpertWeights& host);

// Inputs of a layer on the device.
struct DeviceData {
  DeviceBuffer<uint16_t> hidden_states;
  DeviceBuffer<std::byte> routing_map;
  DeviceBuffer<float> probabilities;
  MoeInputs inputs;

  explicit DeviceData(const MoeInputs& host);
  // Other values of the same shapes, at the same addresses.
  void upload(const MoeInputs& host);
};

// FP32 or BF16 output of a layer on the device, NaN before the run.
struct DeviceOut {
  DeviceBuffer<std::byte> bytes;
  TensorView view;
  DeviceOut(const MoeCase& c, DType dtype);
  void reset();
  std::vector<float> values() const;
};

}  // namespace hexpert::test

#include "cuda/device_memory.hpp"

#include <fmt/format.h>

#include <atomic>

namespace hexpert::cuda {
namespace {

std::atomic<int> until_failure{0};

bool injected_failure() {
  return until_failure.load() > 0 && until_failure.fetch_sub(1) == 1;
}

class DeviceMemory final : public Memory {
 public:
  DeviceMemory(std::byte* data, int64_t size, const Device& device)
      : data_(data), size_(size), device_(device) {}
  ~DeviceMemory() override {
    const CurrentDevice current(device_);
    // A device that failed refuses this too; there is nobody to tell.
    if (cudaFree(data_) != cudaSuccess) (void)cudaGetLastError();
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const override { return data_; }
  int64_t size() const override { return size_; }

 private:
  std::byte* data_;
  int64_t size_;
  Device device_;
};

}  // namespace

Status check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  const ErrorCode code =
      error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDeviceError;
  return {code,
          fmt::format("{}: {}: {}", what, cudaGetErrorName(error), cudaGetErrorString(error))};
}

CurrentDevice::CurrentDevice(const Device& device) {
  int current = -1;
  status_ = check(cudaGetDevice(&current), "cudaGetDevice");
  if (!status_.ok() || current == device.index) return;
  status_ = check(cudaSetDevice(device.index), to_string(device));
  if (status_.ok()) former_ = current;
}

CurrentDevice::~CurrentDevice() {
  if (former_ >= 0 && cudaSetDevice(former_) != cudaSuccess) (void)cudaGetLastError();
}

Result<std::unique_ptr<Memory>> allocate_memory(int64_t bytes, const Device& device) {
  const CurrentDevice current(device);
  if (!current.status().ok()) return current.status();
  void* data = nullptr;
  const cudaError_t error = injected_failure() ? cudaErrorMemoryAllocation
                                               : cudaMalloc(&data, static_cast<size_t>(bytes));
  const Status status = check(error, fmt::format("{} bytes on {}", bytes, to_string(device)));
  if (!status.ok()) return status;
  return std::unique_ptr<Memory>(
      std::make_unique<DeviceMemory>(static_cast<std::byte*>(data), bytes, device));
}

Status check_memory(std::string_view name, const void* data, const Device& device) {
  cudaPointerAttributes attributes{};
  HX_RETURN_IF_ERROR(check(cudaPointerGetAttributes(&attributes, data), name));
  const auto pinned_elsewhere = [&] {
    return attributes.type == cudaMemoryTypeHost && attributes.devicePointer == nullptr;
  };
  if (pinned_elsewhere()) {
    // A thread that has not used the device yet knows no address of pinned memory on it.
    const CurrentDevice current(device);
    HX_RETURN_IF_ERROR(current.status());
    HX_RETURN_IF_ERROR(check(cudaSetDevice(device.index), name));
    HX_RETURN_IF_ERROR(check(cudaPointerGetAttributes(&attributes, data), name));
  }
  if (attributes.type == cudaMemoryTypeUnregistered || pinned_elsewhere()) {
    return {ErrorCode::kDeviceMismatch,
            fmt::format(
                "{}: expected memory of {}, got host memory at {}", name, to_string(device), data)};
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device.index) {
    return {ErrorCode::kDeviceMismatch,
            fmt::format("{}: expected memory of {}, got memory of cuda:{}",
                        name,
                        to_string(device),
                        attributes.device)};
  }
  return {};
}

Status synchronize(Stream stream, const Device& device) {
  const CurrentDevice current(device);
  HX_RETURN_IF_ERROR(current.status());
  return check(cudaStreamSynchronize(to_cuda(stream)), "synchronize");
}

void fail_allocation(int n) {
  until_failure = n;
}

}  // namespace hexpert::cuda

#include "common.hpp"
#include "cuda_memory.hpp"
#include "layer_io.hpp"

namespace hexpert::tools {
namespace {

int64_t bytes_of(const ConstTensorView& view) {
  return view.num_elements() * size_of(view.dtype);
}

// A tensor's bytes on the device. `view` is changed to point at them.
template <typename View>
CudaArray<std::byte> copy_of(View& view, const Device& device) {
  view.device = device;
  if (bytes_of(view) == 0) return {};
  CudaArray<std::byte> copy(bytes_of(view));
  copy.upload(view.data);
  view.data = copy.data();
  return copy;
}

class CudaIo final : public LayerIo {
 public:
  CudaIo(const Device& device, const MoeInputs& inputs, const TensorView& out)
      : host_out_(out), inputs_(inputs), out_(out) {
    cuda_require(cudaSetDevice(device.index));
    hidden_states_ = copy_of(inputs_.hidden_states, device);
    routing_map_ = copy_of(inputs_.routing_map, device);
    probabilities_ = copy_of(inputs_.probabilities, device);
    out_bytes_ = copy_of(out_, device);
  }
  double forward(RoutedMoe& moe) override {
    const double start = now_seconds();
    require(moe.forward(inputs_, out_, {stream_.get()}));
    cuda_require(cudaStreamSynchronize(stream_.get()));
    return now_seconds() - start;
  }
  void fetch() override {
    cuda_require(cudaMemcpy(host_out_.data,
                            out_bytes_.data(),
                            static_cast<size_t>(out_bytes_.size()),
                            cudaMemcpyDeviceToHost));
  }

 private:
  CudaStream stream_;
  TensorView host_out_;
  MoeInputs inputs_;
  TensorView out_;
  CudaArray<std::byte> hidden_states_, routing_map_, probabilities_, out_bytes_;
};

}  // namespace

void cuda_require(cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(
      Status(error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDeviceError,
             std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error)));
}

std::unique_ptr<LayerIo> create_cuda_io(const Device& device,
                                        const MoeInputs& inputs,
                                        const TensorView& out) {
  return std::make_unique<CudaIo>(device, inputs, out);
}

}  // namespace hexpert::tools

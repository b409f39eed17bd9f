#include "layer_io.hpp"

#include "common.hpp"

namespace hexpert::tools {
namespace {

class CpuIo final : public LayerIo {
 public:
  CpuIo(const MoeInputs& inputs, const TensorView& out) : inputs_(inputs), out_(out) {}
  double forward(RoutedMoe& moe) override {
    const double start = now_seconds();
    require(moe.forward(inputs_, out_));
    return now_seconds() - start;
  }
  void fetch() override {}

 private:
  MoeInputs inputs_;
  TensorView out_;
};

}  // namespace

Device device_of(std::string_view backend) {
  for (const BackendInfo& info : list_backends()) {
    if (info.name == backend && info.device == DeviceType::kCuda) return Device::cuda(0);
  }
  return Device::cpu();
}

std::unique_ptr<LayerIo> LayerIo::create(const Device& device,
                                         const MoeInputs& inputs,
                                         const TensorView& out) {
  if (device.type == DeviceType::kCuda) return create_cuda_io(device, inputs, out);
  return std::make_unique<CpuIo>(inputs, out);
}

}  // namespace hexpert::tools

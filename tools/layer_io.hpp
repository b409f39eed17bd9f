// Layers whose inputs and outputs are in host memory, on whatever device their weights are.
#pragma once

#include <memory>
#include <string_view>

#include "hexpert/moe.hpp"

namespace hexpert::tools {

// Where a backend keeps its weights: the CPU, or the first CUDA device.
Device device_of(std::string_view backend);

// Inputs and output of one call. On a GPU the object holds copies of them.
class LayerIo {
 public:
  // `out` [T, H] is copied to the device as well: a row that no forward writes stays as it is.
  static std::unique_ptr<LayerIo> create(const Device& device,
                                         const MoeInputs& inputs,
                                         const TensorView& out);
  virtual ~LayerIo() = default;
  // Runs the layer and waits for it; seconds.
  virtual double forward(RoutedMoe& moe) = 0;
  // Brings the result into `out`.
  virtual void fetch() = 0;
};

// Of a GPU. Throws Error where there is none, or no memory.
std::unique_ptr<LayerIo> create_cuda_io(const Device& device,
                                        const MoeInputs& inputs,
                                        const TensorView& out);

}  // namespace hexpert::tools

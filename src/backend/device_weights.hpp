// What ExpertWeights holds in place of CPU tiles when its device is not the CPU, and memory there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "hexpert/weights.hpp"

namespace hexpert {

// Memory of a device, freed with the object.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::byte* data() const = 0;
  virtual int64_t size() const = 0;
};

// Arguments arrive checked: packed bf16 of the right sizes, `expert` in range. A stack lies on
// device() or on the CPU. Calls without a stream wait until the device is idle and return when they
// are done.
class DeviceWeights {
 public:
  virtual ~DeviceWeights() = default;

  virtual Device device() const = 0;
  virtual std::string_view layout_name() const = 0;
  virtual int64_t size_bytes() const = 0;

  // Quantizes both stacks into the memory held. Stacks on the device: enqueued on `stream`, no
  // allocation, no synchronization. A stack on the CPU passes through a buffer for one expert, and
  // the call returns when the stack is no longer needed. `refuse_nonfinite` waits for the result.
  virtual Status quantize(const ConstTensorView& fc1,
                          const ConstTensorView& fc2,
                          bool refuse_nonfinite,
                          Stream stream) = 0;
  virtual Status set_expert(int64_t expert,
                            const ConstTensorView& fc1,
                            const ConstTensorView& fc2,
                            Stream stream) = 0;

  // One expert, to and from expert 0 of `tiles`, which holds CPU tiles of one expert.
  virtual Status write_expert(int64_t expert, const ExpertWeights::Storage& tiles) = 0;
  virtual Status read_expert(int64_t expert, ExpertWeights::Storage& tiles) const = 0;
  // All experts' alphas, [L] each.
  virtual Status read_alphas(float* fc1_up, float* fc1_gate, float* fc2) const = 0;
};

}  // namespace hexpert

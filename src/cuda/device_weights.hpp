// Expert weights in the memory of a Hopper GPU, in fragment order; and tokens quantized there.
#pragma once

#include <memory>
#include <vector>

#include "backend/device_weights.hpp"
#include "cuda/fragment_weights.hpp"
#include "hexpert/format.hpp"

namespace hexpert::cuda {

class HopperWeights final : public DeviceWeights {
 public:
  // Zero experts.
  static Result<std::unique_ptr<DeviceWeights>> allocate(const ExpertShape& shape,
                                                         const PrepareOptions& options);

  // Pointers that stay the same as long as the object lives.
  const FragmentWeights& view() const { return view_; }

  Device device() const override { return device_; }
  std::string_view layout_name() const override { return "sm90-fragments"; }
  int64_t size_bytes() const override { return memory_->size(); }
  Status quantize(const ConstTensorView& fc1,
                  const ConstTensorView& fc2,
                  bool refuse_nonfinite,
                  Stream stream) override;
  Status set_expert(int64_t expert,
                    const ConstTensorView& fc1,
                    const ConstTensorView& fc2,
                    Stream stream) override;
  Status write_expert(int64_t expert, const ExpertWeights::Storage& tiles) override;
  Status read_expert(int64_t expert, ExpertWeights::Storage& tiles) const override;
  Status read_alphas(float* fc1_up, float* fc1_gate, float* fc2) const override;

 private:
  HopperWeights(const Device& device, const FragmentWeights& sizes);
  Status quantize_experts(int64_t first,
                          int64_t experts,
                          const ConstTensorView& fc1,
                          const ConstTensorView& fc2,
                          Stream stream);
  Status check_finite(Stream stream) const;

  Device device_;
  FragmentWeights view_;
  uint32_t* fc1_amax_ = nullptr;  // [L] scratch of the quantizer
  uint32_t* fc2_amax_ = nullptr;  // [L]
  uint64_t* progress_ = nullptr;  // [1 + L]
  std::unique_ptr<Memory> memory_;
};

// Backend::quantize_tokens.
Status quantize_tokens_on_device(const ConstTensorView& hidden_states,
                                 const Nvfp4View& out,
                                 Stream stream);

}  // namespace hexpert::cuda

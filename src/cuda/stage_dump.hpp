// Intermediate results of a forward on the device, copied to a StageDump. Does nothing without one.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.hpp"
#include "cuda/hopper_plan.hpp"

namespace hexpert::cuda {

class DeviceDump {
 public:
  DeviceDump(const ForwardArgs& args,
             const Device& device,
             const FragmentWeights& weights,
             const HopperWorkspace& work);

  // Allocates what the stages fill beside their own results; null without a dump.
  Status begin();
  uint8_t* x_codes() const { return x_codes_; }
  uint8_t* x_block_scales() const { return x_block_scales_; }
  uint16_t* intermediate() const { return intermediate_; }
  uint8_t* h_codes() const { return h_codes_; }
  uint8_t* h_block_scales() const { return h_block_scales_; }
  uint16_t* route_output() const { return route_output_; }

  // Before the activations are overwritten in place. `partial`: the requantizer stores them.
  Status after_fc1(bool partial);
  // Waits for the forward and copies everything. `partial`: the combine stored the route rows.
  Status end(bool partial);

 private:
  const ForwardArgs& args_;
  Device device_;
  const FragmentWeights& w_;
  const HopperWorkspace& work_;
  int64_t routes_ = 0;  // permuted rows in use
  std::unique_ptr<Memory> memory_;
  uint8_t* x_codes_ = nullptr;
  uint8_t* x_block_scales_ = nullptr;
  uint16_t* intermediate_ = nullptr;
  uint8_t* h_codes_ = nullptr;
  uint8_t* h_block_scales_ = nullptr;
  uint16_t* route_output_ = nullptr;
};

}  // namespace hexpert::cuda

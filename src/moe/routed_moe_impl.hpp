// Inside of RoutedMoe, for the C++ file and for tests that look at intermediate results.
#pragma once

#include "backend/backend.hpp"
#include "hexpert/moe.hpp"
#include "weights/storage.hpp"

namespace hexpert {

struct RoutedMoe::Impl {
  MoeProblem problem;
  MoeOptions options;  // num_threads resolved
  const ExpertWeights::Storage* weights = nullptr;
  Device device;
  const Backend* backend = nullptr;
  int64_t workspace_bytes = 0;
  AlignedBuffer own_workspace;                   // of a CPU backend
  std::unique_ptr<Memory> own_device_workspace;  // of another; both empty: the caller's
  std::byte* workspace = nullptr;
  std::unique_ptr<BackendPlan> plan;
  Status broken;  // the first device error: its layer's later results cannot be trusted
};

// forward() that also copies the intermediate results.
Status forward_with_dump(RoutedMoe& moe,
                         const MoeInputs& inputs,
                         const TensorView& out,
                         const StageDump& dump,
                         Stream stream = {});

}  // namespace hexpert

// route -> quantize -> FC1 + activation -> requantize -> FC2 -> combine, enqueued on one stream.
#pragma once

#include <memory>

#include "backend/backend.hpp"

namespace hexpert::cuda {

// Backend::plan: prepares the device's kernels, so that a forward allocates and asks nothing.
Result<std::unique_ptr<BackendPlan>> make_plan(const MoeProblem& problem,
                                               const ExpertWeights::Storage& weights,
                                               const MoeOptions& options,
                                               std::byte* workspace);

// Backend::forward.
Status forward(const ForwardArgs& args);

}  // namespace hexpert::cuda

// The parts of the extension module, and the object that they share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <shared_mutex>

#include "hexpert/weights.hpp"

namespace hexpert::python {

void bind_weights(nanobind::module_& m);
void bind_moe(nanobind::module_& m);

// Weights as Python shares them between threads and layers: a forward waits for a refresh on the
// host and the reverse. Always locked without the interpreter lock.
struct SharedWeights {
  explicit SharedWeights(ExpertWeights made) : weights(std::move(made)) {}
  ExpertWeights weights;
  mutable std::shared_mutex mutex;
};

// The Python object: layers hold the same weights.
struct WeightsHandle {
  std::shared_ptr<SharedWeights> shared;
};

}  // namespace hexpert::python

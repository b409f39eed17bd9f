// The CUDA backends.
#pragma once

#include "backend/backend.hpp"

namespace hexpert::cuda {

extern const Backend cuda_sm90a_backend;

}  // namespace hexpert::cuda

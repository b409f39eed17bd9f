// Numbers of threads that callers ask for.
#pragma once

#include <omp.h>

#include <algorithm>
#include <string>

#include "hexpert/status.hpp"

namespace hexpert {

inline constexpr int kMaxThreads = 1024;  // OpenMP ends the process when it cannot start a thread

inline Status check_num_threads(const char* name, int num_threads) {
  if (num_threads >= 0 && num_threads <= kMaxThreads) return Status::success();
  return {ErrorCode::kInvalidArgument,
          std::string(name) + ": expected 0.." + std::to_string(kMaxThreads) + ", got " +
              std::to_string(num_threads)};
}

// 0 is the OpenMP default.
inline int threads_or_default(int num_threads) {
  return num_threads > 0 ? num_threads : std::clamp(omp_get_max_threads(), 1, kMaxThreads);
}

}  // namespace hexpert

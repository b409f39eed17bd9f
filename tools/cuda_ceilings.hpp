// What a GPU can do at this moment.
#pragma once

#include "cuda_memory.hpp"

namespace hexpert::tools {

struct CudaCeilings {
  double read_gbs = 0;      // pure read of memory larger than the L2 cache
  double copy_gbs = 0;      // device to device, bytes read plus bytes written
  double dense_tflops = 0;  // BF16 8192^3 of cuBLAS, sustained; 0 where the library is not found
};
CudaCeilings measure_ceilings(const CudaStream& stream);

}  // namespace hexpert::tools

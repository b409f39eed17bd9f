#include "cuda/grouped_gemm.cuh"

namespace hexpert::cuda {
const GemmVariant gemm_width16 = gemm::variant<16>();
}

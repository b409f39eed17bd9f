#include "cuda/grouped_gemm.cuh"

namespace hexpert::cuda {
const GemmVariant gemm_width256 = gemm::variant<256>();
}

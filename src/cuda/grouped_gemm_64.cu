#include "cuda/grouped_gemm.cuh"

namespace hexpert::cuda {
const GemmVariant gemm_width64 = gemm::variant<64>();
}

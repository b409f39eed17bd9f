#include "cuda/grouped_gemm.cuh"

namespace hexpert::cuda {
const GemmVariant gemm_width32 = gemm::variant<32>();
}

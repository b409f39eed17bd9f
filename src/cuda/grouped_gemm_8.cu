#include "cuda/grouped_gemm.cuh"

namespace hexpert::cuda {
const GemmVariant gemm_width8 = gemm::variant<8>();
}

// Picks the instance of gemm_tile for m tokens, 1 <= m <= kMax.
template <int kMax, int M = 1>
void gemm_int(
    const uint8_t* group, int64_t k, const uint8_t* tile, int m, float* c, int64_t c_stride) {
  if constexpr (M < kMax) {
    if (m > M) return gemm_int<kMax, M + 1>(group, k, tile, m, c, c_stride);
  }
  gemm_tile<M>(group, k, tile, c, c_stride);
}

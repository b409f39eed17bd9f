// From tiles to the instance for their width. Expects kWidestTile, expand_tile(rows, m, k, tile) and
// gemm_tile<M>(pair, k, tile, c).

void expand_int(const Nvfp4Row* rows, int64_t count, int64_t k, uint8_t* tiles_out) {
  const TokenCut cut(count, kWidestTile);
  for (int64_t t = 0; t < cut.parts; ++t) {
    const int64_t begin = cut.begin(t);
    expand_tile(rows + begin, cut.width(t), k, tiles_out + int_tile_bytes(begin, k));
  }
}

template <int M = 1>
void gemm_tile_of_width(int m, const uint8_t* pair, int64_t k, const uint8_t* tile, float* c) {
  if constexpr (M < kWidestTile) {
    if (m > M) return gemm_tile_of_width<M + 1>(m, pair, k, tile, c);
  }
  gemm_tile<M>(pair, k, tile, c);
}

void gemm_tiles(const uint8_t* pair, int64_t k, const uint8_t* tiles_in, int64_t count, float* c) {
  const TokenCut cut(count, kWidestTile);
  for (int64_t t = 0; t < cut.parts; ++t) {
    const int64_t begin = cut.begin(t);
    gemm_tile_of_width(
        cut.width(t), pair, k, tiles_in + int_tile_bytes(begin, k), c + begin * kPairRows);
  }
}

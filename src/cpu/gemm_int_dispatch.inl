// The integer GEMM over all tiles of an expert. Expects kWidestTile, expand_tile(rows, m, k, tile)
// and gemm_tile(strip, k, tile, m, c), which handles one of them.

void expand_int(const Nvfp4Row* rows, int64_t count, int64_t k, uint8_t* tiles_out) {
  const TokenCut cut(count, kWidestTile);
  for (int64_t t = 0; t < cut.parts; ++t) {
    const int64_t begin = cut.begin(t);
    expand_tile(rows + begin, cut.width(t), k, tiles_out + int_tile_bytes(begin, k));
  }
}

void gemm_int(const uint8_t* strip, int64_t k, const uint8_t* tiles_in, int64_t count, float* c) {
  const TokenCut cut(count, kWidestTile);
  for (int64_t t = 0; t < cut.parts; ++t) {
    const int64_t begin = cut.begin(t);
    gemm_tile(
        strip, k, tiles_in + int_tile_bytes(begin, k), cut.width(t), c + begin * tiles::kStripRows);
  }
}

// Quantizer and packing of the scalar table: the oracle itself, and the offsets of cpu_tiles.

uint16_t amax_bits(const uint16_t* x, int64_t n) {
  uint16_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t magnitude = x[i] & 0x7FFF;
    if (magnitude > amax) amax = magnitude;
  }
  return amax;
}

void quantize_row(const uint16_t* x,
                  int64_t n,
                  const OuterScale& outer,
                  uint8_t* codes,
                  uint8_t* scales,
                  const uint16_t*) {
  for (int64_t block = 0; block < n / kBlockSize; ++block) {
    scales[block] = quantize_block(x + block * kBlockSize, outer, codes + block * kBlockSize / 2);
  }
}

void pack_group(const Nvfp4Row* rows, int64_t k, uint8_t* group) {
  std::memset(group, 0, static_cast<size_t>(tiles::group_bytes(k)));
  for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
    for (int64_t i = 0; i < k; ++i) {
      const int code = rows[n].codes[i / 2] >> (i % 2 * 4) & 15;
      uint8_t& byte = group[tiles::code_offset(n, i)];
      byte = static_cast<uint8_t>(byte | code << (tiles::nibble_is_high(i) ? 4 : 0));
    }
    for (int64_t block = 0; block < k / kBlockSize; ++block) {
      group[tiles::scale_offset(n, block)] = rows[n].scales[block];
    }
  }
}

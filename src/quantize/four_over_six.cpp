#include "quantize/four_over_six.hpp"

#include <algorithm>
#include <cmath>

namespace hexpert {
namespace {

struct Candidate {
  uint8_t scale_code = 0;
  uint8_t codes[kBlockSize] = {};
  float error = 0;
};

Candidate try_scale(const uint16_t* x, const FourOverSixScale& scale, float raw) {
  Candidate result;
  result.scale_code = e4m3_encode(raw);
  const float value = e4m3_value(result.scale_code);
  const float encode = block_encode(result.scale_code, scale.outer.decode);
  for (int64_t i = 0; i < kBlockSize; ++i) {
    const float original = bf16_to_f32(x[i]);
    result.codes[i] = e2m1_encode(original * encode);
    const float scaled = e2m1_value(result.codes[i]) * value;
    const float decoded =
        scale.per_row ? scaled * scale.amax / scale.full_range : scaled * scale.outer.decode;
    const float difference = decoded - original;
    result.error += scale.options.error == FourOverSix::Error::kMse ? difference * difference
                                                                    : std::fabs(difference);
  }
  return result;
}

}  // namespace

FourOverSixScale four_over_six_scale(const FourOverSix& options, bool per_row, uint16_t amax_bits) {
  FourOverSixScale scale;
  scale.options = options;
  scale.per_row = per_row;
  scale.amax = bf16_to_f32(amax_bits);
  scale.full_range = kE2M1Max * options.e4m3_max;
  scale.outer = outer_scale(amax_bits, per_row ? 0.0F : 1.0F, scale.full_range);
  return scale;
}

uint8_t quantize_block(const uint16_t* x, const FourOverSixScale& scale, uint8_t* codes) {
  uint16_t bmax_bits = 0;
  for (int64_t i = 0; i < kBlockSize; ++i) {
    bmax_bits = std::max(bmax_bits, static_cast<uint16_t>(x[i] & 0x7FFF));
  }
  if (scale.outer.poisoned || bmax_bits == 0) {
    std::fill_n(codes, kBlockSize / 2, uint8_t{0});
    return scale.outer.poisoned ? kE4M3Nan : uint8_t{0};
  }
  const float base = bf16_to_f32(bmax_bits) / kE2M1Max * scale.outer.encode;
  const Candidate six = try_scale(x, scale, base);
  const Candidate four = try_scale(x, scale, base * 1.5F);
  const Candidate& best = four.error < six.error ? four : six;
  for (int64_t j = 0; j < kBlockSize / 2; ++j) {
    codes[j] = static_cast<uint8_t>(best.codes[2 * j] | best.codes[2 * j + 1] << 4);
  }
  return best.scale_code;
}

}  // namespace hexpert

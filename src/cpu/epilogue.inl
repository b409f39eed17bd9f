// FC1 and FC2 epilogues and the combine, written once over a vector type `Vec` that the including
// file defines. One IEEE operation a step and no step that depends on the width: every instruction
// set gives the same bits.

// g sigmoid(g) u with relative error below 2^-21 for every finite g and u, and the definition's value for
// the others.
//
// exp(-|g|) = p * 2^n. For g >= 0 the factor is 1 / (1 + p 2^n); for g < 0 it is p 2^n / (1 + p 2^n),
// and 2^n may be far below the smallest FP32 number although the product with a large u is not: it
// is therefore applied in four parts, of which none underflows unless the result does.
inline Vec::F swiglu(Vec::F g, Vec::F u) {
  const Vec::F one = Vec::set1(1.0F);
  const Vec::F zero = Vec::set1(0.0F);
  // Below -190 the result is zero for every finite u.
  const Vec::F gate = Vec::max_or_second(Vec::set1(-190.0F), g);
  const Vec::F x = Vec::min_or_second(Vec::set1(200.0F), Vec::abs(gate));

  const Vec::F shifted = Vec::fma(x, Vec::set1(-1.44269504F), Vec::set1(kMagic));
  const Vec::I n = Vec::subtract_bits(shifted, kMagicBits);
  const Vec::F n_float = Vec::sub(shifted, Vec::set1(kMagic));
  Vec::F r = Vec::fma(n_float, Vec::set1(-0.693145752F), Vec::sub(zero, x));  // ln 2, upper 16 bits
  r = Vec::fma(n_float, Vec::set1(-1.42860677e-6F), r);                       // ln 2, the rest
  Vec::F p = Vec::set1(1.0F / 5040);
  p = Vec::fma(p, r, Vec::set1(1.0F / 720));
  p = Vec::fma(p, r, Vec::set1(1.0F / 120));
  p = Vec::fma(p, r, Vec::set1(1.0F / 24));
  p = Vec::fma(p, r, Vec::set1(1.0F / 6));
  p = Vec::fma(p, r, Vec::set1(0.5F));
  p = Vec::fma(p, r, one);
  p = Vec::fma(p, r, one);

  const Vec::I quarter = Vec::quarter(n);  // floor(n / 4)
  const Vec::F f = Vec::pow2(quarter);
  const Vec::F f_last = Vec::pow2(Vec::minus_3_times(n, quarter));
  const Vec::F f2 = Vec::mul(f, f);
  const Vec::F z = Vec::mul(Vec::mul(Vec::mul(p, f2), f), f_last);

  // The definition's sigmoid, in FP64, is zero below this: an infinite u gives NaN.
  const Vec::F below = Vec::add(g, Vec::set1(709.782654F));
  const Vec::F p_or_zero = Vec::if_negative(below, zero, p);
  const Vec::F numerator = Vec::mul(gate, Vec::if_negative(gate, p_or_zero, one));
  const Vec::F q = Vec::div(numerator, Vec::add(one, z));
  const Vec::F scale = Vec::if_negative(gate, f, one);
  const Vec::F last = Vec::if_negative(gate, f_last, one);
  return Vec::mul(Vec::mul(Vec::mul(Vec::mul(q, scale), Vec::mul(u, scale)), scale), last);
}

inline Vec::F squared_relu(Vec::F z) {
  const Vec::F r = Vec::max_or_second(Vec::set1(0.0F), z);
  return Vec::mul(r, r);
}

// 16 features of one route. `gate` may be `up`: squared ReLU does not look at it.
inline void activate16(const Activation& activation,
                       const float* up,
                       const float* gate,
                       float up_scale,
                       float gate_scale,
                       uint16_t* out) {
  const Vec::F up_factor = Vec::set1(up_scale);
  const Vec::F gate_factor = Vec::set1(gate_scale);
  switch (activation.type) {
    case ActivationType::kSquaredRelu:
      for (int i = 0; i < 16; i += Vec::kLanes) {
        Vec::store_bf16(out + i, squared_relu(Vec::mul(Vec::load(up + i), up_factor)));
      }
      return;
    case ActivationType::kSwiGlu:
      for (int i = 0; i < 16; i += Vec::kLanes) {
        Vec::store_bf16(out + i,
                        swiglu(Vec::mul(Vec::load(gate + i), gate_factor),
                               Vec::mul(Vec::load(up + i), up_factor)));
      }
      return;
    default:
      for (int i = 0; i < 16; ++i) {
        out[i] = bf16_from_f32(static_cast<float>(
            hexpert::activate(activation, up[i] * up_scale, gate[i] * gate_scale)));
      }
  }
}

void activate(const Activation& activation,
              bool gated,
              const float* c,
              int64_t columns,
              int64_t count,
              const float* up_scale,
              const float* gate_scale,
              uint16_t* out,
              int64_t stride) {
  for (int64_t i = 0; i < count; ++i, c += columns, out += stride) {
    if (gated) {
      for (int64_t n = 0; n < columns; n += 32)
        activate16(activation, c + n, c + n + 16, up_scale[i], gate_scale[i], out + n / 2);
    } else {
      for (int64_t n = 0; n < columns; n += 16)
        activate16(activation, c + n, c + n, up_scale[i], up_scale[i], out + n);
    }
  }
}

void round_routes(const float* c,
                  int64_t columns,
                  int64_t count,
                  const float* scale,
                  uint16_t* out,
                  int64_t stride) {
  for (int64_t i = 0; i < count; ++i, c += columns, out += stride) {
    const Vec::F factor = Vec::set1(scale[i]);
    for (int64_t n = 0; n < columns; n += Vec::kLanes) {
      Vec::store_bf16(out + n, Vec::mul(factor, Vec::load(c + n)));
    }
  }
}

void combine(const uint16_t* const* routes,
             const float* probabilities,
             int64_t slots,
             int64_t begin,
             int64_t end,
             void* out,
             bool out_is_f32) {
  int64_t i = begin;
  for (; i + Vec::kLanes <= end; i += Vec::kLanes) {
    Vec::F acc = Vec::set1(0.0F);
    for (int64_t s = 0; s < slots; ++s) {
      if (routes[s] == nullptr) continue;
      acc = Vec::fma(Vec::set1(probabilities[s]), Vec::load_bf16(routes[s] + i), acc);
    }
    if (out_is_f32) {
      Vec::store(static_cast<float*>(out) + i, acc);
    } else {
      Vec::store_bf16(static_cast<uint16_t*>(out) + i, acc);
    }
  }
  for (; i < end; ++i) {
    float acc = 0;
    for (int64_t s = 0; s < slots; ++s) {
      if (routes[s] != nullptr) acc = std::fma(probabilities[s], bf16_to_f32(routes[s][i]), acc);
    }
    if (out_is_f32) {
      static_cast<float*>(out)[i] = acc;
    } else {
      static_cast<uint16_t*>(out)[i] = bf16_from_f32(acc);
    }
  }
}

// FC1 and FC2 epilogues and the combine, written once over a vector type `Vec` that the including
// file defines. One IEEE operation a step and no step that depends on the width: every instruction
// set gives the same bits.

// N vectors side by side, so that hardly an instruction waits for the one before it: the processor looks
// no further ahead than one or two evaluations of swiglu.
template <int N>
struct Side {
  struct F {
    Vec::F v[N];
  };
  struct I {
    Vec::I v[N];
  };
  template <typename To = F, typename Operation, typename... Args>
  static To each(Operation operation, const Args&... args) {
    To to;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
      to.v[i] = operation(args.v[i]...);
    return to;
  }
  static F set1(float v) {
    return each([v] { return Vec::set1(v); });
  }
  static F add(const F& a, const F& b) {
    return each(Vec::add, a, b);
  }
  static F sub(const F& a, const F& b) {
    return each(Vec::sub, a, b);
  }
  static F mul(const F& a, const F& b) {
    return each(Vec::mul, a, b);
  }
  static F div(const F& a, const F& b) {
    return each(Vec::div, a, b);
  }
  static F fma(const F& a, const F& b, const F& c) {
    return each(Vec::fma, a, b, c);
  }
  static F abs(const F& v) {
    return each(Vec::abs, v);
  }
  static F max_or_second(const F& a, const F& b) {
    return each(Vec::max_or_second, a, b);
  }
  static F min_or_second(const F& a, const F& b) {
    return each(Vec::min_or_second, a, b);
  }
  static F if_negative(const F& v, const F& yes, const F& no) {
    return each(Vec::if_negative, v, yes, no);
  }
  static I subtract_bits(const F& v, int32_t bits) {
    return each<I>([bits](Vec::F x) { return Vec::subtract_bits(x, bits); }, v);
  }
  static I quarter(const I& n) {
    return each<I>(Vec::quarter, n);
  }
  static I minus_3_times(const I& n, const I& q) {
    return each<I>(Vec::minus_3_times, n, q);
  }
  static F pow2(const I& n) {
    return each(Vec::pow2, n);
  }
};

// g sigmoid(g) u with relative error below 2^-21 for every finite g and u, and the definition's value for
// the others.
//
// exp(-|g|) = p * 2^n. For g >= 0 the factor is 1 / (1 + p 2^n); for g < 0 it is p 2^n / (1 + p 2^n),
// and 2^n may be far below the smallest FP32 number although the product with a large u is not: it
// is therefore applied in four parts, of which none underflows unless the result does.
template <typename V>
inline typename V::F swiglu(const typename V::F& g, const typename V::F& u) {
  const auto one = V::set1(1.0F);
  const auto zero = V::set1(0.0F);
  // Below -190 the result is zero for every finite u.
  const auto gate = V::max_or_second(V::set1(-190.0F), g);
  const auto x = V::min_or_second(V::set1(200.0F), V::abs(gate));

  const auto shifted = V::fma(x, V::set1(-1.44269504F), V::set1(kMagic));
  const auto n = V::subtract_bits(shifted, kMagicBits);
  const auto n_float = V::sub(shifted, V::set1(kMagic));
  auto r = V::fma(n_float, V::set1(-0.693145752F), V::sub(zero, x));  // ln 2, upper 16 bits
  r = V::fma(n_float, V::set1(-1.42860677e-6F), r);                   // ln 2, the rest
  auto p = V::set1(1.0F / 5040);
  p = V::fma(p, r, V::set1(1.0F / 720));
  p = V::fma(p, r, V::set1(1.0F / 120));
  p = V::fma(p, r, V::set1(1.0F / 24));
  p = V::fma(p, r, V::set1(1.0F / 6));
  p = V::fma(p, r, V::set1(0.5F));
  p = V::fma(p, r, one);
  p = V::fma(p, r, one);

  const auto quarter = V::quarter(n);  // floor(n / 4)
  const auto f = V::pow2(quarter);
  const auto f_last = V::pow2(V::minus_3_times(n, quarter));
  const auto f2 = V::mul(f, f);
  const auto z = V::mul(V::mul(V::mul(p, f2), f), f_last);

  // The definition's sigmoid, in FP64, is zero below this: an infinite u gives NaN.
  const auto below = V::add(g, V::set1(709.782654F));
  const auto p_or_zero = V::if_negative(below, zero, p);
  const auto numerator = V::mul(gate, V::if_negative(gate, p_or_zero, one));
  const auto q = V::div(numerator, V::add(one, z));
  const auto scale = V::if_negative(gate, f, one);
  const auto last = V::if_negative(gate, f_last, one);
  return V::mul(V::mul(V::mul(V::mul(q, scale), V::mul(u, scale)), scale), last);
}

inline Vec::F squared_relu(Vec::F z) {
  const Vec::F r = Vec::max_or_second(Vec::set1(0.0F), z);
  return Vec::mul(r, r);
}

template <int kRows>
inline void swiglu_rows(const float* c,
                        int64_t columns,
                        const float* up_scale,
                        const float* gate_scale,
                        uint16_t* out,
                        int64_t stride) {
  using Rows = Side<kRows>;
  for (int64_t n = 0; n < columns / 2; n += Vec::kLanes) {
    const float* up = c + 2 * (n - n % 16) + n % 16;
    typename Rows::F u;
    typename Rows::F g;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      u.v[r] = Vec::mul(Vec::load(up + r * columns), Vec::set1(up_scale[r]));
      g.v[r] = Vec::mul(Vec::load(up + r * columns + 16), Vec::set1(gate_scale[r]));
    }
    const typename Rows::F h = swiglu<Rows>(g, u);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      Vec::store_bf16(out + r * stride + n, h.v[r]);
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
  constexpr int64_t kLanes = Vec::kLanes;
  switch (activation.type) {
    case ActivationType::kSquaredRelu:
      for (int64_t i = 0; i < count; ++i, c += columns, out += stride) {
        const Vec::F factor = Vec::set1(up_scale[i]);
        for (int64_t n = 0; n < columns; n += 2 * kLanes) {
          Vec::store_bf16(out + n,
                          squared_relu(Vec::mul(Vec::load(c + n), factor)),
                          squared_relu(Vec::mul(Vec::load(c + n + kLanes), factor)));
        }
      }
      return;
    case ActivationType::kSwiGlu:
      for (; count >= Vec::kTogether; count -= Vec::kTogether) {
        swiglu_rows<Vec::kTogether>(c, columns, up_scale, gate_scale, out, stride);
        c += Vec::kTogether * columns;
        up_scale += Vec::kTogether;
        gate_scale += Vec::kTogether;
        out += Vec::kTogether * stride;
      }
      for (; count > 0; --count, c += columns, out += stride)
        swiglu_rows<1>(c, columns, up_scale++, gate_scale++, out, stride);
      return;
    default:
      for (int64_t i = 0; i < count; ++i, c += columns, out += stride) {
        for (int64_t n = 0; n < (gated ? columns / 2 : columns); ++n) {
          const float* up = gated ? c + 2 * (n - n % 16) + n % 16 : c + n;
          const float gate = gated ? up[16] * gate_scale[i] : 0;
          out[n] = bf16_from_f32(
              static_cast<float>(hexpert::activate(activation, up[0] * up_scale[i], gate)));
        }
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
    for (int64_t n = 0; n < columns; n += 2 * Vec::kLanes) {
      Vec::store_bf16(out + n,
                      Vec::mul(factor, Vec::load(c + n)),
                      Vec::mul(factor, Vec::load(c + n + Vec::kLanes)));
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

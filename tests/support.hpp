// Inputs and buffers for tests: seeded BF16 generators, guarded memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "format/codec.hpp"

namespace hexpert::test {

inline constexpr std::size_t kTestAlignment = 64;

template <typename T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <typename U>
  AlignedAllocator(const AlignedAllocator<U>&) {}  // NOLINT(google-explicit-constructor)
  T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{kTestAlignment}));
  }
  void deallocate(T* p, std::size_t) { ::operator delete (p, std::align_val_t{kTestAlignment}); }
  template <typename U>
  bool operator==(const AlignedAllocator<U>&) const {
    return true;
  }
};

/// A vector on a 64-byte boundary.
template <typename T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;
using Bf16Vector = AlignedVector<uint16_t>;

/// Memory on a 64-byte boundary, filled with 0xA5 and fenced on both sides, so that a missing
/// write and a write out of bounds both show.
template <typename T>
class PoisonedBuffer {
 public:
  static constexpr uint8_t kPoison = 0xA5;

  explicit PoisonedBuffer(int64_t count)
      : count_(count), bytes_(static_cast<std::size_t>(count) * sizeof(T) + 2 * kGuard, kPoison) {}

  T* data() { return reinterpret_cast<T*>(bytes_.data() + kGuard); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + kGuard); }
  int64_t size() const { return count_; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  std::vector<T> to_vector() const { return {data(), data() + count_}; }

  /// Nothing was written outside [data(), data() + size()).
  bool guards_intact() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (bytes_[i] != kPoison || bytes_[bytes_.size() - 1 - i] != kPoison) return false;
    }
    return true;
  }
  /// Nothing was written at all.
  bool untouched() const {
    for (uint8_t byte : bytes_) {
      if (byte != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 4 * kTestAlignment;
  int64_t count_;
  AlignedVector<uint8_t> bytes_;
};

/// A small generator with the same stream on every platform (SplitMix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
  }
  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  /// Uniform in [low, high], both included.
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  /// Standard normal (Box-Muller).
  double gaussian() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  uint64_t state_;
};

inline uint16_t bf16(double value) {
  return bf16_from_f32(static_cast<float>(value));
}

template <typename Generate>
Bf16Vector make_bf16(int64_t count, Generate&& generate) {
  Bf16Vector values(static_cast<std::size_t>(count));
  for (uint16_t& value : values)
    value = generate();
  return values;
}

inline Bf16Vector gaussian_bf16(int64_t count, uint64_t seed, double stddev = 1.0) {
  Random random(seed);
  return make_bf16(count, [&] { return bf16(stddev * random.gaussian()); });
}

inline Bf16Vector uniform_bf16(int64_t count, uint64_t seed, double low, double high) {
  Random random(seed);
  return make_bf16(count, [&] { return bf16(low + (high - low) * random.uniform()); });
}

/// Gaussian, with every 50th value on average 30 times larger.
inline Bf16Vector outlier_bf16(int64_t count, uint64_t seed, double stddev = 1.0) {
  Random random(seed);
  return make_bf16(count, [&] {
    const double value = stddev * random.gaussian();
    return bf16(random.uniform() < 0.02 ? 30.0 * value : value);
  });
}

/// Either sign, log-uniform magnitude in [2^min_exponent, 2^(max_exponent + 1)).
inline Bf16Vector log_uniform_bf16(int64_t count,
                                   uint64_t seed,
                                   int min_exponent,
                                   int max_exponent) {
  Random random(seed);
  return make_bf16(count, [&] {
    const int exponent = static_cast<int>(random.integer(min_exponent, max_exponent));
    const double magnitude = std::ldexp(1.0 + random.uniform() * 0.99, exponent);
    return bf16((random.bits() & 1) != 0 ? -magnitude : magnitude);
  });
}

/// Any bit pattern: NaN, infinity, subnormals and signed zeros included.
inline Bf16Vector any_bf16(int64_t count, uint64_t seed) {
  Random random(seed);
  return make_bf16(count, [&] { return static_cast<uint16_t>(random.bits() >> 48); });
}

inline std::vector<float> f32_from_bf16(const Bf16Vector& values) {
  std::vector<float> out;
  out.reserve(values.size());
  for (uint16_t value : values)
    out.push_back(bf16_to_f32(value));
  return out;
}

inline uint32_t f32_bits(float value) {
  return std::bit_cast<uint32_t>(value);
}

/// Distance in BF16 steps between two finite values: 0 when equal, 1 for neighbours.
inline int bf16_ulp_distance(uint16_t a, uint16_t b) {
  const auto ordered = [](uint16_t v) {
    return (v & 0x8000) != 0 ? -static_cast<int>(v & 0x7FFF) : static_cast<int>(v);
  };
  return std::abs(ordered(a) - ordered(b));
}

/// sqrt(sum (a - b)^2 / sum b^2) in f64; 0 when both are zero.
template <typename A, typename B>
double relative_l2(const A& actual, const B& expected) {
  double noise = 0;
  double signal = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = static_cast<double>(expected[i]);
    const double d = static_cast<double>(actual[i]) - e;
    noise += d * d;
    signal += e * e;
  }
  if (noise == 0) return 0;
  return signal == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(noise / signal);
}

}  // namespace hexpert::test
